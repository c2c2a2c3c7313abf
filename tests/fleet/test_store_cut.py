"""The store is cut off for ten seconds under a fleet of real processes. It is S3 behind a proxy, which resets what
comes, or never answers, as a dead link does."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.proxy import Action, FaultProxy, Rule
from tests.fleet.fleet import Fleet, goes_on, push, until
from tests.stores.servers import BUCKET, seaweedfs

from weighbridge.errors import StoreError, SyncIncomplete
from weighbridge.flows.server import ServerInfo

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]

CUT_SECONDS = 10.0
_ALL = 1 << 30


@pytest.fixture(scope="module")
def line() -> Iterator[FaultProxy]:
    with seaweedfs() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        import boto3

        boto3.client("s3").create_bucket(Bucket=BUCKET)
        proxy = FaultProxy(server.url)
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy
        proxy.stop()


@pytest.fixture(scope="module")
def fleet(
    line: FaultProxy, tmp_path_factory: pytest.TempPathFactory, home: Path, server: ServerInfo
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("cut")
    with Fleet(folder, home, hosts=2, store_url=f"s3://{BUCKET}/{folder.name}") as made:
        made.trainer.warm()
        yield made


def cut(line: FaultProxy, action: Action) -> tuple[Rule, threading.Timer]:
    """Cuts the line now, and mends it after a while; returns what it meets, and who mends it."""
    rule = Rule(action, times=_ALL)
    line.script(rule)
    mended = threading.Timer(CUT_SECONDS, line.script)
    mended.start()
    return rule, mended


@pytest.mark.parametrize("action", ["reset", "never answer"])
@pytest.mark.parametrize("at_work", ["the trainer", "the hosts"])
def test_the_store_is_away_for_ten_seconds_in_mid_sync(
    fleet: Fleet, line: FaultProxy, home: Path, at_work: str, action: Action
) -> None:
    line.script()
    cuts: list[tuple[Rule, threading.Timer]] = []

    def source() -> Iterator[tuple[str, Any]]:
        if at_work == "the trainer":
            cuts.append(cut(line, action))
        yield from fleet.train().items()

    outcome = push(fleet, source())
    if at_work == "the hosts":
        until(lambda: any(method == "PUT" and "manifest" in target for method, target, _ in line.seen), what="a commit")
        cuts.append(cut(line, action))
    failure = outcome.exception(timeout=300)
    assert failure is None or isinstance(failure, (StoreError, SyncIncomplete)), failure
    ((rule, mended),) = cuts
    mended.join()
    assert rule.hits, "the cut was felt"
    goes_on(fleet, home)
