"""A host that follows a neighbour: looks, mirrors, applies, and catches up with several versions in one."""

from pathlib import Path

import pytest
from tests.peers import handmade
from tests.peers.test_reading import Neighbour

from weighbridge.errors import CorruptData
from weighbridge.flows.follower import catch_up
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.peers import mirror as mirrors
from weighbridge.storage.peers.following import following
from weighbridge.storage.peers.pull import open_mirror
from weighbridge.storage.peers.registry import get_layout
from weighbridge.storage.replica import open_replica
from weighbridge.storage.stores import open_store
from weighbridge.storage.stores.hooks import Hooks
from weighbridge.tasks.engines.none import NoEngine
from weighbridge.tasks.host import Host


def test_a_host_follows_looks_away_from_what_is_damaged_and_keeps_its_mirror_small(tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path, "pull-weights", handmade.pull_weights, {})
    mirror = open_mirror(
        neighbour.folder,
        layout=get_layout("pull-weights"),
        foreign=open_store(str(neighbour.root)),
        base=neighbour.base,
        disk=LocalDisk("process"),
        clock=SystemClock(),
    )
    with open_replica(
        neighbour.folder, store=mirror.store, base=neighbour.base, durability="process", lineage=mirror.lineage
    ) as replica:
        host = Host(
            "h", mirror.lineage.run.run_id, mirror.store, replica, NoEngine(), hooks=following(mirror, replica, Hooks())
        )

        def look() -> int:
            host.hooks.reading(host.store.url)
            if host.lineage.head() > replica.version:
                catch_up(host, host.lineage.head())
            return neighbour.serves()

        assert look() == 0
        for _ in range(3):
            neighbour.publish()
        assert look() == 3
        assert (mirror.version, mirror.foreign_version) == (1, 3)
        made = neighbour.publish()
        file = made / "model-00000-of-00002.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with pytest.raises(CorruptData):
            look()
        assert neighbour.serves() == 3
        file.write_bytes(whole)
        assert look() == 4
        for _ in range(4):
            neighbour.publish(share=0.9)
            look()
        assert neighbour.serves() == 8
        kept = [path.parent.name for path in (neighbour.folder / "mirror").rglob("*.safetensors")]
        assert len(set(kept)) <= mirrors._KEPT + 3, kept
