"""JSON objects that prove themselves: small objects of a store that carry a digest over their own bytes, so that a byte
which changed is never believed. docs/FORMAT.md gives the rule. Must not know what the fields mean."""

import json
import re
from collections.abc import Mapping
from typing import Any

from weighbridge.storage import strict_json
from weighbridge.storage.digests import chain_digest

MOST_SEALED_BYTES = 1 << 20
"""What is sealed is small: the longest says why a host failed. JSON of any length would become objects twenty times as
large."""

_FIELD = "digest"
_NO_DIGEST = "0" * 64
_HEX64 = re.compile(r"[0-9a-f]{64}")


def seal(fields: Mapping[str, Any]) -> bytes:
    """The bytes of an object with these fields and, last of all, the digest of its own bytes."""
    # A text may hold a file name that is no Unicode; it must not make the object unreadable.
    text = json.dumps({**fields, _FIELD: _NO_DIGEST}, ensure_ascii=False, allow_nan=False)
    zeroed = text.encode(errors="replace")
    return zeroed[: -len(_NO_DIGEST) - 2] + chain_digest(zeroed).encode() + zeroed[-2:]


def unseal(data: bytes) -> dict[str, Any]:
    """The fields without the digest. Raises ValueError when a single byte is not as it was written."""
    if len(data) > MOST_SEALED_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, and a document of its kind at most {MOST_SEALED_BYTES:,}")
    fields = strict_json.parse(data)
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    digest = fields.pop(_FIELD, None)
    if not isinstance(digest, str) or not _HEX64.fullmatch(digest) or data.count(digest.encode()) != 1:
        raise ValueError("it does not name its own digest once")
    if chain_digest(data.replace(digest.encode(), _NO_DIGEST.encode())) != digest:
        raise ValueError("its bytes do not have the digest that it names")
    return fields
