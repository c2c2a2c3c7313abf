"""Record: what became of a host's attempt, written to the store. One object with a name of its own, so repeating it is
safe."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from weighbridge.tasks.fetch import may_pass_by_itself
from weighbridge.tasks.handle import Handle
from weighbridge.tasks.host_attempt import HostAttempt


@task(
    name="record",
    retries=3,
    retry_delay_seconds=[0.5, 2.0, 5.0],
    retry_jitter_factor=0.5,
    retry_condition_fn=may_pass_by_itself,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def record(attempt: Handle[HostAttempt]) -> str:
    """Writes that the host serves the version; returns the attempt's name."""
    return attempt.value.record_served().attempt
