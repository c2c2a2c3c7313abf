"""Looks into an Arrow file, before Arrow does, for what would make it take memory that the file does not have: bodies
that are compressed, and dictionaries. Reads nothing but flatbuffer tables, within the file's bounds. Must not know
columns."""

import struct

_MAGIC = b"ARROW1"
_RECORD_BATCH = 3  # org.apache.arrow.flatbuf.MessageHeader
_BLOCK_BYTES = 24


def check_plain(data: bytes) -> None:
    """Whether a file's record batches are as long as they say, not compressed, and without dictionaries.

    Raises ValueError for any other, and for what is no Arrow file. Follows the footer, as Arrow's own reader does.
    """
    try:
        _check(data)
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError(f"its tables lead out of it ({error})") from None


def _check(data: bytes) -> None:
    if data[: len(_MAGIC)] != _MAGIC or data[-len(_MAGIC) :] != _MAGIC:
        raise ValueError("it does not begin and end as an Arrow file does")
    end = len(data) - len(_MAGIC) - 4
    (nbytes,) = struct.unpack_from("<i", data, end)
    if not 8 <= nbytes <= end:
        raise ValueError("its footer is longer than the file")
    footer = _Table.root(data, end - nbytes)
    if footer.vector(2)[1]:
        raise ValueError("it has dictionaries")
    start, count = footer.vector(3)
    for number in range(min(count, 2)):  # no reader of ours takes a second one
        offset, meta_bytes, body_bytes = struct.unpack_from("<qi4xq", data, start + number * _BLOCK_BYTES)
        if not (0 <= offset <= len(data) and meta_bytes >= 8 and body_bytes >= 0):
            raise ValueError("a record batch lies outside of it")
        if offset + meta_bytes + body_bytes > len(data):
            raise ValueError("a record batch ends outside of it")
        (prefix,) = struct.unpack_from("<I", data, offset)
        message = _Table.root(data, offset + (8 if prefix == 0xFFFFFFFF else 4))
        if message.byte(1) != _RECORD_BATCH:
            raise ValueError("it lists something that is no record batch")
        if message.table(2).place(3):
            raise ValueError("it is compressed")


class _Table:
    """A flatbuffer table: its fields by number. Every access is checked by `struct` against the file's end."""

    def __init__(self, data: bytes, at: int) -> None:
        if not 0 <= at < len(data):
            raise ValueError("a table lies outside of it")
        self._data, self._at = data, at
        self._fields = at - struct.unpack_from("<i", data, at)[0]
        if not 0 <= self._fields < len(data):
            raise ValueError("a table lies outside of it")
        self._bytes = struct.unpack_from("<H", data, self._fields)[0]

    @classmethod
    def root(cls, data: bytes, at: int) -> "_Table":
        """The table that a flatbuffer which begins at `at` holds."""
        return cls(data, at + struct.unpack_from("<I", data, at)[0])

    def place(self, field: int) -> int:
        """Where a field's value lies; 0 when the table has none."""
        slot = 4 + 2 * field
        if slot + 2 > self._bytes:
            return 0
        offset: int = struct.unpack_from("<H", self._data, self._fields + slot)[0]
        return self._at + offset if offset else 0

    def byte(self, field: int) -> int:
        """A field of one byte."""
        place = self.place(field)
        return self._data[place] if place else 0

    def table(self, field: int) -> "_Table":
        """A field that is a table."""
        place = self.place(field)
        if not place:
            raise ValueError("a table lacks what it must have")
        return _Table(self._data, place + struct.unpack_from("<I", self._data, place)[0])

    def vector(self, field: int) -> tuple[int, int]:
        """Where a vector's elements begin, and how many there are."""
        place = self.place(field)
        if not place:
            return 0, 0
        start = place + struct.unpack_from("<I", self._data, place)[0]
        return start + 4, struct.unpack_from("<I", self._data, start)[0]
