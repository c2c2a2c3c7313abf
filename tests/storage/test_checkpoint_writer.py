"""A written checkpoint is a whole HF folder of its own: read back by the safetensors library, and by ours."""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tests.faults.medium import UNUSED_INODES, Medium, MediumDisk
from tests.storage.folders import some_arrays, split, write_sharded, write_single

from weighbridge.errors import CheckpointError
from weighbridge.storage import parts
from weighbridge.storage.checkpoint import Checkpoint, open_checkpoint
from weighbridge.storage.checkpoint_writer import copy_checkpoint, write_checkpoint
from weighbridge.storage.layout import natural_key, plan_files
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.values import PartKey, TensorSpec

DISK = LocalDisk("process")


def read_by_safetensors(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), "np") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                assert name not in found
                found[name] = file.get_tensor(name).tobytes()
    return found


def all_parts(checkpoint: Checkpoint) -> list[tuple[PartKey, bytes]]:
    return [
        (part.key, checkpoint.view(name)[part.key.offset : part.key.offset + part.nbytes].tobytes())
        for name, spec in checkpoint.specs().items()
        for part in parts.cut(spec)
    ]


def as_bytes(arrays: dict[str, Any]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def test_a_copy_has_the_same_files_and_bytes_and_shares_no_inode(tmp_path: Path) -> None:
    arrays = some_arrays()
    source = open_checkpoint(write_sharded(tmp_path / "base", split(arrays)))
    (tmp_path / "base" / "left_over.safetensors").write_bytes(b"not of this model")
    (tmp_path / "base" / "optimizer.pt").write_bytes(b"not of this model")
    copied = copy_checkpoint(source, tmp_path / "replica", disk=DISK)
    names = [*source.weight_files, *source.files, source.index_file]
    assert sorted(path.name for path in copied.folder.iterdir()) == sorted(names)
    for name in names:
        assert (copied.folder / name).read_bytes() == (source.folder / name).read_bytes()
        assert (copied.folder / name).stat().st_ino != (source.folder / name).stat().st_ino
    assert read_by_safetensors(copied.folder) == as_bytes(arrays)


def test_a_copy_of_a_hub_cache_holds_plain_files_that_can_be_written_without_touching_the_cache(tmp_path: Path) -> None:
    blobs = write_single(tmp_path / "blobs", some_arrays())
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("model.safetensors", "config.json"):
        (blobs / name).chmod(0o444)
        (snapshot / name).symlink_to(blobs / name)
    copied = copy_checkpoint(open_checkpoint(snapshot), tmp_path / "replica", disk=DISK)
    before = (blobs / "model.safetensors").read_bytes()
    for path in copied.folder.iterdir():
        assert not path.is_symlink()
        assert path.stat().st_nlink == 1
        path.write_bytes(b"changed")
    assert (blobs / "model.safetensors").read_bytes() == before


def test_a_copy_is_whole_after_a_power_cut_names_in_subfolders_too() -> None:
    with tempfile.TemporaryDirectory(dir=UNUSED_INODES) as place:
        machine = Path(place, "machine")
        base = write_single(Path(place, "base"), some_arrays())
        (base / "tokenizer" / "parts").mkdir(parents=True)
        (base / "tokenizer" / "parts" / "vocab.txt").write_text("a b c")
        machine.mkdir()
        medium = Medium(machine)
        copy_checkpoint(open_checkpoint(base), machine / "new" / "copy", disk=MediumDisk(medium))
        medium.cut_power(random.Random(0), keep=0.0)
        found = {str(p.relative_to(machine / "new" / "copy")): p for p in machine.rglob("*") if p.is_file()}
        wanted = {str(p.relative_to(base)): p for p in base.rglob("*") if p.is_file()}
        assert {n: p.read_bytes() for n, p in found.items()} == {n: p.read_bytes() for n, p in wanted.items()}


def test_a_copy_leaves_out_tensors_that_the_index_does_not_list(tmp_path: Path) -> None:
    new, old = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    files = {"a.safetensors": {"w": old, "v": new}, "b.safetensors": {"w": new}}
    weight_map = {"w": "b.safetensors", "v": "a.safetensors"}
    source = open_checkpoint(write_sharded(tmp_path / "base", files, weight_map))
    copied = copy_checkpoint(source, tmp_path / "replica", disk=DISK)
    assert copied.unlisted == ()
    assert read_by_safetensors(copied.folder) == {"w": new.tobytes(), "v": new.tobytes()}


def test_nothing_is_written_into_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    source = open_checkpoint(write_single(tmp_path / "base", some_arrays()))
    target = write_single(tmp_path / "other", {"w": np.ones(2)})
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="not empty"):
        copy_checkpoint(source, target, disk=DISK)
    with pytest.raises(CheckpointError, match="not empty"):
        write_checkpoint(target, [], [], {}, disk=DISK)
    assert (target / "model.safetensors").read_bytes() == before


def test_a_checkpoint_written_from_parts_in_any_order_equals_the_one_they_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 32)
    arrays = some_arrays()
    source = open_checkpoint(write_single(tmp_path / "base", arrays))
    stream = all_parts(source)
    random.Random(3).shuffle(stream)
    files = {"config.json": b"{}", "templates/tool.jinja": b"{{ x }}"}
    written = write_checkpoint(tmp_path / "new", source.specs().values(), stream, files, disk=DISK, file_bytes=100)
    assert len(written.weight_files) > 1
    assert written.specs() == source.specs()
    assert written.digests("blake3") == source.digests("blake3")
    assert read_by_safetensors(written.folder) == as_bytes(arrays)
    assert written.files == ("config.json", "templates/tool.jinja")
    index = json.loads((written.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == source.nbytes
    assert set(index["weight_map"]) == set(arrays)


def test_a_small_model_is_one_file_without_an_index(tmp_path: Path) -> None:
    source = open_checkpoint(write_sharded(tmp_path / "base", split(some_arrays())))
    written = write_checkpoint(tmp_path / "new", source.specs().values(), all_parts(source), {}, disk=DISK)
    assert [path.name for path in written.folder.iterdir()] == ["model.safetensors"]
    assert written.digests("xxh3-128") == source.digests("xxh3-128")


def test_only_one_part_is_asked_for_at_a_time(tmp_path: Path) -> None:
    source = open_checkpoint(write_single(tmp_path / "base", some_arrays()))
    alive: list[bytearray] = []

    def stream() -> Iterator[tuple[PartKey, bytearray]]:
        buffer = bytearray()
        for key, data in all_parts(source):
            buffer[:] = b"\xee" * len(buffer)  # what was handed out before must have been used already
            buffer[:] = data
            alive.append(buffer)
            yield key, buffer

    written = write_checkpoint(tmp_path / "new", source.specs().values(), stream(), {}, disk=DISK)
    assert written.digests("xxh3-128") == source.digests("xxh3-128")
    assert len({id(buffer) for buffer in alive}) == 1


@pytest.mark.parametrize("fault", ["missing", "twice", "foreign", "short"])
def test_parts_that_do_not_make_the_checkpoint_are_refused_by_name(tmp_path: Path, fault: str) -> None:
    source = open_checkpoint(write_single(tmp_path / "base", some_arrays()))
    stream = all_parts(source)
    key, data = stream[0]
    stream = {
        "missing": stream[1:],
        "twice": [*stream, stream[0]],
        "foreign": [*stream, (PartKey(key.tensor, 4), b"")],
        "short": [(key, data[:-1]), *stream[1:]],
    }[fault]
    with pytest.raises(CheckpointError, match=key.tensor):
        write_checkpoint(tmp_path / "new", source.specs().values(), stream, {}, disk=DISK)


@pytest.mark.parametrize(
    "name", ["../config.json", "/etc/x.json", "a/../../b", "model.safetensors", ".netrc", "", "a//b"]
)
def test_a_small_file_whose_name_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    source = open_checkpoint(write_single(tmp_path / "base", some_arrays()))
    with pytest.raises(CheckpointError, match="no small file"):
        write_checkpoint(tmp_path / "new", source.specs().values(), all_parts(source), {name: b"x"}, disk=DISK)
    assert not (tmp_path / "config.json").exists()


def spec(name: str, nbytes: int, dtype: str = "U8") -> TensorSpec:
    return TensorSpec(name, dtype, (nbytes,), nbytes)


def test_layers_follow_each_other_by_number_and_stay_together() -> None:
    specs = [spec(f"model.layers.{layer}.{part}.weight", 10) for layer in range(12) for part in ("mlp", "attn")]
    plan = plan_files([*specs, spec("lm_head.weight", 10)], file_bytes=50)
    layers = [[int(s.name.split(".")[2]) for s in file.specs if "layers" in s.name] for file in plan]
    flat = [layer for file in layers for layer in file]
    assert flat == sorted(flat)
    assert all(file.count(layer) == 2 for file in layers for layer in file)
    assert all(sum(s.nbytes for s in file.specs) <= 50 for file in plan)
    assert plan[0].name == f"model-00001-of-{len(plan):05d}.safetensors"


def test_a_tensor_larger_than_a_file_has_one_to_itself() -> None:
    plan = plan_files([spec("layers.0.a", 10), spec("layers.0.b", 500), spec("layers.0.c", 10)], file_bytes=50)
    assert [[s.name for s in file.specs] for file in plan] == [["layers.0.a"], ["layers.0.b"], ["layers.0.c"]]


def test_wider_elements_come_first_so_that_each_is_aligned() -> None:
    (file,) = plan_files([spec("a", 3), TensorSpec("b", "BF16", (1,), 2), TensorSpec("c", "I64", (2,), 16)])
    assert [s.name for s in file.specs] == ["c", "b", "a"]


def test_names_sort_as_people_count() -> None:
    names = ["l.10.x", "l.2.x", "l.x", "l.3", "l.02.x", "l." + "9" * 9000]
    assert sorted(names, key=natural_key)[:4] == ["l.02.x", "l.2.x", "l.3", "l.10.x"]
