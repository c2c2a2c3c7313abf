"""Small files with a digest of their own: a JSON object under a line that proves it, so that garbage is never believed.
Must not know what the fields mean."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weighbridge.storage import strict_json
from weighbridge.storage.digests import chain_digest


def seal(fields: Mapping[str, Any]) -> bytes:
    """The bytes of a sealed file: hex blake3 of the rest, a line break, JSON."""
    body = json.dumps(fields, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return chain_digest(body).encode() + b"\n" + body


def unseal(data: bytes) -> dict[str, Any] | None:
    """The fields of a sealed file, or None when a single byte of it is not as it was written."""
    digest, line_break, body = data[:64], data[64:65], data[65:]
    if line_break != b"\n" or chain_digest(body).encode() != digest:
        return None
    try:
        fields = strict_json.parse(body)
    except ValueError:  # somebody sealed what we never write
        return None
    return fields if isinstance(fields, dict) else None


def read_sealed(path: Path) -> dict[str, Any] | None:
    """The fields of a sealed file, or None when it is not there or not as it was written."""
    try:
        return unseal(path.read_bytes())
    except FileNotFoundError:
        return None
