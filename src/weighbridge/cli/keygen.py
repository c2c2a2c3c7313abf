"""`keygen`: a key pair, made on this machine."""

from pathlib import Path

from weighbridge.cli.options import Json
from weighbridge.cli.report import print_json, print_line
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.signing import make_key


def keygen(key: Path, *, json: Json = False) -> None:
    """Make an Ed25519 key pair: KEY, for the trainer (`--sign KEY`), and KEY.pub, for hosts (`--trust KEY.pub`).

    Parameters
    ----------
    key
        Where to; nothing may be there yet.
    """
    public = make_key(key, disk=LocalDisk())
    if json:
        print_json({"key": key, "public": key.with_name(key.name + ".pub"), "name": public.name})
    else:
        print_line(f"key {public.name}: {key} stays with the trainer, {key}.pub goes to the hosts")
