"""A batch: parallel lists of records, their origins and, if there are any, keys, times and floors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import Any, Protocol

from exactlyonce.pipeline.event_time import NO_FLOOR, shown_time

RESULT_OF = "result:"
"""The beginning of the topic of an `Origin` that is no place of an input: no topic's name has a colon."""
_append: Callable[[Any, Any], None] = list.append
_exhaust = deque[Any](maxlen=0).extend


class Origin(Protocol):
    """The origin of a record: a Kafka message, or its coordinates after a shuffle.

    That of a result which an operator gives as time goes on has `RESULT_OF` and the operator as topic, a key group or 0
    as partition, and the time in ms as offset.
    """

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...


def result_of(origin: Origin) -> tuple[str, str] | None:
    """The operator that gave the result at *origin* as time went on, and its time; None: it is the place of an input
    record."""
    topic = origin.topic() or ""
    return (topic.removeprefix(RESULT_OF), shown_time(origin.offset() or 0)) if topic.startswith(RESULT_OF) else None


def shown_origin(origin: Origin | None) -> str:
    """The record at *origin* for an error or a note."""
    if origin is None:
        return "a record"
    if (result := result_of(origin)) is not None:
        return "a result of operator {!r} at {}".format(*result)
    return f"the record at {origin.topic()}[{origin.partition()}] offset {origin.offset()}"


@dataclass(slots=True)
class Batch:
    """Records in order. All lists have one length. A method that makes another batch carries all lists."""

    records: list[Any]
    origins: Sequence[Origin]
    keys: list[bytes] | None = None
    """Canonical keys, below a `key_by`."""
    times: list[int] | None = None
    """Event times in milliseconds, where the graph needs them."""
    floors: list[int] | None = None
    """The floor of each late record: a time in ms, not below its own, up to which no window takes it. Others have
    `NO_FLOOR`. None: no record is late."""

    def of(self, records: list[Any]) -> Batch:
        """*records* in place of these, one for each."""
        return Batch(records, self.origins, self.keys, self.times, self.floors)

    def unkeyed(self, records: list[Any]) -> Batch:
        """*records* without keys in place of these, one for each."""
        return Batch(records, self.origins, times=self.times, floors=self.floors)

    def stemming(self, records: list[Any], places: Sequence[int]) -> Batch:
        """*records* without keys; each stems from the record at its place in *places*."""
        times = None if self.times is None else list(map(self.times.__getitem__, places))
        floors = None if self.floors is None else list(map(self.floors.__getitem__, places))
        return Batch(records, list(map(self.origins.__getitem__, places)), times=times, floors=floors)

    def keyed(self, keys: list[bytes]) -> Batch:
        """The same records with *keys*, one for each."""
        return Batch(self.records, self.origins, keys, self.times, self.floors)

    def part(self, start: int, end: int) -> Batch:
        keys = None if self.keys is None else self.keys[start:end]
        times = None if self.times is None else self.times[start:end]
        floors = None if self.floors is None else self.floors[start:end]
        return Batch(self.records[start:end], self.origins[start:end], keys, times, floors)

    def where(self, kept: Sequence[bool]) -> Batch:
        keys = None if self.keys is None else list(compress(self.keys, kept))
        times = None if self.times is None else list(compress(self.times, kept))
        floors = None if self.floors is None else list(compress(self.floors, kept))
        return Batch(list(compress(self.records, kept)), list(compress(self.origins, kept)), keys, times, floors)

    def expanded(self, lists: Sequence[Sequence[Any]]) -> Batch:
        """The records of *lists*, one list for each of these records, without keys."""
        lengths = list(map(len, lists))

        def repeated(items: Iterable[Any]) -> list[Any]:
            return list(chain.from_iterable(map(repeat, items, lengths)))

        return Batch(
            list(chain.from_iterable(lists)),
            repeated(self.origins),
            times=None if self.times is None else repeated(self.times),
            floors=None if self.floors is None else repeated(self.floors),
        )

    def dealt(self, receivers: Sequence[int], count: int) -> list[Batch]:
        """A batch for each of *count* receivers; *receivers* has the receiver of each record."""

        def shares(items: Iterable[Any]) -> list[list[Any]]:
            dealt: list[list[Any]] = [[] for _ in range(count)]
            _exhaust(map(_append, map(dealt.__getitem__, receivers), items))
            return dealt

        none: list[Any] = [None] * count
        keys = none if self.keys is None else shares(self.keys)
        times = none if self.times is None else shares(self.times)
        floors = none if self.floors is None else shares(self.floors)
        return list(map(Batch, shares(self.records), shares(self.origins), keys, times, floors))


def joined(batches: Sequence[Batch]) -> Batch:
    """The records of *batches*, which all have the same lists but for floors, in one batch."""

    def flat(lists: Iterable[Any]) -> list[Any] | None:
        given = [items for items in lists if items is not None]
        return list(chain.from_iterable(given)) if given else None

    late = any(batch.floors is not None for batch in batches)
    return Batch(
        list(chain.from_iterable(batch.records for batch in batches)),
        list(chain.from_iterable(batch.origins for batch in batches)),
        flat(batch.keys for batch in batches),
        flat(batch.times for batch in batches),
        flat(map(floors_of, batches)) if late else None,
    )


def floors_of(batch: Batch) -> list[int]:
    """The floor of each record of *batch*."""
    return [NO_FLOOR] * len(batch.records) if batch.floors is None else batch.floors


Push = Callable[[Batch], None]
"""Takes a batch. It is processed when the call returns."""
