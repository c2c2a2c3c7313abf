"""Manifests: every field there and back, every damaged byte noticed, every hostile one refused by name."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pyarrow as pa
import pytest
from tests.storage.manifests import (
    ZERO_DIGEST,
    ZERO_SIGNATURE,
    forged,
    opened,
    sealed,
    some_anchor,
    some_base,
    some_manifest,
    some_row,
    some_shard,
    written,
)

from weighbridge.errors import ManifestCorrupt, UsageError
from weighbridge.storage.manifest import (
    check_labels,
    check_name,
    from_bytes,
    manifest_key,
    shard_key,
    to_bytes,
    version_folder,
)
from weighbridge.values import Manifest, PartKey, ShardInfo

FIXTURE = Path(__file__).parent / "data" / "manifest-format-1.arrow"


# --- there and back


@pytest.mark.parametrize(
    "manifest",
    [
        some_manifest(),
        some_base(),
        some_manifest(rows=(), shards=(), labels={}, aliases={}),
        some_manifest(signature="ab" * 64),
        some_anchor(),
        some_manifest(
            digest_kind="blake3",
            shards=(replace(some_shard(), digest=b"s" * 32),),
            rows=(some_row(before=b"b" * 32, after=b"a" * 32, tensor_digest=b"t" * 32),),
        ),
        some_manifest(rows=(some_row(shape=(0, 3), nbytes=0),)),
        some_manifest(rows=(some_row(key=PartKey("w", 1 << 40), shape=((1 << 40) + 12,)),)),
    ],
    ids=["delta", "base", "empty", "signed", "anchor", "blake3", "empty tensor", "huge tensor"],
)
def test_every_field_comes_back_as_it_was_written(manifest: Manifest) -> None:
    data, filled = to_bytes(manifest)
    read = from_bytes(data)
    assert read == filled
    for field in fields(Manifest):
        if field.name not in ("digest", "signature"):
            assert getattr(read, field.name) == getattr(manifest, field.name), field.name
    assert read.signature == (manifest.signature or ZERO_SIGNATURE)
    assert type(read.labels.get("good")) is type(manifest.labels.get("good"))


def test_the_same_manifest_gives_the_same_bytes() -> None:
    assert to_bytes(some_manifest()) == to_bytes(some_manifest())


def test_the_digest_of_the_argument_plays_no_role() -> None:
    assert to_bytes(some_manifest(digest="ee" * 32)) == to_bytes(some_manifest())


def test_labels_and_aliases_are_written_in_sorted_order() -> None:
    data, _ = to_bytes(some_manifest(labels={"b": 1, "a": 2}))
    assert to_bytes(some_manifest(labels={"a": 2, "b": 1}))[0] == data
    assert opened(data)[1]["labels"] == '{"a":2,"b":1}'


def test_keys_of_a_version_are_those_of_the_format() -> None:
    assert version_folder(12) == "versions/000000000012"
    assert manifest_key(0) == "versions/000000000000/manifest.arrow"
    assert shard_key(12, some_shard(3)) == f"versions/000000000012/{'c0ffee00' * 4}-00003.safetensors"


# --- its own digest


def test_the_own_digest_is_blake3_over_the_bytes_with_both_fields_zeroed() -> None:
    for manifest in (some_manifest(), some_manifest(signature="12" * 64)):
        data, filled = to_bytes(manifest)
        zeroed = data.replace(filled.digest.encode(), ZERO_DIGEST.encode())
        zeroed = zeroed.replace(filled.signature.encode(), ZERO_SIGNATURE.encode())
        assert blake3.blake3(zeroed).hexdigest() == filled.digest
        assert len(zeroed) == len(data)


def test_a_signature_does_not_change_the_digest() -> None:
    assert to_bytes(some_manifest(signature="12" * 64))[1].digest == to_bytes(some_manifest())[1].digest


def test_a_manifest_whose_digest_stands_a_third_time_is_refused() -> None:
    batch, metadata = opened(to_bytes(some_manifest())[0])
    filled = {**metadata, "writer": metadata["digest"]}
    with pytest.raises(ManifestCorrupt, match="twice"):
        from_bytes(written(batch.replace_schema_metadata(filled)))


def test_a_manifest_with_an_all_zero_digest_is_refused() -> None:
    batch, metadata = opened(to_bytes(some_manifest())[0])
    with pytest.raises(ManifestCorrupt, match="names no digest"):
        from_bytes(written(batch.replace_schema_metadata({**metadata, "digest": ZERO_DIGEST})))


def test_a_forged_manifest_is_accepted_when_nothing_in_it_is_wrong() -> None:
    """The forger of these tests is right: what it forges is refused for the forged detail alone."""
    assert from_bytes(forged()) == to_bytes(some_manifest())[1]


# --- damage


@pytest.fixture(scope="module")
def small() -> bytes:
    return to_bytes(some_manifest(rows=(some_row(),), labels={"step": 1}, aliases={}))[0]


def test_every_flipped_bit_of_a_byte_is_refused(small: bytes) -> None:
    for place in range(len(small)):
        spoilt = bytearray(small)
        spoilt[place] ^= 1 << place % 8
        with pytest.raises(ManifestCorrupt, match="versions/7"):
            from_bytes(bytes(spoilt), where="versions/7")


def test_every_truncation_is_refused(small: bytes) -> None:
    for length in range(len(small)):
        with pytest.raises(ManifestCorrupt):
            from_bytes(small[:length])


def test_bytes_behind_the_file_or_before_it_are_refused(small: bytes) -> None:
    for spoilt in (small + b"\0", small + small, b"\0" + small, small + b"\0" * 8):
        with pytest.raises(ManifestCorrupt):
            from_bytes(spoilt)


@pytest.mark.parametrize("data", [b"", b"ARROW1", b"ARROW1\0\0" * 40, b"{}", b"\xff" * 4096])
def test_what_is_no_arrow_file_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestCorrupt, match="not an Arrow file"):
        from_bytes(data)


def test_every_stretch_of_eight_bytes_at_their_extremes_is_refused(small: bytes) -> None:
    """Counts and lengths in Arrow's own structure, made as large and as negative as they go."""
    for place in range(0, len(small) - 8, 8):
        for extreme in (b"\xff" * 7 + b"\x7f", b"\xff" * 8, b"\xff\xff\xff\x7f" * 2):
            spoilt = small[:place] + extreme + small[place + 8 :]
            if spoilt != small:
                with pytest.raises(ManifestCorrupt):
                    from_bytes(spoilt)


# --- hostile metadata, rightly sealed


def setting(field: str, value: str) -> Callable[[dict[str, str]], object]:
    return lambda metadata: metadata.update({field: value})


def without(field: str) -> Callable[[dict[str, str]], object]:
    return lambda metadata: metadata.pop(field)


DEEP = "[" * 100_000 + "]" * 100_000
NAME = some_shard().name
DIGEST = "00" * 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format_version", "2"),
        ("format_version", "01"),
        ("kind", "snapshot"),
        ("kind", ""),
        ("kind", "base"),  # its rows are not of the base
        ("run_id", ""),
        ("run_id", "../elsewhere"),
        ("run_id", ".hidden"),
        ("run_id", "a" * 65),
        ("run_id", "a b"),
        ("commit_id", "c0ffee"),
        ("commit_id", "C0FFEE00" * 4),
        ("version", "-1"),
        ("version", "012"),
        ("version", " 12"),
        ("version", "1_2"),
        ("version", "+12"),
        ("version", "12.0"),
        ("version", "9" * 5000),
        ("version", "\u0661\u0662"),  # Arabic digits, which int() takes
        ("parent", "-2"),
        ("parent", "--1"),
        ("parent_digest", "ab" * 31),
        ("parent_digest", "AB" * 32),
        ("created_ns", "-1"),
        ("created_ns", str(1 << 63)),
        ("digest_kind", "md5"),
        ("digest_kind", "blake3"),  # then all its digests are too short
        ("state_digest", "cd" * 31),
        ("state_digest", "zz" * 32),
        ("model_bytes", "-5"),
        ("model_bytes", "nan"),
        ("model_elements", "-5"),
        ("tensors", "-1"),
        ("tensors", "many"),
        ("shards", "{}"),
        ("shards", "7"),
        ("shards", "null"),
        ("shards", "[[]]"),
        ("shards", "not json"),
        ("shards", DEEP),
        ("shards", f'[["{NAME}",-1,"{DIGEST}"],["{some_shard(1).name}",1,"{DIGEST}"]]'),
        ("shards", f'[["{NAME}",true,"{DIGEST}"],["{some_shard(1).name}",1,"{DIGEST}"]]'),
        ("shards", f'[["{NAME}",1.5,"{DIGEST}"],["{some_shard(1).name}",1,"{DIGEST}"]]'),
        ("shards", f'[["{NAME}",{"9" * 40},"{DIGEST}"],["{some_shard(1).name}",1,"{DIGEST}"]]'),
        ("shards", f'[["{NAME}",1,"{DIGEST}"],["{NAME}",1,"{DIGEST}"]]'),
        ("shards", f'[["{NAME}",1,"{DIGEST}"]]'),  # a row names the second
        ("shards", f'[["{NAME}",1,"00"],["{some_shard(1).name}",1,"{DIGEST}"]]'),
        ("shards", f'[["{NAME}",1,"{"AB" * 16}"],["{some_shard(1).name}",1,"{DIGEST}"]]'),
        ("shards", f'[["{NAME}",1,"{"0 " * 16}"],["{some_shard(1).name}",1,"{DIGEST}"]]'),
        ("shards", f'[["{NAME}",1,7],["{some_shard(1).name}",1,"{DIGEST}"]]'),
        ("shards", f'[[7,1,"{DIGEST}"],["{some_shard(1).name}",1,"{DIGEST}"]]'),
        ("labels", "[]"),
        ("labels", "3"),
        ("labels", "null"),
        ("labels", '{"a":'),
        ("labels", '{"a":[1]}'),
        ("labels", '{"a":{}}'),
        ("labels", '{"a":NaN}'),
        ("labels", '{"a":Infinity}'),
        ("labels", '{"a":1,"a":2}'),
        ("labels", '{"a":"\\ud800"}'),
        ("labels", '{"a":' + DEEP + "}"),
        ("aliases", "[]"),
        ("aliases", '{"a":1}'),
        ("aliases", '{"a":null}'),
        ("aliases", DEEP),
        ("files", "elsewhere.safetensors"),
        ("more", "of it"),
    ],
)
def test_metadata_that_no_publisher_writes_is_refused(field: str, value: str) -> None:
    with pytest.raises(ManifestCorrupt):
        from_bytes(forged(setting(field, value)))


@pytest.mark.parametrize(
    "name",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "manifest.arrow",
        f"../{NAME}",
        f"{NAME}\\u0000",
        f"{NAME}\\n",
        f".{NAME}",
        NAME.upper(),
        f"{'c0ffee00' * 4}-{'0' * 17}.safetensors",
        "c0ffee-00000.safetensors",
    ],
)
def test_a_shard_name_that_leads_elsewhere_is_refused(name: str) -> None:
    shards = f'[["{name}",1,"{DIGEST}"],["{some_shard(1).name}",1,"{DIGEST}"]]'
    with pytest.raises(ManifestCorrupt):
        from_bytes(forged(setting("shards", shards)))


@pytest.mark.parametrize("field", sorted(opened(to_bytes(some_manifest())[0])[1]))
def test_a_field_that_is_missing_is_refused(field: str) -> None:
    batch, metadata = opened(to_bytes(some_manifest())[0])
    del metadata[field]
    with pytest.raises(ManifestCorrupt):
        from_bytes(written(batch.replace_schema_metadata(metadata)))


def test_no_metadata_at_all_is_refused() -> None:
    with pytest.raises(ManifestCorrupt):
        from_bytes(written(opened(to_bytes(some_manifest())[0])[0].replace_schema_metadata(None)))


def test_metadata_that_is_not_utf8_is_refused() -> None:
    batch, metadata = opened(to_bytes(some_manifest())[0])
    for key, value in (("writer", b"\xff\xfe"), (b"\xff", "x")):
        with pytest.raises(ManifestCorrupt):
            from_bytes(written(batch.replace_schema_metadata({**metadata, key: value})))


# --- hostile rows, rightly sealed


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("tensor", ["w", "w", "big", "big"]),  # ("w", 0) twice
        ("shard", [0, 0, 0, 2]),
        ("shard", [0, 0, 0, -2]),
        ("shard", [-1, 0, 0, 1]),  # a delta's row that claims to be the base's
        ("shard", [0, 0, 0, 2**31 - 1]),
        ("codec", ["base", "gap", "gap", "gap"]),
        ("shape", [[-2, -3], [1], [1], []]),
        ("before", [b"", b"1" * 16, b"1" * 16, b"1" * 16]),
        ("before", [b"1" * 15, b"1" * 16, b"1" * 16, b"1" * 16]),
        ("after", [b"1" * 17, b"1" * 16, b"1" * 16, b"1" * 16]),
        ("after", [b"", b"1" * 16, b"1" * 16, b"1" * 16]),
        ("tensor_digest", [b"", b"1" * 16, b"1" * 16, b"1" * 16]),
    ],
)
def test_rows_that_no_publisher_writes_are_refused(column: str, values: list[Any]) -> None:
    with pytest.raises(ManifestCorrupt):
        from_bytes(forged(columns={column: values}))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("codec", ["base", "gap"]),
        ("shard", [-1, 0]),
        ("before", [b"", b"1" * 16]),
        ("tensor", ["a", "a"]),
    ],
)
def test_rows_of_a_base_that_no_publisher_writes_are_refused(column: str, values: list[Any]) -> None:
    with pytest.raises(ManifestCorrupt):
        from_bytes(forged(columns={column: values}, manifest=some_base()))


def test_a_name_that_is_not_utf8_is_refused() -> None:
    batch, metadata = opened(to_bytes(some_manifest())[0])
    names = pa.array([b"\xff\xfe", b"b", b"c", b"d"], pa.binary()).view(pa.utf8())
    with pytest.raises(ManifestCorrupt):
        from_bytes(sealed(batch.set_column(0, batch.schema.field(0), names), metadata))


def test_columns_of_another_order_name_type_or_number_are_refused() -> None:
    batch, metadata = opened(to_bytes(some_manifest())[0])
    names = batch.schema.names
    nullable = pa.schema([field.with_nullable(True) for field in batch.schema])
    for changed in (
        batch.select(names[:-1]),
        batch.select([*names[::-1]]),
        batch.rename_columns(["name", *names[1:]]),
        batch.append_column("more", pa.array([1] * batch.num_rows)),
        batch.set_column(1, "offset", batch.column("offset").cast(pa.int64())),
        pa.RecordBatch.from_arrays(batch.columns, schema=nullable),
    ):
        with pytest.raises(ManifestCorrupt, match="columns"):
            from_bytes(sealed(changed, metadata))


def test_several_record_batches_or_none_are_refused() -> None:
    data = to_bytes(some_manifest())[0]
    batch, _ = opened(data)
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        schema = reader.schema
    for count in (0, 2):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as writer:
            for _ in range(count):
                writer.write_batch(batch)
        with pytest.raises(ManifestCorrupt, match=f"{count} record batches"):
            from_bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_manifest_is_refused(compression: str) -> None:
    """A few kB must not become gigabytes in a reader's memory."""
    batch, metadata = opened(to_bytes(some_manifest())[0])
    with pytest.raises(ManifestCorrupt, match="compress"):
        from_bytes(sealed(batch, metadata, pa.ipc.IpcWriteOptions(compression=compression)))


# --- what cannot be written


@pytest.mark.parametrize(
    "labels",
    [
        {"a": [1]},
        {"a": {"b": 1}},
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": "\ud800"},
        {"\ud800": 1},
        {"a": b"bytes"},
        {"a": 1 << 64},
        {"a": object()},
        {"a": np.int64(1)},
        {1: "a"},
    ],
)
def test_labels_that_could_not_be_read_back_are_refused(labels: dict[Any, Any]) -> None:
    with pytest.raises(UsageError, match="label"):
        check_labels(labels)
    with pytest.raises(UsageError, match="label"):
        to_bytes(some_manifest(labels=labels))


@pytest.mark.parametrize("name", ["", ".a", "a/b", "a" * 65, "ä", "a b", "a\n", "..", "a\0"])
def test_a_name_that_cannot_stand_in_a_key_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="host"):
        check_name("host", name)


@pytest.mark.parametrize("name", ["a", "run-7", "A.b_C-9", "a" * 64, "-x"])
def test_a_name_that_can_stand_in_a_key_comes_back(name: str) -> None:
    assert check_name("host", name) == name


# --- the format of today, for the readers of tomorrow


def test_a_manifest_written_by_the_first_release_still_says_the_same() -> None:
    read = from_bytes(FIXTURE.read_bytes())
    assert read == replace(
        some_manifest(),
        digest="a0c8ad3da17752430c99264a35262aa52c1e16512b329a474f7a4d6ee536ecde",
        signature=ZERO_SIGNATURE,
        shards=(
            ShardInfo("c0ffee00c0ffee00c0ffee00c0ffee00-00000.safetensors", 1234, b"\0" * 16),
            ShardInfo("c0ffee00c0ffee00c0ffee00c0ffee00-00001.safetensors", 1235, b"\1" * 16),
        ),
    )
    assert (read.run_id, read.version, read.parent, read.kind) == ("run-7.a_B", 12, 11, "delta")
    assert read.rows[2].key == PartKey("big", 268_435_456)
    assert (read.wire_bytes, read.changed_elements) == (2469, 13)


def test_labels_of_kinds_that_are_numbers_or_texts_come_back_as_such() -> None:
    labels = {"loss": np.float64(0.1), "step": (1 << 63) - 1, "least": -(1 << 63), "zero": -0.0, "": "", "💥": "\0\n"}
    data, _ = to_bytes(some_manifest(labels=labels))
    assert from_bytes(data).labels == labels
