"""What Prometheus is told of a host and of a trainer: versions, lag, bytes, seconds, failures. Numbers are counted
whether anybody asks or not; a port is opened only where one is set. Must not know who calls, and never fails a step."""

import structlog
from prometheus_client import Counter, Gauge, Histogram, start_http_server

from weighbridge.errors import UsageError
from weighbridge.values import HostRecord, PushResult

log = structlog.get_logger("weighbridge.metrics")

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

VERSION = Gauge("weighbridge_version", "The newest version published or served", ["role", "name"])
LAG = Gauge("weighbridge_lag_versions", "Versions that a host is behind the newest that it knows of", ["name"])
BYTES = Counter("weighbridge_bytes", "Bytes of shards published or fetched", ["role", "name"])
ENDED = Counter("weighbridge_attempts", "Pushes and hosts' attempts, by how they ended", ["role", "name", "outcome"])
FAILED = Counter("weighbridge_failures", "Pushes and hosts' attempts that failed, by error", ["role", "name", "error"])
TOOK = Histogram("weighbridge_seconds", "How long each phase took", ["role", "phase"], buckets=_SECONDS)
DENSITY = Gauge("weighbridge_density", "Share of the elements that the newest version changed", ["name"])


def serve_metrics(listen: str) -> None:
    """Answers scrapes at `listen`, "address:port", for as long as this process lives; "" opens nothing. Raises
    UsageError when that cannot be."""
    if not listen:
        return
    address, _, port = listen.rpartition(":")
    try:
        start_http_server(int(port), addr=address or "127.0.0.1")
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"metrics cannot be served at {listen!r}: {error}. Give address:port, free.") from error
    log.info("metrics", listen=listen)


def count_push(run: str, result: PushResult) -> None:
    """A push whose version stands."""
    VERSION.labels("trainer", run).set(result.version)
    DENSITY.labels(run).set(result.density)
    BYTES.labels("trainer", run).inc(result.wire_bytes)
    ENDED.labels("trainer", run, result.outcome).inc()
    for phase, seconds in result.seconds.items():
        TOOK.labels("trainer", phase).observe(seconds)


def count_failed_push(run: str, failure: BaseException) -> None:
    """A push that failed; its version may stand all the same."""
    FAILED.labels("trainer", run, type(failure).__name__).inc()


def count_attempt(record: HostRecord, *, serves: int) -> None:
    """A host's attempt that ended; `serves` is the version that the host holds now."""
    VERSION.labels("host", record.host).set(serves)
    LAG.labels(record.host).set(max(0, record.head - serves))
    BYTES.labels("host", record.host).inc(record.fetched_bytes)
    ENDED.labels("host", record.host, record.outcome).inc()
    if record.error:
        FAILED.labels("host", record.host, record.error.partition(":")[0]).inc()
    for phase, seconds in record.seconds.items():
        TOOK.labels("host", phase).observe(seconds)
