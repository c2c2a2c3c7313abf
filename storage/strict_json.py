"""JSON read as strictly as the Rust reader of safetensors does, where Python's own is lax, and with duplicate keys
refused. Must not know what the document means."""

import json
import math
from collections import Counter
from typing import NoReturn

MAX_DEPTH = 127  # serde_json's limit


def parse(data: bytes) -> object:
    """The document in `data`. Raises ValueError, with the reason, for whatever is not strict JSON.

    Integers beyond 64 bits become floats, as serde_json makes them; so does "-0". NaN and infinities, numbers that
    overflow a float, lone surrogates, duplicate keys and nesting deeper than MAX_DEPTH are refused.
    """
    text = data.decode("utf-8")
    try:
        document = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    if "\\ud" in text or "\\uD" in text:  # only escapes can smuggle a lone surrogate in; encoding finds it
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    _check_depth(document)
    return document


def _check_depth(document: object) -> None:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def _integer(text: str) -> int | float:
    if len(text) <= 20:
        value = int(text)
        if -(1 << 63) <= value < 1 << 64 and text != "-0":
            return value
    return _finite(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number out of range: {text[:40]}")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
        raise ValueError("duplicate keys: " + ", ".join(map(repr, twice)))
    return found


_DECODER = json.JSONDecoder(
    parse_int=_integer, parse_float=_finite, parse_constant=_constant, object_pairs_hook=_unique, strict=True
)
