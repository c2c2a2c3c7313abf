"""The header parser agrees with safetensors.safe_open wherever its docstring does not say otherwise."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from weighbridge.errors import CheckpointError, HeaderError
from weighbridge.storage.safetensors_header import build_header, parse_header, read_header
from weighbridge.values import DTYPE_BITS, TensorSpec

ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def file_bytes(header: str | bytes | dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + data


def theirs(path: Path, content: bytes) -> dict[str, list[int]] | None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        with safe_open(str(path), "np") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError:
        return None


def ours(content: bytes) -> dict[str, list[int]] | None:
    try:
        header = parse_header(content, len(content))
    except HeaderError:
        return None
    return {name: list(place.spec.shape) for name, place in header.tensors.items()}


def info(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def with_number(text: str, where: str = "extra") -> str:
    return json.dumps({"a": info(**{where: "@"})} if where == "extra" else {"a": info(shape=["@"])}).replace(
        '"@"', text
    )


def nested(depth: int) -> str:
    return with_number("[" * depth + "]" * depth)


AGREED: dict[str, bytes] = {
    "plain": file_bytes({"a": ONE}, b"abcd"),
    "no tensors": file_bytes({}),
    "nothing at all": b"",
    "seven bytes": b"\0" * 7,
    "no header": file_bytes(""),
    "a list": file_bytes("[]"),
    "space before": file_bytes("  " + json.dumps({"a": ONE}), b"abcd"),
    "space after": file_bytes(json.dumps({"a": ONE}) + " \n\t\r", b"abcd"),
    "form feed after": file_bytes(json.dumps({"a": ONE}) + "\f", b"abcd"),
    "nul after": file_bytes(json.dumps({"a": ONE}) + "\0", b"abcd"),
    "byte order mark": file_bytes("\ufeff" + json.dumps({"a": ONE}), b"abcd"),
    "not utf-8": file_bytes(b'{"\xff":' + json.dumps(ONE).encode() + b"}", b"abcd"),
    "lone surrogate": file_bytes('{"\\ud800":' + json.dumps(ONE) + "}", b"abcd"),
    "capital lone surrogate": file_bytes('{"\\uD800":' + json.dumps(ONE) + "}", b"abcd"),
    "surrogate pair": file_bytes('{"\\ud83d\\ude00":' + json.dumps(ONE) + "}", b"abcd"),
    "control character": file_bytes('{"a\x01":' + json.dumps(ONE) + "}", b"abcd"),
    "nul in a name": file_bytes({"a\0": ONE}, b"abcd"),
    "empty name": file_bytes({"": ONE}, b"abcd"),
    "trailing comma": file_bytes('{"a":' + json.dumps(ONE) + ",}", b"abcd"),
    "leading zero": file_bytes(with_number("01", "shape"), b"abcd"),
    "metadata": file_bytes({"__metadata__": {"format": "pt"}, "a": ONE}, b"abcd"),
    "metadata null": file_bytes({"__metadata__": None}),
    "metadata of numbers": file_bytes({"__metadata__": {"a": 1}}),
    "metadata with null": file_bytes({"__metadata__": {"a": None}}),
    "metadata a list": file_bytes({"__metadata__": []}),
    "metadata escaped": file_bytes('{"\\u005f_metadata__":{"a":"b"}}'),
    "metadata twice": file_bytes('{"__metadata__":{},"__metadata__":{}}'),
    "a null tensor": file_bytes({"a": None}),
    "a string tensor": file_bytes({"a": "F32"}),
    "no shape": file_bytes({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"abcd"),
    "extra field": file_bytes({"a": info(extra=[1, {}])}, b"abcd"),
    "field twice": file_bytes('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"abcd"),
    "nested 125": file_bytes(nested(125), b"abcd"),
    "nested 126": file_bytes(nested(126), b"abcd"),
    "nested 5000": file_bytes(nested(5000), b"abcd"),
    "number too large": file_bytes(with_number("1e999"), b"abcd"),
    "integer of 30 digits": file_bytes(with_number("9" * 30), b"abcd"),
    "integer of 400 digits": file_bytes(with_number("9" * 400), b"abcd"),
    "integer of 9000 digits": file_bytes(with_number("9" * 9000), b"abcd"),
    "not a number": file_bytes(with_number("NaN"), b"abcd"),
    "float dimension": file_bytes(with_number("1.0", "shape"), b"abcd"),
    "exponent dimension": file_bytes(with_number("1e0", "shape"), b"abcd"),
    "true dimension": file_bytes(with_number("true", "shape"), b"abcd"),
    "negative dimension": file_bytes(with_number("-1", "shape"), b"abcd"),
    "minus zero dimension": file_bytes(with_number("-0", "shape")),
    "minus zero offset": file_bytes(json.dumps({"a": info(offsets=["@", 4])}).replace('"@"', "-0"), b"abcd"),
    "true offset": file_bytes({"a": info("U8", (1,), (False, True))}, b"a"),
    "three offsets": file_bytes({"a": info(offsets=(0, 4, 8))}, b"abcd"),
    "dimension of 2^64": file_bytes({"a": info(shape=(1 << 64, 0), offsets=(0, 0))}),
    "product overflows": file_bytes({"a": info(shape=(1 << 32, 1 << 32, 1 << 32))}, b"abcd"),
    "overflows before a zero": file_bytes({"a": info(shape=(1 << 32, 1 << 32, 1 << 32, 0), offsets=(0, 0))}),
    "zero before it overflows": file_bytes({"a": info(shape=(0, 1 << 32, 1 << 32, 1 << 32), offsets=(0, 0))}),
    "bits overflow": file_bytes({"a": info(shape=(1 << 60,))}, b"abcd"),
    "scalar": file_bytes({"a": info(shape=())}, b"abcd"),
    "F4": file_bytes({"a": info("F4", (8,))}, b"abcd"),
    "F4 not whole bytes": file_bytes({"a": info("F4", (7,))}, b"abcd"),
    "F6": file_bytes({"a": info("F6_E2M3", (4,), (0, 3))}, b"abc"),
    "one byte short": file_bytes({"a": ONE}, b"abc"),
    "one byte long": file_bytes({"a": ONE}, b"abcde"),
    "a hole": file_bytes({"a": ONE, "b": info(offsets=(5, 9))}, b"123456789"),
    "an overlap": file_bytes({"a": ONE, "b": info(offsets=(2, 6))}, b"123456"),
    "the same bytes twice": file_bytes({"a": ONE, "b": ONE}, b"abcd"),
    "backwards": file_bytes({"a": info(shape=(0,), offsets=(4, 0))}, b""),
    "listed in another order": file_bytes({"a": info(offsets=(4, 8)), "b": ONE}, b"12345678"),
    "empty ones between": file_bytes({"a": ONE, "b": info(shape=(0,), offsets=(4, 4))}, b"abcd"),
    "length past the end": struct.pack("<Q", 1 << 20) + b"{}",
    "length over the limit": struct.pack("<Q", 100_000_001) + b"{}",
    "length of 2^63": struct.pack("<Q", 1 << 63) + b"{}",
} | {
    f"dtype {dtype}": file_bytes({"a": info(dtype, (8,), (0, bits))}, b"\0" * bits)
    for dtype, bits in DTYPE_BITS.items()
}  # fmt: skip


@pytest.mark.parametrize("case", AGREED)
def test_it_accepts_and_refuses_what_safe_open_does(case: str, tmp_path: Path) -> None:
    assert ours(AGREED[case]) == theirs(tmp_path / "file.safetensors", AGREED[case])


counts = st.one_of(st.integers(0, 4), st.sampled_from([1 << 31, 1 << 62]), st.just(True), st.floats(0, 9), st.just(-1))
infos = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "F32", "U8", "BF16"]),
        "shape": st.lists(counts, max_size=3),
        "data_offsets": st.lists(counts, min_size=1, max_size=3),
    }
)
whole = st.lists(
    st.tuples(
        st.text(max_size=3), st.sampled_from(["U8", "BF16", "F32", "F4"]), st.lists(st.integers(0, 3), max_size=3)
    ),
    unique_by=lambda item: item[0],
    max_size=4,
)


def laid_out(items: list[tuple[str, str, list[int]]]) -> tuple[dict[str, Any], int]:
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in items:
        nbytes = (int(np.prod(shape)) * DTYPE_BITS[dtype] + 7) // 8
        header[name] = info(dtype, shape, (end, end + nbytes))
        end += nbytes
    return header, end


def same_verdict(content: bytes, path: Path) -> None:
    mine = ours(content)
    on_purpose = duplicate_keys(content) or other_spelling(content) if mine is None else unknown_dtype(content)
    if on_purpose:
        return
    assert mine == theirs(path, content)


def unknown_dtype(content: bytes) -> bool:
    places = parse_header(content, len(content)).tensors.values()
    return any(place.spec.dtype not in DTYPE_BITS for place in places)


def duplicate_keys(content: bytes) -> bool:
    found = False

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        found = found or len(dict(pairs)) < len(pairs)
        return dict(pairs)

    try:
        json.JSONDecoder(object_pairs_hook=look).raw_decode(content[8:].decode("utf-8", "replace").lstrip())
    except ValueError:
        return found
    return found


def other_spelling(content: bytes) -> bool:
    try:
        document, _ = json.JSONDecoder().raw_decode(content[8:].decode("utf-8", "replace").lstrip())
    except ValueError:
        return False
    values = document.values() if isinstance(document, dict) else ()
    return any(isinstance(v, list) or (isinstance(v, dict) and isinstance(v.get("dtype"), dict)) for v in values)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=3), infos, max_size=3), data=st.binary(max_size=12))
def test_it_agrees_with_safe_open_on_odd_descriptions(tmp_path: Path, header: dict[str, Any], data: bytes) -> None:
    same_verdict(file_bytes(header, data), tmp_path / "file.safetensors")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=whole, cuts=st.data())
def test_it_agrees_with_safe_open_on_mutated_files(
    tmp_path: Path, items: list[tuple[str, str, list[int]]], cuts: st.DataObject
) -> None:
    header, end = laid_out(items)
    content = bytearray(file_bytes(header, bytes(end)))
    for _ in range(cuts.draw(st.integers(0, 2), label="mutations")):
        at = cuts.draw(st.integers(0, len(content) - 1), label="at")
        size = cuts.draw(st.integers(0, 2), label="removed")
        content[at : at + size] = cuts.draw(
            st.one_of(st.binary(max_size=2), st.sampled_from([b"0", b"1", b" ", b'"', b"{", b"]", b",", b"-"])),
            label="put",
        )
        if not content:
            break
    same_verdict(bytes(content), tmp_path / "file.safetensors")


def test_duplicate_names_are_refused_though_safe_open_lets_the_last_win(tmp_path: Path) -> None:
    content = file_bytes('{"a":' + json.dumps(ONE) + ',"a":' + json.dumps(ONE) + "}", b"abcd")
    assert theirs(tmp_path / "file.safetensors", content) == {"a": [1]}
    with pytest.raises(HeaderError, match="duplicate keys: 'a'"):
        parse_header(content, len(content))


def test_an_unknown_dtype_is_opaque_bytes() -> None:
    content = file_bytes({"a": info("INT3_PACKED", (9, 9), (0, 31))}, b"\0" * 31)
    place = parse_header(content, len(content)).tensors["a"]
    assert place.spec == TensorSpec("a", "INT3_PACKED", (9, 9), 31)


def test_other_spellings_that_no_writer_uses_are_refused() -> None:
    for text in ('{"a":["F32",[1],[0,4]]}', '{"a":{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}}'):
        with pytest.raises(HeaderError):
            parse_header(file_bytes(text, b"abcd"), len(file_bytes(text, b"abcd")))


def test_places_are_offsets_into_the_file(tmp_path: Path) -> None:
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array(7, np.int64), "empty": np.empty((0, 4))}
    path = tmp_path / "model.safetensors"
    save_file(arrays, path, metadata={"format": "np"})
    header = read_header(path)
    content = path.read_bytes()
    assert header.metadata == {"format": "np"}
    assert header.file_bytes == len(content)
    for name, array in arrays.items():
        place = header.tensors[name]
        assert content[place.start : place.start + place.spec.nbytes] == array.tobytes()
        assert place.spec.shape == array.shape


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"\0" * 9)
    with pytest.raises(CheckpointError, match=r"broken\.safetensors"):
        read_header(path)
    with pytest.raises(HeaderError, match=r"absent\.safetensors: cannot be read"):
        read_header(tmp_path / "absent.safetensors")


@given(items=whole, metadata=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
@settings(max_examples=60, deadline=None)
def test_a_built_header_parses_to_what_it_was_built_from(
    items: list[tuple[str, str, list[int]]], metadata: dict[str, str]
) -> None:
    header, _ = laid_out(items)
    specs = [
        TensorSpec(name, i["dtype"], tuple(i["shape"]), i["data_offsets"][1] - i["data_offsets"][0])
        for name, i in header.items()
        if name != "__metadata__" and int(np.prod(i["shape"])) * DTYPE_BITS[i["dtype"]] % 8 == 0
    ]
    raw = build_header(specs, metadata)
    assert len(raw) % 8 == 0
    parsed = parse_header(raw, len(raw) + sum(spec.nbytes for spec in specs))
    assert [place.spec for place in parsed.tensors.values()] == sorted_by_place(specs)
    assert parsed.metadata == metadata


def sorted_by_place(specs: list[TensorSpec]) -> list[TensorSpec]:
    starts: list[tuple[tuple[int, int], TensorSpec]] = []
    end = 0
    for spec in specs:
        starts.append(((end, end + spec.nbytes), spec))
        end += spec.nbytes
    return [spec for _, spec in sorted(starts, key=lambda item: item[0])]
