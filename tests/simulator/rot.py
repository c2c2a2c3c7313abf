"""Damage done to a replica while its host is down: what a disk, or a person, does to it. Never a no-op."""

import random
from pathlib import Path

from tests.replica.runs import flip


def damage(replica: Path, rng: random.Random) -> tuple[str, bool]:
    """Damages one file; says which, and whether it may cost what `current` leads to."""
    loaded = (replica / "current").resolve()
    files = sorted(
        path
        for path in replica.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size and path.name not in ("lock", "notes.txt")
    )
    if not files:
        return "nothing", False
    path = rng.choice(files)
    way = rng.choice(("flip", "truncate", "remove"))
    if way == "flip":
        flip(path, rng.randrange(path.stat().st_size))
    elif way == "truncate":
        with path.open("r+b") as file:
            file.truncate(rng.randrange(path.stat().st_size))
    else:
        path.unlink()
    place = path.relative_to(replica)
    only = len([name for name in ("a", "b") if (replica / "state" / f"{name}.json").exists()]) < 2
    grave = loaded in path.parents or path.name == "replica.json" or (only and place.parts[0] in ("copies", "state"))
    return f"{way} {place}", grave
