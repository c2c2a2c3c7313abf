"""Whole versions over S3 on a faulty line: the real publisher, two real replicas, and faults strewn over whatever they
ask. Afterwards the chain is whole, both hosts are bit-exact, and nothing stays behind in the store or on a disk."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoints import trained
from tests.faults.proxy import ACTIONS, Action, FaultProxy, Rule
from tests.storage.publishing import Run, assert_sound, bytes_of, push
from tests.stores.servers import BUCKET, Server

from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.leftovers import find_leftovers
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.replica.pull import bring_up
from weighbridge.storage.stores import Profile, open_store

pytestmark = [pytest.mark.stores, pytest.mark.timeout(180)]

VERSIONS = 3


@pytest.fixture(scope="module")
def proxy(s3_server: Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(s3_server.url)
    yield proxy
    proxy.stop()


def strewn(action: Action) -> list[Rule]:
    """The same fault again and again, far enough apart not to hit one call twice."""
    return [Rule(action, skip=skip, seconds=0.2) for skip in (3, 11, 19, 29)]


@pytest.mark.parametrize("action", ACTIONS)
def test_versions_cross_and_nothing_stays_behind(proxy: FaultProxy, tmp_path: Path, action: Action) -> None:
    run = Run(tmp_path, clock=SystemClock())
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    run.store = open_store(url, profile=impatient(proxy))
    proxy.script(*strewn(action))
    publisher = run.open()
    states = {0: run.base_weights}
    for version in range(1, VERSIONS + 1):
        states[version] = trained(states[version - 1], version)
        assert push(publisher, states[version]).version == version
    assert sum(rule.hits for rule in proxy.rules) == len(proxy.rules)

    proxy.script(*strewn(action))

    def host(name: str) -> dict[str, bytes]:
        result = bring_up(tmp_path / name, store=open_store(url, profile=impatient(proxy)), base=run.base)
        assert result.version == VERSIONS
        checkpoint = open_checkpoint(tmp_path / name / "current")
        return {tensor: checkpoint.view(tensor).tobytes() for tensor in checkpoint.tensors}

    # One after the other: beside each other one may use up the other's requests, and a call meets two faults in a row.
    served = [host(name) for name in ("host-0", "host-1")]
    assert served == [bytes_of(states[VERSIONS])] * 2
    assert any(rule.hits for rule in proxy.rules)

    proxy.script()
    assert_sound(run, states)
    assert list(find_leftovers(run.store, Lineage(run.store), grace_seconds=0.0)) == []
    assert run.spooled() == []
    assert [path.name for path in tmp_path.rglob("*") if path.name.endswith((".part", ".tmp"))] == []


def test_twenty_shards_commit_and_four_hosts_at_once_download_each_of_them_once(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    weights = {f"w{i:02d}": np.arange(1000, dtype=np.float32) + i for i in range(20)}  # each larger than a shard
    run = Run(tmp_path, base_weights=weights, clock=SystemClock())
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    run.store = open_store(url, profile=impatient(proxy))
    proxy.script()
    after = {name: values + np.float32(0.5) for name, values in weights.items()}
    manifest = push(run.open(), after)
    assert len(manifest.shards) == 20

    proxy.script()
    folders = [tmp_path / f"host-{i}" for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(
            lambda folder: bring_up(folder, store=open_store(url, profile=impatient(proxy)), base=run.base), folders
        )
        assert [result.version for result in done] == [1] * 4
    downloads = [target.split("?")[0].rsplit("/", 1)[1] for method, target, _ in proxy.seen if method == "GET"]
    assert {name: downloads.count(name) for name in (shard.name for shard in manifest.shards)} == {
        shard.name: 4 for shard in manifest.shards
    }
    for folder in folders:
        checkpoint = open_checkpoint(folder / "current")
        assert {name: checkpoint.view(name).tobytes() for name in checkpoint.tensors} == bytes_of(after)


def impatient(proxy: FaultProxy) -> Profile:
    return Profile(endpoint_url=proxy.url, call_seconds=4.0)
