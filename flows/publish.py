"""Publish: encode and upload shards as the trainer's thread hands them over, then commit. Runs in the trainer's
process, in a thread of its own; gathering stays in the caller's thread, which feeds it."""

from prefect.futures import PrefectFuture

from weighbridge.flows import names
from weighbridge.flows.artifacts import show_bill
from weighbridge.flows.marks import steps_unmarked
from weighbridge.flows.ours import our_flow
from weighbridge.storage.attempt import Attempt, SpooledShard
from weighbridge.storage.errand import Elsewhere
from weighbridge.storage.feed import Feed
from weighbridge.storage.publication import Publication
from weighbridge.tasks.commit import commit
from weighbridge.tasks.encode import encode
from weighbridge.tasks.encode_elsewhere import encode_elsewhere
from weighbridge.tasks.handle import Handle
from weighbridge.tasks.upload import upload


@our_flow(
    name=names.PUBLISH,
    flow_run_name="publish v{version}",
    validate_parameters=False,
)
def publish(run: str, version: int, publication: Handle[Publication]) -> int:
    """Publishes one version; returns its number once the commit stands. Raises what the failing step raised."""
    pushed = publication.value
    attempt, feed = Handle(pushed.attempt), Handle(pushed.feed)
    try:
        with steps_unmarked():
            if pushed.elsewhere is None:
                _encode_here(pushed, attempt, feed)
            else:
                _encode_there(pushed, pushed.elsewhere)
            commit(publication)
        pushed.announce()
        if pushed.manifest is not None:
            show_bill(pushed.manifest, pushed.seconds)
    except BaseException as failure:
        # Prefect may lose an exception on its way out; the trainer is owed this one.
        pushed.failure = failure
        pushed.feed.fail(failure)
        raise
    finally:
        attempt.release()
        feed.release()
    return version


def _encode_here(pushed: Publication, attempt: Handle[Attempt], feed: Handle[Feed]) -> None:
    under_way: list[PrefectFuture[int]] = []
    for batch in pushed.feed:
        encoded = encode.submit(batch.index, attempt, Handle(batch), feed)
        under_way += [encoded, upload.submit(batch.index, attempt, wait_for=[encoded], return_state=False)]
    for step in under_way:  # a shard's encode before its upload: the first failure is the one that counts
        step.result()


def _encode_there(pushed: Publication, elsewhere: Elsewhere) -> None:
    """Sends each batch as an errand, and waits for all of them: what was uploaded is known even when one fails."""
    sent: list[PrefectFuture[SpooledShard]] = [
        encode_elsewhere.submit(elsewhere.site.errand(batch)) for batch in pushed.feed
    ]
    failure: Exception | None = None
    for errand in sent:
        try:
            pushed.attempt.take_in(errand.result())
        except Exception as error:  # noqa: BLE001 - raised below, once all have ended
            failure = failure or error
        pushed.feed.done()
    if failure is not None:
        raise failure
