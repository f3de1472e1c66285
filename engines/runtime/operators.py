"""Operators as functions over batches: no Python call per record but the user's own functions.

An operator takes a batch and pushes its outputs to the operators after it, within the same call. It may also push
between two batches, without input. An error of the user's function becomes a `RecordError` with the coordinates of its
record; an outage becomes `Unavailable`, for which the job restarts.

An operator breathes between chunks, for a user's function may take any time. A breath is like a turn of the loop
between two batches: it polls writers, which hold only outputs of earlier batches. It takes no input and advances no
snapshot, which would see state in the middle of a batch.

A watermark goes from operator to operator between two batches. A `TimedOperator` passes it on once it has given all
results that are due; see `engines.runtime.timed_operators`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import length_hint
from typing import Any

import msgspec

from exactlyonce.connectors.kafka.partitioning import PARTITIONERS
from exactlyonce.engines.runtime.activity import CHUNK_RECORDS, Activity
from exactlyonce.engines.runtime.batch import Batch, Origin, Push, facts_of, or_skip, shown_origin
from exactlyonce.engines.runtime.faults import (
    DeadLetterOutput,
    declared_at,
    is_outage,
    misfit,
    pause,
    record_error,
    retried,
)
from exactlyonce.engines.runtime.watermarks import Port, Watermark
from exactlyonce.pipeline.errors import (
    ExactlyOnceError,
    RecordError,
    Unavailable,
    UserError,
    require_whole,
    users_errors,
)
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR, NO_WATERMARK, ms_of
from exactlyonce.pipeline.keys import canonical_key, explained_key, key_groups
from exactlyonce.pipeline.shape import type_name
from exactlyonce.pipeline.sink import FunctionRaised
from exactlyonce.sinks.writer import SinkEncoder
from exactlyonce.state.backend import Table
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.key_groups import subtask_of


@dataclass(slots=True)
class BatchOperator:
    """An operator takes batches, and pushes others to the operators after it."""

    id: str
    downstream: list[Push] = field(default_factory=list, kw_only=True)
    activity: Activity = field(default_factory=Activity, kw_only=True)
    dead_letters: DeadLetterOutput | None = field(default=None, kw_only=True)
    """Takes the records on which the user's function raises; None: the job stops before such a record."""
    sides: dict[str, list[Push]] = field(default_factory=dict, kw_only=True)
    """The receivers by side output, for kinds with any. A function with state gets `emit` if there are some."""
    ports: list[Port] = field(default_factory=list, kw_only=True)
    """Where watermarks go: to all operators after this one. Empty in a graph without event time."""

    def __call__(self, batch: Batch) -> None:
        raise NotImplementedError

    def push(self, batch: Batch) -> None:
        """Give a batch to the operators after this one."""
        for push in self.downstream:
            push(batch)

    def settle(self) -> None:
        """Bring everything that it keeps into its table: a barrier is here."""

    def advance(self, watermark: int, *, idle: bool = False) -> None:
        """Take a watermark; see `Port`."""
        self.pass_on(watermark, idle=idle)

    def pass_on(self, watermark: int, *, idle: bool) -> None:
        """Give a watermark to the operators after this one."""
        for port in self.ports:
            port.advance(watermark, idle=idle)

    def error(self, origin: Origin, error: BaseException) -> RecordError | Unavailable:
        """The *error* that the user's function raised on the record at *origin*."""
        return record_error(f"Operator {self.id!r}", self.id, origin, error)

    def misuse(self, origin: Origin | None, what: str, on: str = "") -> RecordError:
        """The error of a function that does not give what it should for the record at *origin*: *what*, after the
        operator's name. *on*: for what else."""
        return RecordError(
            f"Operator {self.id!r} {what.removesuffix('.')}. That was for {on or shown_origin(origin)}. The job has "
            f"stopped before it; nothing is lost. Fix the function, and run again{or_skip(origin)}.",
            **facts_of(self.id, origin),
        )

    def survives(self, error: BaseException) -> bool:
        """Whether a record on which the user's function raised *error* becomes a dead letter."""
        of_the_record = isinstance(error, Exception) and not isinstance(error, ExactlyOnceError | MemoryError)
        return self.dead_letters is not None and of_the_record and not is_outage(error)

    def apply(self, fn: Callable[[Any], Any], batch: Batch, *, again: bool = False) -> tuple[Batch, list[Any]]:
        """*batch*, without dead letters, and *fn* of each of its records. *again*: these were counted before."""
        done: list[Any] = []
        failed: list[tuple[int, BaseException]] = []
        entered_s = self.activity.enter(self.id)
        for chunk in chunks(len(batch.records)):
            end = min(chunk.stop, len(batch.records))
            records = iter(batch.records[chunk])
            while len(done) + len(failed) < end:
                try:
                    done += map(fn, records)  # keeps the results before an error
                    require_whole(done, end - len(failed))
                except users_errors() as error:
                    place = end - length_hint(records) - 1
                    if self.survives(error):
                        failed.append((place, error))
                    elif isinstance(error, UserError) and not isinstance(error, Unavailable):
                        raise
                    else:
                        raise self.error(batch.origins[place], error) from error
            self.activity.breathe()
        self.activity.leave(self.id, entered_s, 0 if again else len(batch.records))
        return self._without(batch, failed), done

    def _without(self, batch: Batch, failed: Sequence[tuple[int, BaseException]]) -> Batch:
        """*batch* without the records at the places of *failed*, which are dead letters."""
        if not failed:
            return batch
        assert self.dead_letters is not None, "else the first would have raised"
        return self.dead_letters.add(batch, failed)


def chunks(records: int) -> Iterator[slice]:
    """So many records in parts, between which an operator breathes."""
    return (slice(start, start + CHUNK_RECORDS) for start in range(0, records, CHUNK_RECORDS))


@dataclass(slots=True)
class Map(BatchOperator):
    fn: Callable[[Any], Any]

    def __call__(self, batch: Batch) -> None:
        batch, done = self.apply(self.fn, batch)
        self.push(batch.of(done))


@dataclass(slots=True)
class Peek(BatchOperator):
    fn: Callable[[Any], Any]

    def __call__(self, batch: Batch) -> None:
        self.apply(self.fn, batch)
        self.push(batch)


@dataclass(slots=True)
class Filter(BatchOperator):
    fn: Callable[[Any], bool]

    def __call__(self, batch: Batch) -> None:
        if self.dead_letters is not None:  # in one call, so that a record fails as a whole
            batch, kept = self.apply(lambda record: bool(self.fn(record)), batch)
        else:
            _, kept = self.apply(bool, batch.of(self.apply(self.fn, batch)[1]), again=True)
        self.push(batch.where(kept))


@dataclass(slots=True)
class FlatMap(BatchOperator):
    fn: Callable[[Any], Any]

    def __call__(self, batch: Batch) -> None:
        fn = self.fn
        batch, lists = self.apply(lambda record: list(fn(record)), batch)
        self.push(batch.expanded(lists))


@dataclass(slots=True)
class WithTime(BatchOperator):
    """`with_time`: a new time for each record, and the watermark less the disorder.

    The bound of a record in time is the ms before its time, that of a late one its floor: the watermark before it is
    not above that. A record is late if its new time is not above its bound less the disorder, which is its floor then.
    So late records remain a function of those that come, and the watermark is not above the floor of any later record.
    """

    fn: Callable[[Any], Any]
    disorder_ms: int

    def __call__(self, batch: Batch) -> None:
        fn, disorder_ms = self.fn, self.disorder_ms
        batch, times = self.apply(lambda record: ms_of(fn(record), "with_time gave"), batch)
        assert batch.times is not None
        bounds = [time - 1 - disorder_ms for time in batch.times]
        if batch.floors is not None:
            bounds = [max(bound, floor - disorder_ms) for bound, floor in zip(bounds, batch.floors, strict=True)]
        late = [bound if time <= bound else NO_FLOOR for time, bound in zip(times, bounds, strict=True)]
        floors = late if late.count(NO_FLOOR) < len(late) else None
        self.push(Batch(batch.records, batch.origins, times=times, floors=floors))

    def advance(self, watermark: int, *, idle: bool = False) -> None:
        is_time = NO_WATERMARK < watermark < END_OF_TIME
        self.pass_on(watermark - self.disorder_ms if is_time else watermark, idle=idle)


@dataclass(slots=True)
class Pass(BatchOperator):
    """A node without a function: a source, a union, the head of a loop."""

    def __call__(self, batch: Batch) -> None:
        self.push(batch)


@dataclass(slots=True)
class Parts(BatchOperator):
    """The head of a source with several members, whose records are `Routed`. The order of records holds within each
    member: those of a batch go to one member after the other."""

    def __call__(self, batch: Batch) -> None:
        outputs = [outputs for outputs, _ in batch.records]
        batch = batch.of([record for _, record in batch.records])
        for ids in dict.fromkeys(outputs):
            whole = outputs.count(ids) == len(outputs)
            mine = batch if whole else batch.where([each is ids for each in outputs])
            for place, id in enumerate(ids):
                given = mine if len(ids) == 1 else mine.of([records[place] for records in mine.records])
                for push in self.sides[id]:
                    push(given)


class KeyPlaces:
    """The keys whose state is in *subtask*, where keys are placed by the partitions of a topic.

    A partitioner gives each key one partition, and sources give partition *p* to subtask ``p % parallelism``. So a
    record that comes to another subtask proves that the topic is not partitioned so, without a look at any other.
    """

    def __init__(self, partitioner: str, partitions: int, parallelism: int, subtask: int) -> None:
        self.partitioner, self.partitions = partitioner, partitions
        self.parallelism, self.subtask = parallelism, subtask
        self._own: set[bytes] = set()
        """Some of the canonical keys that `misplaced` has found in their place."""

    def misplaced(self, keys: Sequence[bytes]) -> int | None:
        """The place in canonical *keys* of the first one whose state is elsewhere; None: none is."""
        if self._own.issuperset(keys):
            return None
        new = list(set(keys) - self._own)
        partitions = dict(zip(new, self.partitions_of(new), strict=True))
        wrong = {key for key, at in partitions.items() if at is None or at % self.parallelism != self.subtask}
        if wrong:
            return next(place for place, key in enumerate(keys) if key in wrong)
        if len(self._own) > KEYS_REMEMBERED:
            self._own.clear()
        self._own.update(new)
        return None

    def partitions_of(self, keys: Sequence[bytes]) -> list[int | None]:
        """The partition of the message with each canonical key: text in UTF-8, an int in digits, bytes as they are.
        None: it has none of its own."""
        values = map(msgspec.msgpack.decode, keys)
        messages = [str(value).encode() if isinstance(value, str) or type(value) is int else value for value in values]
        place = PARTITIONERS[self.partitioner]
        if self.partitioner.startswith("murmur2") and all(isinstance(message, bytes) for message in messages):
            return [*key_groups(messages, self.partitions)]  # many at once are far cheaper
        return [place(message, self.partitions) if isinstance(message, bytes) else None for message in messages]

    def error(self, operator: str, key: bytes, origin: Origin) -> RecordError:
        """The error of the record at *origin*, whose *key* belongs to another subtask."""
        (partition,) = self.partitions_of([key])
        where = "no partition" if partition is None else f"partition {partition} of {self.partitions}"
        return RecordError(
            f"{operator!r} has partitioned=, and {shown_origin(origin)} has the key "
            f"{msgspec.msgpack.decode(key)!r:.100}, which belongs to {where}, by {self.partitioner}. The job has "
            f"stopped before it, for another subtask may have the state of that key; nothing is lost. Name the "
            f'partitioner by which the topic was written, as partitioned="consistent_random", that of librdkafka; or '
            f"leave partitioned= out, so that records are shuffled, and begin from a savepoint or with `exactlyonce "
            f"reset`.",
            **facts_of(operator, origin),
        )


KEYS_REMEMBERED = 1 << 18


@dataclass(slots=True)
class KeyBy(BatchOperator):
    fn: Callable[[Any], Any]
    in_utc: Callable[[Any], Any] | None = None
    """Brings points in time to UTC, as a shuffle would, whether there is one or not."""
    places: KeyPlaces | None = None
    """Of keys that partitions place in more than one subtask."""

    def __call__(self, batch: Batch) -> None:
        if self.dead_letters is not None:  # in one call, so that a record fails as a whole
            batch, pairs = self.apply(self._keyed, batch)
            self._push(batch.of([record for _, record in pairs]), [key for key, _ in pairs])
            return
        values = batch.of(self.apply(self.fn, batch)[1])
        try:
            _, keys = self.apply(canonical_key, values, again=True)
        except RecordError:  # again, to say why: with an explanation each call is slower
            _, keys = self.apply(explained_key, values, again=True)
        if self.in_utc is not None:
            batch = batch.of(self.apply(self.in_utc, batch, again=True)[1])
        self._push(batch, keys)

    def _push(self, batch: Batch, keys: list[bytes]) -> None:
        if self.places is not None and (wrong := self.places.misplaced(keys)) is not None:
            raise self.places.error(self.id, keys[wrong], batch.origins[wrong])
        self.push(batch.keyed(keys))

    def _keyed(self, record: Any) -> tuple[bytes, Any]:
        return explained_key(self.fn(record)), record if self.in_utc is None else self.in_utc(record)


@dataclass(slots=True)
class KeyByCanonical(BatchOperator):
    """A `KeyBy` of messages that have canonical keys, and came through a `KeyBy` before."""

    fn: Callable[[Any], bytes]

    def __call__(self, batch: Batch) -> None:
        self.push(batch.keyed(list(map(self.fn, batch.records))))


@dataclass(slots=True)
class KeyBefore(BatchOperator):
    """A `KeyBy` that keeps the keys that the records have."""

    in_utc: Callable[[Any], Any] | None = None
    """See `KeyBy`."""

    def __call__(self, batch: Batch) -> None:
        self.push(batch if self.in_utc is None else batch.of(self.apply(self.in_utc, batch, again=True)[1]))


class Emitted:
    """The records that a function emits on *batch*, by output, with the places they stem from. `push` sends them on."""

    __slots__ = ("_batch", "_listeners", "_noted", "place")

    def __init__(self, batch: Batch, sides: Mapping[str, list[Push]], main: list[Push] | None = None) -> None:
        """The receivers of side outputs and of the main output. *main* None: it may not emit there."""
        self._batch = batch
        self._listeners: dict[str | None, list[Push]] = {} if main is None else {None: main}
        self._listeners.update(sides)
        self._noted: dict[str | None, tuple[list[Any], list[int]]] = {name: ([], []) for name in self._listeners}
        self.place = -1
        """The place in the batch of the record that the function is called with."""

    def emit(self, record: Any, output: Any = None) -> None:
        """Note *record* for *output*, or for the main one."""
        try:
            records, places = self._noted[None if output is None else output.name]
        except (KeyError, AttributeError):
            raise TypeError(self._misuse(output)) from None
        records.append(record)
        places.append(self.place)

    def _misuse(self, output: Any) -> str:
        declared = ", ".join(filter(None, self._listeners)) or "none"
        if output is None:
            return f"emit(value) names no output ({declared}): return what goes to the main one"
        return f"emit(value, output) got {getattr(output, 'name', output)!r:.100}, and outputs= declares {declared}"

    @property
    def count(self) -> int:
        """The number of records in all outputs."""
        return sum(len(places) for _, places in self._noted.values())

    def take_back(self) -> None:
        """Forget what the function has emitted on the record at `place`, where it has failed."""
        for records, places in self._noted.values():
            while places and places[-1] == self.place:
                records.pop()
                places.pop()

    def push(self) -> None:
        """Give the records of each output to its receivers."""
        for name, (records, places) in self._noted.items():
            for push in self._listeners[name] if records else ():
                push(self._batch.stemming(records, places))


class StateCalls(BatchOperator):
    """Calls the user's function with the state of each record's key."""

    __slots__ = ()
    fn: Callable[..., Any]
    flat: bool
    reduces: bool
    clone: Callable[[Any], Any] | None
    """Copies a state that the function may change in place; None: it cannot, or there are no dead letters."""

    @property
    def table_reduces(self) -> bool:
        """Whether the table has a loop of its own for a function that reduces."""
        return False

    def error(self, origin: Origin, error: BaseException) -> RecordError | Unavailable:
        at = ""
        if "unpack" in str(error):  # outside of the function, so no line of it is in the traceback
            at = f": it must return a pair, the state and the output{declared_at(self.fn)}"
        return record_error(f"Operator {self.id!r}", self.id, origin, error, at=at)

    def _runner(
        self, fn: Callable[..., Any], batch: Batch, dead: Sequence[tuple[int, BaseException]]
    ) -> Callable[[slice], list[Any]]:
        """Runs *fn* on a part of *batch*, part after part; it returns the outputs. *fn* adds to *dead*."""
        raise NotImplementedError

    def __call__(self, batch: Batch) -> None:
        fn = self._listed if self.flat else self._reduced if self.reduces and not self.table_reduces else self.fn
        emitted = Emitted(batch, self.sides) if self.sides else None
        if emitted is not None:
            fn = self._emitting(emitted)
        dead: list[tuple[int, BaseException]] = []
        if self.dead_letters is not None:
            fn = self._surviving(fn, dead, emitted)
        run = self._runner(fn, batch, dead)
        outputs: list[Any] = []
        entered_s = self.activity.enter(self.id)
        for chunk in chunks(len(batch.records)):
            try:
                outputs += run(chunk)
            except ApplyFailed as failed:
                cause = failed.__cause__ or failed
                raise self.error(batch.origins[chunk.start + failed.index], cause) from cause
            self.activity.breathe()
        self.activity.leave(self.id, entered_s, len(outputs))
        taken = self._without(batch, dead)
        if dead:
            places = {place for place, _ in dead}
            outputs = [output for place, output in enumerate(outputs) if place not in places]
        if emitted is not None:
            outputs = [returned[0] for returned in outputs]
        self.push(taken.expanded(outputs) if self.flat else taken.unkeyed(outputs))
        if emitted is not None:
            emitted.push()

    def _listed(self, state: Any, record: Any) -> tuple[Any, tuple[Any, ...]]:
        """The function with its outputs as a tuple: they may be a list that changes, or a generator."""
        state, outputs = self.fn(state, record)
        return state, tuple(outputs)

    def _reduced(self, state: Any, record: Any) -> tuple[Any, Any]:
        reduced = record if state is None else self.fn(state, record)
        return reduced, reduced

    def _surviving(
        self, fn: Callable[[Any, Any], Any], dead: list[tuple[int, BaseException]], emitted: Emitted | None
    ) -> Callable[[Any, Any], Any]:
        """*fn*, which leaves a key's state as it was where it raises, and adds the place of the record to *dead*."""
        places = itertools.count()

        def run(state: Any, record: Any) -> Any:
            place = next(places)
            before = state if self.clone is None or state is None else self.clone(state)
            try:
                return fn(state, record)
            except users_errors() as error:
                if not self.survives(error):
                    raise
                dead.append((place, error))
                if emitted is not None:
                    emitted.take_back()
                return before, None

        return run

    def _emitting(self, emitted: Emitted) -> Callable[[Any, Any], tuple[Any, Any]]:
        """The function with `emit`. Its output is its result, then everything emitted: each may share the state."""
        fn, flat = self.fn, self.flat
        given: list[Any] = []

        def emit(value: Any, output: Any = None) -> None:
            emitted.emit(value, output)
            given.append(value)

        def run(state: Any, record: Any) -> tuple[Any, tuple[Any, ...]]:
            emitted.place += 1
            given.clear()
            state, returned = fn(state, record, emit)
            return state, (tuple(returned) if flat else returned, *given)

        return run


@dataclass(slots=True)
class Stateful(StateCalls):
    """`stateful_map`, `stateful_flat_map` and `reduce`: the table runs the user's function."""

    fn: Callable[..., Any]
    table: Table[Any]
    flat: bool = False
    reduces: bool = False
    clone: Callable[[Any], Any] | None = None

    @property
    def table_reduces(self) -> bool:
        return self.reduces and self.dead_letters is None

    def _runner(
        self, fn: Callable[..., Any], batch: Batch, dead: Sequence[tuple[int, BaseException]]
    ) -> Callable[[slice], list[Any]]:
        assert batch.keys is not None
        keys, records = batch.keys, batch.records
        run = self.table.reduce if self.table_reduces else self.table.apply
        return lambda chunk: run(fn, keys[chunk], records[chunk])


@dataclass(slots=True)
class Split(BatchOperator):
    """A function that emits to its main output and to side outputs."""

    fn: Callable[[Any, Callable[..., None]], Any]

    def __call__(self, batch: Batch) -> None:
        emitted = Emitted(batch, self.sides, main=self.downstream)
        fn, emit = self.fn, emitted.emit
        failed: list[tuple[int, BaseException]] = []
        entered_s = self.activity.enter(self.id)
        for chunk in chunks(len(batch.records)):
            for emitted.place, record in enumerate(batch.records[chunk], chunk.start):
                try:
                    fn(record, emit)
                except users_errors() as error:
                    if not self.survives(error):
                        raise self.error(batch.origins[emitted.place], error) from error
                    emitted.take_back()
                    failed.append((emitted.place, error))
            self.activity.breathe()
        self.activity.leave(self.id, entered_s, len(batch.records))
        self._without(batch, failed)
        emitted.push()


class Sides:
    """An operator of two inputs, which takes the batches of each by a method of its own."""

    __slots__ = ()

    def left(self, batch: Batch) -> None:
        """Take a batch of the first input."""
        raise NotImplementedError

    def right(self, batch: Batch) -> None:
        """Take a batch of the second input."""
        raise NotImplementedError


def receiver(operator: Any, port: int) -> Push:
    """The receiver of input number *port* of *operator*."""
    if isinstance(operator, Sides):
        return operator.right if port else operator.left
    taking: Push = operator
    return taking


@dataclass(slots=True)
class Shuffle(BatchOperator):
    """The end of a task: it distributes records by key group. *send* takes (subtask, batch)."""

    send: Callable[[int, Batch], None]
    parallelism: int
    max_parallelism: int
    groups: set[int] | None = None
    """The key groups that were sent; None: not noted."""
    tell: Callable[[Watermark], None] | None = field(default=None, kw_only=True)
    """Gives a watermark to all subtasks; None: nobody waits for one."""
    _owners: list[int] = field(init=False)
    """The receiving subtask by key group."""

    def __post_init__(self) -> None:
        groups = range(self.max_parallelism)
        self._owners = [subtask_of(group, self.parallelism, self.max_parallelism) for group in groups]

    def advance(self, watermark: int, *, idle: bool = False) -> None:
        if self.tell is not None:
            self.tell(Watermark(watermark, idle))

    def groups_by_subtask(self) -> dict[int, list[int]]:
        """The key groups that were sent, by receiving subtask, in order."""
        sent: dict[int, list[int]] = {}
        for group in sorted(self.groups or ()):
            sent.setdefault(self._owners[group], []).append(group)
        return sent

    def __call__(self, batch: Batch) -> None:
        assert batch.keys is not None
        groups = key_groups(batch.keys, self.max_parallelism)
        if self.groups is not None:
            self.groups.update(groups)
        receivers = list(map(self._owners.__getitem__, groups))
        for subtask, share in enumerate(batch.dealt(receivers, self.parallelism)):
            if share.records:
                self.send(subtask, share)


@dataclass(slots=True)
class ToAll(Shuffle):
    """A `Shuffle` that sends each record to all subtasks."""

    def __call__(self, batch: Batch) -> None:
        for subtask in range(self.parallelism if batch.records else 0):
            self.send(subtask, batch)


def listeners(producer: BatchOperator, output: str | None) -> list[Push]:
    """The receivers of *producer*'s main output, or of side output *output*."""
    if output is None:
        return producer.downstream
    return producer.sides.setdefault(output, [])


@dataclass(frozen=True)
class Declared:
    """The declared type of *operator*'s records."""

    operator: str
    type: Any

    def unlike(self, record: Any) -> str:
        """Why *record* is not of the type; empty if it is, or only the user's codec could tell."""
        try:
            msgspec.convert(record, self.type)
        except msgspec.ValidationError as error:
            return str(error)
        except TypeError:  # only a codec of the user's knows the type
            pass
        return ""


def _not_as_declared(declared: Declared, origin: Origin, problem: str) -> RecordError:
    name = type_name(declared.type)
    return RecordError(
        f"Operator {declared.operator!r} says that it gives {name}, and gave something else for "
        f"{shown_origin(origin)}: {problem.removesuffix('.')}. The job has stopped before it; nothing is lost. Let its "
        f"function return {name}, or declare what it returns{or_skip(origin)}."
    )


@dataclass(slots=True)
class SinkOutput(BatchOperator):
    """The end of a branch: it encodes records for the writer."""

    write: Callable[[Any], None]
    """Takes encoded outputs."""
    encoder: SinkEncoder
    declared: Declared | None = field(default=None, kw_only=True)
    """The type of its records; None: unknown."""
    sleep: Callable[[float], None] = field(default=pause, kw_only=True)
    origins: Sequence[Origin] = field(default=(), init=False)
    """The origins of the outputs that are being written."""

    def __call__(self, batch: Batch) -> None:
        entered_s = self.activity.enter(self.id)
        outputs = None
        while batch.records and outputs is None:
            try:
                outputs = retried(partial(self.encoder.encode, batch.records), self.sleep)
            except users_errors() as error:
                rest = self._encodable(batch) if self.survives(error) else batch
                if len(rest.records) == len(batch.records):
                    raise self._refused(batch, error) from error
                batch = rest
        self.activity.leave(self.id, entered_s, len(batch.records))
        if batch.records:
            self.origins = batch.origins
            self.write(outputs)

    def _encodable(self, batch: Batch) -> Batch:
        """*batch* without the records that cannot be encoded, which become dead letters."""
        failed: list[tuple[int, BaseException]] = []
        for place, record in enumerate(batch.records):
            try:
                retried(partial(self.encoder.encode, [record]), self.sleep)
            except users_errors() as error:
                if not self.survives(error):
                    raise self._refused(batch.part(place, place + 1), error) from error
                failed.append((place, error.__cause__ or error if isinstance(error, FunctionRaised) else error))
        return self._without(batch, failed)

    def _refused(self, batch: Batch, error: BaseException) -> RecordError | Unavailable:
        """The error of the first record that cannot be encoded. Encoding has no effects, so each record is tried again,
        except during an outage, which names no record."""
        culprit = 0
        for place, record in enumerate(() if is_outage(error) else batch.records):
            try:
                self.encoder.encode([record])
            except users_errors() as first:
                culprit, error = place, first
                break
        origin = None if is_outage(error) else batch.origins[culprit]
        if origin is not None and self.declared and (problem := self.declared.unlike(batch.records[culprit])):
            return _not_as_declared(self.declared, origin, problem)
        if isinstance(error, FunctionRaised):
            subject = f"{error.argument}= of sink {self.id!r}"
            return record_error(subject, self.id, origin, error.__cause__ or error)
        return misfit(self.id, origin, error)
