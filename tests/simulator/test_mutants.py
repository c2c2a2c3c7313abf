"""A check that cannot fail is a defect: for each promise the real code is broken on purpose, and the simulator must say
so within a few seeds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.simulator import simulation, store
from tests.simulator.soak import run_seed
from tests.simulator.truth import MANIFEST
from tests.simulator.weather import forecast

from weighbridge.errors import StoreError, WeighbridgeError
from weighbridge.flows.follower import Follower
from weighbridge.storage import attempt, checkpoint_writer, gc, retention, transfer
from weighbridge.storage.publisher import Publisher
from weighbridge.storage.replica import apply as applying
from weighbridge.storage.replica import patching, recover
from weighbridge.storage.replica.site import Site
from weighbridge.tasks.cutover import _CutOver

SEEDS = 40
Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Mutant:
    """A way to break a promise. `first` is a seed from which on it was caught soon; `storm` is the weather in which it
    shows, where it is not the seed's own."""

    promise: int
    name: str
    apply: Callable[[Patch], None]
    first: int = 0
    storm: Mapping[str, float] = field(default_factory=dict)


def no_dirty_mark(patch: Patch) -> None:
    real = Site.save
    patch.setattr(Site, "save", lambda site, state: real(site, state) if state.clean else state)


def older_copy_under_the_new_number(patch: Patch) -> None:
    def restore(cutover: Any, failure: WeighbridgeError) -> None:
        kept = cutover._copies.fall_back()
        cutover._engine.reload(cutover._copies.current, kept, seconds=cutover._left())
        cutover._number(cutover._version)
        cutover._resume(cutover._version, after=failure)
        raise cutover._failed(str(failure), served=cutover._version)

    patch.setattr(_CutOver, "_restore", restore)


def resumed_without_a_load(patch: Patch) -> None:
    def restore(cutover: Any, failure: WeighbridgeError) -> None:
        kept = cutover._copies.fall_back()
        cutover._resume(kept, after=failure)
        raise cutover._failed(str(failure), served=kept)

    patch.setattr(_CutOver, "_restore", restore)


def in_doubt_and_yet_taken_back(patch: Patch) -> None:
    patch.setattr(Publisher, "discard", lambda publisher, attempt: attempt.discard(uploaded=True))
    a_store_that_goes_silent(patch)


def a_store_that_goes_silent(patch: Patch) -> None:
    """No mutant: a manifest is created, and then nothing is heard for a while; but what is to be deleted is."""
    real = store.SimStore.create

    def create(connection: Any, key: str, data: bytes) -> None:
        real(connection, key, data)
        life = connection._life
        if MANIFEST.fullmatch(key) and life.stormy and life.rng.random() < 0.5:
            life.away_until = life.baton.now + 120
            raise StoreError(f"{key}: nothing is heard")

    patch.setattr(store.SimStore, "create", create)
    patch.setattr(store.SimStore, "delete", lambda connection, key: connection.objects.delete(key))


def unsynced_data(patch: Patch) -> None:
    class Unsynced:
        def __init__(self, disk: Any) -> None:
            self._disk = disk

        def __getattr__(self, name: str) -> Any:
            return getattr(self._disk, name)

        def sync(self, path: Any) -> None: ...

    real = Site.stamp
    patch.setattr(
        Site,
        "stamp",
        lambda site, *rest: real(replace(site, disk=Unsynced(site.disk)), *rest),  # type: ignore[arg-type]
    )


def journal_stays(patch: Patch) -> None:
    for module in (applying, recover):
        patch.setattr(module, "drop_journal", lambda path, disk: None)


def names_of_a_copy_unsynced(patch: Patch) -> None:
    patch.setattr(checkpoint_writer, "_sync_names", lambda target, names, disk: None)


def no_answer_counts_as_lost(patch: Patch) -> None:
    def put_if_absent(where: Any, key: str, data: bytes, *, clock: Any) -> bool:
        try:
            where.create(key, data)
        except StoreError:
            return False
        return True

    patch.setattr(attempt, "put_if_absent", put_if_absent)
    a_store_that_goes_silent(patch)


def commit_overwrites(patch: Patch) -> None:
    def put(where: Any, key: str, data: bytes, *, clock: Any) -> bool:
        clock.sleep(15)  # in which another trainer may come first
        where.put(key, data)
        return True

    patch.setattr(attempt, "put_if_absent", put)


def served_is_not_recorded(patch: Patch) -> None:
    patch.setattr(Follower, "_is_recorded", lambda follower: True)


def snapshot_before_the_commit(patch: Patch) -> None:
    real = Publisher._settle

    def settle(publisher: Any, sealed: Any) -> Any:
        publisher._advance(sealed.manifest, sealed.path)
        return real(publisher, sealed)

    patch.setattr(Publisher, "_settle", settle)
    writes_go_wrong(patch, "refuse")


def commit_before_its_shards(patch: Patch) -> None:
    def upload(where: Any, key: str, path: Any, *, clock: Any) -> None:
        try:
            where.put_file(key, path)
        except StoreError:
            return  # it will have landed

    patch.setattr(attempt, "upload_file", upload)
    writes_go_wrong(patch, "before")


def writes_go_wrong(patch: Patch, how: str) -> None:
    """No mutant: whatever goes wrong with a write goes wrong in this way."""
    patch.setattr(store, "_WRITES", (how,))


def gc_without_marks(patch: Patch) -> None:
    patch.setattr(gc._Collection, "mark", lambda collection, form: True)


def gc_of_what_is_needed(patch: Patch) -> None:
    real = retention.what_is_kept

    def too_little(stock: Any, wanted: Any) -> Any:
        return replace(real(stock, wanted), needed=frozenset())

    patch.setattr(retention, "what_is_kept", too_little)


def nothing_is_proven(patch: Patch) -> None:
    real = transfer._complete

    def complete(disk: Any, part: Any, source: Any, hasher: Any, report: Any) -> bytes:
        real(disk, part, source, hasher, report)
        return bytes(source.info.digest)

    patch.setattr(transfer, "_complete", complete)
    patch.setattr(patching, "_check", lambda row, digest: None)
    a_store_that_lies(patch)


def a_store_that_lies(patch: Patch) -> None:
    """No mutant: whatever goes wrong with a read is a flipped bit."""
    patch.setattr(store, "_READS", ("flip",))


CALM = {"crash": 0.0, "store_fault": 0.0, "engine_fault": 0.0, "full": 0.0, "rot": 0.0, "storm_seconds": 200.0}
POWER_CUTS = {**CALM, "crash": 0.04, "power": 1.0, "keep": 0.5, "storm_seconds": 120.0}
NOTHING_KEPT = {**POWER_CUTS, "keep": 0.0}
ENGINE_FAULTS = {"engine_fault": 0.15}
SILENCE = {"crash": 0.0, "storm_seconds": 200.0}
STORE_FAULTS = {**CALM, "store_fault": 0.15}

MUTANTS = [
    Mutant(1, "data is not synced before the clean mark", unsynced_data, first=23),
    Mutant(1, "a copy is written without a dirty mark", no_dirty_mark, first=7, storm=POWER_CUTS),
    Mutant(
        1,
        "after a failed load the older copy is served as the new version",
        older_copy_under_the_new_number,
        storm=ENGINE_FAULTS,
    ),
    Mutant(1, "after a failed load the engine is resumed as it is", resumed_without_a_load, storm=ENGINE_FAULTS),
    Mutant(2, "a journal stays behind", journal_stays),
    Mutant(2, "the names of a seeded copy's files are not synced", names_of_a_copy_unsynced, storm=NOTHING_KEPT),
    Mutant(2, "a commit without an answer counts as lost", no_answer_counts_as_lost, storm=SILENCE),
    Mutant(3, "a commit overwrites what stands there", commit_overwrites, storm=CALM),
    Mutant(3, "a host that died before its record never writes one", served_is_not_recorded, first=90),
    Mutant(3, "the snapshot advances before the commit is settled", snapshot_before_the_commit, storm=STORE_FAULTS),
    Mutant(4, "a commit does not wait for its shards", commit_before_its_shards, storm=STORE_FAULTS),
    Mutant(4, "a push in doubt takes its shards back", in_doubt_and_yet_taken_back, storm=SILENCE),
    Mutant(4, "gc deletes before it has marked", gc_without_marks, first=5, storm=CALM),
    Mutant(4, "gc forgets the way to what is kept", gc_of_what_is_needed),
    Mutant(5, "no digest is checked before bytes are written", nothing_is_proven, storm=STORE_FAULTS),
]


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=f"promise {m.promise}: {m.name}") for m in MUTANTS],
)
def test_the_simulator_catches(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    monkeypatch.setattr(simulation, "forecast", lambda rng: replace(forecast(rng), **mutant.storm))
    for seed in range(mutant.first, mutant.first + SEEDS):
        failure = run_seed(seed).failure
        if failure:
            assert "Broken" in failure or "weighbridge.errors" in failure, failure
            return
    pytest.fail(f"{SEEDS} seeds from {mutant.first} on, and nobody noticed")


def test_a_store_that_lies_is_found_out_by_the_code_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    a_store_that_lies(monkeypatch)
    for seed in range(5):
        outcome = run_seed(seed)
        assert not outcome.failure, outcome.failure
