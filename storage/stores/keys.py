"""Which keys are keys, and which file names are a writer's own temp files. Must not know any kind of store: the same
keys are good on all of them, so that a root can be copied from one kind to another."""

import secrets

from weighbridge.errors import UsageError

TEMP_PREFIX = ".weighbridge-"
TEMP_SUFFIX = ".tmp"

_MAX_KEY_BYTES = 1000  # S3 and GCS allow 1024, the root's own prefix included
_MAX_NAME_BYTES = 255


def checked_key(key: str) -> str:
    """The key itself when it names an object on every kind of store; raises UsageError otherwise."""
    names = key.split("/")
    if (
        any(name in ("", ".", "..") or len(name.encode(errors="replace")) > _MAX_NAME_BYTES for name in names)
        or any(name.startswith(TEMP_PREFIX) for name in names)
        or not key.isprintable()
        or "\\" in key
        or len(key.encode()) > _MAX_KEY_BYTES
    ):
        raise UsageError(
            f"{key!r} cannot be the key of an object: a key is names joined by '/', none of them empty, '.' or '..', "
            f"without control characters or backslashes, and none begins with {TEMP_PREFIX!r}. Nothing was touched."
        )
    return key


def checked_prefix(prefix: str) -> str:
    """The same for the key of a folder, where "" is the root."""
    return checked_key(prefix) if prefix else prefix


def checked_create(key: str, data: bytes) -> str:
    """The key, when a conditional create of `data` can be honoured everywhere: S3 clients overwrite silently when the
    object is empty, so an empty create is a UsageError on every store."""
    if not data:
        raise UsageError(f"{key!r} cannot be created empty: not every store keeps put-if-absent for empty objects.")
    return checked_key(key)


def temp_name() -> str:
    """A fresh name for a temp file of ours, which no key can have and no listing shows."""
    return f"{TEMP_PREFIX}{secrets.token_hex(8)}{TEMP_SUFFIX}"


def is_temp_name(name: str) -> bool:
    """Whether a file name is one of `temp_name`'s."""
    return name.startswith(TEMP_PREFIX) and name.endswith(TEMP_SUFFIX)
