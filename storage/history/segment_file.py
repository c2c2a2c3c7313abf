"""A segment as it may be read: whoever can write to a store can make one, under a right name, so Arrow is given nothing
of it that was not looked into, and what it says is held to what a segment can say. Must not know who asks, nor what the
versions themselves say."""

import io
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from weighbridge.errors import CorruptData, StoreError, UsageError
from weighbridge.storage import strict_json
from weighbridge.storage.history.parquet_bounds import MOST_COLUMNS, MOST_GROUPS, check_footer, page_bytes
from weighbridge.storage.history.segments import Kind, Segment
from weighbridge.storage.history.tables import RECORDS, VERSIONS, leaves, parts_schema, to_parquet
from weighbridge.storage.manifest import check_labels, check_name
from weighbridge.storage.stores.contract import MOST_SMALL_BYTES, Store

_MAGIC = b"PAR1"
_END_BYTES = 8
_TAIL_BYTES = 1 << 16
_MOST_FOOTER_BYTES = 4 << 20
_MOST_PAGES = 1 << 16
_LEAST_UNPACKED, _MOST_UNPACKED = 1 << 20, 1 << 30
_RATIO = 64
"""What is read of a segment takes at most so many times its bytes in memory: those of our writers, digests and attempts
being noise, take a tenth of it."""
_GAP_BYTES = 1 << 16  # a request more costs more than so many bytes more
_VALUE_BYTES = 12  # of a value within a list or a map: itself, and its two levels
_NULLS = frozenset({"part_digest"})

Source = Callable[[int, int], bytes]
"""Reads so many bytes from a place."""


class SegmentFile:
    """A segment's footer, read and looked into. Raises CorruptData, here and in `read`, for what no writer of segments
    makes and for what would take more memory than it may; what the store raises goes on."""

    def __init__(self, segment: Segment, source: Source) -> None:
        self._segment, self._source = segment, source
        self._most = min(_MOST_UNPACKED, _LEAST_UNPACKED + _RATIO * segment.nbytes)
        self._metadata = self._told(self._open)

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return int(self._metadata.num_rows)

    def groups_with(self, wanted: str | int) -> list[int]:
        """The row groups that can hold a tensor, or a version, by the extremes that the file keeps."""
        found: list[int] = self._told(lambda: list(self._groups_with(wanted)))
        return found

    def read(self, columns: Sequence[str] | None = None, *, groups: Sequence[int] | None = None) -> Any:
        """A table of some of its columns (None: all), and of some of its row groups (None: all)."""
        return self._told(
            lambda: self._read(columns, range(self._metadata.num_row_groups) if groups is None else groups)
        )

    def _told(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except StoreError:
            raise
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise CorruptData(
                f"{self._segment.key} cannot be read: {error}. Read without it; `compact --mend` it."
            ) from error

    def _open(self) -> Any:
        nbytes = self._segment.nbytes
        _need(len(_MAGIC) + _END_BYTES < nbytes <= MOST_SMALL_BYTES, f"it has {nbytes:,} bytes")
        tail = self._source(max(0, nbytes - _TAIL_BYTES), min(nbytes, _TAIL_BYTES))
        (footer_bytes,) = struct.unpack_from("<I", tail, len(tail) - _END_BYTES)
        _need(tail.endswith(_MAGIC), "it does not end as a Parquet file does")
        _need(footer_bytes <= min(nbytes - len(_MAGIC) - _END_BYTES, _MOST_FOOTER_BYTES), "its footer is too long")
        self._end = nbytes - _END_BYTES - footer_bytes
        if footer_bytes + _END_BYTES > len(tail):
            tail = self._source(self._end, footer_bytes + _END_BYTES)
        footer = tail[len(tail) - _END_BYTES - footer_bytes :]
        check_footer(footer[:-_END_BYTES], partial(_levels, self._segment.kind))
        metadata = pq.ParquetFile(
            pa.BufferReader(_MAGIC + footer),
            thrift_string_size_limit=_MOST_FOOTER_BYTES,
            thrift_container_size_limit=max(MOST_COLUMNS, MOST_GROUPS),
        ).metadata
        self._check(metadata)
        return metadata

    def _check(self, metadata: Any) -> None:
        said = metadata.schema.to_arrow_schema().remove_metadata()
        _need(any(said.equals(schema) for schema in _schemas(self._segment.kind)), f"its columns are {said.names}")
        self._schema = said
        self._leaves = {
            name: range(at, at + len(leaves(pa.schema([said.field(name)]))))
            for name, at in zip(said.names, _starts(said), strict=True)
        }
        packed = rows = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            _need(group.num_columns == metadata.num_columns and group.num_rows >= 0, "a row group lacks columns")
            rows += group.num_rows
            for column in map(group.column, range(group.num_columns)):
                start, end = _place(column)
                _need(len(_MAGIC) <= start <= end <= self._end, "a column lies outside of it")
                _need(column.num_values >= 0, "a column has fewer values than none")
                packed += end - start
        _need(packed <= self._segment.nbytes, "its columns lie in each other")
        _need(rows == metadata.num_rows, "its row groups have other rows than it says")
        if self._segment.kind == "versions":
            first, last = self._segment.span
            _need(rows == last - first + 1, f"it has {rows} rows for the versions {first} to {last}")

    def _groups_with(self, wanted: str | int) -> Iterator[int]:
        (place,) = self._leaves["tensor" if isinstance(wanted, str) else "version"]
        for group in range(self._metadata.num_row_groups):
            extremes = self._metadata.row_group(group).column(place).statistics
            if extremes is None or not extremes.has_min_max or extremes.min <= wanted <= extremes.max:
                yield group

    def _read(self, columns: Sequence[str] | None, groups: Sequence[int]) -> Any:
        names = list(self._schema.names if columns is None else columns)
        held = _Held(self._segment.nbytes, self._fetch(names, groups))
        texts = [
            self._metadata.schema.column(place).path
            for name in names
            for place in self._leaves[name]
            if self._metadata.schema.column(place).logical_type.type == "STRING"
        ]
        # Texts stay in dictionaries until it is known how long they are together.
        file = pq.ParquetFile(
            pa.PythonFile(held, mode="r"),
            metadata=self._metadata,
            read_dictionary=texts,
            page_checksum_verification=True,
            pre_buffer=False,
        )
        coded = file.read_row_groups(list(groups), columns=names).select(names).replace_schema_metadata(None)
        coded.validate(full=True)
        _need(sum(map(_text_bytes, coded.columns)) <= self._most, "its texts are longer than it warrants")
        table = coded.cast(pa.schema([self._schema.field(name) for name in names]))
        self._check_values(table, coded)
        return table

    def _fetch(self, names: Sequence[str], groups: Sequence[int]) -> list[tuple[int, memoryview]]:
        """Stretches of the file with all that is asked for, once all of it was looked into."""
        chunks = [self._metadata.row_group(g).column(place) for g in groups for n in names for place in self._leaves[n]]
        places = sorted(map(_place, chunks))
        stretches: list[list[int]] = []
        for start, end in places:
            if stretches and start - stretches[-1][1] <= _GAP_BYTES:
                stretches[-1][1] = max(end, stretches[-1][1])
            else:
                stretches.append([start, end])
        read = [(start, memoryview(self._source(start, end - start))) for start, end in stretches if end > start]
        held, pages, unpacked = [], 0, 0
        for chunk in chunks:
            start, end = _place(chunk)
            within = ((at, data) for at, data in read if at <= start and end <= at + len(data))
            data = next((data[start - at : end - at] for at, data in within), None)
            if data is None:
                _need(chunk.num_values == 0, "a column has values and no bytes")
                continue
            more, found = page_bytes(data, chunk.num_values, _MOST_PAGES - pages)
            pages, unpacked = pages + found, unpacked + more + _VALUE_BYTES * chunk.num_values
            _need(unpacked <= self._most, f"it unpacks to {unpacked:,} bytes and more")
            held.append((start, data))
        return held

    def _check_values(self, table: Any, coded: Any) -> None:
        """What no writer of segments says, and readers count on."""
        first, last = self._segment.span
        for name, column in zip(table.schema.names, table.columns, strict=True):
            _need(name in _NULLS or column.null_count == 0, f"{name} is null somewhere")
        by = "head" if self._segment.kind == "records" else "version"
        if by in table.schema.names and table.num_rows:
            extremes = pc.min_max(table.column(by)).as_py()
            _need(first <= extremes["min"] <= extremes["max"] <= last, f"it says something of another {by}")
            if self._segment.kind == "versions":
                _need(len(table.column(by).unique()) == table.num_rows, "it tells of a version twice")
        for name, check in (("labels", _check_labels), ("host", _check_host)):
            if name in table.schema.names:
                for chunk in coded.column(name).chunks:
                    for text in chunk.dictionary.to_pylist():
                        check(text)
        if "seconds" in table.schema.names:
            for chunk in table.column("seconds").chunks:
                _need(chunk.items.null_count == 0 and pc.all(pc.is_finite(chunk.items)).as_py() is not False, "seconds")


def open_segment(store: Store, segment: Segment) -> SegmentFile:
    """A segment that is read in ranges. Raises ObjectMissing, CorruptData."""
    return SegmentFile(segment, lambda start, nbytes: store.get_range(segment.key, start, nbytes))


def segment_of(segment: Segment, data: bytes) -> SegmentFile:
    """A segment whose bytes are at hand. Raises CorruptData."""
    at_hand = Segment(segment.kind, *segment.span, segment.edition, segment.digest, len(data))
    return SegmentFile(at_hand, lambda start, nbytes: data[start : start + nbytes])


class _Held(io.RawIOBase):
    """A file of which only stretches are held; to read anything else is an error."""

    def __init__(self, nbytes: int, stretches: list[tuple[int, memoryview]]) -> None:
        super().__init__()
        self._nbytes, self._stretches, self._place = nbytes, stretches, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._nbytes}[whence]
        self._place = start + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        end = self._nbytes if size is None or size < 0 else min(self._place + size, self._nbytes)
        for start, data in self._stretches:
            if start <= self._place and end <= start + len(data):
                found = bytes(data[self._place - start : end - start])
                self._place = end
                return found
        raise ValueError("a reader asked for bytes of it that nobody looked into")


def _need(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)


def _schemas(kind: Kind) -> list[Any]:
    return {"versions": [VERSIONS], "records": [RECORDS], "parts": [parts_schema(16), parts_schema(32)]}[kind]


@lru_cache(maxsize=128)
def _levels(kind: Kind, number: int) -> tuple[int, int]:
    """How many levels of repetition and of definition a column of our own files has."""
    schema = _schemas(kind)[0]
    ours = pq.ParquetFile(pa.BufferReader(to_parquet(kind, schema.empty_table(), {}))).metadata.schema
    if number >= len(ours):
        raise ValueError("it has more columns than any writer of it makes")
    column = ours.column(number)
    return column.max_repetition_level + 1, column.max_definition_level + 1


def _starts(schema: Any) -> Iterator[int]:
    at = 0
    for field in schema:
        yield at
        at += len(leaves(pa.schema([field])))


def _place(column: Any) -> tuple[int, int]:
    """Where a column chunk lies, as Arrow reckons it."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    return start, start + max(0, column.total_compressed_size)


def _text_bytes(column: Any) -> int:
    """The bytes of a column's texts once they stand in every row."""
    total = 0
    for chunk in column.chunks:
        if isinstance(chunk, pa.MapArray):
            total += _text_bytes(pa.chunked_array([chunk.keys]))
        elif isinstance(chunk, pa.DictionaryArray):
            total += pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices).cast(pa.int64())).as_py() or 0
    return total


def _check_labels(text: str) -> None:
    labels = strict_json.parse(text.encode())
    if not isinstance(labels, dict):
        raise ValueError("labels are no object")
    try:
        check_labels(labels)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _check_host(text: str) -> None:
    check_name("host", text)
