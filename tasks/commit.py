"""Commit: one object is created, and its outcome read back. No retry and no timeout from Prefect: the commit has its
own deadline, and repeating it blindly is what `CommitStateUnknown` is there to prevent."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from weighbridge.storage.publication import Publication
from weighbridge.tasks.handle import Handle


@task(name="commit", cache_policy=NO_CACHE, persist_result=False)
def commit(publication: Handle[Publication]) -> int:
    """Commits the attempt and advances the snapshot; returns the version."""
    return publication.value.commit().version
