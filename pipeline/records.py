"""A value with its key and coordinates: what a source with ``metadata=True`` gives and a Kafka sink understands."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Record(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """A value and where it came from; a Kafka sink writes the value under this key with these headers.

    ``Record(key="ann", value=None)`` is a tombstone for "ann". Only key and value need to be given for output.
    """

    value: T
    key: Any = None
    """bytes, or what the source's `key=` decodes to; None when Kafka has a null key."""
    timestamp_ms: int | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    topic: str = ""
    partition: int = -1
    offset: int = -1
