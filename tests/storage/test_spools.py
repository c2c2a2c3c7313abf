"""A writer's spool folder goes with it, also when it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.spools import spool_folder

DISK = LocalDisk("process")


def test_a_spool_is_there_while_it_is_used_and_gone_after(tmp_path: Path) -> None:
    with spool_folder(tmp_path / "spools", disk=DISK) as folder:
        (folder / "shard").write_bytes(b"x")
        with spool_folder(tmp_path / "spools", disk=DISK) as other:
            assert other != folder and (folder / "shard").exists(), "a living writer's is left alone"
    assert list((tmp_path / "spools").iterdir()) == []


def test_what_a_killed_writer_left_goes_with_the_next_one(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from weighbridge.storage.localdisk import LocalDisk; from weighbridge.storage.spools import spool_folder\n"
        "with spool_folder(Path(sys.argv[1]), disk=LocalDisk('process')) as f:\n"
        "    (f / 'shard').write_bytes(b'x' * 1000); print(f, flush=True); time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert writer.stdout is not None
    left = Path(writer.stdout.readline().strip())
    writer.send_signal(signal.SIGKILL)
    writer.wait(30)
    writer.stdout.close()
    (tmp_path / "weighbridge-spool-being-made").mkdir()
    (tmp_path / "somebody-elses").mkdir()
    assert (left / "shard").exists()
    with spool_folder(tmp_path, disk=DISK):
        assert not left.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["somebody-elses", "weighbridge-spool-being-made"]


def test_links_that_others_lay_in_a_shared_folder_are_neither_emptied_nor_followed(tmp_path: Path) -> None:
    home, mine = tmp_path / "tmp", tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").write_text("precious")
    (mine / "owner").write_text("precious too")
    (home / "weighbridge-spool-evil").mkdir(parents=True)
    (home / "weighbridge-spool-evil" / "owner").symlink_to(mine / "precious")
    (home / "weighbridge-spool-linked").symlink_to(mine)
    with spool_folder(home, disk=DISK):
        pass
    assert (mine / "precious").read_text() == "precious"
    assert (mine / "owner").read_text() == "precious too"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_spools_of_other_users_are_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "weighbridge-spool-theirs"
    theirs.mkdir()
    (theirs / "owner").write_text("theirs")
    os.chown(theirs, 4711, 4711)
    with spool_folder(tmp_path, disk=DISK):
        pass
    assert (theirs / "owner").read_text() == "theirs"
