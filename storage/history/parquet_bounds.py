"""Looks into a Parquet file, before Arrow does, for what would make it take memory that the file does not warrant: its
footer, and the headers of the pages that are about to be read. Both are structs of Thrift's compact protocol, read
within the given bytes only. Must not know columns, nor what is in a page."""

from collections.abc import Callable
from typing import Any

MOST_COLUMNS = 64
MOST_GROUPS = 1 << 12
_MOST_VALUES = 1 << 18
_MOST_DEPTH = 16

# Thrift's types on the wire, and Parquet's numbers: parquet.thrift
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_ENCODINGS = frozenset({0, 2, 3, 8})  # plain, of a dictionary, run lengths: none makes a value of another's bytes
_LEAST_ENTRY_BYTES = 4


def check_footer(footer: bytes, levels: Callable[[int], tuple[int, int]]) -> None:
    """Whether a footer has as many columns and row groups as a writer of ours may give it, none of them encrypted, and
    with histograms of a column's levels (repetition, definition: of so many each) that are as long as they must be:
    where they are not, to ask pyarrow for the column ends the process. Raises ValueError."""
    try:
        fields = _Compact(footer, 0).struct()
        groups = fields.get(4, [])
        if len(fields.get(2, [])) > MOST_COLUMNS or len(groups) > MOST_GROUPS:
            raise ValueError("it has more columns or row groups than any writer of it makes")
        if any(len(group.get(1, [])) > MOST_COLUMNS for group in groups):
            raise ValueError("a row group has more columns than any writer of it makes")
        for group in groups:
            for number, chunk in enumerate(group.get(1, [])):
                sizes = chunk[3].get(16, {})
                lengths = tuple(len(sizes.get(field, [])) for field in (2, 3))
                if any(length not in (0, most) for length, most in zip(lengths, levels(number), strict=True)):
                    raise ValueError("a column's levels are not counted as its schema has them")
                if 8 in chunk or 9 in chunk:
                    raise ValueError("a column is encrypted")
    except (IndexError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"its footer is none ({error})") from None


def page_bytes(chunk: memoryview, values: int, most_pages: int) -> tuple[int, int]:
    """The bytes that the pages of a column chunk unpack to, by what Arrow will allocate for them, and their number.

    Raises ValueError unless the pages fill the chunk, have `values` values, and are of the kinds that we write: a
    dictionary at most, then pages of the first version.
    """
    place = unpacked = pages = 0
    left = values
    try:
        while left > 0:
            if (pages := pages + 1) > most_pages:
                raise ValueError("it has more pages than any writer of it makes")
            reader = _Compact(chunk, place)
            header = reader.struct()
            plain, packed = _size(header[2]), _size(header[3])
            place = reader.at + packed
            if place > len(chunk):
                raise ValueError("a page ends outside of its column")
            unpacked += plain
            if header[1] == _DICTIONARY_PAGE and pages == 1:
                if _size(header[7][1]) * _LEAST_ENTRY_BYTES > plain:
                    raise ValueError("a dictionary has more entries than bytes for them")
            elif header[1] == _DATA_PAGE and header[5][2] in _ENCODINGS and 0 < header[5][1] <= left:
                left -= header[5][1]
            else:
                raise ValueError("a page is of a kind that no writer of it makes, or has more values than its column")
    except (IndexError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"the header of a page is none ({error})") from None
    return unpacked, pages


def _size(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"a page's size is {number!r}")
    return number


class _Compact:
    """Values of Thrift's compact protocol from `at` on; at most so many, so deep. Raises IndexError at the end of the
    bytes, ValueError for what the protocol does not know."""

    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self._data, self.at = data, at
        self._left = _MOST_VALUES

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """A struct's fields by number."""
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            step, kind = head >> 4, head & 15
            number = number + step if step else self._zigzag()
            self._count(1)
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth + 1)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise ValueError("it is nested deeper than any writer of it nests")
        if kind in (_I16, _I32, _I64):
            return self._zigzag()
        if kind == _BINARY:
            return self._skip(self._varint())
        if kind in (_LIST, _SET):
            head = self._byte()
            count, inner = head >> 4, head & 15
            count = self._varint() if count == 15 else count
            self._count(count)
            return [self._value(inner, depth + 1) for _ in range(count)]
        if kind == _STRUCT:
            return self.struct(depth)
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind == _DOUBLE:
            return self._skip(8)
        raise ValueError(f"it holds something of the unknown type {kind}")

    def _count(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise ValueError("it has more to say than any writer of it says")

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number has more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _skip(self, nbytes: int) -> None:
        self.at += nbytes
        if self.at > len(self._data):
            raise IndexError("it ends too early")
