"""What we write for neighbours is what their receivers make the same weights of, whatever died on the way."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.checkpoints import Weights, half_weights, tiny_weights, trained
from tests.faults.faulty_store import Fault, FaultyStore, Killed
from tests.peers import handmade
from tests.storage.publishing import Run, assert_sound, bytes_of, push

from weighbridge.errors import StoreError, UsageError
from weighbridge.storage.anchor_sources import anchor_from_store
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.peers import frames, pull_weights, trl
from weighbridge.storage.peers.contract import Writing
from weighbridge.storage.peers.export import Export
from weighbridge.storage.peers.pull import bring_up_from_peer
from weighbridge.storage.peers.registry import LAYOUTS, get_layout
from weighbridge.storage.stores import Store

Receive = Callable[[Path, int, Mapping[str, bytes]], dict[str, bytes]]
CASES: dict[str, tuple[str, Receive, dict[str, Any]]] = {
    "pull-weights xor xxh3": ("pull-weights", handmade.receive_pull_weights, {}),
    "pull-weights overwrite blake3": (
        "pull-weights",
        handmade.receive_pull_weights,
        {"encoding": "overwrite", "checksum": "blake3"},
    ),
    "pull-weights xor adler32": ("pull-weights", handmade.receive_pull_weights, {"checksum": "adler32"}),
    "skyrl": ("skyrl", handmade.receive_skyrl, {}),
    "skyrl, whatever checksum is set": ("skyrl", handmade.receive_skyrl, {"checksum": "blake3"}),
    "trl": ("trl", handmade.receive_trl, {}),
}


def run_for(layout: str, folder: Path) -> Run:
    """A run whose tensors that layout carries."""
    return Run(folder, base_weights=half_weights() if layout == "trl" else tiny_weights())


def export(run: Run, layout: str, *, store: Store | None = None, **options: Any) -> Export:
    writing = Writing(run.folder / "peer-spool", LocalDisk("process"), run.clock, **options)
    return Export(get_layout(layout), store or run.store, writing)


@pytest.mark.parametrize("case", CASES)
def test_a_receiver_of_each_layout_makes_the_same_weights(case: str, tmp_path: Path) -> None:
    layout, receive, options = CASES[case]
    run = run_for(layout, tmp_path)
    exports = [export(run, layout, **options)]
    publisher = run.open(exports=exports)
    states: list[Weights] = [run.base_weights]
    held = bytes_of(run.base_weights)
    for version in (1, 2):
        states.append(trained(states[-1], version, only=None if version == 1 else ("embed.weight", "mask")))
        push(publisher, states[-1])
        held = receive(tmp_path / "root", version, held)
        assert held == bytes_of(states[-1])
    push(publisher, states[-1])  # nothing changed: a version all the same
    assert receive(tmp_path / "root", 3, held) == held
    # Who resumes goes on; what stands is not written again.
    resumed = run.open(exports=exports)
    states += [states[-1], trained(states[-1], 4)]
    push(resumed, states[-1])
    assert receive(tmp_path / "root", 4, held) == bytes_of(states[-1])
    assert_sound(run, dict(enumerate(states)))
    assert not list((tmp_path / "peer-spool").iterdir())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_own_hosts_read_what_we_write(layout: str, tmp_path: Path) -> None:
    run = run_for(layout, tmp_path)
    weights = run.base_weights
    publisher = run.open(exports=[export(run, layout)])
    for version in (1, 2, 3):
        weights = trained(weights, version)
        push(publisher, weights)
    result = bring_up_from_peer(tmp_path / "replica", layout=get_layout(layout), foreign=run.store, base=run.base)
    assert result.version == 3
    found = load_file(tmp_path / "replica" / "current" / "model.safetensors")
    assert {name: array.tobytes() for name, array in found.items()} == bytes_of(weights)


def test_trl_anchors_are_whole_and_come_every_so_many_versions(tmp_path: Path) -> None:
    run = run_for("trl", tmp_path)
    weights = run.base_weights
    publisher = run.open(exports=[export(run, "trl", anchors=2)])
    for version in (1, 2, 3):
        weights = trained(weights, version)
        push(publisher, weights)
        if version == 2:
            second = weights
    anchors = list((tmp_path / "root" / "anchors").glob("step_*.safetensors"))
    assert [path.name for path in anchors] == ["step_000002.safetensors"]
    assert {name: array.tobytes() for name, array in load_file(anchors[0]).items()} == bytes_of(second)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_store_that_fails_is_told_and_the_next_push_writes_the_version_first(layout: str, tmp_path: Path) -> None:
    run = run_for(layout, tmp_path)
    theirs = FaultyStore(run.store, Fault("*", "denied", times=10**6))
    receive = next(receive for name, receive, _ in CASES.values() if name == layout)
    publisher = run.open(exports=[export(run, layout, store=theirs)])
    first, second = trained(run.base_weights, 1), trained(run.base_weights, 2)
    with pytest.raises(StoreError, match="committed and stands, but its"):
        push(publisher, first)
    assert Lineage(run.store).head() == 1
    theirs.faults.clear()
    push(publisher, second)
    held = receive(tmp_path / "root", 1, bytes_of(run.base_weights))
    assert held == bytes_of(first)
    assert receive(tmp_path / "root", 2, held) == bytes_of(second)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whoever_dies_while_writing_for_a_neighbour_is_followed_by_one_who_ends_it(layout: str, tmp_path: Path) -> None:
    receive = next(receive for name, receive, _ in CASES.values() if name == layout)
    for call in range(20):
        run = run_for(layout, tmp_path / str(call))
        theirs = FaultyStore(run.store, Fault("*", "kill" if call % 2 else "kill before", skip=call))
        first = trained(run.base_weights, 1)
        try:
            push(run.open(exports=[export(run, layout, store=theirs)]), first)
        except Killed:
            pass
        else:
            assert call > 2
            break
        run.open(exports=[export(run, layout)])
        if Lineage(run.store).head():
            made = receive(run.folder / "root", 1, bytes_of(run.base_weights))
            assert made == bytes_of(first)
    else:
        raise AssertionError("writing a version takes fewer calls")


def test_what_a_dead_attempt_left_in_a_folder_is_no_part_of_the_version(tmp_path: Path) -> None:
    run = Run(tmp_path)
    leftover = tmp_path / "root" / "weight_v000001" / "model-00007-of-00009.safetensors"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half of something")
    publisher = run.open(exports=[export(run, "pull-weights")])
    push(publisher, trained(run.base_weights, 1))
    assert not leftover.exists()


def test_a_tensor_that_u32_positions_cannot_reach_is_refused_and_nothing_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_weights, "OVERWRITE_BYTES", 1024)
    monkeypatch.setattr(frames, "OVERWRITE_BYTES", 1024)
    with pytest.raises(ValueError, match="u32"):
        frames.overwrite_frame(np.zeros(1024, np.uint8), np.zeros(1024, np.uint8))
    run = Run(tmp_path)
    with pytest.raises(UsageError, match="layout_encoding"):
        run.open(exports=[export(run, "pull-weights", encoding="overwrite")])
    run.open(exports=[export(run, "pull-weights")])
    monkeypatch.setattr(trl, "_MOST_ELEMENTS", 100)
    halves = run_for("trl", tmp_path / "halves")
    with pytest.raises(UsageError, match="leave layout trl out"):
        halves.open(exports=[export(halves, "trl")])


def test_a_delta_of_several_dtypes_which_trl_refuses_is_never_written(tmp_path: Path) -> None:
    """Its receiver joins the values of all tensors into one row, which gives some of them another dtype."""
    run = Run(tmp_path)
    with pytest.raises(UsageError, match="BOOL, F16, F32, I64"):
        run.open(exports=[export(run, "trl")])
    assert not (tmp_path / "root" / "run.json").exists()


def test_a_layout_that_lacks_what_an_anchor_skips_is_refused_at_the_start(tmp_path: Path) -> None:
    run = Run(tmp_path)
    weights = run.base_weights
    publisher = run.open()
    for version in (1, 2, 3):
        weights = trained(weights, version, share=0.9)
        push(publisher, weights)
    lineage = Lineage(run.store)
    anchor_from_store(lineage, 3, base=run.base, spool=tmp_path / "anchor-spool")
    with pytest.raises(UsageError, match="cannot be written any more"):
        run.open(exports=[export(run, "skyrl")])
