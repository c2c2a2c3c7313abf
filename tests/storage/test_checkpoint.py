"""Any HF checkpoint folder can be opened, and what is wrong with one is named all at once."""

import json
import os
import threading
from pathlib import Path

import blake3
import numpy as np
import pytest
import xxhash
from tests.storage.folders import some_arrays, split, write_sharded, write_single

from weighbridge.errors import CheckpointError, UsageError
from weighbridge.storage import parts
from weighbridge.storage.checkpoint import Checkpoint, open_checkpoint
from weighbridge.values import PartKey, TensorSpec


def contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: checkpoint.view(name).tobytes() for name in checkpoint.tensors}


def test_a_single_file_opens_with_every_tensor_and_its_bytes(tmp_path: Path) -> None:
    arrays = some_arrays()
    checkpoint = open_checkpoint(write_single(tmp_path, arrays))
    assert contents(checkpoint) == {name: array.tobytes() for name, array in arrays.items()}
    assert list(checkpoint.tensors) == sorted(arrays)
    assert checkpoint.specs()["model.layers.0.w"] == TensorSpec("model.layers.0.w", "F16", (4, 4), 32)
    assert checkpoint.specs()["model.layers.1.steps"].shape == ()
    assert checkpoint.weight_files == ("model.safetensors",)
    assert checkpoint.index_file == ""
    assert checkpoint.nbytes == sum(array.nbytes for array in arrays.values())


def test_how_tensors_are_cut_into_files_changes_no_spec_and_no_digest(tmp_path: Path) -> None:
    arrays = some_arrays()
    single = open_checkpoint(write_single(tmp_path / "single", arrays))
    sharded = open_checkpoint(write_sharded(tmp_path / "sharded", split(arrays)))
    assert len(sharded.weight_files) == 2
    assert sharded.specs() == single.specs()
    assert sharded.digests("xxh3-128") == single.digests("xxh3-128")
    assert contents(sharded) == contents(single)


def test_views_are_read_only_and_one_dimensional(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_single(tmp_path, some_arrays()))
    for name, place in checkpoint.tensors.items():
        view = checkpoint.view(name)
        assert view.dtype == np.uint8
        assert view.shape == (place.spec.nbytes,)
        assert not view.flags.writeable


def test_the_index_decides_over_other_files_and_over_a_single_file(tmp_path: Path) -> None:
    arrays = some_arrays()
    write_sharded(tmp_path, split(arrays))
    write_single(tmp_path, {"model.embed.weight": np.zeros(3, np.float32)})
    (tmp_path / "model-00009-of-00009.safetensors").write_bytes(b"left over from an older save")
    checkpoint = open_checkpoint(tmp_path)
    assert contents(checkpoint) == {name: array.tobytes() for name, array in arrays.items()}
    assert checkpoint.weight_files == tuple(split(arrays))
    assert checkpoint.unlisted == ()


def test_of_two_copies_of_a_tensor_the_index_names_the_one_that_counts(tmp_path: Path) -> None:
    new, old = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    files = {"a.safetensors": {"w": old, "v": new}, "b.safetensors": {"w": new}}
    checkpoint = open_checkpoint(write_sharded(tmp_path, files, {"w": "b.safetensors", "v": "a.safetensors"}))
    assert checkpoint.view("w").tobytes() == new.tobytes()
    assert checkpoint.unlisted == ("a.safetensors",)


def test_an_error_names_everything_that_is_wrong(tmp_path: Path) -> None:
    arrays = some_arrays()
    first, second = split(arrays)
    weight_map = {name: file for file, held in split(arrays).items() for name in held}
    weight_map |= {"absent.weight": first, "lost.weight": "model-00003-of-00003.safetensors"}
    weight_map |= {"outside.weight": "../other.safetensors", "odd.weight": 3}
    write_sharded(tmp_path, split(arrays), weight_map)
    with (tmp_path / second).open("ab") as file:
        file.write(b"more")
    (tmp_path / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    for word in (
        "'absent.weight'",
        "model-00003-of-00003",
        "'../other.safetensors'",
        "'odd.weight'",
        second,
        "tokenizer",
    ):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "duplicate keys: 'a'"),
        ('{"weight_map": {}}', "no tensors"),
    ],
)
def test_an_index_that_cannot_be_right_is_refused(tmp_path: Path, index: str, reason: str) -> None:
    write_single(tmp_path, some_arrays())
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(tmp_path)


def test_a_folder_without_a_model_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no safetensors file"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"it holds adapter_model\.safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        open_checkpoint(tmp_path / "absent")


def test_a_hub_cache_of_links_is_read_through(tmp_path: Path) -> None:
    arrays = some_arrays()
    blobs = write_single(tmp_path / "blobs", arrays)
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (snapshot / name).symlink_to(os.path.relpath(blobs / name, snapshot))
    checkpoint = open_checkpoint(snapshot)
    assert contents(checkpoint) == {name: array.tobytes() for name, array in arrays.items()}
    assert checkpoint.files == ("config.json",)


def test_a_link_that_moves_after_opening_does_not_mix_two_folders(tmp_path: Path) -> None:
    arrays = some_arrays()
    write_single(tmp_path / "old", arrays)
    write_single(tmp_path / "new", {name: np.zeros_like(array) for name, array in arrays.items()})
    current = tmp_path / "current"
    current.symlink_to("old")
    checkpoint = open_checkpoint(current)
    current.unlink()
    current.symlink_to("new")
    assert contents(checkpoint) == {name: array.tobytes() for name, array in arrays.items()}


def test_a_file_that_changed_its_size_since_opening_is_not_mapped(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_single(tmp_path, some_arrays()))
    os.truncate(tmp_path / "model.safetensors", 200)
    with pytest.raises(CheckpointError, match="changed its size"):
        checkpoint.view("model.embed.weight")
    with pytest.raises(CheckpointError, match="became shorter"):
        checkpoint.digests("xxh3-128")


def test_small_files_come_along_and_weights_caches_and_other_models_do_not(tmp_path: Path) -> None:
    write_sharded(tmp_path, split(some_arrays()))
    wanted = [
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "modeling_custom.py",
        "xxh3.json",
    ]
    wanted += ["templates/tool.jinja", "generation_config.json", "LICENSE"]
    refused = ["pytorch_model.bin", "model.gguf", "training_args.bin", "optimizer.pt", "tf_model.h5", ".gitattributes"]
    refused += [".cache/huggingface/x.json", "__pycache__/modeling.pyc", "pytorch_model.bin.index.json"]
    refused += ["checkpoint-5/model.safetensors", "checkpoint-5/config.json", "checkpoint-5/deeper/config.json"]
    for name in wanted + refused:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    os.mkfifo(tmp_path / "pipe")
    assert open_checkpoint(tmp_path).files == tuple(sorted([*wanted, "config.json"]))


@pytest.mark.parametrize(("kind", "whole"), [("xxh3-128", xxhash.xxh3_128), ("blake3", blake3.blake3)])
def test_digests_are_those_of_each_part_and_of_the_whole_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, whole: type
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 64)
    arrays = some_arrays()
    checkpoint = open_checkpoint(write_sharded(tmp_path, split(arrays)))
    of_parts, of_tensors = checkpoint.digests(kind, threads=2)
    expected_parts = {}
    for name, array in arrays.items():
        data = array.tobytes()
        assert of_tensors[name] == whole(data).digest()
        for offset in range(0, max(len(data), 1), 64):
            expected_parts[PartKey(name, offset)] = whole(data[offset : offset + 64]).digest()
    assert of_parts == expected_parts
    assert PartKey("model.embed.weight", 128) in of_parts


def test_an_unknown_digest_kind_is_a_typed_error(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_single(tmp_path, some_arrays()))
    with pytest.raises(UsageError, match="md5"):
        checkpoint.digests("md5")


def test_digests_do_not_depend_on_the_number_of_threads_and_leave_none_behind(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_single(tmp_path, some_arrays()))
    before = threading.active_count()
    assert checkpoint.digests("xxh3-128", threads=1) == checkpoint.digests("xxh3-128", threads=5)
    assert threading.active_count() == before


def test_a_tensor_of_an_unknown_dtype_is_opaque_bytes(tmp_path: Path) -> None:
    text = json.dumps({"q": {"dtype": "INT3", "shape": [8], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\x01\x02\xff")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.view("q").tobytes() == b"\x01\x02\xff"
    assert checkpoint.specs()["q"].nbytes == 3
