"""Images, verify before write, and the journal that carries what was proven."""

from pathlib import Path

import numpy as np
import pytest
from tests.replica.runs import SmallRun, spec, tensors_of

from weighbridge.errors import CheckpointError, DigestMismatch, PayloadCorrupt
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.codecs import Patch
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.replica.fetch import Spool
from weighbridge.storage.replica.image import FolderImage, Image, MemoryImage
from weighbridge.storage.replica.journal import JournalHead, JournalWriter, read_journal
from weighbridge.storage.replica.parallel import in_parallel
from weighbridge.storage.replica.patching import Deltas, Proven, prove
from weighbridge.storage.safetensors_header import build_header
from weighbridge.values import PartKey, TensorSpec

HEAD = JournalHead("replica", "a", "boot", 1, 3, "f" * 64)


@pytest.fixture(params=["memory", "folder"])
def image(request: pytest.FixtureRequest, run: SmallRun) -> Image:
    """The base, in either form."""
    if request.param == "folder":
        return FolderImage(open_checkpoint(run.base), LocalDisk("process"))
    return MemoryImage({name: (spec(name), data.copy()) for name, data in run.versions[0].items()})


def deltas_of(run: SmallRun, folder: Path) -> Deltas:
    spool = Spool(folder, run.lineage, disk=LocalDisk("process"), clock=SystemClock(), threads=1)
    return Deltas(run.lineage.chain(0, run.head), spool.path_of)


def content(image: Image) -> dict[str, bytes]:
    return {key.tensor: bytes(image.view(key)) for key in image.parts}


@pytest.mark.parametrize("threads", [1, 4])
def test_what_is_proven_and_scattered_is_the_published_version(
    run: SmallRun, image: Image, tmp_path: Path, threads: int
) -> None:
    for _ in range(3):
        run.push()
    deltas = deltas_of(run, tmp_path / "spool")
    before = content(image)
    proven = list(prove(image, deltas, digest_kind="xxh3-128", threads=threads))
    assert content(image) == before
    assert {one.key: one.after for one in proven} == dict(deltas.after)
    for one in proven:
        image.scatter(one.key, one.patches)
    wanted = {name: data.tobytes() for name, data in run.versions[3].items()}
    assert content(image) == wanted
    for one in proven:
        image.scatter(one.key, one.patches)
    assert content(image) == wanted


def test_a_wrong_old_byte_is_a_mismatch_and_nothing_is_given_to_write(
    run: SmallRun, image: Image, tmp_path: Path
) -> None:
    run.push("embed.weight")
    key = PartKey("embed.weight", 0)
    image.scatter(key, [Patch(2, np.array([5], np.uint32), np.array([1, 1], np.uint8))])
    with pytest.raises((DigestMismatch, PayloadCorrupt)):
        list(prove(image, deltas_of(run, tmp_path / "spool"), digest_kind="xxh3-128"))


def test_a_patch_beyond_its_part_is_refused_before_anything_is_written(image: Image) -> None:
    before = content(image)
    patch = Patch(2, np.array([0, 96 * 32], np.uint32), np.zeros(4, np.uint8))
    with pytest.raises(PayloadCorrupt):
        image.scatter(PartKey("embed.weight", 0), [patch])
    assert content(image) == before


def test_a_folder_image_writes_only_stretches_that_changed(tmp_path: Path) -> None:
    class Counting(LocalDisk):
        written = 0

        def pwrite(self, path: Path, offset: int, data: object) -> None:
            Counting.written += memoryview(data).nbytes  # type: ignore[arg-type]
            super().pwrite(path, offset, data)  # type: ignore[arg-type]

    nbytes = 32 << 20
    big = TensorSpec("big", "BF16", (nbytes // 2,), nbytes)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 255, nbytes, np.uint8)
    (tmp_path / "model.safetensors").write_bytes(build_header([big], {}) + data.tobytes())
    image = FolderImage(open_checkpoint(tmp_path), Counting("process"))
    positions = np.array([3, 70, 64 * 1000, 12_000_000, 16_777_215], np.uint32)
    values = rng.integers(0, 255, positions.size * 2, np.uint8)
    image.scatter(PartKey("big", 0), [Patch(2, positions, values)])
    data.view(np.uint16)[positions] = values.view(np.uint16)
    assert tensors_of(tmp_path)["big"] == data.tobytes()
    assert 0 < Counting.written <= 4 * (64 << 10)


def test_a_file_that_was_cut_off_is_an_error_and_not_a_crash(run: SmallRun) -> None:
    image = FolderImage(open_checkpoint(run.base), LocalDisk("process"))
    key = PartKey("norm.weight", 0)
    with image.path(key).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match="cut off"):
        image.read(key, np.empty(4096, np.uint8))


def patches() -> list[Proven]:
    some = Patch(2, np.array([1, 5, 9], np.uint32), np.arange(6, dtype=np.uint8))
    more = Patch(4, np.array([2], np.uint32), np.arange(4, dtype=np.uint8))
    every = Patch(1, None, np.arange(13, dtype=np.uint8))
    return [
        Proven(PartKey("layers.0", 0), b"b" * 16, b"a" * 16, (some, more)),
        Proven(PartKey("größe", 1 << 40), b"b" * 16, b"a" * 16, (every,)),
    ]


def written(path: Path) -> bytes:
    writer = JournalWriter(path, HEAD, disk=LocalDisk("process"))
    for one in patches():
        writer.add(one)
    writer.seal()
    return path.read_bytes()


def test_a_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    written(tmp_path / "journal")
    journal = read_journal(tmp_path / "journal")
    assert journal is not None and journal.head == HEAD
    for found, wanted in zip(journal.parts, patches(), strict=True):
        assert (found.key, found.before, found.after) == (wanted.key, wanted.before, wanted.after)
        for a, b in zip(found.patches, wanted.patches, strict=True):
            assert a.width == b.width and bytes(a.values) == bytes(b.values)
            assert (a.positions is None) == (b.positions is None)
            if a.positions is not None and b.positions is not None:
                assert a.positions.tolist() == b.positions.tolist() and a.positions.flags.aligned


def test_a_journal_with_any_byte_changed_or_cut_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = written(path)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert read_journal(path) is None, at
        path.write_bytes(data[:at])
        assert read_journal(path) is None, at
    path.write_bytes(data)
    assert read_journal(path) is not None


def test_a_journal_has_no_name_before_it_is_whole(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "journal", HEAD, disk=LocalDisk("process"))
    writer.add(patches()[0])
    assert not (tmp_path / "journal").exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_parallel_work_is_bounded_complete_and_stops_at_the_first_failure(threads: int) -> None:
    taken: list[int] = []
    assert sorted(in_parallel(lambda n: n * n, range(20), threads=threads)) == [n * n for n in range(20)]

    def fail(n: int) -> int:
        taken.append(n)
        if n == 4:
            raise KeyError(n)
        return n

    with pytest.raises(KeyError):
        list(in_parallel(fail, range(20), threads=threads))
    assert len(taken) < 20
