"""Rows as bytes, and the parts in which they are applied.

A row is a header, the key, and the script's arguments for it, in Redis' own protocol: applying it copies bytes, and
reads only headers. Rows follow one another without anything between.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import msgspec

from exactlyonce.pipeline.errors import require

_HEADER = struct.Struct("<III")
"""Length of the key, count and length of the arguments."""
Row = tuple[bytes, int, bytes]
"""Key, count of its arguments, and the arguments as they are sent."""
PART_BYTES_MAX = 16 << 20
"""A part ends with the row that exceeds it."""


def argument(value: bytes) -> bytes:
    """One argument of a command, as it goes over the wire.

    >>> argument(b"ann")
    b'$3\\r\\nann\\r\\n'
    """
    return b"$%d\r\n%b\r\n" % (len(value), value)


def row(key: bytes, arguments: list[bytes]) -> bytes:
    """A row; *arguments* follow the key."""
    sent = b"".join(map(argument, arguments))
    return _HEADER.pack(len(key), len(arguments), len(sent)) + key + sent


class Part(msgspec.Struct):
    """Rows that one call of a script applies."""

    first: int
    """The number of the committable's rows before it."""
    rows: int
    is_last: bool
    keys: list[bytes]
    """Distinct; for strings, those that are set come first, and the others are deleted."""
    arguments: list[bytes]
    """In pieces that are joined."""
    argument_count: int

    @property
    def after(self) -> int:
        """The number of the committable's rows up to its end."""
        return self.first + self.rows


class Parts:
    """The rows of a committable in parts of at most *rows_max*. There is always one, which may be empty."""

    def __init__(self, chunks: Iterable[bytes], kind: str, rows_max: int) -> None:
        self._gather = _gather_strings if kind == "string" else _gather_listed
        self._rows = _read(chunks)
        self._next = next(self._rows, None)
        self._rows_max = rows_max
        self.first = 0
        """The number of rows that are known to be applied."""
        self._taken = self._take()

    def current(self) -> Part:
        """The rows from `first` on."""
        return self._gather(self.first, self._taken, self._next is None)

    def advance(self, applied: int) -> None:
        """Skip the first *applied* rows of the committable."""
        require(applied >= self.first, "rows that were applied stay applied")
        while applied >= self.first + len(self._taken) and self._next is not None:
            self.first += len(self._taken)
            self._taken = self._take()
        del self._taken[: applied - self.first]
        self.first = applied

    def _take(self) -> list[Row]:
        if self._next is None:
            return []
        taken, size = [self._next], len(self._next[0]) + len(self._next[2])
        self._next, rows_max = None, self._rows_max
        for row in self._rows:
            if len(taken) >= rows_max or size > PART_BYTES_MAX:
                self._next = row
                break
            taken.append(row)
            size += len(row[0]) + len(row[2])
        return taken


def _read(chunks: Iterable[bytes]) -> Iterator[Row]:
    header_of, size = _HEADER.unpack_from, _HEADER.size
    for chunk in chunks:
        at, end = 0, len(chunk)
        while at < end:
            key_length, count, length = header_of(chunk, at)
            key_at = at + size
            at = key_at + key_length + length
            yield chunk[key_at : key_at + key_length], count, chunk[key_at + key_length : at]


def _gather_strings(first: int, rows: list[Row], is_last: bool) -> Part:
    """The last row of each key: no reader could see the others."""
    latest = {key: (count, sent) for key, count, sent in rows}
    values = {key: sent for key, (count, sent) in latest.items() if count}
    keys = [*values, *(key for key in latest if key not in values)]
    return Part(first, len(rows), is_last, keys, list(values.values()), len(values))


def _gather_listed(first: int, rows: list[Row], is_last: bool) -> Part:
    """All rows, in order, each after the index of its key."""
    index: dict[bytes, bytes] = {}
    arguments: list[bytes] = []
    total = 0
    for key, count, sent in rows:
        number = index.get(key)
        if number is None:
            number = index[key] = argument(b"%d" % len(index))
        arguments += (number, sent)
        total += 1 + count
    return Part(first, len(rows), is_last, list(index), arguments, total)
