"""docs/FIELD_CASES.md names a test for every case, and every test that it names is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"\| (?P<case>[A-F]\d+) \| (?P<fault>[^|]+) \| (?P<here>[^|]+) \| (?P<shown>[^|]+) \|")
OUT_OF_SCOPE = "none: out of scope"


def rows() -> list[re.Match[str]]:
    lines = (ROOT / "docs" / "FIELD_CASES.md").read_text().splitlines()
    return [found for line in lines if (found := ROW.fullmatch(line))]


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_case_is_shown_by_tests_that_are_there_or_says_why_not() -> None:
    cases = [row["case"] for row in rows()]
    assert len(cases) == len(set(cases)) > 80
    missing = []
    for row in rows():
        named = re.findall(r"`([^`:]+)::(test_[a-z0-9_]+)`", row["shown"])
        assert named or (row["shown"] == OUT_OF_SCOPE and re.match("out of scope|not offered", row["here"])), row[0]
        missing += [f"{file}::{name}" for file, name in named if name not in names_in(ROOT / "tests" / file)]
    assert not missing
