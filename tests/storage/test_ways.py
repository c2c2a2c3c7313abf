"""The shortest way to a version: never longer than any other, and around what is gone."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.errors import ManifestCorrupt, ObjectMissing, ReplicaError, VersionRetired
from weighbridge.storage.ways import find_way
from weighbridge.values import Manifest, ShardInfo

MODEL = 1000


def manifest(version: int, nbytes: int, kind: str = "delta") -> Manifest:
    return Manifest(
        run_id="run-1", version=version, parent=version - 1, parent_digest="", writer="", commit_id="", created_ns=0,
        digest_kind="xxh3-128", state_digest="", model_bytes=MODEL, model_elements=1, tensors=1,
        shards=(ShardInfo(f"{kind}-{version}", nbytes, b""),), rows=(), kind=kind,
    )  # fmt: skip


class Line:
    """A lineage of bare weights: `deltas[v]` is what version v weighs, `anchors[v]` what its anchor does."""

    def __init__(self, deltas: list[int], anchors: dict[int, int], gone: set[tuple[str, int]] = frozenset()) -> None:  # type: ignore[assignment]
        self._deltas = [manifest(v, w, "base" if v == 0 else "delta") for v, w in enumerate(deltas)]
        self._anchors = {v: manifest(v, w, "anchor") for v, w in anchors.items()}
        self.gone, self.listings, self.steps = set(gone), 0, 0
        self.run = SimpleNamespace(run_id="run-1")
        self.store = self
        self.unreadable = -1
        self.collected: set[tuple[str, int]] = set()
        self.asked: list[str] = []

    def size(self, key: str) -> int:
        self.asked.append(key)
        if any(f"/{version:012d}/" in key and "delta" in key for kind, version in self.collected):
            raise ObjectMissing(key)
        return 1

    def back(self, version: int) -> Any:
        for v in range(version, -1, -1):
            self.steps += 1
            yield self.manifest(v)

    def manifest(self, version: int) -> Manifest:
        if version == self.unreadable:
            raise ManifestCorrupt(f"version {version} cannot be read")
        return self._deltas[version]

    def is_marked(self, of: Manifest) -> bool:
        return (of.kind, of.version) in self.collected

    def forget_shards(self, of: Manifest) -> None:
        self.gone.add((of.kind, of.version))

    def anchors(self) -> tuple[int, ...]:
        self.listings += 1
        return tuple(sorted(self._anchors))

    def anchor(self, version: int) -> Manifest:
        return self._anchors[version]

    def are_shards_gone(self, of: Manifest) -> bool:
        return (of.kind, of.version) in self.gone


def way(line: Line, target: int, held: dict[int, int]) -> Any:
    return find_way(line, target, held=held)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_other_way_weighs_less(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 8))
    deltas = [0, *data.draw(st.lists(st.integers(0, 900), min_size=length, max_size=length))]
    anchors = data.draw(st.dictionaries(st.integers(0, length), st.just(700), max_size=3))
    held = dict.fromkeys(data.draw(st.sets(st.integers(0, length), max_size=2)), 0)
    gone = {("delta", v) for v in data.draw(st.sets(st.integers(1, length), max_size=2))}
    target = data.draw(st.integers(0, length))
    starts = [(0, v, "held") for v in held] + [(w, v, "anchor") for v, w in anchors.items()]
    open_to = [
        s for s in starts if s[1] <= target and not any(("delta", v) in gone for v in range(s[1] + 1, target + 1))
    ]
    line = Line(deltas, anchors, gone)
    if not open_to:
        with pytest.raises((VersionRetired, ReplicaError)):
            way(line, target, held)
        return
    best = min(nbytes + sum(deltas[start + 1 : target + 1]) for nbytes, start, _ in open_to)
    found = way(line, target, held)
    assert [m.version for m in found.deltas] == list(range(found.start + 1, target + 1))
    assert found.nbytes == sum(m.wire_bytes for m in found.manifests)
    # Without a listing a light way of deltas is taken as it is; an anchor never weighs that little.
    assert found.nbytes == best or (found.anchor is None and found.nbytes * 8 <= MODEL)
    assert found.anchor is not None or found.start in held


def test_a_host_that_keeps_up_asks_for_no_anchors_and_reads_one_manifest_and_its_parent() -> None:
    line = Line([0, 9, 9, 9, 9], {0: 500, 3: 500})
    assert way(line, 4, {3: 0}).start == 3
    assert (line.listings, line.steps) == (0, 2)


def test_a_long_way_is_not_walked_below_what_an_anchor_weighs() -> None:
    line = Line([0, *[100] * 500], {450: 700})
    found = way(line, 460, {0: 0})
    assert (found.start, found.nbytes) == (450, 1700)
    assert line.steps < 40


def test_of_two_equal_ways_the_one_from_the_lower_rank_is_taken() -> None:
    assert way(Line([0, 5, 0, 5], {}), 3, {2: 1, 1: 0}).start == 1
    assert way(Line([0, 5, 0, 5], {}), 3, {2: 0, 1: 1}).start == 2


def test_an_anchor_that_is_gone_is_no_way_and_an_older_one_is() -> None:
    found = way(Line([0, 500, 500, 500], {1: 700, 2: 700}, {("anchor", 2)}), 3, {})
    assert (found.start, found.nbytes) == (1, 1700)


def test_without_a_base_and_an_anchor_it_says_what_to_give() -> None:
    with pytest.raises(ReplicaError, match="base folder"):
        way(Line([0, 5], {}), 1, {})


def test_a_version_behind_a_gap_is_retired_and_one_above_an_anchor_is_not() -> None:
    line = Line([0, 5, 5], {2: 700}, {("delta", 1)})
    assert way(line, 2, {0: 0}).anchor is not None
    with pytest.raises(VersionRetired, match=r"version 1 is retired.*ask for the head"):
        way(line, 1, {0: 0})


def test_a_manifest_that_cannot_be_read_is_gone_round_by_an_anchor_and_by_what_is_held_above_it() -> None:
    line = Line([0, 9, 9, 9, 9, 9], {3: 700})
    line.unreadable = 2
    assert (way(line, 5, {0: 0}).start, way(line, 5, {0: 0}).nbytes) == (3, 718)
    assert way(line, 5, {0: 0, 4: 1}).start == 4
    with pytest.raises(ManifestCorrupt, match="version 2"):
        way(line, 1 + 1, {0: 0})
    bare = Line([0, 9, 9, 9], {})
    bare.unreadable = 1
    with pytest.raises(ManifestCorrupt, match="version 1"):
        way(bare, 3, {0: 0})


def test_what_is_held_is_a_start_also_when_its_own_manifest_cannot_be_read() -> None:
    line = Line([0, 9, 9, 9], {})
    line.unreadable = 2
    found = way(line, 3, {2: 0})
    assert (found.start, [m.version for m in found.deltas]) == (2, [3])


def test_a_light_way_over_collected_deltas_is_not_begun_where_an_anchor_leads_past_them() -> None:
    line = Line([0, 40, 40, 40, 40, 40], {4: 700})
    line.collected = {("delta", 3)}
    found = way(line, 5, {0: 0})
    assert found.anchor is not None and found.start == 4


def test_a_host_that_keeps_up_asks_after_one_shard_of_its_way() -> None:
    line = Line([0, 9, 9, 9, 9], {1: 700})
    assert way(line, 4, {1: 0}).start == 1
    assert len(line.asked) == 1
