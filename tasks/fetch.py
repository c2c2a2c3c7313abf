"""Fetch: the shards a host lacks, each proven by its digest. Retried, since it changes nothing but a download folder;
not where the store said no, the disk is full, or the version is not there."""

from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from weighbridge.errors import CorruptData, StoreError, StoreRefused
from weighbridge.tasks.handle import Handle
from weighbridge.tasks.host_attempt import HostAttempt


def may_pass_by_itself(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a failure may be gone at the next try: a store that did not answer, bytes spoilt on the way."""
    failure = state.result(raise_on_failure=False)
    return isinstance(failure, (StoreError, CorruptData)) and not isinstance(failure, StoreRefused)


@task(
    name="fetch",
    retries=2,
    retry_delay_seconds=[0.5, 2.0],
    retry_jitter_factor=0.5,
    retry_condition_fn=may_pass_by_itself,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def fetch(attempt: Handle[HostAttempt]) -> int:
    """Plans and fetches; returns the bytes that came over the wire."""
    return attempt.value.fetch()
