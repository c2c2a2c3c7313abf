"""Hosts that trust a key refuse every store that is not wholly its holder's, and write nothing from it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.checkpoints import tiny_weights, trained
from tests.faults.virtual_clock import VirtualClock
from tests.replica.runs import digest_tree
from tests.storage.publishing import Run, push
from tests.storage.test_signing import keys

from weighbridge.errors import (
    DigestMismatch,
    ForeignSignature,
    Frozen,
    ManifestCorrupt,
    NotTrusted,
    Replayed,
    RolledBack,
    ShardCorrupt,
    Unsigned,
)
from weighbridge.storage.manifest import from_bytes, manifest_key, shard_key, to_bytes
from weighbridge.storage.replica.pull import PullResult, bring_up
from weighbridge.storage.signing import Signer, Trust


class Signed:
    """A signed run at version 2, a replica at version 1, and an enemy who may do anything to the store."""

    def __init__(self, folder: Path) -> None:
        self.signer, self.trust = keys(folder)
        self.enemy, _ = keys(folder, "enemy")
        self.run = Run(folder)
        self.root = folder / "root"
        self.folder = folder / "replica"
        self.publisher = self.run.open(signer=self.signer, digest_kind="blake3")
        self.weights = trained(tiny_weights(), 1)
        push(self.publisher, self.weights)
        self.pull()
        self.weights = trained(self.weights, 2)
        push(self.publisher, self.weights)

    def pull(self, trust: Trust | None = None, folder: Path | None = None, **options: object) -> PullResult:
        return bring_up(
            folder or self.folder,
            store=self.run.store,
            base=self.run.base,
            trust=trust or self.trust,
            clock=self.run.clock,
            **options,  # type: ignore[arg-type]
        )

    def rewrite(self, version: int, signer: Signer | None, data: bytes | None = None, **changes: object) -> None:
        path = self.root / manifest_key(version)
        manifest = from_bytes(data or path.read_bytes())
        path.write_bytes(to_bytes(replace(manifest, signature="", **changes), signer=signer)[0])  # type: ignore[arg-type]


def unsigned(signed: Signed) -> None:
    signed.rewrite(2, None)


def foreign(signed: Signed) -> None:
    signed.rewrite(2, signed.enemy)


def replayed(signed: Signed) -> None:
    (signed.root / manifest_key(2)).write_bytes((signed.root / manifest_key(1)).read_bytes())


def of_another_run(signed: Signed) -> None:
    signed.rewrite(2, signed.signer, run_id="run-2")


def mixed(signed: Signed) -> None:
    signed.rewrite(2, signed.signer, parent_digest="ab" * 32)


def other_weights(signed: Signed) -> None:
    shard = from_bytes((signed.root / manifest_key(2)).read_bytes()).shards[0]
    path = signed.root / shard_key(2, shard)
    path.write_bytes(path.read_bytes()[::-1])


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    return Signed(tmp_path)


@pytest.mark.parametrize(
    ("deed", "refusal"),
    [
        (unsigned, Unsigned),
        (foreign, ForeignSignature),
        (replayed, Replayed),
        (of_another_run, Replayed),
        (mixed, ManifestCorrupt),
        (other_weights, ShardCorrupt),
    ],
)
def test_what_an_enemy_made_of_a_version_is_refused_and_nothing_is_written(
    deed: Callable[[Signed], None], refusal: type[Exception], signed: Signed
) -> None:
    deed(signed)
    before = digest_tree(signed.folder / "copies")
    with pytest.raises(refusal):
        signed.pull()
    assert digest_tree(signed.folder / "copies") == before


def test_what_the_trainer_signed_is_pulled(signed: Signed) -> None:
    assert signed.pull().version == 2


def test_a_store_that_was_rolled_back_is_refused_even_by_a_replica_that_lost_its_copies(signed: Signed) -> None:
    assert signed.pull().version == 2
    shutil.rmtree(signed.root / "versions" / f"{2:012d}")
    for name in ("copies", "state"):
        shutil.rmtree(signed.folder / name)
        with pytest.raises(RolledBack, match="showed version 2 before, and shows no more than version 1"):
            signed.pull()
    assert signed.pull(version=1, rollback=True).version == 1  # a person said so
    assert signed.pull().version == 1


def test_a_history_that_became_another_is_refused(signed: Signed) -> None:
    assert signed.pull().version == 2
    signed.rewrite(2, signed.signer, labels={"another": True})
    before = digest_tree(signed.folder)
    with pytest.raises(RolledBack, match="another version of that number"):
        signed.pull()
    assert digest_tree(signed.folder) == before


def test_a_store_that_stands_still_for_too_long_is_refused(signed: Signed, tmp_path: Path) -> None:
    clock = signed.run.clock
    assert isinstance(clock, VirtualClock)
    limited = Trust(signed.trust.keys, 60)
    assert signed.pull(limited).version == 2
    clock.sleep(100)
    with pytest.raises(Frozen):
        signed.pull(limited)
    with pytest.raises(Frozen):
        signed.pull(limited, tmp_path / "new")
    assert not (tmp_path / "new" / "copies").exists()
    push(signed.publisher, trained(signed.weights, 3))
    assert signed.pull(limited).version == 3


def test_a_run_that_was_never_signed_is_refused_before_a_copy_is_made(tmp_path: Path) -> None:
    _, trust = keys(tmp_path)
    run = Run(tmp_path)
    push(run.open(), trained(tiny_weights(), 1))
    with pytest.raises(NotTrusted):
        bring_up(tmp_path / "replica", store=run.store, base=run.base, trust=trust)
    assert not (tmp_path / "replica" / "copies").exists()


def test_a_state_that_the_signed_rows_do_not_lead_to_is_refused(signed: Signed) -> None:
    signed.rewrite(2, signed.signer, state_digest="cd" * 32)
    with pytest.raises(DigestMismatch):
        signed.pull()
