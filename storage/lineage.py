"""A run's versions as a reader sees them: which run a root belongs to, which version is the head, and the hash chain
that leads to it. Only reads; claiming a root and committing to it is `publisher.py`, which way leads to a
version is `ways.py`."""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TypeVar

from weighbridge.errors import LineageError, ManifestCorrupt, ObjectMissing, Replayed, VersionUnknown
from weighbridge.storage.digests import DIGESTS
from weighbridge.storage.manifest import (
    ANCHORS_FOLDER,
    OpenManifest,
    anchor_key,
    check_name,
    from_bytes,
    manifest_key,
    open_bytes,
    retired_key,
    version_folder,
)
from weighbridge.storage.sealed_json import MOST_SEALED_BYTES, seal, unseal
from weighbridge.storage.signing import Trust
from weighbridge.storage.state import base_digests, state_digest
from weighbridge.storage.stores.contract import Store
from weighbridge.values import Manifest

T = TypeVar("T")

RUN_KEY = "run.json"
_KEPT_MANIFESTS = 32
_KEPT_ANCHORS = 2
_MOST_GAP = 64
"""Versions in a row that may be missing below one that stands: somebody lost them. Where more are, somebody made the
one above up, and whoever went through them all would be busy for ever."""

_HEX64 = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"[0-9]{12}")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What run.json says: which run claimed the root, by which digests, on which base (state digest of version 0)."""

    run_id: str
    digest_kind: str
    base_digest: str
    created_ns: int

    def to_bytes(self) -> bytes:
        """run.json's bytes."""
        return seal({"format": 1, **asdict(self)})


def parse_run(data: bytes, where: str) -> RunInfo:
    """Reads run.json's bytes. Raises LineageError when they are not a run this version of weighbridge can read."""
    try:
        fields = unseal(data)
        if type(fields["format"]) is not int or fields["format"] != 1 or fields["digest_kind"] not in DIGESTS:
            raise ValueError(f"format {fields['format']!r} with digests {fields['digest_kind']!r} is not known here")
        if not _HEX64.fullmatch(fields["base_digest"]):
            raise ValueError("base_digest is not hex of its length")
        if type(fields["created_ns"]) is not int:
            raise ValueError("created_ns is no whole number")
        return RunInfo(
            run_id=check_name("run", fields["run_id"]),
            digest_kind=fields["digest_kind"],
            base_digest=fields["base_digest"],
            created_ns=fields["created_ns"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LineageError(f"{where}/{RUN_KEY} does not describe a run: {error}. Nothing was changed.") from error


class Lineage:
    """The committed versions under one root. Thread-safe for readers; keeps the manifests it read last."""

    def __init__(self, store: Store, *, floor: int = -1, trust: Trust | None = None) -> None:
        """`floor` is a version known to be committed: nothing below it is listed to find the head. With `trust` every
        version must be signed by one of its keys: what reads a manifest raises NotTrusted otherwise."""
        self.store = store
        self.trust = trust
        self._floor = floor
        self._run: RunInfo | None = None
        self._seen: OrderedDict[int, Manifest] = OrderedDict()
        self._seen_anchors: OrderedDict[int, Manifest] = OrderedDict()
        self._collected: set[tuple[str, int]] = set()
        self._head = -1

    @property
    def run(self) -> RunInfo:
        """The run that claimed this root. Raises LineageError when nobody did."""
        if self._run is None:
            try:
                self._run = parse_run(self.store.get(RUN_KEY, most=MOST_SEALED_BYTES), self.store.url)
            except ObjectMissing as error:
                raise LineageError(
                    f"{self.store.url} holds no run: check the URL, or publish to it first. Nothing was changed."
                ) from error
        return self._run

    def manifest(self, version: int) -> Manifest:
        """One version's manifest, proven by its own digest. Raises VersionUnknown, ManifestCorrupt."""
        known = self._seen.get(version)  # one step: another thread may drop it at any moment
        if known is not None:
            return known
        manifest = self._read_version(version, from_bytes)
        self.check(manifest, version)
        self._seen[version] = manifest
        while len(self._seen) > _KEPT_MANIFESTS:
            self._seen.popitem(last=False)
        return manifest

    def open(self, version: int) -> OpenManifest:
        """The same with its rows as Arrow has them, and not kept."""
        opened = self._read_version(version, open_bytes)
        self.check(opened.head, version)
        return opened

    def anchors(self) -> tuple[int, ...]:
        """The versions of which the store says that they have an anchor, oldest first, in one listing: hints."""
        names = (info.key.rpartition("/")[2] for info in self.store.list(ANCHORS_FOLDER))
        return tuple(sorted(int(name) for name in names if _VERSION.fullmatch(name)))

    def anchor(self, version: int) -> Manifest:
        """The anchor of a version, proven to be of the same state. Raises VersionUnknown when there is none,
        ManifestCorrupt."""
        known = self._seen_anchors.get(version)
        if known is not None:
            return known
        key, of = anchor_key(version), self.manifest(version)
        try:
            anchor = self._read(key, from_bytes)
        except ObjectMissing as error:
            raise VersionUnknown(f"version {version} has no anchor in {self.store.url}. Nothing was read.") from error
        expected = ("anchor", version, version, of.digest, of.state_digest, of.run_id, of.digest_kind)
        found = (anchor.kind, anchor.version, anchor.parent, anchor.parent_digest, anchor.state_digest)
        if (*found, anchor.run_id, anchor.digest_kind) != expected or state_digest(base_digests(anchor)) != found[-1]:
            raise ManifestCorrupt(f"{key} is not of version {version} as it was published; nothing was read from it")
        self._seen_anchors[version] = anchor
        while len(self._seen_anchors) > _KEPT_ANCHORS:
            self._seen_anchors.popitem(last=False)
        return anchor

    def forget_shards(self, manifest: Manifest) -> None:
        """Remembers that the shards of a version, or of an anchor, were found gone: no way leads over them again."""
        self._collected.add((manifest.kind, manifest.version))

    def recall_shards(self, manifest: Manifest) -> None:
        """Takes `forget_shards` back."""
        self._collected.discard((manifest.kind, manifest.version))

    def are_shards_gone(self, manifest: Manifest) -> bool:
        """Whether `forget_shards` was told of a version or anchor. Asks nothing of the store."""
        return (manifest.kind, manifest.version) in self._collected

    def _read_version(self, version: int, parse: Callable[..., T]) -> T:
        try:
            return self._read(manifest_key(version), parse)
        except ObjectMissing as error:
            raise VersionUnknown(f"{self.store.url} has no version {version}; its head is {self.head()}") from error

    def _read(self, key: str, parse: Callable[..., T]) -> T:
        # A bit that flipped on the way is not in the store; one that is, is there the second time too. Not within an
        # `except`, whose error would keep the first bytes in memory beside the second.
        with suppress(ManifestCorrupt):
            return parse(self.store.get(key), where=key, trust=self.trust)
        return parse(self.store.get(key), where=key, trust=self.trust)

    def check(self, manifest: Manifest, version: int) -> None:
        """Whether a manifest, rows aside, is this run's of this version. Raises ManifestCorrupt, or Replayed when it is
        rightly signed."""
        expected = (version, version - 1, self.run.run_id, self.run.digest_kind, "base" if version == 0 else "delta")
        found = (manifest.version, manifest.parent, manifest.run_id, manifest.digest_kind, manifest.kind)
        if found != expected:
            refusal = ManifestCorrupt if self.trust is None else Replayed
            raise refusal(f"{manifest_key(version)} is of {found}, not of {expected}; nothing was read from it")
        if version == 0 and manifest.state_digest != self.run.base_digest:
            raise ManifestCorrupt(f"{manifest_key(0)} is of another base than {RUN_KEY}; nothing was read from it")

    def head(self) -> int:
        """The newest committed version; -1 when not even version 0 stands. Asks the store, and never goes back.

        Raises ManifestCorrupt for a store where one stands far above all others.
        """
        if self._head < 0:
            listed = self.store.folders_after("versions", "" if self._floor < 0 else f"{self._floor:012d}")
            above = sorted({int(n) for n in listed if n.isascii() and n.isdigit()})
            # Folders above the head are attempts under way, or dead: walk down to one that was committed.
            newest = next((v for v in reversed(above) if self.is_committed(v)), self._floor)
            standing = [self._floor, *(v for v in above if v <= newest)]
            if any(upper - lower > _MOST_GAP for lower, upper in pairwise(standing)):
                raise ManifestCorrupt(
                    f"{manifest_key(newest)} stands in {self.store.url}, and more than {_MOST_GAP} versions in a row "
                    "below it do not. Nothing was read from it; find out who made it, and remove it."
                )
            self._head = newest
        head = self._head
        while self.is_committed(head + 1):
            head += 1
        self._head = max(self._head, head)  # another thread may have looked further meanwhile
        return self._head

    def newest(self) -> Manifest:
        """The manifest of the head. Raises VersionUnknown where nothing was published."""
        return self.manifest(max(self.head(), 0))

    def is_committed(self, version: int) -> bool:
        """Whether a version's manifest stands, asked of the store."""
        return version in self._seen or self._stands(manifest_key(version))

    def is_retired(self, version: int) -> bool:
        """Whether a version's shards were collected."""
        return self._stands(f"{version_folder(version)}/retired")

    def is_marked(self, manifest: Manifest) -> bool:
        """Whether the mark stands that the shards of a version, or of an anchor, are collected."""
        return self._stands(retired_key(manifest))

    def _stands(self, key: str) -> bool:
        try:
            self.store.size(key)
        except ObjectMissing:
            return False
        return True

    def chain(self, after: int, upto: int) -> tuple[Manifest, ...]:
        """The manifests of versions after+1 .. upto, proven as a hash chain from `after`'s own."""
        return tuple(self.walk(after, upto))

    def walk(self, after: int, upto: int) -> Iterator[Manifest]:
        """The same, one at a time: for long chains. Raises ManifestCorrupt where the chain breaks."""
        parent = self.manifest(after)
        for version in range(after + 1, upto + 1):
            manifest = self.manifest(version)
            _check_link(parent, manifest)
            yield manifest
            parent = manifest

    def back(self, version: int) -> Iterator[Manifest]:
        """The manifests from a version down to version 0, each proven to be the parent of the one before it."""
        child: Manifest | None = None
        for number in range(version, -1, -1):
            manifest = self.manifest(number)
            if child is not None:
                _check_link(manifest, child)
            yield manifest
            child = manifest


def _check_link(parent: Manifest, child: Manifest) -> None:
    if child.parent_digest != parent.digest:
        raise ManifestCorrupt(
            f"{manifest_key(child.version)} names another parent than the version {parent.version} that stands here: "
            "the chain is broken. Nothing was read from it; audit the store."
        )
