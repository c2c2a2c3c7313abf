"""A folder whose shards are encoded on Dask or Ray: real clusters of two worker processes on this machine, against a
push of the same folders in threads."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file
from tests.checkpoints import state_digest_of

from weighbridge import WeightSync
from weighbridge.errors import CheckpointError, GatherError
from weighbridge.flows.server import ServerInfo
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import shard_key
from weighbridge.storage.stores import open_store
from weighbridge.values import Manifest

pytestmark = pytest.mark.fleet

SHARD_BYTES = 1 << 20


def weights(step: int) -> dict[str, Any]:
    """Some 5 MiB: several shards, a tensor of more than one of them, and one that never changes."""
    rng = np.random.default_rng(3)
    found = {f"layers.{i}.weight": rng.standard_normal((512, 512)).astype(np.float16) for i in range(7)}
    found |= {"wide": rng.standard_normal((640, 1024)).astype(np.float16), "bias": np.arange(9, dtype=np.float32)}
    for number in range(step):
        of_step = np.random.default_rng(100 + number)
        for name in list(found)[:-1]:
            flat = found[name].reshape(-1).view(np.uint16)
            flat[of_step.integers(0, flat.size, flat.size // 50)] += np.uint16(1)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = []
    for step in range(3):
        folder = tmp_path_factory.mktemp("steps") / str(step)
        folder.mkdir()
        arrays = weights(step)
        if step == 2:  # a trainer's masters: cast to the base's dtype on the way
            arrays["layers.0.weight"] = arrays["layers.0.weight"].astype(np.float32)
        save_file(arrays, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        made.append(folder)
    return made


@pytest.fixture(scope="module")
def in_threads(
    tmp_path_factory: pytest.TempPathFactory, folders: list[Path], server: ServerInfo, home: Path
) -> Lineage:
    return Lineage(open_store(str(pushed(tmp_path_factory.mktemp("threads"), folders, home=home))))


def pushed(folder: Path, folders: list[Path], *, home: Path, **settings: Any) -> Path:
    """A store with every folder as a version."""
    store = folder / "store"
    with WeightSync(store, folders[0], home=home, run="run", shard_bytes=SHARD_BYTES, threads=2, **settings) as sync:
        for step in folders[1:]:
            sync.push(step, labels={"step": step.name})
    return store


@pytest.fixture(scope="module", params=["dask", "ray"])
def elsewhere(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, folders: list[Path], home: Path
) -> Iterator[Lineage]:
    """What the same folders came to on a cluster that stays from push to push."""
    carrier = request.param
    if carrier == "dask":
        from distributed import LocalCluster

        with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
            address = cluster.scheduler_address
            store = pushed(
                tmp_path_factory.mktemp(carrier), folders, home=home, encode_on=carrier, encode_address=address
            )
            yield Lineage(open_store(str(store)))
    else:
        store = pushed(tmp_path_factory.mktemp(carrier), folders, home=home, encode_on=carrier)
        yield Lineage(open_store(str(store)))


def without_origin(manifest: Manifest) -> Manifest:
    """A manifest without what differs between any two writers of the same bytes."""
    shards = tuple(replace(shard, name=shard.name.partition("-")[2]) for shard in manifest.shards)
    none = {"commit_id": "", "writer": "", "created_ns": 0, "digest": "", "parent_digest": ""}
    return replace(manifest, shards=shards, files=manifest.files.partition("-")[2], **none)  # type: ignore[arg-type]


def test_every_object_of_the_store_is_the_same_as_from_threads(in_threads: Lineage, elsewhere: Lineage) -> None:
    assert elsewhere.head() == in_threads.head() == 2
    for version in range(3):
        here, there = in_threads.manifest(version), elsewhere.manifest(version)
        assert without_origin(there) == without_origin(here)
        assert len(here.shards) > 4 or version == 0
        for one, other in zip(here.shards, there.shards, strict=True):
            shards = in_threads.store.get(shard_key(version, one)), elsewhere.store.get(shard_key(version, other))
            assert shards[0] == shards[1]
    keys = [sorted(key.rpartition("/")[0] for key in names(lineage)) for lineage in (in_threads, elsewhere)]
    assert keys[0] == keys[1]  # and there is nothing else
    assert elsewhere.manifest(2).state_digest == state_digest_of(weights(2))


def names(lineage: Lineage) -> list[str]:
    root = Path(lineage.store.url)
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]


def test_a_worker_that_is_killed_is_made_up_for(
    tmp_path: Path, folders: list[Path], server: ServerInfo, home: Path
) -> None:
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        with WeightSync(
            tmp_path / "store",
            folders[0],
            home=home,
            shard_bytes=SHARD_BYTES,
            encode_on="dask",
            encode_address=address,
        ) as sync:
            sync.push(folders[1])
            os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL)
            assert sync.push(folders[2]).version == 2
    assert Lineage(open_store(str(tmp_path / "store"))).manifest(2).state_digest == state_digest_of(weights(2))


def test_what_a_worker_cannot_read_is_told_and_nothing_is_published(
    tmp_path: Path, folders: list[Path], server: ServerInfo, home: Path
) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    whole = (folders[1] / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole)
    (cut / "config.json").write_text("{}")
    store = tmp_path / "store"
    with WeightSync(store, folders[0], home=home, shard_bytes=SHARD_BYTES, threads=2, encode_on="dask") as sync:
        sync.warm()
        before = sorted(store.rglob("*"))
        with pytest.raises(GatherError, match=r"layers\.0\.weight"):
            strange = tmp_path / "strange"
            strange.mkdir()
            save_file({**weights(1), "layers.0.weight": np.zeros((2, 2), np.float16)}, strange / "model.safetensors")
            sync.push(strange)
        opened = open_checkpoint(cut)
        (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError):
            sync.push(opened)
        assert sorted(store.rglob("*")) == before
        assert sync.push(weights(1)).version == 1  # tensors: here, as ever
        assert sync.push(folders[2]).version == 2
    assert Lineage(open_store(str(store))).manifest(2).state_digest == state_digest_of(weights(2))
    assert not [child for child in psutil.Process().children() if "distributed" in " ".join(child.cmdline())]
