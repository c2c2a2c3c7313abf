"""Hosts read what neighbours publish: versions made by hand, in every encoding and checksum."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoints import Weights, tiny_weights, trained, write_checkpoint
from tests.peers import handmade
from tests.replica.runs import digest_tree, tensors_of
from tests.storage.publishing import bytes_of

from weighbridge.cli import main
from weighbridge.errors import CorruptData, DigestMismatch, UsageError, VersionUnknown
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.peers.pull import bring_up_from_peer
from weighbridge.storage.peers.registry import get_layout
from weighbridge.storage.peers.verify import verify_peer
from weighbridge.storage.replica.pull import PullResult
from weighbridge.storage.stores import open_store

Write = Callable[..., Path]
WRITERS: dict[str, tuple[str, Write, dict[str, Any]]] = {
    "pull-weights xor xxh3": ("pull-weights", handmade.pull_weights, {}),
    "pull-weights xor adler32": ("pull-weights", handmade.pull_weights, {"sums": "adler32"}),
    "pull-weights overwrite blake3": (
        "pull-weights",
        handmade.pull_weights,
        {"encoding": "overwrite", "sums": "blake3"},
    ),
    "skyrl": ("skyrl", handmade.skyrl, {}),
    "skyrl, its own folder names": ("skyrl", handmade.skyrl, {"folder_name": "v{:08d}"}),
    "skyrl, its older manifests": ("skyrl", handmade.skyrl, {"older": True}),
    "trl gaps": ("trl", handmade.trl, {}),
    "trl raw": ("trl", handmade.trl, {"encoding": "raw"}),
    "trl, no number left out": ("trl", handmade.trl, {"before": True}),
}


class Neighbour:
    """A root that somebody else writes, its base, and all its states."""

    def __init__(self, folder: Path, layout: str, write: Write, options: dict[str, Any]) -> None:
        self.layout, self._write, self._options = layout, write, options
        self.root = folder / "theirs"
        self.root.mkdir()
        self.states: list[Weights] = [tiny_weights()]
        self.base = write_checkpoint(folder / "base", self.states[0])
        self.folder = folder / "replica"

    def publish(self, **changes: Any) -> Path:
        new = trained(self.states[-1], len(self.states), **changes)
        self.states.append(new)
        return self._write(self.root, len(self.states) - 1, self.states[-2], new, **self._options)

    def pull(self, **options: Any) -> PullResult:
        return bring_up_from_peer(
            self.folder, layout=get_layout(self.layout), foreign=open_store(str(self.root)), base=self.base, **options
        )

    def serves(self) -> int:
        found = tensors_of(self.folder / "current")
        return next(v for v, state in enumerate(self.states) if bytes_of(state) == found)


@pytest.fixture(params=WRITERS)
def neighbour(request: pytest.FixtureRequest, tmp_path: Path) -> Neighbour:
    return Neighbour(tmp_path, *WRITERS[request.param])


def test_a_host_follows_a_neighbour_version_by_version_and_several_at_once(neighbour: Neighbour) -> None:
    neighbour.publish()
    first = neighbour.pull()
    assert (first.outcome, first.version, first.from_version, neighbour.serves()) == ("applied", 1, 0, 1)
    for _ in range(3):
        neighbour.publish(share=0.02)
    assert (neighbour.pull(version=3).version, neighbour.serves()) == (3, 3)
    assert (neighbour.pull().version, neighbour.serves()) == (4, 4)
    again = neighbour.pull()
    assert (again.outcome, again.version) == ("current", 4)
    assert neighbour.pull(version=2).outcome == "superseded"
    assert verify_peer(get_layout(neighbour.layout), open_store(str(neighbour.root)), base=neighbour.base).version == 4
    proven = verify_peer(
        get_layout(neighbour.layout),
        open_store(str(neighbour.root)),
        base=neighbour.base,
        folder=neighbour.folder / "current",
    )
    assert proven.deltas == 4


def test_a_delta_is_never_applied_twice_even_when_the_replica_lost_what_it_knew(neighbour: Neighbour) -> None:
    neighbour.publish()
    neighbour.pull()
    shutil.rmtree(neighbour.folder / "state")
    assert (neighbour.pull().version, neighbour.serves()) == (1, 1)


def test_a_byte_that_rotted_here_is_mended_and_no_delta_is_put_on_top_of_it(neighbour: Neighbour) -> None:
    neighbour.publish()
    neighbour.pull()
    weights = neighbour.folder / "current" / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-40, 2)
        file.write(b"rot")
    neighbour.publish()
    result = neighbour.pull()
    assert (result.version, neighbour.serves()) == (2, 2)
    assert result.repaired


def test_every_flipped_byte_that_reaches_a_tensor_is_refused_and_nothing_is_written(
    neighbour: Neighbour, tmp_path: Path
) -> None:
    neighbour.publish()
    neighbour.pull()
    made = neighbour.publish()
    before = digest_tree(neighbour.folder / "copies")
    layout, store = get_layout(neighbour.layout), open_store(str(neighbour.root))
    specs = open_checkpoint(neighbour.base).specs()
    right = {name: data.tobytes() for name, data in neighbour.states[2].items()}
    files = [made] if made.is_file() else sorted(made.iterdir())
    flips = 0
    for path in files:
        whole = path.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 150)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            try:
                version = layout.open(store, 2, specs)
                for name in version.names:
                    new = version.new_bytes(name, np.frombuffer(neighbour.states[1][name].tobytes(), np.uint8))
                    # A layout without checksums cannot tell a value from another; that it says so is in docs/PEERS.md.
                    assert neighbour.layout == "trl" or new.tobytes() == right[name]
            except (CorruptData, VersionUnknown):
                flips += 1
        path.write_bytes(whole)
    assert flips > 50
    if neighbour.layout != "trl":
        path = next(path for path in files if path.suffix == ".safetensors")
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with pytest.raises(CorruptData):
            neighbour.pull()
        assert digest_tree(neighbour.folder / "copies") == before
        path.write_bytes(whole)
    assert (neighbour.pull().version, neighbour.serves()) == (2, 2)


def test_a_version_that_is_not_finished_is_not_seen(neighbour: Neighbour) -> None:
    neighbour.publish()
    made = neighbour.publish()
    if made.is_dir():
        next(made.glob("*.json")).unlink()
        assert neighbour.pull().version == 1


@pytest.mark.parametrize("writer", sorted(WRITERS.keys() - {"trl gaps", "trl raw"}))
def test_a_gap_is_refused_and_an_older_version_stays(writer: str, tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path, *WRITERS[writer])
    neighbour.publish()
    neighbour.pull()
    gone = neighbour.publish()
    neighbour.publish()
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(VersionUnknown):
        neighbour.pull()
    assert neighbour.serves() == 1


def test_anchors_lead_over_gaps(tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path, "trl", handmade.trl, {})
    made = [neighbour.publish() for _ in range(4)]
    for path in made[:3]:
        path.unlink()
    handmade.trl_anchor(neighbour.root, 3, neighbour.states[3])
    assert (neighbour.pull().version, neighbour.serves()) == (4, 4)


def test_our_own_anchors_must_be_complete(tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path, "trl", handmade.trl, {"before": True})
    for path in [neighbour.publish() for _ in range(3)]:
        path.unlink()
    lacking = dict(neighbour.states[3])
    del lacking["mask"]
    handmade.trl_anchor(neighbour.root, 3, lacking, before=True)
    with pytest.raises(CorruptData, match="anchor is whole"):
        neighbour.pull()


def test_an_anchor_of_another_model_is_refused(tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path, "trl", handmade.trl, {})
    neighbour.publish().unlink()
    right = neighbour.states[1]
    for name, array in (
        ("layers.0.norm.weight", right["layers.0.norm.weight"].view(np.int32)),
        ("embed.weight", right["embed.weight"].reshape(16, 48)),
        ("a.stranger", right["mask"]),
    ):
        handmade.trl_anchor(neighbour.root, 1, {**right, name: array})
        with pytest.raises(CorruptData, match=name):
            neighbour.pull()


def test_an_anchor_of_trl_that_stands_instead_of_a_delta_has_what_changed_in_its_step(tmp_path: Path) -> None:
    """TRL's first anchor is whole; every later one has the tensors of its step, whole, and no delta beside it."""
    neighbour = Neighbour(tmp_path, "trl", handmade.trl, {})
    neighbour.publish().unlink()
    handmade.trl_anchor(neighbour.root, 1, neighbour.states[1])
    neighbour.publish()
    neighbour.publish(only=("embed.weight", "mask")).unlink()
    handmade.trl_anchor(neighbour.root, 3, {name: neighbour.states[3][name] for name in ("embed.weight", "mask")})
    neighbour.publish()
    for version in (1, 2, 3, 4):
        assert (neighbour.pull(version=version).version, neighbour.serves()) == (version, version)
    shutil.rmtree(neighbour.folder)
    assert (neighbour.pull().version, neighbour.serves()) == (4, 4)
    shutil.rmtree(neighbour.folder)
    (neighbour.root / "anchors" / "step_000001.safetensors").unlink()
    with pytest.raises(VersionUnknown):
        neighbour.pull()  # what it lacks stands nowhere


def test_numbers_that_trl_left_out_changed_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    neighbour = Neighbour(tmp_path, "trl", handmade.trl, {})
    neighbour.publish().unlink()
    handmade.trl_anchor(neighbour.root, 1, neighbour.states[1])
    for _ in (2, 3):
        neighbour.publish(only=()).unlink()
    neighbour.publish()
    assert neighbour.pull(version=1).version == 1
    assert (neighbour.pull().version, neighbour.serves()) == (4, 4)
    shutil.rmtree(neighbour.folder)
    assert (neighbour.pull().version, neighbour.serves()) == (4, 4)
    with pytest.raises(VersionUnknown):
        verify_peer(get_layout("trl"), open_store(str(neighbour.root)), base=neighbour.base, version=3)
    words = ("4", "--layout", "trl", "--store", str(neighbour.root), "--base", str(neighbour.base), "--json")
    ours = logging.getLogger("weighbridge")  # whose lines go no further once a command has set it up
    ours.addHandler(caplog.handler)
    try:
        with pytest.raises(SystemExit, match="0"):
            main(("verify", *words))
    finally:
        ours.removeHandler(caplog.handler)
    assert json.loads(capsys.readouterr().out)["ok"]  # and nothing else: what is logged stays out of the answer
    assert "changed nothing" in caplog.text
    # Where nothing at all stands below, more was lost than steps without a change.
    shutil.rmtree(neighbour.folder)
    (neighbour.root / "anchors" / "step_000001.safetensors").unlink()
    with pytest.raises(VersionUnknown):
        neighbour.pull()


@pytest.mark.parametrize("index", [True, False])
def test_a_whole_checkpoint_among_deltas_is_read(index: bool, tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path, "pull-weights", handmade.pull_weights, {})
    folder = neighbour.publish()
    shutil.rmtree(folder)
    write_checkpoint(folder, neighbour.states[1])
    if index:
        document = {"metadata": {}, "weight_map": dict.fromkeys(neighbour.states[1], "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])  # still being copied
    with pytest.raises(CorruptData):
        neighbour.pull()
    assert neighbour.serves() == 0
    weights.write_bytes(whole)
    neighbour.publish()
    assert (neighbour.pull().version, neighbour.serves()) == (2, 2)


@pytest.mark.parametrize("index", [True, False])
def test_a_whole_checkpoint_of_another_model_is_refused(index: bool, tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path, "pull-weights", handmade.pull_weights, {})
    folder = neighbour.publish()
    right = neighbour.states[1]
    for name, array in (
        ("mask", None),
        ("layers.0.norm.weight", right["layers.0.norm.weight"].view(np.int32)),
        ("embed.weight", right["embed.weight"].reshape(16, 48)),
    ):
        shutil.rmtree(folder)
        other = {**right, name: array}
        write_checkpoint(folder, {key: value for key, value in other.items() if value is not None})
        if index:
            document = {"weight_map": {key: "model.safetensors" for key, value in other.items() if value is not None}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(document))
        with pytest.raises(CorruptData, match=name):
            neighbour.pull()
        assert neighbour.serves() == 0


def test_the_wrong_base_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path, "skyrl", handmade.skyrl, {})
    neighbour.publish()
    neighbour.base = write_checkpoint(tmp_path / "other", tiny_weights(seed=9))
    with pytest.raises(DigestMismatch):
        neighbour.pull()
    assert not list((neighbour.folder / "mirror" / "store" / "versions").glob("000000000001"))


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path, "skyrl", handmade.skyrl, {})
    neighbour.folder.mkdir()
    (neighbour.folder / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        neighbour.pull()
    assert [path.name for path in neighbour.folder.iterdir()] == ["thesis.txt"]
