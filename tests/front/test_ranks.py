"""`push` on every rank of a trainer: torchrun, four processes, gloo. One launch plays all scenarios; each test reads
what the ranks saw, and what stands in the scenario's store."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save, save_file
from tests.front.rank_trainer import LATEST_SECONDS, NAMES, SCENARIOS, tensors

from weighbridge.errors import RankLost
from weighbridge.flows.server import ServerInfo
from weighbridge.storage.anchor import state_at
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import shard_key
from weighbridge.storage.ranks import Alone
from weighbridge.storage.stores import open_store
from weighbridge.values import PartKey

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[2]
RANKS = 4


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, server: ServerInfo, home: Path) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "base").mkdir()
    save_file(tensors(0), folder / "base" / "model.safetensors")
    (folder / "base" / "config.json").write_text("{}")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "WEIGHBRIDGE_HOME": str(home)}
    command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m", "tests.front.rank_trainer"]
    said = subprocess.run(
        [sys.executable, "-m", *command, str(folder)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=330,
        check=False,
    )
    assert said.returncode == 0, said.stdout[-4000:] + said.stderr[-8000:]
    return folder


def saw(played: Path, scenario: str) -> list[dict[str, Any]]:
    """What each rank saw."""
    return [json.loads((played / f"{scenario}-{rank}.json").read_text()) for rank in range(RANKS)]


def lineage_of(played: Path, scenario: str) -> Lineage:
    return Lineage(open_store(str(played / scenario)))


def digests_of(step: int) -> dict[PartKey, bytes]:
    import xxhash

    found = {}
    for name, tensor in tensors(step).items():
        raw = save({"t": tensor.contiguous()})
        found[PartKey(name, 0)] = xxhash.xxh3_128_digest(raw[8 + int.from_bytes(raw[:8], "little") :])
    return found


def assert_holds(played: Path, scenario: str, version: int, step: int) -> None:
    """The version has exactly the bytes of a step, and its own shards stand."""
    lineage = lineage_of(played, scenario)
    assert {key: row.after for key, row in state_at(lineage, version).rows.items()} == digests_of(step)
    manifest = lineage.manifest(version)
    for shard in manifest.shards:
        assert lineage.store.size(shard_key(version, shard)) == shard.nbytes
    assert len({row.key for row in manifest.rows}) == len(manifest.rows)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s not in ("unfit", "broken", "hung", "meshes")])
def test_every_rank_gets_the_same_versions_and_they_have_the_trainers_bytes(played: Path, scenario: str) -> None:
    ranks = saw(played, scenario)
    versions = ranks[0]["versions"]
    assert versions == list(range(1, len(versions) + 1))
    assert all(rank["versions"] == versions for rank in ranks)
    for version in versions:
        assert_holds(played, scenario, version, version)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s != "hung"])
def test_each_tensor_is_held_by_one_rank_and_every_rank_carries_its_part(played: Path, scenario: str) -> None:
    held = [set(rank["held"]) for rank in saw(played, scenario)]
    assert sorted(name for names in held for name in names) == sorted(NAMES)
    assert all(held) or scenario == "stages"  # where two ranks yield nothing, two publish nothing


def test_distributed_tensors_of_any_mesh_and_placement_are_put_together(played: Path) -> None:
    assert [rank["versions"] for rank in saw(played, "meshes")] == [[1]] * RANKS
    assert_holds(played, "meshes", 1, 1)


def test_what_is_committed_does_not_depend_on_the_ranks_numbers_nor_on_the_order_of_names(played: Path) -> None:
    for version in (1, 2):
        one, other = (lineage_of(played, scenario).manifest(version) for scenario in ("split", "moved"))
        assert one.rows == other.rows
        assert [(s.nbytes, s.digest) for s in one.shards] == [(s.nbytes, s.digest) for s in other.shards]
        assert one.state_digest == other.state_digest


def test_ranks_that_yield_nothing_run_their_generator_to_its_end(played: Path) -> None:
    ranks = saw(played, "stages")
    assert [rank["drained"] for rank in ranks] == [[1, 2, 3]] * RANKS
    assert [bool(rank["held"]) for rank in ranks] == [True, False, True, False]


@pytest.mark.parametrize("push", ["refused", "streamed"])
def test_replicas_that_ran_apart_are_refused_on_all_ranks_with_both_digests(played: Path, push: str) -> None:
    ours = digests_of(2)[PartKey("layers.4.weight", 0)].hex()
    for rank in saw(played, "replicas"):
        assert rank[push]["kind"] == "GatherError"
        assert "layers.4.weight" in rank[push]["said"] and "on rank 3" in rank[push]["said"]
        assert ours in rank[push]["said"]


def test_what_one_rank_brings_wrongly_or_no_rank_brings_is_one_error_on_all(played: Path) -> None:
    for rank in saw(played, "unfit"):
        assert rank["stranger"]["kind"] == rank["missing"]["kind"] == "GatherError"
        assert "- stranger" in rank["stranger"]["said"]
        assert "missing (1)" in rank["missing"]["said"]
    assert_holds(played, "unfit", 1, 1)


def test_a_failure_on_any_rank_ends_all_with_that_error_and_leaves_nothing_in_the_store(played: Path) -> None:
    for rank in saw(played, "broken"):
        for what in ("encode_shard", "upload_file", "put_if_absent"):
            assert rank[what]["kind"] == "MemoryError" and "no room" in rank[what]["said"], what
    assert_holds(played, "broken", 1, 1)
    named = {shard.name for shard in lineage_of(played, "broken").manifest(1).shards}
    stands = {path.name for path in (played / "broken" / "versions" / f"{1:012d}").iterdir()}
    assert stands == {*named, "manifest.arrow"}


def test_ranks_that_hang_in_a_collective_of_a_source_that_failed_end_with_its_error(played: Path) -> None:
    for rank in saw(played, "hung"):
        assert rank["hung"]["kind"] == "ZeroDivisionError"
        assert "rank 2" in rank["hung"]["said"]
        assert rank["hung"]["seconds"] < 2 * LATEST_SECONDS  # by the group's own timeout at the latest
    assert not (played / "hung" / "versions" / f"{1:012d}").exists()


def test_alone_there_is_nobody_to_wait_for() -> None:
    with pytest.raises(RankLost):
        Alone().round().take("never said", 1)
