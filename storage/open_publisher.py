"""Opens a run for writing: which writer this is, whose root it is, and where its snapshot begins. Must not know what is
published next."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from weighbridge.errors import UsageError, VersionRetired
from weighbridge.storage.attempt import Attempt, Snapshot
from weighbridge.storage.checkpoint import Checkpoint
from weighbridge.storage.claim import Base, claim
from weighbridge.storage.clock import Clock
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk
from weighbridge.storage.peers.export import Export
from weighbridge.storage.publisher import Publisher
from weighbridge.storage.ranks import FIRST, Alone, Ranks
from weighbridge.storage.replica.room import Kind, open_room
from weighbridge.storage.resume import first_snapshot
from weighbridge.storage.share import Share, empty_snapshot
from weighbridge.storage.signing import SIGNED_DIGEST, Signer, Trust, is_signed
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.stores.probe import probe
from weighbridge.values import Manifest

log = structlog.get_logger("weighbridge.publisher")

_OPEN_TRIES = 4


def open_publisher(
    store: Store,
    checkpoint: Checkpoint,
    *,
    run_id: str | None,
    digest_kind: str,
    aliases: Mapping[str, str],
    spool: Path,
    disk: Disk,
    clock: Clock,
    threads: int,
    replica: Path | None = None,
    trainable: Sequence[str] = (),
    signer: Signer | None = None,
    trust: Trust | None = None,
    exports: Sequence[Export] = (),
    snapshot: Kind = "memory",
    ranks: Ranks | None = None,
    hold: bool = True,
    hand_over: Callable[[Manifest, Attempt], None] | None = None,
) -> Publisher:
    """Opens a run for writing: probes the store, claims the root (or goes on with it), and rebuilds the snapshot, by
    the shortest way from the base, an anchor, or a `replica` on this machine that proves equal.

    `trainable` are patterns of the tensors that may change; another that does is told, and published all the same.
    `exports` are neighbours' layouts, written after each commit. With a `signer` every version is signed, and only
    versions signed by its key (or those of `trust`) are gone on from.
    Holds one copy of the model from then on, in memory or in a file that is mapped. With several `ranks` all of them
    call this; the first claims the root, and each brings only its share of the snapshot, when it is first needed. So
    does a single one with `hold` False: for a writer whose shards are encoded elsewhere. `hand_over`: see Publisher.
    Raises StoreUnfit, ForeignRun, CheckpointError, VersionRetired, NotTrusted, StoreError, RankLost; UsageError for a
    run that cannot be signed, and for exports by ranks of which none has the whole model.
    """
    group = ranks or Alone()
    if exports and group.size > 1:
        raise UsageError(
            f"{group.size} ranks write a run together, and none of them has the whole model, which other layouts are "
            "written from. Nothing was published; leave the layout out, or push from one rank with ranks='alone'."
        )
    for export in exports:
        export.demand(checkpoint.specs())
    if signer is not None and trust is None:
        trust = Trust((signer.public,))
    shared = group.round()
    try:
        base: Base | None = None
        if group.rank == FIRST:
            probe(store, clock=clock)
            writer = uuid.uuid4().hex
            run, base = claim(
                store,
                checkpoint,
                run_id=run_id,
                digest_kind=digest_kind,
                writer=writer,
                aliases=aliases,
                clock=clock,
                signer=signer,
            )
            if signer is not None and run.digest_kind != SIGNED_DIGEST:
                raise UsageError(
                    f"run {run.run_id} has {run.digest_kind} digests, which an enemy can forge: signing needs "
                    f"{SIGNED_DIGEST}. Nothing was published; sign a fresh root from its first version on."
                )
            if signer is None and is_signed(Lineage(store).manifest(0)):
                raise UsageError(
                    f"run {run.run_id} is signed, and hosts that trust its key believe no version that is not, nor any "
                    "after it. Nothing was published; sign with the run's key (`--sign KEY`)."
                )
            shared.post("opened", writer)
        else:
            writer = shared.take("opened", FIRST)
        lineage = Lineage(store, trust=trust)
        disk.make_folder(spool, mode=PRIVATE_FOLDER)
        room = open_room(snapshot, spool / "snapshot", checkpoint.nbytes, disk=disk)
        share = Share(lineage, checkpoint, room=room, spool=spool / "share", disk=disk, clock=clock, threads=threads)

        def first() -> Snapshot:
            if group.size > 1 or base is None or not hold:
                return empty_snapshot(lineage, checkpoint)
            return first_snapshot(
                lineage, base, replica=replica, spool=spool, disk=disk, clock=clock, threads=threads, room=room
            )

        for attempt in range(1, _OPEN_TRIES + 1):
            publisher = Publisher(
                store=store,
                lineage=lineage,
                snapshot=first(),
                aliases=aliases,
                writer=writer,
                spool=spool,
                disk=disk,
                clock=clock,
                threads=threads,
                trainable=trainable,
                signer=signer,
                exports=exports,
                ranks=group,
                share=share,
                hand_over=hand_over,
            )
            for export in exports:
                export.begin(publisher.version)
            try:
                publisher.follow()
            except VersionRetired as error:
                if attempt == _OPEN_TRIES:
                    raise
                log.warning("a way to the head was closed, opening again", error=str(error))
            else:
                shared.exchange("ready", None)
                log.info("opened", run=publisher.run_id, version=publisher.version, writer=writer, store=store.url)
                return publisher
    except BaseException as failure:
        shared.fail(failure)
        raise
    raise AssertionError("the loop ends by returning or raising")
