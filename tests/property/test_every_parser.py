"""Each parser that `make fuzz` gives to atheris takes the right input, and ends in its typed errors, or in what was
written, for damaged ones: no parser of others' bytes is left out of either."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz import TARGETS
from tests.property.hostile import bounded, damaged, many, refused

import weighbridge

PARSERS = {
    # what reads bytes that others may have written, by name: its target, or the test that stands for it
    "parse_run": "run", "parse_record": "record", "from_bytes": "manifest", "open_bytes": "manifest",
    "check_plain": "arrow", "parse_header": "header", "parse": "json, roster", "unseal": "run, record, state",
    "open_shard": "shard-full", "apply_frame": "frame-xor", "read_json": "skyrl", "segment_of": "segment-parts",
    "open_segment": "segment-parts", "check_footer": "segment-parts", "page_bytes": "segment-parts",
    "read_state": "state", "read_identity": "identity", "read_journal": "journal", "read_sealed": "state",
    "read_signer": "private-key", "read_trust": "public-key", "parse_key": "tests/storage/test_segments.py",
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
@many
@given(data=st.data())
def test_a_damaged_input_is_refused_or_read(name: str, data: st.DataObject, made: dict[str, object]) -> None:
    make, errors = TARGETS[name]
    if name not in made:
        made[name] = make()
        target, seed = made[name]  # type: ignore[misc]
        target(seed)
    target, seed = made[name]  # type: ignore[misc]
    with bounded():
        refused(lambda: target(data.draw(damaged(seed))), *errors)


@pytest.fixture(scope="module")
def made() -> dict[str, object]:
    """Targets take a while to make; each is made once."""
    return {}


def test_no_parser_is_left_out() -> None:
    """Functions of storage whose names say that they parse are in the list above."""
    root = Path(weighbridge.__file__).parent / "storage"
    found = {
        node.name
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("parse", "unseal", "from_bytes", "open_bytes"))
    }
    assert found <= PARSERS.keys()
    known = {name for targets in PARSERS.values() for name in targets.split(", ")}
    assert {name for name in known if "/" not in name} <= TARGETS.keys()
