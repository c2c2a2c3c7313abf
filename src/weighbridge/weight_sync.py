"""The front door for trainers: `WeightSync` publishes what changed after each optimizer step. Gathers in the caller's
thread; everything else runs in a thread of its own, so that the trainer's event loop and signal handlers stay its own.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from weighbridge import logs
from weighbridge.errors import CommitConflict, SyncIncomplete, UsageError, WriterOvertaken
from weighbridge.flows.elsewhere import need_carrier
from weighbridge.flows.lanes import Lanes
from weighbridge.flows.sync import SyncOptions, SyncOutcome, leave, run_rollout, run_sync
from weighbridge.pending import Backlog, PendingPush
from weighbridge.reading import elsewhere_of, have_read, read_here
from weighbridge.settings import Settings, load_settings
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.codecs import warm as warm_kernels
from weighbridge.storage.feed import Feed, FeedBroken
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.manifest import check_labels
from weighbridge.storage.open_publisher import open_publisher
from weighbridge.storage.peers.contract import Writing
from weighbridge.storage.peers.export import Export
from weighbridge.storage.peers.registry import get_layout
from weighbridge.storage.publication import Publication
from weighbridge.storage.publisher import Publisher
from weighbridge.storage.ranks import FIRST, Alone, Ranks, Round
from weighbridge.storage.records import SERVED, SUPERSEDED
from weighbridge.storage.spools import spool_folder
from weighbridge.storage.stores import open_store
from weighbridge.tasks.gather import Source, folder_of
from weighbridge.tasks.metrics import count_failed_push, count_push, serve_metrics
from weighbridge.tasks.publish_here import publish_here
from weighbridge.tasks.sharing import Sharing
from weighbridge.tasks.torch_ranks import as_message, ranks_of_process
from weighbridge.transport import open_sender
from weighbridge.values import HostOutcome, Label, PushResult

T = TypeVar("T")

_CONFLICT_TRIES = 3
_ANY_NUMBER = 1 << 40  # of batches that hold no bytes


class WeightSync:
    """Publishes a model's versions to a store and brings hosts to them. Use it from one thread; a context manager.

    store: a directory or URL. base: the HF folder that is version 0. hosts: names under which `weighbridge host`
    processes run; none publishes alone, without Prefect having anything to dispatch. `settings` are those of
    `weighbridge.settings.Settings` (run, aliases, unchanged, digest, policy, sync_deadline, threads, ...); what is not
    given comes from `WEIGHBRIDGE_*` and the configuration files. Raises UsageError at once for what cannot be right.

    Where torch.distributed is initialised, every rank makes one and calls `warm`, `push` and `close` in the same order;
    each publishes the tensors that it alone brings and its part of those that several do, and the first one commits and
    talks to Prefect. `ranks="alone"` is for a trainer of which one rank pushes everything.

    One copy of the model (with ranks, of this one's part) is kept from `warm` or the first push on: in memory, or with
    `snapshot="mmap"` in a file. A trainer that resumes makes it from the base or an anchor and the deltas after it;
    with `replica=` a replica's folder on this machine is read instead, where that is shorter and it proves equal.
    """

    def __init__(
        self,
        store: str | Path | None = None,
        base: str | Path | None = None,
        hosts: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        given = {"store": str(store) if store else None, "base": base, "hosts": hosts or None, **settings}
        self._settings: Settings = load_settings(given)
        if self._settings.store is None or self._settings.base is None:
            raise UsageError("WeightSync needs a store and a base checkpoint. Nothing was started.")
        if self._settings.encode_on != "threads":
            need_carrier(self._settings.encode_on)
        logs.configure(json_lines=self._settings.log_json)
        serve_metrics(self._settings.metrics_listen)
        self._options = SyncOptions(
            self._settings.hosts, self._settings.required, self._settings.sync_deadline, self._settings.cutover
        )
        self._lanes = Lanes(self._settings.home)
        self._ranks: Ranks | None = None
        self._publisher: Publisher | None = None
        self._spools = ExitStack()
        self._last: PendingPush | None = None
        self._backlog = Backlog(self._settings.allowed_staleness)
        self._under_way: Publication | None = None

    def warm(self) -> None:
        """Opens the run, takes it over from a writer before this one, and brings every host to the newest version.

        Worth calling while the first step trains: it digests the base, compiles kernels, starts the embedded server
        when no PREFECT_API_URL is set, and seeds and proves every host's replica. Raises SyncIncomplete when fewer
        hosts made it than the policy asks for.
        """
        publisher = self._at_rest()
        publisher.take_over()
        warm_kernels()
        shared = publisher.ranks.round()
        if publisher.ranks.rank != FIRST:
            self._heard(shared)
        else:
            self._told(shared, lambda: self._roll_out(publisher))

    def _roll_out(self, publisher: Publisher) -> None:
        if self._options.hosts:
            store, run, version = publisher.store, publisher.run_id, publisher.version
            outcome = self._lanes.submit(lambda: run_rollout(store, run, version, self._options)).result()
            self._demand(publisher.version, outcome.hosts)

    @overload
    def push(
        self, source: Source, *, labels: Mapping[str, Label] | None = None, wait: Literal[True] = True
    ) -> PushResult: ...

    @overload
    def push(
        self, source: Source, *, labels: Mapping[str, Label] | None = None, wait: Literal[False]
    ) -> PendingPush: ...

    def push(
        self, source: Source, *, labels: Mapping[str, Label] | None = None, wait: bool = True
    ) -> PushResult | PendingPush:
        """Publishes `source` as the next version and brings the hosts to it.

        source: a module, a state dict, (name, tensor) pairs, or a checkpoint folder; names, dtypes and shapes are the
        base's (fp32, bf16 and fp16 are cast to each other). The weights must not change until `push` returns. With
        `wait=False` it returns a `PendingPush` once the weights were read: upload, commit and hosts go on beside the
        next step. With `allowed_staleness` a push first waits for hosts that are more versions than that behind it.

        Raises GatherError (the store is as it was), CommitStateUnknown (the next push settles it), WriterOvertaken
        (for good), OrchestrationError (says whether the version stands), SyncIncomplete (it stands; some hosts do not
        serve it).
        """
        again = 0 if isinstance(source, Iterator) or self._open().ranks.size > 1 else _CONFLICT_TRIES
        while True:
            try:
                pending = self._push(source, dict(check_labels(labels or {})))
                return pending.result() if wait else pending
            except CommitConflict as conflict:
                # The weights are still there to be read again, and become the version after the other writer's.
                if isinstance(conflict, WriterOvertaken) or again == 0:
                    raise
                again -= 1

    def close(self) -> None:
        """Waits for a push that is under way and lets go of the snapshot. Versions and hosts stay as they are.

        Raises what the last push failed with, if nobody asked for its result.
        """
        unheard = self._end()
        if unheard is not None:
            raise unheard

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unheard = self._end()
        if unheard is not None and error is None:
            raise unheard

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that a push brings along. Set it to let one join (once it is ready) or leave: the next push asks
        these. Raises UsageError for a name twice."""
        return self._options.hosts

    @hosts.setter
    def hosts(self, names: Sequence[str]) -> None:
        if len(set(names)) != len(names):
            raise UsageError(f"a host is named twice: {', '.join(names)}. The hosts stay as they were.")
        self._options = replace(self._options, hosts=tuple(names))

    @property
    def version(self) -> int:
        """The newest version that this writer published or found."""
        return self._open().version

    def _end(self) -> BaseException | None:
        """Ends everything; returns a failure that nobody heard of."""
        unheard = None
        if self._last is not None:
            self._last.wait()
            unheard = self._last.unheard
        self._lanes.close()
        if self._publisher is not None and self._last is not None and self._publisher.ranks.rank == FIRST:
            _in_thread(partial(leave, self._publisher.run_id, self._settings.home)).result()
        self._spools.close()
        self._publisher = self._last = None
        return unheard

    def _open(self) -> Publisher:
        if self._publisher is None:
            settings = self._settings
            assert settings.store is not None and settings.base is not None
            disk = LocalDisk("process")
            self._spools.close()
            spool = self._spools.enter_context(spool_folder(settings.spool, disk=disk))
            store = open_store(settings.store, profile=settings.profile)
            theirs = settings.layout_store and open_store(settings.layout_store, profile=settings.profile)
            writing = Writing(
                spool / "peers",
                disk,
                SystemClock(),
                settings.layout_encoding,
                settings.layout_checksum,
                settings.layout_anchors,
            )
            if self._ranks is None:
                self._ranks = self._find_ranks()
            sender = open_sender(settings, self._ranks, spool, disk=disk, hosts=lambda: self._options.hosts)
            if sender is not None:
                self._spools.callback(sender.close)
            self._publisher = open_publisher(
                store,
                open_checkpoint(settings.base),
                run_id=settings.run,
                digest_kind=settings.digest_kind,
                aliases=settings.aliases,
                spool=spool,
                disk=disk,
                clock=SystemClock(),
                threads=settings.encode_threads,
                replica=settings.replica,
                trainable=settings.trainable,
                signer=settings.signer,
                trust=settings.trusted,
                exports=[Export(get_layout(name), theirs or store, writing) for name in settings.layout],
                snapshot=settings.snapshot,
                ranks=self._ranks,
                hold=settings.encode_on == "threads",
                hand_over=None if sender is None else sender.take,
            )
        return self._publisher

    def _find_ranks(self) -> Ranks:
        if self._settings.ranks == "alone":
            return Alone()
        ranks = ranks_of_process(deadline_seconds=self._settings.rank_deadline, grace_seconds=self._settings.rank_grace)
        if ranks.size > 1 and self._settings.encode_on != "threads":
            raise UsageError(
                f"encode_on is {self._settings.encode_on!r}, for a folder that one process pushes, and {ranks.size} "
                "ranks push together. Nothing was published; leave it out, or push from one rank with ranks='alone'."
            )
        return ranks

    def _at_rest(self) -> Publisher:
        """The publisher, once the push before has settled whether its version stands."""
        if self._under_way is not None:
            self._under_way.settled.wait()
        return self._open()

    def _push(self, source: Source, labels: Mapping[str, Label]) -> PendingPush:
        publisher = self._at_rest()
        self._backlog.make_room(publisher.version + 1)
        started = time.perf_counter()
        folder = folder_of(source) if self._settings.encode_on != "threads" else None
        feed = Feed(in_flight=self._settings.encode_threads + 1 if folder is None else _ANY_NUMBER)
        attempt = publisher.begin()
        publication = Publication(
            publisher,
            attempt,
            feed,
            labels,
            self._settings.encode_threads,
            self._settings.hooks,
            elsewhere=None if folder is None else elsewhere_of(folder, publisher, attempt, self._settings),
        )
        work = partial(self._publish, publication, started)
        outcome = self._lanes.submit(work) if publisher.ranks.rank == FIRST else _in_thread(work)
        outcome.add_done_callback(publication.end)
        self._under_way = publication
        self._last = PendingPush(publication.attempt.version, outcome)
        self._backlog.add(self._last)
        shared = publication.attempt.round
        sharing = Sharing(
            publisher.ranks,
            shared,
            publisher.specs,
            publisher.owners,
            saw=publication.attempt.saw,
            digest_kind=publisher.digest_kind,
            window_bytes=self._settings.shard_bytes,
        )
        try:
            if folder is None:
                read_here(source, publication, sharing, self._settings)
            else:
                have_read(folder, publication, self._settings)
            shared.leave()
        except FeedBroken:
            shared.leave()
            outcome.result()  # raises what broke it
        except BaseException as failure:
            shared.fail(failure)
            feed.fail(failure)
            shared.leave(failure if sharing.source_failed else None)
            wait_for((outcome,))
            shared.check()  # what failed first, on whichever rank
            raise
        return self._last

    def _publish(self, publication: Publication, started: float) -> PushResult:
        """The other thread's part: the sync flow, and what it came to."""
        shared = publication.attempt.round
        if publication.publisher.ranks.rank == FIRST:
            return self._told(shared, lambda: self._sync(publication, started))
        try:
            publish_here(publication)
        except BaseException as failure:
            publication.give_up(failure)
            raise
        result: PushResult = self._heard(shared)
        return result

    def _sync(self, publication: Publication, started: float) -> PushResult:
        try:
            outcome = run_sync(publication, self._options)
        except BaseException as failure:
            publication.give_up(failure)
            count_failed_push(publication.publisher.run_id, failure)
            raise
        publication.seconds["total"] = time.perf_counter() - started
        return self._result(publication, outcome)

    def _told(self, shared: Round, work: Callable[[], T]) -> T:
        """Does what only the first rank does, and tells the others how it went."""
        try:
            result = work()
        except BaseException as failure:
            shared.post("result", as_message(failure))
            raise
        shared.post("result", result)
        return result

    def _heard(self, shared: Round) -> Any:
        """What the first rank's work came to."""
        result = shared.take("result", FIRST, heed=False, more_seconds=self._settings.sync_deadline)
        if isinstance(result, BaseException):
            raise result
        return result

    def _result(self, publication: Publication, outcome: SyncOutcome) -> PushResult:
        manifest = publication.manifest
        assert manifest is not None
        result = PushResult(
            version=manifest.version,
            density=manifest.changed_elements / manifest.model_elements if manifest.model_elements else 0.0,
            changed_elements=manifest.changed_elements,
            model_bytes=manifest.model_bytes,
            wire_bytes=manifest.wire_bytes,
            seconds=publication.seconds,
            outcome=outcome.outcome,
            hosts=outcome.hosts,
        )
        count_push(manifest.run_id, result)
        self._demand(manifest.version, outcome.hosts, result)
        return result

    def _demand(self, version: int, hosts: Sequence[HostOutcome], result: PushResult | None = None) -> None:
        """Raises SyncIncomplete when fewer hosts made it than the policy asks for."""
        late = [host for host in hosts if host.outcome not in (SERVED, SUPERSEDED)]
        if len(hosts) - len(late) < math.ceil(self._options.required * len(hosts)):
            why = "; ".join(f"{host.host} {host.outcome}: {host.error}" for host in late)
            raise SyncIncomplete(
                f"version {version} is committed and stands, but {len(late)} of {len(hosts)} hosts do not serve it: "
                f"{why} They serve what they served before. Retry on their runs in the UI or `weighbridge retry "
                f"{version}` runs them again; with policy='best-effort' a push goes on without them.",
                result=result,
            )


def _in_thread(work: Callable[[], T]) -> "Future[T]":
    """Runs work in a thread of its own, for a rank that has no lane to Prefect."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as failure:  # noqa: BLE001 - this thread's edge: whoever asked gets it
            answer.set_exception(failure)

    threading.Thread(target=run, name="weighbridge-sync", daemon=True).start()
    return answer
