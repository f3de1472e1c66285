"""The rows of a job in one figure: how many they are, and a sum of their hashes.

Invariants: it is the same in whatever order and by whatever tasks the rows are written; other rows have, as far as
anybody knows, another one. A row counts as its bytes: a string and a binary column with the same bytes are alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec

HASH_BYTES = 16
_MODULUS = 1 << 8 * HASH_BYTES
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class Tally(msgspec.Struct, frozen=True):
    """Of some rows."""

    rows: int = 0
    digest: int = 0
    """The sum of the rows' hashes, modulo 2^128."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, (self.digest + other.digest) % _MODULUS)


def tally_of(rows: Iterable[tuple[Any, ...]]) -> Tally:
    """Of rows, as their values.

    >>> tally_of([("t", b"a", None), ("t", b"b", None)]) == tally_of([("t", b"b", None), ("t", b"a", None)])
    True
    >>> tally_of([("t", b"a", None)]).digest == tally_of([("t", b"b", None)]).digest
    False
    """
    hashes = [blake2b(_encoded(row), digest_size=HASH_BYTES).digest() for row in rows]
    return Tally(len(hashes), sum(int.from_bytes(each, "little") for each in hashes) % _MODULUS)


def _encoded(value: Any) -> bytes:
    try:
        return _encode(value)
    except TypeError:  # a map whose keys are no strings has no order there
        return _encode(_sorted(value))


def _sorted(value: Any) -> Any:
    """*value* with a list of pairs for every map in it."""
    if isinstance(value, dict):
        return sorted((_encoded(key), _encoded(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return [_sorted(each) for each in value]
    return value
