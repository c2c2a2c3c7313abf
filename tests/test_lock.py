"""requirements.lock pins what constraints.txt pins, torch apart, and each by a hash."""

import os
import re
import subprocess
import sys
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


def test_a_lock_that_takes_too_long_is_given_up_and_the_old_one_stays() -> None:
    before = (ROOT / "requirements.lock").read_bytes()
    words = [sys.executable, "-m", "tests.lock"]
    ended = subprocess.run(words, cwd=ROOT, env=os.environ | {"LOCK_SECONDS": "0.01"}, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "not done within 0 s" in ended.stderr and "as it was" in ended.stderr
    assert (ROOT / "requirements.lock").read_bytes() == before
