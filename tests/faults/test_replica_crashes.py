"""A replica killed at every write, out of power at every write, and on a full disk at every write: what `current`
leads to is always exactly one version, and the next run ends at the newest, bit for bit. `make test` takes every third
write, those marked slow every one."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.faults.crash_disk import Crash, CrashDisk, FullDisk, PowerCutDisk, RecordingDisk
from tests.faults.medium import UNUSED_INODES
from tests.replica.runs import SmallRun, flip, versions_in

from weighbridge.errors import DiskFull
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.replica import bring_up, open_replica, verify_folder

Work = Callable[[SmallRun, Path, Disk], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """A run of three versions."""
    run = SmallRun(tmp_path_factory.mktemp("run"))
    for _ in range(3):
        run.push()
    return run


def pull(run: SmallRun, folder: Path, disk: Disk, version: int, copies: int) -> None:
    bring_up(folder, store=run.store, base=run.base, version=version, disk=disk, copies=copies, threads=1)


def seed(run: SmallRun, folder: Path, disk: Disk, copies: int) -> None:
    with open_replica(folder, store=run.store, base=run.base, disk=disk, copies=copies, threads=1):
        pass


def prepared(run: SmallRun, folder: Path, stage: str, copies: int) -> Work:
    """Prepares a replica and returns the work that will be cut short."""
    if stage == "seed":
        return lambda run, folder, disk: seed(run, folder, disk, copies)
    for version in range(3):
        pull(run, folder, RecordingDisk(), version, copies)
    if stage == "repair":
        weights = folder / "copies" / "a" / "model-00001-of-00002.safetensors"
        flip(weights, weights.stat().st_size - 1)
        flip(weights, weights.stat().st_size - 9000)
        return lambda run, folder, disk: seed(run, folder, disk, copies)
    if stage == "reseed":
        (folder / "copies" / "a" / "model-00001-of-00002.safetensors").unlink()
        return lambda run, folder, disk: seed(run, folder, disk, copies)
    return lambda run, folder, disk: pull(run, folder, disk, 3, copies)


def served(run: SmallRun, folder: Path) -> set[int] | None:
    """The versions that `current` leads to; None when it leads nowhere, which nothing can load."""
    return versions_in(run, folder / "current") if (folder / "current").is_dir() else None


STAGES = [(stage, copies) for stage in ("seed", "apply", "repair", "reseed") for copies in (2, 1)]
APART = [3, pytest.param(1, marks=pytest.mark.slow)]
KILLS = [(*stage, "torn") for stage in STAGES] + [("apply", 2, "after"), ("apply", 1, "after"), ("repair", 1, "after")]


@pytest.mark.parametrize("apart", APART)
@pytest.mark.parametrize(("stage", "copies", "how"), KILLS)
def test_a_kill_at_every_write_leaves_one_version_and_the_next_run_ends_bit_exact(
    run: SmallRun, tmp_path: Path, stage: str, copies: int, how: str, apart: int
) -> None:
    template = tmp_path / "template"
    work = prepared(run, template, stage, copies)
    damaged = stage in ("repair", "reseed")
    at = copies % apart
    while True:
        folder = tmp_path / f"replica-{at}"
        if template.exists():
            shutil.copytree(template, folder, symlinks=True, copy_function=shutil.copy2)
        disk = CrashDisk(at, how)
        try:
            work(run, folder, disk)
        except Crash:
            pass
        else:
            break
        found = served(run, folder)
        # The damage that a stage begins with may still be there, before it is mended.
        if found is not None and not damaged:
            assert found & {0, 2, 3}, (at, disk.log[-3:])
        result = bring_up(folder, store=run.store, base=run.base, copies=copies, threads=1, disk=RecordingDisk())
        assert result.version == 3, (at, disk.log[-3:])
        assert versions_in(run, folder / "current") == {3}, (at, disk.log[-3:])
        verify_folder(folder, run.lineage).demand()
        assert not list(folder.rglob(".seeding*")) and not (folder / "journal").exists()
        shutil.rmtree(folder)
        at += apart
    assert at > 15


@pytest.mark.parametrize("apart", APART)
@pytest.mark.parametrize("copies", [2, 1])
@pytest.mark.parametrize("stage", ["seed", "apply"])
def test_a_power_cut_at_every_write_loses_no_version(
    run: SmallRun, tmp_path: Path, stage: str, copies: int, apart: int
) -> None:
    template = tmp_path / "template"
    work = prepared(run, template, stage, copies)
    at = copies % apart
    with tempfile.TemporaryDirectory(dir=UNUSED_INODES) as place:
        while True:
            machine = Path(place, f"machine-{at}")
            folder = machine / "replica"
            machine.mkdir()
            if template.exists():
                shutil.copytree(template, folder, symlinks=True, copy_function=shutil.copy2)
            disk = PowerCutDisk(at, machine)
            try:
                work(run, folder, disk)
            except Crash:
                disk.lose()
            else:
                break
            found = served(run, folder)
            assert found is None or found & {0, 2, 3}, (at, disk.log[-3:])
            mended = bring_up(folder, store=run.store, base=run.base, copies=copies, threads=1, disk=RecordingDisk())
            assert mended.version == 3
            assert versions_in(run, folder / "current") == {3}, (at, disk.log[-3:])
            verify_folder(folder, run.lineage).demand()
            shutil.rmtree(machine)
            at += apart


@pytest.mark.parametrize("apart", APART)
@pytest.mark.parametrize(("stage", "copies"), STAGES)
def test_a_full_disk_at_every_write_keeps_the_last_good_version_and_goes_on_with_room(
    run: SmallRun, tmp_path: Path, stage: str, copies: int, apart: int
) -> None:
    template = tmp_path / "template"
    work = prepared(run, template, stage, copies)
    at = copies % apart
    while True:
        folder = tmp_path / f"replica-{at}"
        if template.exists():
            shutil.copytree(template, folder, symlinks=True, copy_function=shutil.copy2)
        disk = FullDisk(at)
        with suppress(DiskFull):
            work(run, folder, disk)
        if not disk.full:
            break
        if stage == "apply":
            assert served(run, folder) in ({2}, {3}, None if copies == 1 else {2}), (at, disk.log[-3:])
        assert (
            bring_up(folder, store=run.store, base=run.base, copies=copies, threads=1, disk=RecordingDisk()).version
            == 3
        )
        assert versions_in(run, folder / "current") == {3}
        verify_folder(folder, run.lineage).demand()
        shutil.rmtree(folder)
        at += apart


def test_a_journal_finishes_the_apply_that_was_cut_short(run: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "replica"
    pull(run, folder, RecordingDisk(), 2, 2)
    with pytest.raises(Crash):
        pull(run, folder, CrashDisk(_first_scatter(run, tmp_path), "torn"), 3, 2)
    with open_replica(folder, store=run.store, base=run.base) as replica:
        assert replica.recovery.how == "journal"
        assert replica.version == 2 and sorted(replica.held.values()) == [2, 3]
        assert replica.plan(3).action == "switch"


def test_a_torn_journal_under_a_dirty_mark_means_digest_everything(run: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "replica"
    pull(run, folder, RecordingDisk(), 2, 2)
    with pytest.raises(Crash):
        pull(run, folder, CrashDisk(_first_scatter(run, tmp_path) + 2, "torn"), 3, 2)
    journal = (folder / "journal").read_bytes()
    (folder / "journal").write_bytes(journal[: len(journal) // 2])
    with open_replica(folder, store=run.store, base=run.base) as replica:
        assert replica.recovery.how == "repaired" and replica.recovery.digested > 0
        assert replica.version == 2 and versions_in(run, replica.current) == {2}
    assert bring_up(folder, store=run.store, base=run.base).version == 3
    verify_folder(folder, run.lineage).demand()


def test_another_boot_after_unsynced_writes_means_digest_everything(run: SmallRun, tmp_path: Path) -> None:
    class OtherBoot(RecordingDisk):
        def boot_id(self) -> str:
            return "another"

    folder = tmp_path / "replica"
    bring_up(folder, store=run.store, base=run.base, durability="process")
    disk = OtherBoot("process")
    with open_replica(folder, store=run.store, base=run.base, disk=disk) as replica:
        assert replica.recovery.how == "digested" and replica.recovery.digested > 0
    with open_replica(folder, store=run.store, base=run.base, disk=disk) as replica:
        assert replica.recovery.how == "clean"


def test_process_durability_never_waits_for_the_disk(
    run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int) -> None:
        raise AssertionError("fsync")

    monkeypatch.setattr(os, "fsync", refuse)
    bring_up(tmp_path / "replica", store=run.store, base=run.base, durability="process")


def test_data_is_synced_after_the_dirty_mark_and_before_the_clean_one(run: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "replica"
    pull(run, folder, RecordingDisk(), 2, 2)
    disk = RecordingDisk()
    pull(run, folder, disk, 3, 2)
    verbs = disk.log
    sealed = verbs.index(("rename", "journal"))
    marks = [i for i, step in enumerate(verbs) if step[0] == "write_atomic" and step[1].endswith(".json")]
    dirty, clean = marks[-2:]
    data = [i for i, (verb, name) in enumerate(verbs) if verb == "pwrite" and name.endswith(".safetensors")]
    synced = [i for i, (verb, name) in enumerate(verbs) if verb == "sync" and name.endswith(".safetensors")]
    assert sealed < dirty < min(data) and max(data) < min(synced) and max(synced) < clean
    assert verbs[sealed - 1] == ("sync", "journal.unfinished")
    assert verbs.index(("unlink", "journal"), clean) < verbs.index(("point", "current"))


def _first_scatter(run: SmallRun, tmp_path: Path) -> int:
    """The number of the first write into weights when version 3 is applied over 2."""
    folder = tmp_path / "rehearsal"
    pull(run, folder, RecordingDisk(), 2, 2)
    disk = RecordingDisk()
    pull(run, folder, disk, 3, 2)
    return next(i for i, (verb, name) in enumerate(disk.log) if verb == "pwrite" and name.endswith(".safetensors"))


def test_a_host_killed_in_mid_apply_comes_back_bit_exact(run: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "replica"
    pull(run, folder, RecordingDisk(), 2, 2)
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from weighbridge.storage.localdisk import LocalDisk
        from weighbridge.storage.replica import bring_up
        from weighbridge.storage.stores import open_store

        class Suicidal(LocalDisk):
            writes = 0
            def pwrite(self, path, offset, data):
                Suicidal.writes += 1
                if Suicidal.writes == 3:
                    super().pwrite(path, offset, bytes(data)[: len(bytes(data)) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                super().pwrite(path, offset, data)

        folder, store, base = sys.argv[1:]
        bring_up(Path(folder), store=open_store(store), base=Path(base), disk=Suicidal())
        """
    )
    arguments = [sys.executable, "-c", script, str(folder), run.store.url, str(run.base)]
    killed = subprocess.run(arguments, capture_output=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert versions_in(run, folder / "current") == {2}
    result = bring_up(folder, store=run.store, base=run.base, lock_seconds=0)
    assert result.recovery.how == "journal"
    assert versions_in(run, folder / "current") == {3}
