"""What Prometheus reads of a host and of a trainer, over its own port."""

import uuid

import httpx
import pytest
from prometheus_client import REGISTRY
from tests.stores.servers import free_ports

from weighbridge.errors import StoreError, UsageError
from weighbridge.tasks.metrics import count_attempt, count_failed_push, count_push, serve_metrics
from weighbridge.values import HostRecord, PushResult


def value(metric: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(metric, labels) or 0.0


def record(host: str, version: int, *, outcome: str = "served", error: str = "", head: int = -1) -> HostRecord:
    return HostRecord(
        "run", host, version, uuid.uuid4().hex, outcome, "canary", version - 1, "", 0, 1, 100, 0, {"pause": 0.2},
        error=error, head=head,
    )  # fmt: skip


def test_a_host_tells_its_version_lag_bytes_seconds_and_failures() -> None:
    host = f"host-{uuid.uuid4().hex}"
    pauses = value("weighbridge_seconds_count", role="host", phase="pause")
    count_attempt(record(host, 3), serves=3)
    count_attempt(record(host, 5, outcome="failed", error="DigestMismatch: no", head=6), serves=3)
    assert value("weighbridge_version", role="host", name=host) == 3
    assert value("weighbridge_lag_versions", name=host) == 3
    assert value("weighbridge_bytes_total", role="host", name=host) == 200
    assert value("weighbridge_attempts_total", role="host", name=host, outcome="served") == 1
    assert value("weighbridge_failures_total", role="host", name=host, error="DigestMismatch") == 1
    assert value("weighbridge_seconds_count", role="host", phase="pause") == pauses + 2


def test_a_trainer_tells_its_version_bytes_and_failures() -> None:
    run = f"run-{uuid.uuid4().hex}"
    count_push(run, PushResult(7, 0.25, 10, 1000, 64, {"total": 1.5}, "complete"))
    count_failed_push(run, StoreError("away"))
    assert value("weighbridge_version", role="trainer", name=run) == 7
    assert value("weighbridge_density", name=run) == 0.25
    assert value("weighbridge_bytes_total", role="trainer", name=run) == 64
    assert value("weighbridge_failures_total", role="trainer", name=run, error="StoreError") == 1


def test_metrics_are_served_where_told_and_nowhere_else() -> None:
    serve_metrics("")
    (port,) = free_ports(1)
    serve_metrics(f"127.0.0.1:{port}")
    assert "weighbridge_version" in httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    for wrong in (f"127.0.0.1:{port}", "127.0.0.1:no port", "here"):
        with pytest.raises(UsageError, match="metrics cannot be served"):
            serve_metrics(wrong)
