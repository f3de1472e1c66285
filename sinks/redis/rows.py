"""Rows: their encoder, their bytes, and the parts in which they are applied.

A field's value is text or bytes as they are, and else its JSON, without quotes around a time, a UUID or a Decimal. None
deletes a field of a hash, and leaves out one of a stream's entry. What Redis or the ledger could not take is refused.

A row is a header, the key, and the script's arguments for it, in Redis' own protocol: applying it copies bytes, and
reads only headers. Rows follow one another without anything between.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from exactlyonce.pipeline.codec import Codec, require_finite
from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.sink import mapped
from exactlyonce.sinks.redis.scripts import LEDGER_PREFIX

ENTRY_FIELDS_MAX = 3_000
"""In a stream's entry: Lua passes them in one call, which takes less than 8,000 values."""
VALUE_FIELD = "value"
"""The one field of an entry whose sink has a codec."""
_LEDGER_PREFIX = LEDGER_PREFIX.encode()
_encode_json = msgspec.json.Encoder(order="deterministic").encode
_decode_json = msgspec.json.Decoder(str).decode


class RedisEncoder:
    """Encodes outputs of one sink. *keyed*: they have a `value`. *value*: None if the record's fields are written."""

    def __init__(
        self, *, kind: str, key: Callable[[Any], object], keyed: bool, value: Codec[Any] | None, hash_tag: str | None
    ) -> None:
        self._key = key
        self._keyed = keyed
        self._tag = None if hash_tag is None else hash_tag.encode()
        self._arguments: Callable[[Any], list[bytes]] = {
            "string": self._string, "hash": _hash_changes, "stream": self._entry
        }[kind]  # fmt: skip
        self._value = value

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        arguments, keys = self._arguments, self.keys(records)
        return [row(key, arguments(value)) for key, value in zip(keys, self._values(records), strict=True)]

    def keys(self, records: Sequence[Any]) -> list[bytes]:
        """The key of each record's row; ValueError for one that a row cannot have."""
        return list(map(self._checked, mapped("key", self._key, records)))

    def contents(self, records: Sequence[Any]) -> list[Any]:
        """The value of each row: its bytes if there is a codec, else the record with its fields; None: the key is
        deleted."""
        values = self._values(records)
        if self._value is None:
            return [_without_unset(value) if isinstance(value, Mapping) else value for value in values]
        return [None if value is None else self._encoded(value) for value in values]

    def _values(self, records: Sequence[Any]) -> Sequence[Any]:
        return [record.value for record in records] if self._keyed else records

    def _checked(self, key: object) -> bytes:
        name = _key_bytes(key)
        if name.startswith(_LEDGER_PREFIX):
            raise ValueError(f"key: {name!r} begins with {LEDGER_PREFIX}, as the keys of ledgers do")
        if self._tag is not None and _hash_tag(name) != self._tag:
            tag = self._tag.decode()
            raise ValueError(
                f"key: {name!r} lacks the hash tag {{{tag}}}, so that it may lie on another server than the ledger: "
                f"begin it with {{{tag}}}"
            )
        return name

    def _string(self, value: Any) -> list[bytes]:
        return [] if value is None else [self._encoded(value)]

    def _entry(self, value: Any) -> list[bytes]:
        if value is None:
            raise ValueError("value: None cannot be written to a stream, whose entries stay")
        if self._value is not None:
            return [b"2", VALUE_FIELD.encode(), self._encoded(value)]
        fields = [(name, text) for name, text in _fields(value) if text is not None]
        if not 0 < len(fields) <= ENTRY_FIELDS_MAX:
            raise ValueError(f"value: an entry of a stream has 1 to {ENTRY_FIELDS_MAX:,} fields, not {len(fields):,}")
        return [b"%d" % (2 * len(fields)), *chain.from_iterable(fields)]

    def _encoded(self, value: Any) -> bytes:
        assert self._value is not None
        try:
            return self._value.encode(value)
        except UnicodeEncodeError as error:
            raise ValueError(f"value: {_not_text(error)}") from None


def _without_unset(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not msgspec.UNSET}


def _hash_changes(value: Any) -> list[bytes]:
    """Count and pairs of the fields to set, count and names of those to delete; of None: that the hash is deleted."""
    if value is None:
        return [b"-1"]
    written: list[bytes] = []
    deleted: list[bytes] = []
    for name, text in _fields(value):
        if text is None:
            deleted.append(name)
        else:
            written += (name, text)
    return [b"%d" % len(written), *written, b"%d" % len(deleted), *deleted]


def _key_bytes(key: object) -> bytes:
    if isinstance(key, str):
        try:
            return key.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"key: {_not_text(error)}") from None
    if key is None:
        raise ValueError("key: it is None, and Redis has no such key; let key= return text")
    if type(key) is bytes:
        return key
    encoded = _encode_json(key)
    try:
        require_finite(key, encoded)
    except ValueError as error:
        raise ValueError(f"key: {error}") from None
    return encoded


def _hash_tag(key: bytes) -> bytes | None:
    """The part of *key* that decides its slot in Redis Cluster.

    >>> _hash_tag(b"{shop}:ann"), _hash_tag(b"ann"), _hash_tag(b"{}ann")
    (b'shop', None, None)
    """
    _, opened, rest = key.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return tag if opened and closed and tag else None


def _fields(record: Any) -> list[tuple[bytes, bytes | None]]:
    """Name and value of each field that is not msgspec.UNSET."""
    if isinstance(record, Mapping):
        return [(_name(name), _text(name, value)) for name, value in record.items() if value is not msgspec.UNSET]
    kind: Any = type(record)
    names, encoded, tag, get = _layout(kind)
    values = get(record)
    fields = list(zip(encoded, map(_text, names, values), strict=True))
    if any(value is msgspec.UNSET for value in values):
        fields = [field for field, value in zip(fields, values, strict=True) if value is not msgspec.UNSET]
    return fields if tag is None else [tag, *fields]


class _Layout(NamedTuple):
    """The fields of a class of records: their names, also as written, the tag of a union, and how to get the values."""

    names: tuple[str, ...]
    written: tuple[bytes, ...]
    tag: tuple[bytes, bytes | None] | None
    values: Callable[[Any], tuple[Any, ...]]


@lru_cache(maxsize=256)
def _layout(cls: Any) -> _Layout:
    written = names = ()  # type: tuple[str, ...]
    tag = None
    if issubclass(cls, msgspec.Struct):
        names, written = cls.__struct_fields__, cls.__struct_encode_fields__
        config = cls.__struct_config__
        if config.tag_field is not None:
            tag = (config.tag_field.encode(), str(config.tag).encode())
    elif dataclasses.is_dataclass(cls):
        names = written = tuple(field.name for field in dataclasses.fields(cls))
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        names = written = tuple(cls._fields)
    else:
        raise TypeError(f"value: {cls.__name__} has no fields; give a Struct, a dataclass, a NamedTuple or a dict")
    encoded = tuple(name.encode() for name in written)
    if len(names) > 1:
        return _Layout(names, encoded, tag, attrgetter(*names))
    return _Layout(names, encoded, tag, lambda record: tuple(getattr(record, name) for name in names))


def _name(name: object) -> bytes:
    if not isinstance(name, str):
        raise TypeError(f"{name!r}: the name of a field is text, not {type(name).__name__}")
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name of a field: {_not_text(error)}") from None


def _text(name: str, value: Any) -> bytes | None:
    kind = type(value)
    if kind is str:
        try:
            return value.encode()  # type: ignore[no-any-return]  # it is text
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: {_not_text(error)}") from None
    if kind is int:
        return b"%d" % value
    if value is None or value is msgspec.UNSET:
        return None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    try:
        encoded = _encode_json(value)
        require_finite(value, encoded)
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: {_not_text(error)}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name}: {error}") from None
    return _decode_json(encoded).encode() if encoded.startswith(b'"') else encoded


def _not_text(error: UnicodeEncodeError) -> str:
    return f"it has {error.object[error.start]!r} at {error.start}, a lone surrogate, which UTF-8 cannot write"


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
