"""Every fault of the network on every kind of request that a publish and a fetch make, on real servers: the version is
wholly there, its writer knows it, the host has the right bytes, and nothing else stays behind."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.faults.proxy import ACTIONS, Action, FaultProxy, Rule
from tests.stores.faulty_bridge import SHARDS, Bridge
from tests.stores.raw import GCSRaw, S3Raw
from tests.stores.servers import BUCKET, Server

from weighbridge.storage.stores import Profile, Store, open_store

pytestmark = [pytest.mark.stores, pytest.mark.timeout(120)]

S3_REQUESTS = {
    "shard in one request": Rule("reset", method="PUT", target="*abc-00000*"),
    "upload begun": Rule("reset", method="POST", target="*?uploads*"),
    "part": Rule("reset", method="PUT", target="*partNumber=1*"),
    "upload ended": Rule("reset", method="POST", target="*?uploadId=*"),
    "size": Rule("reset", method="HEAD", target="*abc-00001*"),
    "commit": Rule("reset", method="PUT", target="*manifest*", header="if-none-match"),
    "manifest read": Rule("reset", method="GET", target="*manifest*"),
    "shard read": Rule("reset", method="GET", target="*abc-00000*"),
    "range read": Rule("reset", method="GET", target="*abc-00001*", header="range"),
}

GCS_REQUESTS = {
    "shard in one request": Rule("reset", method="POST", target="*uploadType=multipart*"),
    "upload begun": Rule("reset", method="POST", target="*uploadType=resumable*"),
    "part": Rule("reset", method="PUT", target="*upload*", skip=0),
    "upload ended": Rule("reset", method="PUT", target="*upload*", skip=1),
    "size": Rule("reset", method="GET", target="*abc-00001*fields=size*"),
    "commit": Rule("reset", method="POST", target="*ifGenerationMatch=0*"),
    "manifest read": Rule("reset", method="GET", target="*manifest*alt=media*"),
    "shard read": Rule("reset", method="GET", target="*abc-00000*alt=media*"),
    "range read": Rule("reset", method="GET", target="*abc-00001*alt=media*", header="range"),
}


def scripted(rule: Rule, action: Action) -> Rule:
    return Rule(action, method=rule.method, target=rule.target, header=rule.header, skip=rule.skip)


@dataclass(frozen=True, slots=True)
class Line:
    """A store at the far end of a faulty line, and the same root seen without it."""

    store: Store
    proxy: FaultProxy
    raw: S3Raw | GCSRaw


def patient(proxy: FaultProxy) -> Profile:
    return Profile(endpoint_url=proxy.url, call_seconds=3.0, part_bytes=5 << 20)


@pytest.fixture(scope="module")
def s3(s3_server: Server) -> Iterator[Line]:
    raw = S3Raw(BUCKET, "faults")
    proxy = FaultProxy(s3_server.url)
    yield Line(open_store(f"s3://{BUCKET}/faults", profile=patient(proxy)), proxy, raw)
    proxy.stop()


@pytest.fixture(scope="module")
def gcs(gcs_server: Server) -> Iterator[Line]:
    raw = GCSRaw(gcs_server.url, BUCKET, "faults")
    proxy = FaultProxy(gcs_server.url)
    yield Line(open_store(f"gs://{BUCKET}/faults", profile=patient(proxy)), proxy, raw)
    proxy.stop()


def check(line: Line, rule: Rule, folder: Path) -> None:
    bridge = Bridge(line.store, uuid.uuid4().hex, folder)
    line.proxy.script(rule)
    assert bridge.publish()
    assert not bridge.commit(b"another writer's")
    assert line.store.get(bridge.manifest_key) == b"writer abc, version 1"
    assert bridge.fetch("host-0") == SHARDS
    assert rule.hits == 1, line.proxy.seen
    line.proxy.script()
    wanted = sorted([*(bridge.shard_key(name) for name in SHARDS), bridge.manifest_key])
    assert [found.key for found in line.store.list(bridge.root)] == wanted
    assert line.raw.get(bridge.manifest_key) == b"writer abc, version 1"


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", S3_REQUESTS)
def test_a_version_crosses_s3(s3: Line, tmp_path: Path, kind: str, action: Action) -> None:
    check(s3, scripted(S3_REQUESTS[kind], action), tmp_path)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", GCS_REQUESTS)
def test_a_version_crosses_gcs(gcs: Line, tmp_path: Path, kind: str, action: Action) -> None:
    check(gcs, scripted(GCS_REQUESTS[kind], action), tmp_path)
