"""requirements.lock pins what constraints.txt pins, torch apart, and each by a hash."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pin(line: str) -> tuple[str, str]:
    """Name, in the one spelling that all of them mean, and version."""
    name, version = line.split("==")
    return re.sub(r"[-_.]+", "-", name).lower(), version


def test_the_lock_has_every_constraint_but_torch_in_the_same_version_with_a_hash() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    wanted = {pin(line) for line in lines if not line.startswith("torch==")}
    locked = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line.startswith("#"):
            name, digest = line.split(" --hash=sha256:")
            locked[pin(name)] = digest
    assert locked.keys() == wanted, "make lock"
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in locked.values())
