"""What a copy of a replica holds, tensor by tensor, as its own state file says: for whoever loads only what differs.
Only reads, and needs no ownership of the replica."""

from pathlib import Path

from weighbridge.storage.replica.layout import COPIES, Layout, read_identity
from weighbridge.storage.replica.state import read_state


def tensor_digests(folder: Path) -> dict[str, str]:
    """The digest of each tensor (hex; of a large one, those of its parts in turn) in the folder of a copy, or in what
    `current` leads to. Empty for any other folder, and for a copy that is not clean."""
    copy = folder.resolve()
    layout = Layout(copy.parent.parent)
    if copy.name not in COPIES or layout.copy(copy.name) != copy:
        return {}
    identity = read_identity(layout.identity)
    state = None
    if identity is not None:
        state = read_state(layout.state(copy.name), replica_id=identity.replica_id, copy=copy.name)
    if state is None or not state.clean:
        return {}
    digests: dict[str, str] = {}
    for key, digest in sorted(state.parts.items()):
        digests[key.tensor] = digests.get(key.tensor, "") + digest.hex()
    return digests
