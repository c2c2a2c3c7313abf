"""Verify: the state that apply proved is the one the manifest names. The last word before an engine is paused; a
mismatch is no matter of luck, so it is never retried."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from weighbridge.tasks.handle import Handle
from weighbridge.tasks.host_attempt import HostAttempt


@task(name="verify", cache_policy=NO_CACHE, persist_result=False)
def verify(attempt: Handle[HostAttempt]) -> str:
    """Compares; returns the digest of the whole state."""
    return attempt.value.verify()
