"""The partitioners of librdkafka: the partition of a record by its key, and which one an output has.

Invariants: the records of an output are distributed by one partitioner, which its manifests name, so a key stays in its
partition whoever writes, pipeline, Spark or replay; an unknown partitioner is refused, never guessed. A record that the
client distributes at random has no partition here (None): a replay may put it anywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.keys import key_group

DEFAULT = "murmur2_random"
"""The partitioner of Java's clients: a null key goes anywhere, and an empty one has its hash."""
OF_LIBRARY = "consistent_random"
"""The library's own, CRC-32, by which older versions wrote every output whose manifests name none."""
SETTING = "partitioner"
"""The library's setting: the partitioner of outputs whose sink names none."""
Partitioner = Callable[[bytes | None, int], int | None]
"""(key, partition count) -> partition; None: any."""


def partitioner(name: str) -> Partitioner:
    """The partitioner of this name; ConfigError if there is none.

    >>> partitioner(DEFAULT)(b"ann", 4), partitioner(OF_LIBRARY)(b"ann", 4), partitioner(DEFAULT)(None, 4)
    (2, 3, None)
    """
    if name not in PARTITIONERS:
        raise ConfigError(f"{SETTING}={name!r} is unknown. Choose one of {', '.join(sorted(PARTITIONERS))}.")
    return PARTITIONERS[name]


def partitioner_in(manifest: Manifest, sink: str, settings: Mapping[str, object]) -> str:
    """The partitioner of the outputs of *sink* in *manifest*; *settings* are the client's, for older manifests."""
    return manifest.partitioner_of(sink) or str(settings.get(SETTING, OF_LIBRARY))


def fitting(records: Iterable[tuple[bytes | None, int]], count: int, wanted: str) -> str:
    """The partitioner that has put these (key, partition) *records* into *count* partitions, if it is not *wanted*.

    Empty if *wanted* explains them, or if no other one explains them all.
    """
    places = {(key, partition) for key, partition in records if key}
    others = [name for name in (DEFAULT, OF_LIBRARY, "fnv1a_random") if name != wanted]
    if len(places) < KEYS_MIN or _explains(wanted, places, count):
        return ""
    return next((name for name in others if _explains(name, places, count)), "")


def _explains(name: str, places: Iterable[tuple[bytes, int]], count: int) -> bool:
    return all(PARTITIONERS[name](key, count) in (None, partition) for key, partition in places)


KEYS_MIN = 8
"""So many keys in their places are no chance."""


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
