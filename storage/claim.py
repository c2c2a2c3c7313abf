"""Claims a root for one run and publishes version 0: the base's fingerprint and its small files, never its weights.
Both are put-if-absent and healed by whoever comes next with the same base."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from numpy import frombuffer, uint8
from safetensors.numpy import save as to_safetensors

from weighbridge.errors import ForeignRun, ObjectMissing, StoreError
from weighbridge.storage.checkpoint import Checkpoint
from weighbridge.storage.clock import Clock
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.lineage import RUN_KEY, Lineage, RunInfo, parse_run
from weighbridge.storage.manifest import check_name, manifest_key, shard_key, to_bytes
from weighbridge.storage.parts import cut
from weighbridge.storage.sealed_json import MOST_SEALED_BYTES
from weighbridge.storage.signing import Signer
from weighbridge.storage.state import state_digest
from weighbridge.storage.stores.contract import Store
from weighbridge.values import Manifest, PartKey, PartRow, ShardInfo

FILES_SHARD = "files"


@dataclass(frozen=True, slots=True)
class Base:
    """A base checkpoint whose every byte was digested: by part, and by whole tensor."""

    checkpoint: Checkpoint
    digest_kind: str
    parts: Mapping[PartKey, bytes]
    tensors: Mapping[str, bytes]

    @property
    def state_digest(self) -> str:
        """The state digest of version 0."""
        return state_digest(self.parts)


def read_base(checkpoint: Checkpoint, digest_kind: str) -> Base:
    """Digests a base checkpoint: reads all of it once."""
    parts, tensors = checkpoint.digests(digest_kind)
    return Base(checkpoint, digest_kind, parts, tensors)


def claim(
    store: Store,
    checkpoint: Checkpoint,
    *,
    run_id: str | None,
    digest_kind: str,
    writer: str,
    aliases: Mapping[str, str],
    clock: Clock,
    signer: Signer | None = None,
) -> tuple[RunInfo, Base]:
    """Makes the root this run's, or finds that it already is, and makes sure that version 0 stands.

    Without a `run_id` a fresh root gets a new one and a used root is gone on with. Raises ForeignRun when the root
    belongs to another run, or to the same run on another base; nothing is changed then. Version 0 is signed where a
    `signer` is given.
    """
    if run_id is not None:
        check_name("run", run_id)
    try:
        run = parse_run(store.get(RUN_KEY, most=MOST_SEALED_BYTES), store.url)
    except ObjectMissing:
        base = read_base(checkpoint, digest_kind)
        asked = RunInfo(run_id or f"run-{uuid.uuid4().hex[:8]}", digest_kind, base.state_digest, clock.now_ns())
        run = asked if put_if_absent(store, RUN_KEY, asked.to_bytes(), clock=clock) else Lineage(store).run
    else:
        base = read_base(checkpoint, run.digest_kind)
    if run.digest_kind != base.digest_kind:
        base = read_base(checkpoint, run.digest_kind)
    if run_id is not None and run.run_id != run_id:
        raise ForeignRun(
            f"{store.url} belongs to run {run.run_id}, not to {run_id}: give each run a root of its own. "
            "Nothing was changed."
        )
    if run.base_digest != base.state_digest:
        raise ForeignRun(
            f"{store.url} belongs to run {run.run_id} on another base than {checkpoint.folder} "
            f"(state {run.base_digest[:12]}, here {base.state_digest[:12]}): name the base that the run began with, "
            "or a new root. Nothing was changed."
        )
    if not Lineage(store).is_committed(0):
        _publish_base(store, run, base, writer=writer, aliases=aliases, clock=clock, signer=signer)
    return run, base


def _publish_base(
    store: Store,
    run: RunInfo,
    base: Base,
    *,
    writer: str,
    aliases: Mapping[str, str],
    clock: Clock,
    signer: Signer | None,
) -> None:
    checkpoint = base.checkpoint
    commit_id = uuid.uuid4().hex
    files = {name: frombuffer((checkpoint.folder / name).read_bytes(), uint8) for name in checkpoint.files}
    payload = to_safetensors(files)
    shard = ShardInfo(f"{commit_id}-{FILES_SHARD}.safetensors", len(payload), digest_bytes(run.digest_kind, payload))
    store.put(shard_key(0, shard), payload)
    if (stored := store.size(shard_key(0, shard))) != shard.nbytes:
        raise StoreError(
            f"{shard_key(0, shard)} was written to {store.url} with {shard.nbytes} bytes but has {stored} there. No "
            "version was published; start again, and it is written anew."
        )
    specs = checkpoint.specs()
    rows = tuple(
        PartRow(
            part.key, spec.dtype, spec.shape, part.nbytes, "base", -1, 0, b"", base.parts[part.key], base.tensors[name]
        )
        for name, spec in specs.items()
        for part in cut(spec)
    )
    data, _ = to_bytes(
        Manifest(
            run_id=run.run_id,
            version=0,
            parent=-1,
            parent_digest="",
            writer=writer,
            commit_id=commit_id,
            created_ns=clock.now_ns(),
            digest_kind=run.digest_kind,
            state_digest=base.state_digest,
            model_bytes=sum(s.nbytes for s in specs.values()),
            model_elements=sum(s.elements for s in specs.values()),
            tensors=len(specs),
            shards=(shard,),
            rows=rows,
            aliases=aliases,
            files=shard.name,
            kind="base",
        ),
        signer=signer,
    )
    # Another writer of the same run may publish version 0 first: it proves the same state, so either will do, and
    # the chain begins at whichever stands.
    if not put_if_absent(store, manifest_key(0), data, clock=clock):
        store.delete(shard_key(0, shard))
