"""Publish: encode and upload shards as the trainer's thread hands them over, then commit. Runs in the trainer's process,
in a thread of its own; gathering stays in the caller's thread, which feeds it."""

from prefect import flow
from prefect.futures import PrefectFuture

from weighbridge.storage.publication import Publication
from weighbridge.tasks.commit import commit
from weighbridge.tasks.encode import encode
from weighbridge.tasks.handle import Handle
from weighbridge.tasks.upload import upload


@flow(name="publish", flow_run_name="publish v{version} of {run}", validate_parameters=False, persist_result=False)
def publish(run: str, version: int, publication: Handle[Publication]) -> int:
    """Publishes one version; returns its number once the commit stands. Raises what the failing step raised."""
    attempt, feed = Handle(publication.value.attempt), Handle(publication.value.feed)
    uploads: list[PrefectFuture[int]] = []
    try:
        for batch in feed.value:
            encoded = encode.submit(batch.index, attempt, Handle(batch), feed)
            uploads.append(upload.submit(encoded, attempt))
        for uploaded in uploads:
            uploaded.result()
        return commit(publication)
    finally:
        attempt.release()
        feed.release()
