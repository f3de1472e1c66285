"""librdkafka's partitioners: the partition of a record by its key, for a replay that distributes likewise.

Invariant: an unknown partitioner is refused, never guessed. A record that the client distributes at random has no
partition here (None): a replay may put it anywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.keys import key_group

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
            f"partitioner={name} is unknown, so a replay cannot compute partitions. Choose one of "
            f"{', '.join(sorted(PARTITIONERS))}."
        )
    return PARTITIONERS[name]


def _fnv1a(key: bytes | None, count: int) -> int:
    return fnv1a(key or b"") % count


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
    "random": lambda key, count: None,
    "consistent": lambda key, count: zlib.crc32(key or b"") % count,
    "consistent_random": lambda key, count: zlib.crc32(key) % count if key else None,  # an empty key counts as none
    "murmur2": lambda key, count: key_group(key or b"", count),
    "murmur2_random": lambda key, count: None if key is None else key_group(key, count),
    "fnv1a": _fnv1a,
    "fnv1a_random": lambda key, count: None if key is None else _fnv1a(key, count),
}
