"""Somebody with write access to a signed run's directory does his worst, and people use their commands on it: every
command ends by itself with a result or an error of ours, a host that trusts the key holds the trainer's bytes and no
others, nothing is written outside, and a trainer goes on, or says why not."""

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
from safetensors.numpy import load_file, save_file
from tests.checkpoints import Weights, state_digest_of, tiny_weights, trained
from tests.front.test_audit_command import code
from tests.property.hostile import bounded
from tests.storage.publishing import Run, bytes_of, push
from tests.storage.test_records import record

from weighbridge.errors import WeighbridgeError
from weighbridge.storage.history import compact as compacting
from weighbridge.storage.history import segments
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import anchor_key, from_bytes, manifest_key, shard_key, to_bytes
from weighbridge.storage.records import record_key, write_record
from weighbridge.storage.sealed_json import seal
from weighbridge.storage.signing import Signer, read_signer, read_trust

ZERO = "0" * 128


@dataclass
class Stage:
    """A signed run of five versions in a directory, a host's replica at version 2, and an enemy with a key."""

    folder: Path

    def __post_init__(self) -> None:
        for name in ("KEY", "ENEMY"):
            assert code("keygen", self.folder / name) == 0
        self.run, self.root = Run(self.folder), self.folder / "root"
        self.outside = self.folder / "outside"
        self.outside.mkdir()
        (self.outside / "secret").write_text("secret")
        self.states: dict[int, Weights] = {0: tiny_weights()}
        publisher = self.run.open(signer=read_signer(self.folder / "KEY"), digest_kind="blake3")
        for version in range(1, 6):
            self.states[version] = trained(self.states[version - 1], version)
            push(publisher, self.states[version], {"step": version})
            write_record(self.run.store, replace(record(version=version, ended=version), run_id="run-1"))
            if version == 2:
                assert self.pull() == 0
        assert code("anchor", "--store", self.root, "--base", self.run.base, "--version", 4) == 0

    def at(self, folder: Path) -> "Stage":
        """The same on a copy of its own."""
        shutil.copytree(self.folder, folder, symlinks=True)
        other = object.__new__(Stage)
        other.folder, other.root, other.outside, other.states = folder, folder / "root", folder / "outside", self.states
        other.run = Run(folder / "run")
        other.run.store = type(other.run.store)(other.root)  # type: ignore[call-arg]
        return other

    @property
    def enemy(self) -> Signer:
        return read_signer(self.folder / "ENEMY")

    def command(self, *words: object) -> int:
        exit_code = code(*words, "--store", self.root)
        assert isinstance(exit_code, int)
        return exit_code

    def pull(self, replica: str = "replica") -> int:
        base = self.run.base
        return self.command(
            "pull", "--trust", self.folder / "KEY.pub", "--base", base, "--replica", self.folder / replica
        )

    def served(self, replica: str = "replica") -> int:
        """The version that a replica's `current` holds to the byte; -1 when there is none to load."""
        current = self.folder / replica / "current"
        if not current.exists():
            return -1
        found: dict[str, bytes] = {}
        for file in current.glob("*.safetensors"):
            found |= bytes_of(load_file(file))
        return next(version for version, weights in self.states.items() if bytes_of(weights) == found)

    def rewrite(self, of: int, signer: Signer | None, key: str = "", **changes: object) -> None:
        path = self.root / (key or manifest_key(of))
        manifest = replace(from_bytes(path.read_bytes()), signature="", **changes)  # type: ignore[arg-type]
        path.write_bytes(to_bytes(manifest, signer=signer)[0])

    def sparse(self, key: str, nbytes: int = 1 << 40) -> None:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / key).unlink(missing_ok=True)
        with (self.root / key).open("wb") as file:
            file.truncate(nbytes)

    def link(self, key: str, to: Path) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.symlink_to(to)

    def shards(self, version: int) -> list[Path]:
        return sorted((self.root / manifest_key(version)).parent.glob("*.safetensors"))


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("signed"))


def poisoned(stage: Stage, version: int, signer: Signer | None) -> None:
    """Other weights, rightly encoded and digested, under a version's name."""
    other = Run(stage.folder / "other", base_weights=stage.states[0])
    publisher = other.open(digest_kind="blake3", signer=stage.enemy)
    for number in range(1, version + 1):
        push(publisher, trained(stage.states[number - 1], 900 + number))
    shutil.rmtree((stage.root / manifest_key(version)).parent)
    shutil.copytree((Path(other.store.url) / manifest_key(version)).parent, (stage.root / manifest_key(version)).parent)
    parent = from_bytes((stage.root / manifest_key(version - 1)).read_bytes())
    stage.rewrite(version, signer, parent_digest=parent.digest)


def publishes(stage: Stage) -> None:
    """The enemy as a trainer, with the real code: his weights as the next version."""
    either = read_trust([stage.folder / "KEY.pub", stage.folder / "ENEMY.pub"])
    publisher = stage.run.open(signer=stage.enemy, trust=either, digest_kind="blake3", run_id=None)
    push(publisher, trained(stage.states[5], 666))


def seventh(stage: Stage, signer: Signer | None) -> None:
    """A version above the head, which carries the head's rows again."""
    path = stage.root / manifest_key(6)
    shutil.copytree((stage.root / manifest_key(5)).parent, path.parent)
    head = from_bytes((stage.root / manifest_key(5)).read_bytes())
    stage.rewrite(6, signer, version=6, parent=5, parent_digest=head.digest)


def other_anchor(stage: Stage) -> None:
    """The anchor of another version, in place of the right one."""
    other = from_bytes((stage.root / anchor_key(4)).read_bytes())
    rows = tuple(replace(row, after=bytes(len(row.after))) for row in other.rows)
    stage.rewrite(4, None, anchor_key(4), rows=rows)


def evil_small_files(stage: Stage) -> None:
    """config.json that makes a loader run code, in the shard of small files, with its digest set right."""
    base = from_bytes((stage.root / manifest_key(0)).read_bytes())
    import numpy as np
    from blake3 import blake3

    (shard,) = base.shards
    path = stage.root / shard_key(0, shard)
    save_file({"config.json": np.frombuffer(b'{"auto_map": "evil"}', np.uint8)}, path)
    data = path.read_bytes()
    stage.rewrite(0, None, shards=(replace(shard, nbytes=len(data), digest=blake3(data).digest()),))


def flipped(path: Path, at: int = -200) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def lying_segments(stage: Stage) -> None:
    for kind in ("versions", "parts", "records"):
        stage.sparse(f"history/{kind}/{0:012d}-{63:012d}-0000-{'0' * 64}.parquet")
        path = stage.root / f"history/{kind}/{64:012d}-{127:012d}-0000-{'1' * 64}.parquet"
        path.write_bytes(pa.BufferOutputStream().getvalue().to_pybytes() + b"PAR1" * 9)


def strange_names(stage: Stage) -> None:
    for name in (
        "versions/99999999999999999999",
        "versions/\u0663",
        "versions/-1",
        "hosts/..evil",
        "hosts/a b",
        "kept/x y",
    ):
        (stage.root / name).mkdir(parents=True, exist_ok=True)
        (stage.root / name / "manifest.arrow").write_bytes(b"x")
        (stage.root / name / ("e" * 200 + "\x1b[2J\n")).write_bytes(b"x")
    (stage.root / b"hosts/\xff\xfe".decode(errors="surrogateescape")).mkdir()
    (stage.root / b"versions/\xff\xfe".decode(errors="surrogateescape")).mkdir()


ATTACKS: dict[str, Callable[[Stage], object]] = {
    "a byte of a manifest": lambda s: flipped(s.root / manifest_key(3)),
    "a byte of a shard": lambda s: flipped(s.shards(3)[0], -1),
    "a manifest without its signature": lambda s: s.rewrite(3, None),
    "a manifest signed by the enemy": lambda s: s.rewrite(3, s.enemy),
    "other weights, unsigned": lambda s: poisoned(s, 3, None),
    "other weights, signed by the enemy": lambda s: poisoned(s, 3, s.enemy),
    "other labels": lambda s: s.rewrite(4, s.enemy, labels={"step": 99}),
    "an older manifest again": lambda s: shutil.copy(s.root / manifest_key(2), s.root / manifest_key(4)),
    "versions exchanged": lambda s: [
        (s.root / "versions/000000000003").rename(s.root / "versions/x"),
        (s.root / "versions/000000000004").rename(s.root / "versions/000000000003"),
        (s.root / "versions/x").rename(s.root / "versions/000000000004"),
    ],
    "shards exchanged": lambda s: shutil.copy(s.shards(3)[0], s.shards(4)[0]),
    "no more than version 1": lambda s: [shutil.rmtree((s.root / manifest_key(v)).parent) for v in range(2, 6)],
    "no versions": lambda s: shutil.rmtree(s.root / "versions"),
    "no run": lambda s: (s.root / "run.json").unlink(),
    "nothing": lambda s: [shutil.rmtree(s.root), s.root.mkdir()],
    "a run of another base": lambda s: (s.root / "run.json").write_bytes(
        seal({"format": 1, "run_id": "run-1", "digest_kind": "blake3", "base_digest": "0" * 64, "created_ns": 1})
    ),
    "a run of weak digests": lambda s: (s.root / "run.json").write_bytes(
        seal({"format": 1, "run_id": "run-1", "digest_kind": "xxh3-128", "base_digest": "0" * 64, "created_ns": 1})
    ),
    "the enemy publishes, unsigned": lambda s: [publishes(s), s.rewrite(Lineage(s.run.store).head(), None)],
    "the enemy publishes, with his own key": publishes,
    "a version above the head, unsigned": lambda s: seventh(s, None),
    "a version above the head, signed by the enemy": lambda s: seventh(s, s.enemy),
    "a far version that is garbage": lambda s: s.sparse(manifest_key(10**11)),
    "an anchor of other weights": other_anchor,
    "an anchor that is garbage": lambda s: s.sparse(anchor_key(5)),
    "small files of the enemy's": evil_small_files,
    "a manifest of a tebibyte": lambda s: s.sparse(manifest_key(3)),
    "a manifest of 200 MiB": lambda s: s.sparse(manifest_key(3), 200 << 20),
    "a shard of a tebibyte": lambda s: s.sparse(str(s.shards(3)[0].relative_to(s.root))),
    "a run.json of a gibibyte": lambda s: s.sparse("run.json", 1 << 30),
    "records of a gibibyte": lambda s: [
        s.sparse(record_key(replace(record(version=v, ended=v), attempt=f"{v:032x}")), 1 << 30) for v in range(6)
    ],
    "a manifest that is a link": lambda s: s.link(manifest_key(3), s.outside / "secret"),
    "a manifest that is a pipe": lambda s: [
        (s.root / manifest_key(3)).unlink(), os.mkfifo(s.root / manifest_key(3))
    ],
    "a manifest that is a folder": lambda s: [
        (s.root / manifest_key(3)).unlink(), (s.root / manifest_key(3)).mkdir()
    ],
    "a shard that is an endless device": lambda s: s.link(str(s.shards(3)[0].relative_to(s.root)), Path("/dev/zero")),
    "run.json that is an endless device": lambda s: s.link("run.json", Path("/dev/zero")),
    "versions that are a link outside": lambda s: s.link("versions", s.outside),
    "the next version is a link outside": lambda s: s.link("versions/000000000006", s.outside),
    "hosts that are a link outside": lambda s: s.link("hosts", s.outside),
    "probes that are a link outside": lambda s: s.link("probe", s.outside),
    "history that is a link outside": lambda s: s.link("history", s.outside),
    "links in a circle": lambda s: s.link("versions/000000000003/circle", s.root),
    "segments that lie": lying_segments,
    "names that nobody gives": strange_names,
    "marks that all is collected": lambda s: [
        (s.root / f"versions/{v:012d}/retired").write_bytes(seal({"by": "c" * 32, "created_ns": 1}))
        for v in range(1, 6)
    ],
    "marks that are garbage": lambda s: [
        (s.root / f"versions/{v:012d}/retired").write_bytes(b"\xff") for v in range(1, 6)
    ],
    "a name that is garbage": lambda s: s.sparse("kept/best", 1 << 30),
    "records that claim everything": lambda s: [
        write_record(s.run.store, replace(record(version=v, ended=v), host=h, engine="\x1b[2J", error="[/x]"))
        for v in (0, 5, 10**11) for h in ("host-0", "ghost")
    ],
}  # fmt: skip


QUESTIONS = (("status",), ("log",), ("show", 5), ("hosts",), ("diff", 1, 5), ("blame", "embed.weight"), ("stats",))
REFUSED = (0, 5, 8, 9, 16)


@pytest.fixture
def stage(
    signed: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    """A stage of one's own, and what must be true at its end whatever happened on it."""
    monkeypatch.setattr(segments, "BLOCK", 4)
    monkeypatch.setattr(compacting, "RECORDS_BEHIND", 2)
    stage = signed.at(tmp_path / "stage")
    before, started = sorted(stage.outside.iterdir()), time.monotonic()
    with bounded(more_bytes=3 << 30, seconds=60):
        yield stage
    assert "\x1b" not in "".join(capsys.readouterr())
    assert sorted(stage.outside.iterdir()) == before
    assert (stage.outside / "secret").read_text() == "secret"
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("attack", ATTACKS)
def test_hosts_hold_the_trainers_bytes_and_a_trainer_goes_on_or_says_why_not(attack: str, stage: Stage) -> None:
    ATTACKS[attack](stage)
    for replica in ("replica", "fresh"):
        ended, version = stage.pull(replica), stage.served(replica)
        assert ended in (*REFUSED, 3, 10)
        assert version >= (2 if replica == "replica" else 1 if ended == 0 else -1)
    try:
        publisher = stage.run.open(signer=read_signer(stage.folder / "KEY"), digest_kind="blake3", run_id=None)
        push(publisher, trained(stage.states[5], 99))
    except WeighbridgeError as error:
        assert len(str(error)) > 40
    else:
        made = Lineage(stage.run.store, trust=read_trust([stage.folder / "KEY.pub"])).newest()
        assert made.state_digest == state_digest_of(trained(stage.states[5], 99), kind="blake3")


def test_another_user_of_the_machine_can_read_weights_and_nothing_else_and_write_nothing(stage: Stage) -> None:
    assert stage.pull() == 0
    replica = stage.folder / "replica"
    for path in (replica, *replica.rglob("*")):
        mode = path.lstat().st_mode
        assert stat.S_ISLNK(mode) or not mode & 0o022, f"{path} can be written by others"
        is_weights = path == replica or path.relative_to(replica).parts[0] in ("copies", "current")
        assert is_weights or not mode & 0o077, f"{path} can be read by others"
    assert (replica / "seen.json").exists() and (replica / "state" / "a.json").exists()
    assert not (stage.folder / "KEY").stat().st_mode & 0o077


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_every_command_ends_with_a_result_or_an_error_of_ours(attack: str, stage: Stage, tmp_path: Path) -> None:
    ATTACKS[attack](stage)
    for words in QUESTIONS:
        assert stage.command(*words) in (*REFUSED, 2), words
    trust = ("--trust", stage.folder / "KEY.pub")
    assert stage.command("verify", 5, *trust) in REFUSED
    assert stage.command("verify", stage.folder / "replica", *trust) in REFUSED
    assert stage.command("audit", *trust) in REFUSED
    assert stage.command("checkout", 5, tmp_path / "OUT", "--base", stage.run.base, *trust) in REFUSED
    assert stage.command("compact") in REFUSED
    assert stage.command("compact", "--mend") in REFUSED
    assert stage.command("gc", "--keep", 1, "--grace", 0) in REFUSED
