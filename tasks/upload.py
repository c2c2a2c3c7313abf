"""Upload: one spooled shard under a name that only this attempt uses, so repeating it is safe."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from weighbridge.storage.attempt import Attempt
from weighbridge.tasks.handle import Handle


@task(
    name="upload",
    task_run_name="upload-{index:05d}",
    retries=2,
    retry_delay_seconds=[1, 5],
    retry_jitter_factor=0.5,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def upload(index: int, attempt: Handle[Attempt]) -> int:
    """Uploads one shard; returns the bytes that went over the wire."""
    return attempt.value.upload(index)
