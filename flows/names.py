"""The names by which flows, hosts and people find each other in Prefect: pools, deployments, tags, keys. Must not know
how any of them runs."""

HOSTS_POOL = "weighbridge"
"""One queue in it a host, named after the host."""
STEWARD_POOL = "weighbridge-steward"
"""One queue in it a training run, named after the run."""
POOL_TYPE = "weighbridge-host"

HOST_SYNC = "host-sync"
PREPARE = "prepare"
CUTOVER = "cutover"
ROLLOUT = "rollout"
ANCHOR = "anchor"
COMPACT = "compact"
GC = "gc"
SCRUB = "scrub"
AUDIT = "audit"
RETRY_FAILED = "retry-failed"
SYNC = "sync"
SYNC_CHECKPOINT = "sync-checkpoint"
PUBLISH = "publish"

HOST_DEPLOYMENT = f"{HOST_SYNC}/host"
PREPARE_DEPLOYMENT = f"{PREPARE}/host"
CUTOVER_DEPLOYMENT = f"{CUTOVER}/host"

PARTIAL = "PartialRollout"
HEALED = "Healed"
SUPERSEDED = "Superseded"
ENOUGH = "Enough"


def run_tag(run: str) -> str:
    """Marks everything that belongs to one training run."""
    return f"run:{run}"


def version_tag(version: int) -> str:
    """Marks everything that belongs to one version."""
    return f"version:{version}"


def host_tag(host: str) -> str:
    """Marks everything that one host did."""
    return f"host:{host}"


def rollout_deployment(run: str) -> str:
    """The deployment of a training run's rollouts."""
    return f"{ROLLOUT}/{run}"


def upkeep_deployment(flow: str, run: str) -> str:
    """The deployment of one flow of a training run's upkeep."""
    return f"{flow}/{run}"


def scrub_deployment(host: str) -> str:
    """The deployment of one host's scrub."""
    return f"{SCRUB}/{host}"


def host_key(flow: str, run: str, version: int, host: str) -> str:
    """The idempotency key: one run of a host's flow for a version, however often it is asked for."""
    return f"{flow}:{run}:{version}:{host}"
