"""librdkafka's partitioners: the partition of a record by its key, so that a replay distributes likewise.

Invariant: a partitioner that is not known to the last bit is refused, never guessed. A record that the client
distributes
at random has no partition here (None): whoever replays it may put it anywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

from exactlyonce.pipeline.errors import ConfigError

DEFAULT = "consistent_random"
Partitioner = Callable[[bytes | None, int], int | None]
"""(key, partition count) -> partition; None: any."""


def partitioner(settings: Mapping[str, object]) -> Partitioner:
    """The partitioner of a producer with these librdkafka settings.

    >>> partitioner({})(b"ann", 4), partitioner({})(None, 4)
    (3, None)
    """
    name = str(settings.get("partitioner", DEFAULT))
    if name not in PARTITIONERS:
        raise ConfigError(
            f"The setting partitioner={name} is not known here, so that nothing can be said of the partitions of a "
            f"replay. Choose one of {', '.join(sorted(PARTITIONERS))}."
        )
    return PARTITIONERS[name]


def _random(key: bytes | None, count: int) -> None:
    return None


def _consistent(key: bytes | None, count: int) -> int:
    return zlib.crc32(key or b"") % count


def _consistent_random(key: bytes | None, count: int) -> int | None:
    return zlib.crc32(key) % count if key else None  # an empty key counts as none


def _murmur2(key: bytes | None, count: int) -> int:
    return (murmur2(key or b"") & 0x7FFFFFFF) % count


def _murmur2_random(key: bytes | None, count: int) -> int | None:
    return None if key is None else _murmur2(key, count)


def _fnv1a(key: bytes | None, count: int) -> int:
    return fnv1a(key or b"") % count


def _fnv1a_random(key: bytes | None, count: int) -> int | None:
    return None if key is None else _fnv1a(key, count)


def murmur2(data: bytes) -> int:
    """MurmurHash2 with the seed that Kafka's Java client has, as 32 unsigned bits.

    >>> hex(murmur2(b"kafka"))
    '0xd067cf64'
    """
    factor, mask = 0x5BD1E995, 0xFFFFFFFF
    state = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for place in range(0, whole, 4):
        block = int.from_bytes(data[place : place + 4], "little") * factor & mask
        state = (state * factor & mask) ^ ((block ^ (block >> 24)) * factor & mask)
    if rest := data[whole:]:
        state = (state ^ int.from_bytes(rest, "little")) * factor & mask
    state = (state ^ (state >> 13)) * factor & mask
    return state ^ (state >> 15)


def fnv1a(data: bytes) -> int:
    """FNV-1a of 32 bits taken as a signed number, of which librdkafka uses the absolute value, as Sarama does.

    >>> fnv1a(b"kafka")
    221496545
    """
    state = 0x811C9DC5
    for byte in data:
        state = (state ^ byte) * 0x01000193 & 0xFFFFFFFF
    return state if state < 1 << 31 else (1 << 32) - state


PARTITIONERS: dict[str, Partitioner] = {
    "random": _random,
    "consistent": _consistent,
    "consistent_random": _consistent_random,
    "murmur2": _murmur2,
    "murmur2_random": _murmur2_random,
    "fnv1a": _fnv1a,
    "fnv1a_random": _fnv1a_random,
}
