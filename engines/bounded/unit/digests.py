"""Digests of records in order: equal sequences have equal digests, other ones, as far as is known, never.

Invariant: a digest does not depend on the batches in which the records are added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

DIGEST_BYTES = 16
_ARRAY_BYTES = ((16, 1), (1 << 16, 3), (1 << 32, 5))
"""(the items of an array in msgpack are fewer, the length of its head)."""
_encode = msgspec.msgpack.Encoder().encode
Headers = tuple[tuple[str, bytes | None], ...]


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """The digest of a sequence of records."""

    contents: bytes
    """Of keys, values and headers."""
    times: bytes
    """Of timestamps; empty: they were not added."""


class RecordDigest:
    """Adds up the digest of records, column by column."""

    def __init__(self) -> None:
        self._keys, self._values, self._headers, self._times = (
            hashlib.blake2b(digest_size=DIGEST_BYTES) for _ in range(4)
        )
        self._is_timed = False

    def add(
        self,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        headers: Sequence[Headers] | None,
        times_ms: Sequence[int] | None,
    ) -> None:
        """Add the next records; no keys and no headers are the same as empty ones."""
        none = [None] * len(values)
        self._values.update(_items(values))
        self._keys.update(_items(none if keys is None else keys))
        self._headers.update(_items([()] * len(values) if headers is None else headers))
        if times_ms is not None:
            self._is_timed = True
            self._times.update(_items(times_ms))

    def digest(self) -> Digest:
        """The digest of all that was added."""
        contents = b"".join(column.digest() for column in (self._keys, self._values, self._headers))
        return Digest(contents, self._times.digest() if self._is_timed else b"")


NOTHING = RecordDigest().digest()
"""The digest of no records."""


def _items(column: Sequence[object]) -> bytes:
    """The items in msgpack, one after the other.

    >>> _items([1, b"two"]) + _items([None]) == _items([1, b"two", None])
    True
    """
    head = next(length for items, length in _ARRAY_BYTES if len(column) < items)
    return _encode(column)[head:]
