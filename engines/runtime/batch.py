"""A batch: parallel lists of records, their origins and, if there are any, keys, times and floors; and its bytes.

Between subtasks it is typed records in msgpack, with keys and coordinates. Invariant: a record is encoded within the
call that sends it: another branch may change it in place after that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, overload

import msgspec

from exactlyonce.checkpoint.records.manifest import RecordPlace
from exactlyonce.pipeline.errors import (
    Facts,
    RecordError,
)
from exactlyonce.pipeline.event_time import NO_FLOOR, shown_time
from exactlyonce.pipeline.keys import canonical_key, key_groups
from exactlyonce.pipeline.records import wire_of
from exactlyonce.pipeline.shape import type_name
from exactlyonce.state.batches import append_each
from exactlyonce.state.state_type import array_head

RESULT_OF = "result:"
"""The beginning of the topic of an `Origin` that is no place of an input: no topic's name has a colon."""


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
            append_each(dealt, receivers, items)
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


def facts_of(operator: str, origin: Origin | None) -> Facts:
    """The facts of an error: the operator and the coordinates of the input record, if known."""
    facts: dict[str, str | int | None] = {"operator": operator or None}
    if origin is not None and result_of(origin) is None:
        facts |= {"topic": origin.topic(), "partition": origin.partition(), "offset": origin.offset()}
    return {name: fact for name, fact in facts.items() if fact is not None}


def or_skip(origin: Origin | None) -> str:
    """The advice to leave out the record at *origin*; empty where its number may be another's the next time."""
    mark = getattr(origin, "mark", None)
    if origin is None or mark == "" or result_of(origin) is not None:
        return ""
    option = f"--skip {origin.topic()}:{origin.partition()}:{origin.offset()}"
    return f"; or leave the record out: {option}" + (f"@{mark}" if mark else "")


_encode = msgspec.msgpack.Encoder().encode


class Coordinates(NamedTuple):
    """An `Origin` after a shuffle, for error texts."""

    topic_name: str
    partition_number: int
    offset_number: int
    mark: str | None = None
    """The mark of its split, as `SplitRecord.mark`; None: it is of a topic."""

    def topic(self) -> str:
        return self.topic_name

    def partition(self) -> int:
        return self.partition_number

    def offset(self) -> int:
        return self.offset_number


class Origins(Sequence[Coordinates]):
    """The coordinates of a frame's records, made on access, which is rare."""

    __slots__ = ("_marks", "_names", "_offsets", "_partitions", "_topics")

    def __init__(
        self,
        names: list[str],
        marks: list[str | None],
        topics: array[int],
        partitions: array[int],
        offsets: array[int],
    ) -> None:
        """*topics* are places in *names* and *marks*."""
        self._names, self._marks = names, marks
        self._topics, self._partitions, self._offsets = topics, partitions, offsets

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, place: int) -> Coordinates: ...
    @overload
    def __getitem__(self, place: slice) -> Origins: ...
    def __getitem__(self, place: int | slice) -> Coordinates | Origins:
        if isinstance(place, slice):
            return Origins(self._names, self._marks, self._topics[place], self._partitions[place], self._offsets[place])
        name, mark = self._names[self._topics[place]], self._marks[self._topics[place]]
        return Coordinates(name, self._partitions[place], self._offsets[place], mark)

    def __iter__(self) -> Iterator[Coordinates]:
        names, marks = map(self._names.__getitem__, self._topics), map(self._marks.__getitem__, self._topics)
        return map(Coordinates, names, self._partitions, self._offsets, marks)

    @property
    def columns(self) -> tuple[list[str], Sequence[int], Sequence[int]]:
        """See `coordinates_of`."""
        return list(map(self._names.__getitem__, self._topics)), self._partitions, self._offsets


def origins_of(operator: str, groups: Sequence[int], slots: Sequence[int]) -> Origins:
    """The origins of results that *operator* gives for key groups in slots."""
    names = [RESULT_OF + operator]
    return Origins(names, [None], array("H", bytes(2 * len(slots))), array("i", groups), array("q", slots))


def origins_at(topics: Sequence[str], partitions: Sequence[int], offsets: Sequence[int]) -> Origins:
    """The origins of records with these coordinates; see `coordinates_of`."""
    places = {name: place for place, name in enumerate(dict.fromkeys(topics))}
    columns = array("H", map(places.__getitem__, topics)), array("i", partitions), array("q", offsets)
    return Origins([*places], [None] * len(places), *columns)


def coordinates_of(origins: Sequence[Origin]) -> tuple[list[str], Sequence[int], Sequence[int]]:
    """The topics, partitions and offsets of *origins*, as columns."""
    if isinstance(origins, Origins):
        return origins.columns
    return (
        [origin.topic() or "" for origin in origins],
        [origin.partition() or 0 for origin in origins],
        [origin.offset() or 0 for origin in origins],
    )


class BatchCodec:
    """Encodes and decodes frames. A record that is not of its type is the user's error: `RecordError` names the
    first."""

    def __init__(self, record_type: Any) -> None:
        self._type = record_type
        self._wire = wire_of(record_type)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = _frame_decoder(self._wire.type)

    def encode(self, batch: Batch) -> bytes:
        frame = OpenFrame()
        frame.add(batch, self.encode_records(batch))
        return frame.encode()

    def encode_records(self, batch: Batch) -> bytes:
        """The msgpack array of the records alone."""
        try:
            return self._encode(batch.records)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._misfit(batch, lambda record: self._encode([record]), error) from error

    def _encode(self, records: list[Any]) -> bytes:
        return self._encoder.encode(records if self._wire.wrap is None else self._wire.wrap(records))

    def decode(self, frame: bytes) -> Batch:
        try:
            batch = self._decoder.decode(frame).batch()
        except msgspec.ValidationError as error:
            decode = msgspec.msgpack.Decoder(self._wire.type).decode
            raise self._misfit(_frame_decoder(msgspec.Raw).decode(frame).batch(), decode, error) from error
        return batch if self._wire.unwrap is None else batch.of(self._wire.unwrap(batch.records))

    def of_groups(self, frame: bytes, groups: range, max_parallelism: int) -> bytes | None:
        """*frame* with the records of key groups *groups* only, in order; None: there are none."""
        batch = self.decode(frame)
        kept = [group in groups for group in key_groups(batch.keys or [], max_parallelism)]
        return self.encode(batch.where(kept)) if any(kept) else None

    def without(self, frame: bytes, skips: Sequence[RecordPlace]) -> bytes | None:
        """*frame* without the records that stem from *skips*; None: nothing is left."""
        batch = self.decode(frame)
        gone = {(place.topic, place.partition, place.offset) for place in skips}
        kept = [place not in gone for place in zip(*coordinates_of(batch.origins), strict=True)]
        if all(kept):
            return frame
        return self.encode(batch.where(kept)) if any(kept) else None

    def _misfit(self, batch: Batch, code: Callable[[Any], object], error: Exception) -> RecordError:
        for record, origin in zip(batch.records, batch.origins, strict=True):
            try:
                code(record)
            except Exception as problem:
                return RecordError(
                    f"A record that was to be sent to another worker or round a loop is not a valid "
                    f"{type_name(self._type)}: {problem}. It stems from {shown_origin(origin)}. The job has stopped "
                    f"before it; nothing is lost. Let the function that made it return {type_name(self._type)}, or "
                    f"declare another type by output={or_skip(origin)}.",
                    **facts_of("", origin),
                )
        return RecordError(f"Records that were to be sent to another worker cannot be encoded: {error}.")


class OpenFrame:
    """A frame under construction, of the records of several batches."""

    __slots__ = ("_floors", "_keys", "_names", "_offsets", "_packed", "_partitions", "_times", "_topics", "size")

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._keys: list[bytes] | None = None
        self._times: array[int] | None = None
        self._floors: array[int] | None = None
        self._names: dict[str | tuple[str, str], int] = {}
        """Places by topic, or by place and mark."""
        self._topics, self._partitions, self._offsets = array("H"), array("i"), array("q")
        self.size = 0
        """Bytes of its records and keys."""

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, batch: Batch, encoded: bytes) -> None:
        """Append *batch*, whose records `encode_records` has *encoded*."""
        self._packed.append(encoded[len(array_head(len(batch.records))) :])
        self.size += len(encoded)
        if batch.keys is not None:
            self._keys = self._keys or []
            self._keys += batch.keys
            self.size += sum(map(len, batch.keys))
        if batch.times is not None:
            self._times = (self._times or array("q")) + array("q", batch.times)
        if batch.floors is not None or self._floors is not None:
            self._floors = self._floors or array("q", [NO_FLOOR]) * len(self)
            self._floors += array("q", floors_of(batch))
        topics: list[Any]
        topics, partitions, offsets = coordinates_of(batch.origins)
        if topics and hasattr(batch.origins[0], "mark"):
            marks = [getattr(origin, "mark", None) for origin in batch.origins]
            topics = [name if mark is None else (name, mark) for name, mark in zip(topics, marks, strict=True)]
        for name in sorted(set(topics), key=str):
            self._names.setdefault(name, len(self._names))
        self._topics += array("H", map(self._names.__getitem__, topics))
        self._partitions += array("i", partitions)
        self._offsets += array("q", offsets)

    def encode(self) -> bytes:
        records = msgspec.Raw(b"".join((array_head(len(self)), *self._packed)))
        coordinates = (self._topics.tobytes(), self._partitions.tobytes(), self._offsets.tobytes())
        names = [(name, None) if isinstance(name, str) else name for name in self._names]
        marks = [mark for _, mark in names]
        times, floors = (b"" if column is None else column.tobytes() for column in (self._times, self._floors))
        rest: list[Any] = [times, marks if any(mark is not None for mark in marks) else [], floors]
        while rest and not rest[-1]:
            rest.pop()
        return _encode((records, self._keys, [name for name, _ in names], *coordinates, *rest))


def records_in(frame: bytes) -> int:
    """The number of records of a frame: the length of its first array.

    >>> records_in(BatchCodec(int).encode(Batch([1, 2, 3], [Coordinates("t", 0, 0)] * 3, [b"k"] * 3)))
    3
    """
    head = frame[1]
    if head < 0xDC:
        return head & 0x0F
    return int.from_bytes(frame[2 : 4 if head == 0xDC else 6], "big")


def is_same(written: bytes, again: bytes) -> bool:
    """Whether msgpack *written* once, read as a type and encoded *again*, has the same meaning. The order of a set, or
    an integral float written as an integer, makes no difference.

    >>> encode = msgspec.msgpack.encode
    >>> is_same(encode({"n": 1, "tags": ["a", "b"]}), encode({"n": 1.0, "tags": ["b", "a"]}))
    True
    >>> is_same(encode({"n": 1, "m": 2}), encode({"n": 1}))
    False
    """
    if written == again:
        return True
    one, other = map(msgspec.msgpack.decode, (written, again))
    return bool(_canonical(one) == _canonical(other))


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted(map(_canonical, value), key=canonical_key)
    return int(value) if isinstance(value, float) and value.is_integer() else value


Record = TypeVar("Record")


class _Frame(msgspec.Struct, Generic[Record], array_like=True, gc=False):
    """A frame in msgpack."""

    records: list[Record]
    keys: list[bytes] | None
    names: list[str]
    topics: bytes
    partitions: bytes
    offsets: bytes
    times: bytes = b""
    """Empty if its batches had none."""
    marks: list[str | None] = []
    """The marks of `names`; empty if all are topics."""
    floors: bytes = b""
    """Empty if no record is late."""

    def batch(self) -> Batch:
        topics, partitions, offsets = array("H", self.topics), array("i", self.partitions), array("q", self.offsets)
        times = list(array("q", self.times)) if self.times else None
        floors = list(array("q", self.floors)) if self.floors else None
        marks = self.marks or [None] * len(self.names)
        return Batch(self.records, Origins(self.names, marks, topics, partitions, offsets), self.keys, times, floors)


def _frame_decoder(record_type: Any) -> msgspec.msgpack.Decoder[_Frame[Any]]:
    return msgspec.msgpack.Decoder(_Frame[record_type])
