"""The canonical encoding of keys, which alone determines a key's group, on every machine and in every version.

`canonical_key` is msgpack with sorted sets and dicts, so 1, "1", True and 1.0 are four keys. Values with the same
msgpack are one key: a tuple and a list, an enum and its value, a UUID and its text. 0.0 and -0.0 are two. Key groups
are Kafka's murmur2 of these bytes. Refused with TypeError or OverflowError: integers beyond 64 bits, dicts with keys
other than strings, sets that cannot be sorted. `explained_key` is slower by a call, and its errors are for people.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import unpack

import msgspec

canonical_key: Callable[[object], bytes] = msgspec.msgpack.Encoder(order="deterministic").encode

_MADE_OF = (
    "None, bools, numbers (integers of 64 bits), text, bytes, times, enums, UUIDs, and tuples, lists, records, sets "
    "with items that can be sorted, and dicts with text as keys"
)


def explained_key(value: object) -> bytes:
    """`canonical_key` of *value*. Raises a TypeError that says what has one."""
    try:
        return canonical_key(value)
    except (TypeError, OverflowError) as error:
        name = type(value).__name__
        raise TypeError(f"a {name} like this has no canonical encoding: make it of {_MADE_OF} ({error})") from None


_SEED = 0x9747B28C
_M = 0x5BD1E995


def key_groups(keys: Sequence[bytes], max_parallelism: int) -> list[int]:
    """The key group of each canonical key: ``(murmur2(key) & 0x7fffffff) % max_parallelism``, as Kafka's partitioner.

    >>> key_groups([canonical_key("ann"), canonical_key("bob")], 128)
    [123, 79]
    """
    lengths = list(map(len, keys))
    if len(set(lengths)) == 1:
        return [hash_ % max_parallelism for hash_ in _murmur2_positive(keys, lengths[0])]
    places_by_length: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        places_by_length.setdefault(length, []).append(place)
    groups = [0] * len(keys)
    for length, places in places_by_length.items():
        hashes = _murmur2_positive([keys[place] for place in places], length)
        for place, hash_ in zip(places, hashes, strict=True):
            groups[place] = hash_ % max_parallelism
    return groups


def key_group(key: bytes, max_parallelism: int) -> int:
    """The key group of one canonical key; `key_groups` is far cheaper for many."""
    return key_groups((key,), max_parallelism)[0]


def _murmur2_positive(keys: Sequence[bytes], length: int) -> tuple[int, ...]:
    """murmur2 & 0x7fffffff of keys of one length, all at once: key *i* has the 64 bits from 64 * i of one long integer.

    A product of two 32-bit numbers fits into 64 bits, so lanes never touch. The mask removes the bits of the next lane
    that a right shift brings in.
    """
    count = len(keys)
    ones = int.from_bytes(b"\1\0\0\0\0\0\0\0" * count, "little")
    mask = ones * 0xFFFFFFFF
    joined = b"".join(keys)
    h = ones * (_SEED ^ length)
    tail = length & ~3
    for start in range(0, tail, 4):
        k = _lanes(joined, length, start, start + 4) * _M & mask
        k ^= k >> 24 & mask
        h = (h * _M & mask) ^ (k * _M & mask)
    if tail < length:
        h = (h ^ _lanes(joined, length, tail, length)) * _M & mask
    h = (h ^ (h >> 13 & mask)) * _M & mask
    h = (h ^ (h >> 15)) & ones * 0x7FFFFFFF
    return unpack(f"<{count}Q", h.to_bytes(8 * count, "little"))


def _lanes(joined: bytes, length: int, start: int, end: int) -> int:
    """The bytes [start, end) of every key as a little-endian number in its lane."""
    lanes = bytearray(len(joined) // length * 8)
    for place, offset in enumerate(range(start, end)):
        lanes[place::8] = joined[offset::length]
    return int.from_bytes(lanes, "little")
