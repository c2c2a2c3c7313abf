"""What was published and what came of it: log, show, diff and status."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.checkpoints import Weights, tiny_weights, trained
from tests.storage.publishing import Run, push
from tests.storage.test_records import record

from weighbridge.errors import UsageError, VersionUnknown
from weighbridge.storage import parts
from weighbridge.storage.history.questions import (
    VersionLine,
    blame,
    diff,
    iso,
    log,
    outcome,
    show,
    status,
)
from weighbridge.storage.history.reader import History
from weighbridge.storage.records import write_record
from weighbridge.storage.stores import open_store
from weighbridge.values import Manifest


class Published:
    """A run with three versions: the second leaves everything as it is."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder)
        self.weights: list[Weights] = [tiny_weights()]
        first = trained(self.weights[0], 1, only=("embed.weight", "mask"))
        self.weights += [first, first, trained(first, 3, only=("mask", "layers.1.steps"))]
        publisher = self.run.open()
        self.manifests: list[Manifest] = [publisher.lineage.manifest(0)]
        self.manifests += [push(publisher, w, {"step": n}) for n, w in enumerate(self.weights[1:], 1)]

    @property
    def history(self) -> History:
        """As a command opens it: anew."""
        return History(self.run.store)

    def line(self, version: int) -> VersionLine:
        return next(line for line in log(self.history) if line.version == version)

    def changed(self, name: str, before: int, after: int) -> int:
        old, new = (np.atleast_1d(self.weights[v][name]) for v in (before, after))
        width = old.dtype.itemsize
        return int((old.view(np.uint8).reshape(-1, width) != new.view(np.uint8).reshape(-1, width)).any(axis=1).sum())

    def digest(self, name: str, version: int) -> str:
        return xxhash.xxh3_128_hexdigest(self.weights[version][name].tobytes())


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path)


def test_the_log_shows_every_version_newest_first(published: Published) -> None:
    lines = list(log(published.history))
    assert [(line.version, line.parent, line.kind, line.tensors) for line in lines] == [
        (3, 2, "delta", 2),
        (2, 1, "delta", 0),
        (1, 0, "delta", 2),
        (0, -1, "base", 7),
    ]
    assert [line.labels.get("step") for line in lines] == [3, 2, 1, None]
    assert [line.digest for line in lines] == [m.digest for m in reversed(published.manifests)]


def test_a_line_counts_what_changed_and_what_went_over_the_wire(published: Published) -> None:
    line = published.line(1)
    changed = published.changed("embed.weight", 0, 1) + published.changed("mask", 0, 1)
    assert (line.changed_elements, line.wire_bytes) == (changed, published.manifests[1].wire_bytes)
    assert line.density == changed / sum(array.size for array in tiny_weights().values())
    empty, base = published.line(2), published.line(0)
    assert (empty.changed_elements, empty.density, empty.wire_bytes) == (0, 0.0, 0)
    assert (base.changed_elements, base.density, base.wire_bytes) == (0, 0.0, 0)  # its small files are no payload


@pytest.mark.parametrize(("limit", "expected"), [(0, []), (1, [3]), (2, [3, 2]), (4, [3, 2, 1, 0]), (99, [3, 2, 1, 0])])
def test_the_log_stops_at_its_limit(published: Published, limit: int, expected: list[int]) -> None:
    assert [line.version for line in log(published.history, limit=limit)] == expected


def test_a_root_without_versions_has_an_empty_log_and_no_hosts(tmp_path: Path) -> None:
    history = History(open_store(str(tmp_path / "root")))
    assert list(log(history)) == []
    assert status(history) == ()


def test_times_are_shown_as_utc() -> None:
    assert iso(1_700_000_000_123_456_789) == "2023-11-14T22:13:20.123+00:00"
    assert iso(0) == "1970-01-01T00:00:00.000+00:00"


# --- show and diff


def test_a_version_is_shown_with_its_tensors_hosts_and_outcome(published: Published) -> None:
    write_record(published.run.store, record("b", version=1, ended=2))
    write_record(published.run.store, record("a", "failed", version=1, ended=1))
    write_record(published.run.store, record("a", version=2, ended=3))
    shown = show(published.history, 1)
    assert shown.line == published.line(1)
    assert [(r.host, r.outcome) for r in shown.hosts] == [("a", "failed"), ("b", "served")]
    assert (shown.outcome, shown.retired) == ("partial", False)
    embed, mask = shown.tensors
    assert (embed.tensor, embed.dtype, embed.shape, embed.nbytes) == ("embed.weight", "F16", (48, 16), 1536)
    assert (embed.changed, embed.steps) == (published.changed("embed.weight", 0, 1), 1)
    assert embed.after == published.digest("embed.weight", 1)
    assert (mask.tensor, mask.nbytes, mask.after) == ("mask", 33, published.digest("mask", 1))
    assert outcome(published.history, 1) == "partial"
    assert outcome(published.history, 2) == "complete"
    assert outcome(published.history, 3) == "published"


def test_a_version_whose_shards_were_collected_is_shown_as_retired(published: Published) -> None:
    published.run.store.create("versions/000000000001/retired", b"1")
    assert [show(published.history, v).retired for v in (1, 2)] == [True, False]


@pytest.mark.parametrize("version", [-1, 4])
def test_a_version_that_was_never_published_cannot_be_shown(published: Published, version: int) -> None:
    with pytest.raises(VersionUnknown):
        show(published.history, version)


def test_a_diff_adds_up_over_versions(published: Published) -> None:
    changes = {change.tensor: change for change in diff(published.history, 0, 3)}
    assert list(changes) == ["embed.weight", "layers.1.steps", "mask"]
    mask = changes["mask"]
    assert (mask.steps, mask.nbytes) == (2, 33)
    assert mask.changed == published.changed("mask", 0, 1) + published.changed("mask", 2, 3)
    assert mask.after == published.digest("mask", 3)
    assert (changes["embed.weight"].steps, changes["embed.weight"].after) == (1, published.digest("embed.weight", 1))
    assert changes["layers.1.steps"].shape == ()


def test_a_diff_over_an_empty_version_or_none_is_empty(published: Published) -> None:
    assert diff(published.history, 1, 2) == ()
    assert diff(published.history, 3, 3) == ()


def test_a_diff_of_two_versions_with_the_same_weights_is_empty_whatever_lay_between(tmp_path: Path) -> None:
    run = Run(tmp_path)
    publisher, weights = run.open(), run.base_weights
    push(publisher, trained(weights, 1))
    push(publisher, weights)
    assert diff(History(run.store), 0, 1)
    assert diff(History(run.store), 0, 2) == ()


def test_a_diff_starts_after_the_older_version(published: Published) -> None:
    assert [change.tensor for change in diff(published.history, 1, 3)] == ["layers.1.steps", "mask"]


def test_a_diff_backwards_or_of_unknown_versions_is_refused(published: Published) -> None:
    with pytest.raises(UsageError, match="from 2 to 1"):
        diff(published.history, 2, 1)
    with pytest.raises(VersionUnknown):
        diff(published.history, 0, 4)


def test_a_tensor_in_several_parts_is_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 512)
    run = Run(tmp_path)
    publisher = run.open()
    embed = "embed.weight"
    states: list[dict[str, Any]] = [tiny_weights()]
    for elements in ((0, 5, 300), (700,), (701, 702)):  # of parts 0, 0 and 1; 2; 2 again
        after = {name: array.copy() for name, array in states[-1].items()}
        for element in elements:
            after[embed].reshape(-1).view(np.uint16)[element] ^= 1
        states.append(after)
        push(publisher, after)
    lineage = History(run.store)
    digests = [xxhash.xxh3_128_hexdigest(state[embed].tobytes()) for state in states]

    (first,) = show(lineage, 1).tensors
    assert (first.tensor, first.changed, first.steps, first.nbytes, first.after) == (embed, 3, 1, 1024, digests[1])
    (second,) = show(lineage, 2).tensors
    assert (second.changed, second.steps, second.nbytes, second.after) == (1, 1, 512, digests[2])
    (both,) = diff(lineage, 0, 2)
    assert (both.changed, both.steps, both.nbytes, both.after) == (4, 2, 1536, digests[2])
    (all_of_it,) = diff(lineage, 0, 3)
    assert (all_of_it.changed, all_of_it.steps, all_of_it.nbytes, all_of_it.after) == (6, 3, 1536, digests[3])
    assert [line.tensors for line in log(lineage, limit=3)] == [1, 1, 1]
    assert [(b.version, b.changed, b.nbytes, b.after) for b in blame(lineage, embed)] == [
        (3, 2, 512, digests[3]),
        (2, 1, 512, digests[2]),
        (1, 3, 1024, digests[1]),
    ]


# --- status


def test_a_hosts_status_is_what_it_served_last_and_how_its_last_version_went(published: Published) -> None:
    store = published.run.store
    write_record(store, record("a", version=1, ended=10))
    write_record(store, record("a", version=3, ended=20, seconds={"pause": 0.25}))
    write_record(store, record("b", version=2, ended=10))
    write_record(store, replace(record("b", "failed", version=3, ended=20), stage="applied", error="no room"))
    write_record(store, record("c", "missed", version=3, ended=20))
    a, b, c = status(published.history)
    assert (a.host, a.version, a.lag, a.outcome, a.last_version, a.pause_seconds) == ("a", 3, 0, "served", 3, 0.25)
    assert (b.version, b.lag, b.outcome, b.stage, b.error) == (2, 1, "failed", "applied", "no room")
    assert (c.version, c.lag, c.outcome, c.last_version) == (-1, 4, "missed", 3)


def test_a_host_that_was_rolled_back_serves_the_older_version(published: Published) -> None:
    write_record(published.run.store, record("a", version=3, ended=10))
    write_record(published.run.store, record("a", version=1, ended=20))
    (line,) = status(published.history)
    assert (line.version, line.lag, line.last_version, line.at) == (1, 2, 1, iso(20))


def test_a_host_that_failed_and_then_served_is_served(published: Published) -> None:
    write_record(published.run.store, record("a", version=3, ended=20))
    write_record(published.run.store, record("a", "failed", version=3, ended=30))
    (line,) = status(published.history)
    assert (line.version, line.outcome) == (3, "served")


def test_a_folder_that_a_host_is_just_filling_is_not_a_host_yet(published: Published) -> None:
    write_record(published.run.store, record("b", version=3))
    (published.run.folder / "root" / "hosts" / "a").mkdir()
    assert [line.host for line in status(published.history)] == ["b"]
