"""A byte of a neighbour's version is changed, in each of the places that lead to a tensor: it is refused, or makes no
difference. Where a layout has nothing to tell it by, that is said here and in docs/PEERS.md."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoints import Weights
from tests.peers.test_reading import WRITERS, Neighbour

from weighbridge.errors import CorruptData, LineageError
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.peers.chain import chain, fold, touched
from weighbridge.storage.peers.registry import get_layout
from weighbridge.storage.stores import open_store

Places = Mapping[str, list[tuple[Path, range]]]
"""What a byte belongs to, and where such bytes lie."""

UNTOLD = {"trl": {"values", "positions"}}
"""A layout without checksums: another value, or another position in bounds, is as good as the one that was meant."""
IDLE = {"sparse", "payload_files", "total_uncompressed_num_bytes", "total_compressed_num_bytes"}
"""What no reader needs: it may be refused, and must make no difference."""
LOOSE = {"frame", "frame's head"}
"""zstd has bits that mean nothing."""


def places_in_json(path: Path, whole: bytes, start: int = 0) -> Iterator[tuple[str, tuple[Path, range]]]:
    """The values by their field, and the keys of objects that have names for keys."""
    for match in re.finditer(rb'"(?!mask)([a-z0-9_]+)": ?("[^"]*"|\[[0-9, ]*\]|[0-9]+)', whole):
        inside = 1 if match[2].startswith(b'"') else 0
        yield match[1].decode(), (path, range(start + match.start(2) + inside, start + match.end(2) - inside))
    for match in re.finditer(rb'"([a-z]+[.0-9a-z]*[.][a-z.]+|mask)": ?("[^"]*"|\{)', whole):
        yield "tensor name", (path, range(start + match.start(1), start + match.end(1)))
        if match[2] != b"{":
            kind = "checksum of a tensor" if start else "file of a tensor"
            yield kind, (path, range(start + match.start(2) + 1, start + match.end(2) - 1))


def places_in(path: Path) -> Iterator[tuple[str, tuple[Path, range]]]:
    whole = path.read_bytes()
    if path.suffix == ".json":
        yield from places_in_json(path, whole)
        return
    header_bytes = int.from_bytes(whole[:8], "little")
    yield "header's length", (path, range(8))
    yield from places_in_json(path, whole[8 : 8 + header_bytes], 8)
    for name, item in json.loads(whole[8 : 8 + header_bytes]).items():
        if name != "__metadata__":
            begin, end = (8 + header_bytes + offset for offset in item["data_offsets"])
            kind = {"idx": "positions", "val": "values"}.get(name.rpartition(".")[2], "frame")
            if kind == "frame":
                yield "frame's head", (path, range(begin, min(begin + 6, end)))
            yield kind, (path, range(begin, end))


def outcome(neighbour: Neighbour, after: int) -> Weights | None:
    """What a reader that holds version `after` makes of version 2; None: it refuses."""
    layout, store = get_layout(neighbour.layout), open_store(str(neighbour.root))
    held = neighbour.states[after]
    try:
        versions = chain(layout, store, after=after, upto=2, specs=open_checkpoint(neighbour.base).specs())
        made = {name: fold(versions, name, np.frombuffer(held[name].tobytes(), np.uint8)) for name in touched(versions)}
    except (CorruptData, LineageError):
        return None
    return {name: np.asarray(made.get(name, array)).reshape(-1).view(np.uint8) for name, array in held.items()}


@pytest.mark.parametrize("writer", sorted(WRITERS.keys() - {"skyrl, its own folder names"}))
def test_a_changed_byte_of_every_kind_that_leads_to_a_tensor_is_refused(writer: str, tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path, *WRITERS[writer])
    neighbour.publish()
    made = neighbour.publish()
    places: dict[str, list[tuple[Path, range]]] = {}
    for path in [made] if made.is_file() else sorted(made.iterdir()):
        for kind, place in places_in(path):
            places.setdefault(kind, []).append(place)
    right = {name: array.tobytes() for name, array in neighbour.states[2].items()}
    accepted = dict.fromkeys(places, 0)
    for kind, found in places.items():
        spots = [(path, at) for path, span in found for at in span]
        for number, (path, at) in enumerate(spots[:: max(1, len(spots) // 12)]):
            whole = path.read_bytes()
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1, 4, 16, 128)[number % 4]]) + whole[at + 1 :])
            for after in (0, 1):
                state = outcome(neighbour, after)
                accepted[kind] += state is not None
                if kind not in UNTOLD.get(neighbour.layout, ()):
                    assert state is None or {n: a.tobytes() for n, a in state.items()} == right, (kind, at, after)
            path.write_bytes(whole)
    assert len(places) >= 10
    told = places.keys() - IDLE - LOOSE - UNTOLD.get(neighbour.layout, set())
    assert not {kind: accepted[kind] for kind in told if accepted[kind]}
    assert all(accepted[kind] < 6 for kind in LOOSE & places.keys())


def test_a_tensor_that_an_index_leaves_out_of_a_file_is_not_left_out(tmp_path: Path) -> None:
    """Receivers differ in what they do then: one applies all that a file has, another refuses it."""
    neighbour = Neighbour(tmp_path, *WRITERS["pull-weights xor xxh3"])
    neighbour.publish()
    index = neighbour.publish() / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    del whole["weight_map"]["mask"]
    index.write_text(json.dumps(whole))
    assert outcome(neighbour, 1) is None


def test_a_tensor_that_stands_in_a_manifest_twice_is_refused(tmp_path: Path) -> None:
    """SkyRL's receiver would apply both, and XOR twice is nothing."""
    neighbour = Neighbour(tmp_path, *WRITERS["skyrl"])
    neighbour.publish()
    manifest = neighbour.publish() / "manifest.json"
    whole = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(whole | {"tensors": [*whole["tensors"], whole["tensors"][0]]}))
    assert outcome(neighbour, 1) is None


def test_what_trl_files_cannot_tell_stays_in_its_tensor(tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path, *WRITERS["trl gaps"])
    neighbour.publish()
    made = neighbour.publish(only=("embed.weight",))
    whole = made.read_bytes()
    right = {name: array.tobytes() for name, array in neighbour.states[2].items()}
    differ = 0
    for at in range(8 + int.from_bytes(whole[:8], "little"), len(whole)):
        made.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        if state := outcome(neighbour, 1):
            changed = {name for name, array in state.items() if array.tobytes() != right[name]}
            assert changed == {"embed.weight"}
            differ += 1
    assert differ
