"""The test vectors in docs/FORMAT*.md are what the code writes and reads."""

import re
from pathlib import Path

import numpy as np
import pytest
import zstandard
from safetensors.numpy import load, save

from weighbridge.storage import codecs
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.values import PartKey

DOCS = Path(__file__).parents[2] / "docs"


def vectors() -> list[dict[str, str]]:
    text = "\n".join(path.read_text() for path in sorted(DOCS.glob("FORMAT*.md")))
    blocks = re.findall(r"^```vector\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [dict(re.split(r"  +|$", line, maxsplit=1) for line in block.splitlines()) for block in blocks]


def unhex(text: str) -> Bytes:
    """Hex, where `803f*3` is the same as `803f 803f 803f`."""
    words = (word.partition("*") for word in text.split())
    return np.frombuffer(bytes.fromhex("".join(word * int(times or 1) for word, _, times in words)), np.uint8)


def content(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)


def frame(data: Bytes) -> bytes:
    """A frame of another zstd level than ours."""
    return zstandard.ZstdCompressor(level=19).compress(data.tobytes())


def sizes_at(codec: str, extents: bytes) -> slice:
    """Where the sizes of frames stand in `extents`."""
    return slice(2 + 3 * extents[0], 2 + 15 * extents[0]) if codec == "expgap" else slice(0, len(extents))


FRAMED = ("gaps", "steps", "wide", "planes", "frames")
"""Streams of several frames, in the order in which their sizes stand in `extents`."""


def encoded(vector: dict[str, str]) -> dict[str, bytes]:
    """The streams that the code writes, decompressed, under the names that the document uses."""
    codec = vector["codec"]
    part = codecs.PartInput(PartKey("t", 0), vector["dtype"], unhex(vector["old"]), unhex(vector["new"]))
    payload = codecs.encode_shard([part], digest_kind="xxh3-128", codec=codec).payload
    streams = {name.partition("/")[2]: data.tobytes() for name, data in load(payload).items()}
    (prefix,) = {name.rpartition(".")[0] for name in streams}
    prefix = f"{prefix}." if prefix else ""
    out = {f"{prefix}extents": content(streams[f"{prefix}extents"])}
    framed = [name for name in FRAMED if prefix + name in streams and codec in ("expgap", "full", "xor")]
    extents = out[f"{prefix}extents"]
    sizes = np.frombuffer(extents[sizes_at(codec, extents)], "<u4").reshape(max(1, len(framed)), -1)
    for name, its in zip(framed, sizes.tolist(), strict=False):
        for index, size in enumerate(its):
            start = sum(its[:index])
            if size:
                out[f"{prefix}{name} {index}"] = content(streams[prefix + name][start : start + size])
    for name in streams:
        if name not in out and name.removeprefix(prefix) not in framed:
            out[name] = streams[name] if name.endswith("low") else content(streams[name])
    return out


def written_by_another(vector: dict[str, str]) -> bytes:
    """A payload made from the document alone."""
    codec = vector["codec"]
    named = {name: unhex(text) for name, text in vector.items() if name not in ("codec", "dtype", "old", "new")}
    (prefix,) = {name.partition("extents")[0] for name in named if "extents" in name}
    extents = bytearray(named[f"{prefix}extents"].tobytes())
    at = sizes_at(codec, bytes(extents))
    framed = FRAMED[:3] if codec == "expgap" else [n for n in FRAMED[3:] if any(name.startswith(n) for name in named)]
    streams, sizes = {}, []
    for stream in framed:
        count = (at.stop - at.start) // 4 // len(framed)
        frames = [frame(named[key]) if (key := f"{prefix}{stream} {i}") in named else b"" for i in range(count)]
        sizes += [len(data) for data in frames]
        streams[prefix + stream] = b"".join(frames)
    if framed:
        extents[at] = np.array(sizes, "<u4").tobytes()
    for name, data in named.items():
        if " " not in name:
            streams[name] = data.tobytes() if name.endswith("low") else frame(data)
    streams[f"{prefix}extents"] = frame(np.frombuffer(bytes(extents), np.uint8))
    return save({f"{codec}/{name}": np.frombuffer(data, np.uint8) for name, data in streams.items()})


def test_there_are_vectors_for_every_codec() -> None:
    assert {vector["codec"] for vector in vectors()} == set(codecs.CODECS)


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: v["codec"])
def test_a_vector_is_what_the_code_writes(vector: dict[str, str]) -> None:
    got = {name: data.hex() for name, data in encoded(vector).items() if data}
    named = {name: text for name, text in vector.items() if name not in ("codec", "dtype", "old", "new")}
    want = {name: unhex(text).tobytes().hex() for name, text in named.items() if text}
    assert got == want


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: v["codec"])
def test_a_payload_made_from_the_document_is_read(vector: dict[str, str]) -> None:
    old, new = unhex(vector["old"]), unhex(vector["new"])
    row = (vector["codec"], codecs.PartShape(vector["dtype"], old.size))
    target = old.copy()
    codecs.scatter(target, codecs.open_shard(written_by_another(vector), [row]).decode(0, old))
    assert target.tobytes() == new.tobytes()
