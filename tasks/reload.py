"""Reload: the cut over, pause to canary. Never retried by itself: a failed one has already restored the last good copy
or left the engine paused, and what to do next is a person's or the next version's to say."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from weighbridge.tasks.handle import Handle
from weighbridge.tasks.host_attempt import HostAttempt


@task(name="cut over", cache_policy=NO_CACHE, persist_result=False)
def reload(attempt: Handle[HostAttempt]) -> float:
    """Cuts over; returns the seconds for which the engine was paused."""
    return attempt.value.cut_over()
