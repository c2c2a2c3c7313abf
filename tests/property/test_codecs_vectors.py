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
    return np.frombuffer(bytes.fromhex(text), np.uint8)


def frame(data: bytes) -> Bytes:
    return np.frombuffer(zstandard.ZstdCompressor(level=19).compress(data), np.uint8)


def encoded(vector: dict[str, str]) -> dict[str, bytes]:
    """The streams that the code writes, decompressed, under the names that the document uses."""
    part = codecs.PartInput(PartKey("t", 0), vector["dtype"], unhex(vector["old"]), unhex(vector["new"]))
    payload = codecs.encode_shard([part], digest_kind="xxh3-128", codec=vector["codec"]).payload
    streams = {name.partition("/")[2]: data.tobytes() for name, data in load(payload).items()}
    out = {}
    for name, data in streams.items():
        if name == "planes":
            sizes = np.frombuffer(out.get("extents") or zstandard.decompress(streams["extents"]), "<u4").tolist()
            for plane, size in enumerate(sizes):
                start = sum(sizes[:plane])
                out[f"plane {plane}"] = zstandard.decompress(data[start : start + size])
        else:
            out[name] = zstandard.decompress(data)
    return out


def written_by_another(vector: dict[str, str]) -> bytes:
    """A payload made from the document alone, with another zstd level than ours."""
    names = [name for name in vector if name not in ("codec", "dtype", "old", "new")]
    planes = [frame(unhex(vector[name]).tobytes()) for name in names if name.startswith("plane ")]
    streams = {name: frame(unhex(vector[name]).tobytes()) for name in names if not name.startswith("plane ")}
    if planes:
        streams = {
            "extents": frame(np.array([len(p) for p in planes], "<u4").tobytes()),
            "planes": np.concatenate(planes),
        }
    return save({f"{vector['codec']}/{name}": data for name, data in streams.items()})


def test_there_are_vectors_for_every_codec() -> None:
    assert {vector["codec"] for vector in vectors()} == set(codecs.CODECS)


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: f"{v['codec']}-{v['dtype']}")
def test_a_vector_is_what_the_code_writes(vector: dict[str, str]) -> None:
    for name, data in encoded(vector).items():
        assert data.hex() == unhex(vector[name]).tobytes().hex(), name


@pytest.mark.parametrize("vector", vectors(), ids=lambda v: f"{v['codec']}-{v['dtype']}")
def test_a_payload_made_from_the_document_is_read(vector: dict[str, str]) -> None:
    old, new = unhex(vector["old"]), unhex(vector["new"])
    decoder = codecs.open_shard(
        written_by_another(vector), [(vector["codec"], codecs.PartShape(vector["dtype"], old.size))]
    )
    target = old.copy()
    codecs.scatter(target, decoder.decode(0, old))
    assert target.tobytes() == new.tobytes()
