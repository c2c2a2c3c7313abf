"""Versions broadcast from two ranks to two hosts, each a process, and everything that can go wrong on the way: whatever
does, a host ends with the version bit for bit, by the store, and the trainer's push is not held up."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.tasks.collective_play import HOSTS, LATEST_SECONDS, SENDERS, weights

from weighbridge.storage.lineage import Lineage
from weighbridge.storage.stores import open_store
from weighbridge.tasks.collective.desk import Address, Desk, Roster

ROOT = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in with_ports]
    for one in with_ports:
        one.close()
    return ports


class Stage:
    """A run in a folder, its trainer's two ranks, and hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "base").mkdir()
        save_file(weights(0), folder / "base" / "model.safetensors")
        (folder / "base" / "config.json").write_text("{}")
        self.port, self.desk = free_ports(2)
        self.trainer = [self._start("trainer", folder, rank, self.port, self.desk) for rank in range(SENDERS)]
        for rank in range(SENDERS):
            self.wait_for(f"pushed-0-{rank}")
        self.hosts: dict[str, subprocess.Popen[str]] = {}
        for name in HOSTS:
            self.start_host(name)

    def _start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.tasks.collective_play", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"{'-'.join(map(str, arguments[:1]))}.log").open("a"),
            text=True,
        )

    def start_host(self, name: str) -> None:
        self.hosts[name] = self._start("host", name, self.folder, self.desk)
        assert self.hear(name)["ready"]

    def wait_for(self, name: str) -> None:
        until = time.monotonic() + LATEST_SECONDS
        while not (self.folder / name).exists():
            assert time.monotonic() < until, f"{name} did not come: {(self.folder / 'trainer.log').read_text()[-3000:]}"
            time.sleep(0.02)

    def push(self, version: int, **said: object) -> float:
        """Has a version published; returns the longest that a rank's push took, in seconds."""
        (self.folder / "draft").write_text(json.dumps(said))
        (self.folder / "draft").rename(self.folder / f"go-{version}")
        if "end" in said:
            return 0.0
        took = []
        for rank in range(SENDERS):
            self.wait_for(f"pushed-{version}-{rank}")
            took.append(json.loads((self.folder / f"pushed-{version}-{rank}").read_text())["seconds"])
        return max(took)

    def wait_for_roster(self, version: int) -> None:
        """Waits until no host is admitted to a version's broadcast any more."""
        desk = Desk(Address("127.0.0.1", self.desk).client(), "run", version)
        assert desk.roster(seconds=LATEST_SECONDS) is not None

    def order(self, name: str, version: int, **more: object) -> None:
        pipe = self.hosts[name].stdin
        assert pipe is not None
        pipe.write(json.dumps({"version": version, **more}) + "\n")
        pipe.flush()

    def hear(self, name: str) -> dict[str, Any]:
        pipe = self.hosts[name].stdout
        assert pipe is not None
        line = pipe.readline()
        assert line, f"{name} ended: {(self.folder / 'host.log').read_text()[-3000:]}"
        said: dict[str, Any] = json.loads(line)
        return said

    def both(self, version: int, **more: object) -> dict[str, dict[str, Any]]:
        """Has both hosts brought to a version at once; what each said."""
        for name in HOSTS:
            self.order(name, version, **more)
        return {name: self.hear(name) for name in HOSTS}

    def is_exact(self, name: str, version: int) -> bool:
        """Whether a host holds exactly what the trainer had, bit for bit."""
        found, wanted = load_file(self.folder / f"replica-{name}" / "current" / "model.safetensors"), weights(version)
        return found.keys() == wanted.keys() and all(
            np.array_equal(found[key].view(np.uint16), wanted[key].view(np.uint16)) for key in wanted
        )

    def shard_bytes(self, version: int) -> int:
        return Lineage(open_store(str(self.folder / "store"))).manifest(version).wire_bytes

    def end(self) -> None:
        for process in (*self.trainer, *self.hosts.values()):
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The whole story, told once; each test looks at its part of it."""
    stage = Stage(tmp_path_factory.mktemp("collective"))
    saw: dict[str, Any] = {}
    try:
        saw["push"] = [stage.push(1)]
        saw["by group"] = stage.both(1)
        saw["exact"] = {1: [stage.is_exact(name, 1) for name in HOSTS]}
        saw["bytes"] = stage.shard_bytes(1)

        saw["push"].append(stage.push(2, terms={"window_seconds": 0.1}))
        saw["by store"] = stage.both(2, transport=False)
        saw["exact"][2] = [stage.is_exact(name, 2) for name in HOSTS]

        # Nobody came, so nobody is waited for; both come late once, and are expected again.
        saw["push"].append(stage.push(3, terms={"window_seconds": 0.1}))
        stage.wait_for_roster(3)
        saw["too late"] = stage.both(3)
        saw["exact"][3] = [stage.is_exact(name, 3) for name in HOSTS]

        saw["push"].append(stage.push(4))
        stage.order("a", 4, what="flips")
        stage.order("b", 4)
        saw["damaged"] = {name: stage.hear(name) for name in HOSTS}
        saw["exact"][4] = [stage.is_exact(name, 4) for name in HOSTS]

        saw["push"].append(stage.push(5, terms={"window_seconds": 5.0}))
        stage.order("a", 5)
        saw["alone"] = stage.hear("a")
        stage.order("b", 5)  # after all was over
        saw["never came"] = stage.hear("b")
        saw["exact"][5] = [stage.is_exact(name, 5) for name in HOSTS]

        saw["push"].append(stage.push(6))
        stage.order("a", 6)
        stage.order("b", 6, what="dies")
        saw["widow"] = stage.hear("a")
        saw["died with"] = stage.hosts["b"].wait(LATEST_SECONDS)
        stage.start_host("b")
        stage.order("b", 6)
        saw["back again"] = stage.hear("b")
        saw["exact"][6] = [stage.is_exact(name, 6) for name in HOSTS]

        saw["push"].append(stage.push(7))
        stage.order("a", 7, seconds=4.0)
        stage.order("b", 7, what="hangs")
        assert stage.hear("b")["hanging"]
        saw["beside one that hangs"] = stage.hear("a")
        saw["push"].append(stage.push(8))  # while the broadcast before it hangs
        stage.hosts["b"].kill()
        stage.hosts["b"].wait(LATEST_SECONDS)
        stage.start_host("b")
        saw["after that"] = stage.both(8)
        saw["exact"][8] = [stage.is_exact(name, 8) for name in HOSTS]

        saw["push"].append(stage.push(9, dies=1))
        saw["orphaned"] = stage.both(9)
        saw["lost rank"] = stage.trainer[1].wait(LATEST_SECONDS)
        saw["exact"][9] = [stage.is_exact(name, 9) for name in HOSTS]
        stage.trainer[0].kill()
        stage.trainer[0].wait(LATEST_SECONDS)
        stage.order("a", 9)  # it holds that; nobody is there to ask
        saw["no trainer"] = stage.hear("a")
        saw["log"] = (stage.folder / "host.log").read_text()
        yield saw
    finally:
        stage.end()


@pytest.mark.fleet
def test_hosts_that_come_get_every_byte_by_the_group_and_none_from_the_store(played: dict[str, Any]) -> None:
    for said in played["by group"].values():
        assert said["store_bytes"] == 0
        assert said["fetched_bytes"] == played["bytes"]
    for said in played["by store"].values():
        assert said["store_bytes"] == said["fetched_bytes"] > 0


@pytest.mark.fleet
def test_every_version_is_held_bit_for_bit_whatever_became_of_its_broadcast(played: dict[str, Any]) -> None:
    assert played["exact"] == {version: [True, True] for version in (1, 2, 3, 4, 5, 6, 8, 9)}


@pytest.mark.fleet
def test_what_was_damaged_on_the_way_is_found_by_its_digest_and_fetched(played: dict[str, Any]) -> None:
    assert 0 < played["damaged"]["a"]["store_bytes"] < played["bytes"]  # one shard of several
    assert played["damaged"]["b"]["store_bytes"] == 0


@pytest.mark.fleet
def test_a_host_that_is_late_reads_the_store_and_is_waited_for_the_next_time(played: dict[str, Any]) -> None:
    for said in (*played["too late"].values(), played["never came"]):
        assert said["store_bytes"] == said["fetched_bytes"] > 0


@pytest.mark.fleet
def test_a_host_beside_one_that_dies_or_hangs_goes_on_by_the_store(played: dict[str, Any]) -> None:
    assert played["died with"] < 0
    for said in (played["widow"], played["back again"], played["beside one that hangs"]):
        assert said["store_bytes"] > 0
    assert played["beside one that hangs"]["version"] == 7
    assert played["after that"]["a"]["version"] == played["after that"]["b"]["version"] == 8


@pytest.mark.fleet
def test_hosts_of_a_trainer_that_dies_in_mid_broadcast_go_on_by_the_store(played: dict[str, Any]) -> None:
    assert played["lost rank"] == 9
    for said in played["orphaned"].values():
        assert said["store_bytes"] > 0 and said["version"] == 9
    assert played["no trainer"]["version"] == 9


@pytest.mark.fleet
def test_no_push_waits_for_a_broadcast(played: dict[str, Any]) -> None:
    assert len(played["push"]) == 9
    assert max(played["push"]) < LATEST_SECONDS / 2  # a broadcast that is waited for would take the whole of it


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"commit": 1}', b'{"commit":"x","senders":1,"port":1,"receivers":[1],"owners":[1]}']
)
def test_a_roster_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"roster|JSON|Expecting"):
        Roster.parse(text)


def test_a_roster_is_read_as_it_was_written() -> None:
    roster = Roster("digest", 2, 40001, (1, 3), (0, 1, 1))
    assert Roster.parse(roster.to_text().encode()) == roster
