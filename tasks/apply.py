"""Apply: patch the spare copy, each part proven before it is written. Retried only for what the store may yet give: the
journal makes repeating it safe, and `current` is never touched."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from weighbridge.tasks.fetch import may_pass_by_itself
from weighbridge.tasks.handle import Handle
from weighbridge.tasks.host_attempt import HostAttempt


@task(
    name="apply",
    retries=1,
    retry_delay_seconds=1.0,
    retry_jitter_factor=0.5,
    retry_condition_fn=may_pass_by_itself,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def apply(attempt: Handle[HostAttempt]) -> int:
    """Applies what was fetched; returns the parts that were written."""
    return attempt.value.apply()
