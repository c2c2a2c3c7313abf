"""Spool folders on a machine's own disk: one a writer, held by a lock that dies with it, so that the next one removes
what a killed one left. Must not know what is spooled."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from weighbridge.storage.localdisk import Disk

log = structlog.get_logger("weighbridge.spool")

_PREFIX = "weighbridge-spool-"
_OWNER = "owner"


@contextmanager
def spool_folder(parent: Path | None, *, disk: Disk) -> Iterator[Path]:
    """A new folder under `parent` (None: the machine's temporary one), removed at the end; removes those of writers
    that are dead. A folder of ours without a lock file is somebody's who is just making it, and stays."""
    home = Path(tempfile.gettempdir()) if parent is None else parent
    disk.make_folder(home)
    _sweep(home, disk)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=home))
    draft = folder / f".{_OWNER}"
    held = disk.try_lock(draft, b"")
    disk.rename(draft, folder / _OWNER)  # locked before anybody can find it
    try:
        yield folder
    finally:
        disk.remove_tree(folder)
        if held is not None:
            disk.unlock(held)


def _sweep(home: Path, disk: Disk) -> None:
    for owner in sorted(home.glob(f"{_PREFIX}*/{_OWNER}")):
        if not _is_ours(owner.parent) or not _is_ours(owner):
            continue
        try:
            held = disk.try_lock(owner, b"")
        except OSError as error:  # another user's, or gone meanwhile
            log.debug("a spool folder was left alone", folder=str(owner.parent), error=str(error))
            continue
        if held is not None:
            try:
                disk.remove_tree(owner.parent)
                log.info("removed the spool of a writer that died", folder=str(owner.parent))
            finally:
                disk.unlock(held)


def _is_ours(path: Path) -> bool:
    """Whether a folder, or a file, is this user's own, and no link: in a temporary folder anybody can lay a link to one
    of our files under the name of a spool, and taking the lock would empty that file."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)
