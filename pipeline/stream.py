"""The pipeline as a user writes it: streams, and the operators on them.

Only `build` raises for a wrong graph, and names all mistakes at once, with file and line; a method that is missing, or
called without its id, is refused at once. A stream may be used several times: each use gets all its records.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol, TypeVar, get_args, overload

from exactlyonce.pipeline import hints
from exactlyonce.pipeline.aggregates import Accumulator, Aggregate, Misuse, folded, held, several
from exactlyonce.pipeline.builder import Builder
from exactlyonce.pipeline.changes import Change
from exactlyonce.pipeline.dead_letters import DeadLetterTarget
from exactlyonce.pipeline.durations import Duration
from exactlyonce.pipeline.enrich import Calls, Enriched, enriched_type
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.functions import Emit, Function, Output, SideEmit
from exactlyonce.pipeline.graph import Input, Kind, LogicalGraph
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.joins import AsOf, Enrichment, How, IntervalJoin, Join, Joined, Lookup, Pair, WindowJoin
from exactlyonce.pipeline.location import caller, location
from exactlyonce.pipeline.map_batches import BatchCalls
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.shape import UnsupportedType
from exactlyonce.pipeline.sink import Sink
from exactlyonce.pipeline.source import Source
from exactlyonce.pipeline.timed import Deduplicate, Expiry, InOrder, Order, Timed, kept_until
from exactlyonce.pipeline.timers import (
    Batches,
    CoHandler,
    CoHandling,
    Handler,
    Handling,
    kept_entry,
    migrated_entry,
    read_handler,
)
from exactlyonce.pipeline.versions import VersionedState, parameter_type
from exactlyonce.pipeline.windows import Window, Windowed, kept_state, migrated, revised

if TYPE_CHECKING:
    from typing_extensions import TypeForm, Unpack

    from exactlyonce.pipeline.running import RunResult, RunSettings

T = TypeVar("T")
U = TypeVar("U")
S = TypeVar("S")
K = TypeVar("K")
V = TypeVar("V")
Migrations = Mapping[int, Callable[[Any], Any]]
Partitioner = Literal["murmur2_random", "murmur2", "consistent_random", "consistent", "fnv1a_random", "fnv1a"]
"""The partitioners of librdkafka by which a key has one partition."""


F = TypeVar("F")
C = TypeVar("C", bound=Callable[..., Any])
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_KEY = "key_by(fn)"
_SINK = 'sink(id, KafkaSink("topic"))'
_WINDOW = 'key_by(fn).window(Tumbling("1m"))'
_AGGREGATE = f"{_WINDOW}.aggregate(id, Count()), or key_by(fn).stateful_map(id, fn) for a result after each record"
_BATCHES = "map_batches(fn, schema=...), of Arrow batches,"
_OUTER = '.join(id, right, within=("-5m", "1h"), how="left")'
_INSTEAD = {
    "group_by": _KEY, "group_by_key": _KEY, "partition_by": _KEY, "select_key": _KEY,
    "to": _SINK, "to_topic": _SINK, "sink_to": _SINK, "add_sink": _SINK, "through": _SINK, "write": _SINK,
    "foreach": "peek(fn)", "for_each": "peek(fn)", "inspect": "peek(fn)", "print": "peek(), which prints",
    "map_in_arrow": _BATCHES, "map_in_pandas": _BATCHES, "map_partitions": _BATCHES, "map_batch": _BATCHES,
    "map_values": "map(fn)", "transform": "map(fn)", "select": "map(fn)", "flat_map_values": "flat_map(fn)",
    "where": "filter(fn)", "filter_not": "filter(fn)", "merge": "union(other)", "concat": "union(other)",
    "connect": "key_by(fn).co_process(id, right, Handler)", "branch": "split(fn, outputs=[...])",
    "broadcast": "with_broadcast(id, table, fn)",
    "side_output": "side(output)", "get_side_output": "side(output)", "windowed_by": _WINDOW, "window_by": _WINDOW,
    "tumbling_window": _WINDOW, "hopping_window": _WINDOW, "session_window": _WINDOW, "window_all": _WINDOW,
    "count": _AGGREGATE, "sum": _AGGREGATE, "min": _AGGREGATE, "max": _AGGREGATE, "left_join": _OUTER,
    "outer_join": _OUTER, "assign_timestamps_and_watermarks": "time= of the source, or with_time(fn) further on",
    "execute": "pipeline.run()", "run": "pipeline.run()", "uid": "id= of the operator", "name": "id= of the operator",
}  # fmt: skip
"""What does it, by the name that a method has elsewhere, in snake_case."""


def _remedy(kind: type, name: str) -> str | None:
    """What does what a user expects of method *name*, which streams of class *kind* lack; None: nothing is known."""
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    if name == "process":
        apply = "the function over all records of a window is .apply(id, fn)"
        split = "a function of (record, emit) is .split(fn, outputs=[...], id=...)"
        return f"process takes a handler with timers, of a keyed stream; {apply if kind is WindowedStream else split}"
    letters = snake.replace("_", "")
    if same := next((own for own in dir(kind) if own[0] != "_" and own.replace("_", "") == letters), None):
        return f"{name} is {same} here"
    if hasattr(WindowedStream, snake):
        window = '.window(Tumbling("1m"))' if kind is KeyedStream else f".{_WINDOW}"
        return f"{name} is of windows: put {window} before it"
    if kind is Stream and hasattr(KeyedStream, snake):
        return f"{name} keeps state by key: put .key_by(...) before it"
    if kind is Table and (hasattr(KeyedStream, snake) or hasattr(Stream, snake)):
        return (
            f"{name} is not for tables: a keyed stream reads one by .as_of(id, table) or .lookup(id, table), and its "
            f"changes are a stream: put .changes() before it"
        )
    if hasattr(Stream, snake):
        return f"{name} is not for {_STREAMS[kind]}: put it before .key_by(...), or after an operator with state"
    if hasattr(KeyedStream, snake):
        return f"{name} is not for windows: put it before .window(...)"
    return f"{name} is {_INSTEAD[snake]} here" if snake in _INSTEAD else None


def _operator(method: C) -> C:
    """*method*, which refuses a call that does not follow the rule of ids.

    What has state, or anything else in checkpoints, has an id as its first argument; what has none takes ``id=``.
    """
    name = method.__name__
    identified = next(iter([*inspect.signature(method).parameters][1:])) == "id"

    @functools.wraps(method)
    def checked(stream: Any, *given: Any, **options: Any) -> Any:
        first = given[0] if given else options.get("id")
        if identified and not isinstance(first, str):
            raise GraphError(
                f'{location(caller())}: the first argument of {name} is its id in checkpoints, as {name}("{name}", '
                f"...), and not {first!r:.100}"
            )
        if not identified and isinstance(first, str) and len(given) > (name == "with_time"):  # it takes a field
            field = f"a field is named by a function, key_by(lambda record: record.{first}); " * (name == "key_by")
            raise GraphError(
                f"{location(caller())}: {field}{name} has no state, so its id has a name: {name}(..., id={first!r})"
            )
        return method(stream, *given, **options)

    return checked  # type: ignore[return-value]  # of the same signature


class _Partial(Protocol[R_co]):
    """`functools.partial` of a class: type checkers would take it for a function that returns an instance."""

    @property
    def func(self) -> Callable[..., R_co]: ...


_OfBatches = Callable[[Any], Any]
"""A function of a `pyarrow.RecordBatch`: pyarrow has no types."""


class _Schema(Protocol):
    """A `pyarrow.Schema`."""

    @property
    def names(self) -> list[str]: ...


class Pipeline:
    """A pipeline of sources, operators and sinks. Its name identifies its checkpoints.

    >>> from exactlyonce import KafkaSink, KafkaSource
    >>> pipeline = Pipeline("shout")
    >>> words = pipeline.source("words", KafkaSource("words", value=str))
    >>> words.map(str.upper, output=str).sink("out", KafkaSink("loud-words"))
    >>> print(pipeline.build().explain())
    shout
      words            source            KafkaSource words  : str
      map-after-words  map               <- words  : str
      out              sink              <- map-after-words KafkaSink loud-words

    *max_parallelism* is the number of key groups, and the limit of subtasks with state. It is part of every checkpoint
    and cannot be changed later.
    """

    def __init__(self, name: str, max_parallelism: int = 128) -> None:
        self.name = name
        self.max_parallelism = max_parallelism
        self.scope = caller().f_globals
        """The globals of its module, by which worker processes import it."""
        self._builder = Builder(name, max_parallelism)

    @_operator
    def source(self, id: str, source: Source[T]) -> Stream[T]:
        """The stream of *source*."""
        return Stream(self._builder, self._builder.add_source(id, source))

    @_operator
    def table(self, id: str, source: Source[Record[V]] | Source[Change[V]]) -> Table[Any, V]:
        """The newest value by key of a changelog, for `as_of`, `lookup`, `with_broadcast` and `join_table`.

        >>> from exactlyonce import KafkaSource
        >>> pipeline = Pipeline("customers")
        >>> names = pipeline.table("names", KafkaSource.records("names", key=str, value=str))

        The key is the message's, of the type *key* of the source, as of ``KafkaSource.records``. A null value
        deletes the key; its event time is the timestamp of the message. Of `PostgresChanges`, and of a topic read by
        `DebeziumCodec`, the key is the row's.
        """
        return Table(self._builder, self._builder.add_table(id, source))

    @_operator
    def feedback(self, id: str, type: TypeForm[T], *, pause: Duration = "0ms") -> Feedback[T]:
        """A loop: a stream of the records, of *type*, that a later `feed` sends back to it.

        >>> from exactlyonce import KafkaSink, KafkaSource
        >>> pipeline = Pipeline("halve")
        >>> halved = pipeline.feedback("halved", int)
        >>> numbers = pipeline.source("numbers", KafkaSource("numbers", value=int)).union(halved)
        >>> numbers.filter(lambda n: n % 2 == 0).map(lambda n: n // 2, output=int).feed(halved)
        >>> numbers.filter(lambda n: n % 2 == 1).sink("odd", KafkaSink("odd-parts"))

        Unite the loop with other streams, and put an operator into it that lets records out. Records in the loop are
        part of every checkpoint. With *pause*, a duration as "500ms", a record waits so long before it comes round, to
        try again later. After a crash it may wait less.
        """
        return Feedback(self._builder, self._builder.add_loop(id, type, pause))

    def build(self) -> LogicalGraph:
        """The checked graph; raises `GraphError` with every mistake and its remedy."""
        return self._builder.build()

    def run(self, engine: str = "local", **settings: Unpack[RunSettings]) -> RunResult | None:
        """Run it, as `exactlyonce.run(pipeline, ...)`, which has more about settings and result."""
        from exactlyonce.pipeline.running import run

        return run(self, engine, **settings)

    def __repr__(self) -> str:
        return f"Pipeline({self.name!r})"


class _Stream(Generic[T]):
    def __init__(self, builder: Builder, origin: Input) -> None:
        self._builder = builder
        self._origin = origin

    def __iter__(self) -> NoReturn:
        where = location(caller())
        raise GraphError(f"{where}: a stream cannot be iterated: it has no records before the pipeline runs")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            kind = Stream if isinstance(self, Stream) else type(self)
            if not name.startswith("_") and (remedy := _remedy(kind, name)):
                raise GraphError(f"{location(caller())}: {remedy}")
            raise AttributeError(f"a {kind.__name__} has no {name!r}", name=name, obj=self)


class Stream(_Stream[T]):
    """A stream of records. Uses of a stream share them, so a function returns a new value instead of changing one."""

    @overload
    def map(
        self, fn: _Partial[Callable[[T], U]], *, id: str | None = ..., output: TypeForm[U] | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @overload
    def map(
        self, fn: Callable[[T], U], *, id: str | None = ..., output: TypeForm[U] | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @overload
    def map(
        self, fn: Callable[[], Callable[[T], U]], *, id: str | None = ..., output: TypeForm[U] | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @_operator
    def map(
        self, fn: Any, *, id: str | None = None, output: Any = None, on_error: DeadLetterTarget | None = None
    ) -> Stream[Any]:
        """One output for each record: ``fn(record)``.

        *on_error*, of this and other operators, is where records go on which the function raises, as
        ``DeadLetters("orders-dead")``; without it they stop the pipeline.
        """
        function = self._builder.read(fn, ("record",), yields="use flat_map")
        return self._then(Kind.MAP, id, function, _given(output, function.returns), on_error=on_error)

    @overload
    def filter(
        self, fn: Callable[[T], object], *, id: str | None = ..., on_error: DeadLetterTarget | None = ...
    ) -> Stream[T]: ...
    @overload
    def filter(
        self, fn: Callable[[], Callable[[T], object]], *, id: str | None = ..., on_error: DeadLetterTarget | None = ...
    ) -> Stream[T]: ...
    @_operator
    def filter(self, fn: Any, *, id: str | None = None, on_error: DeadLetterTarget | None = None) -> Stream[T]:
        """The records for which ``fn(record)`` is true."""
        function = self._builder.read(fn, ("record",))
        return self._then(Kind.FILTER, id, function, self._type, on_error=on_error)

    @overload
    def flat_map(
        self, fn: Callable[[T], Iterable[U]], *, id: str | None = ..., output: TypeForm[U] | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @overload
    def flat_map(
        self, fn: Callable[[], Callable[[T], Iterable[U]]], *, id: str | None = ..., output: TypeForm[U] | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @_operator
    def flat_map(
        self, fn: Any, *, id: str | None = None, output: Any = None, on_error: DeadLetterTarget | None = None
    ) -> Stream[Any]:
        """0 to n outputs for each record: what ``fn(record)`` returns or yields. *output* is the type of one."""
        function = self._builder.read(fn, ("record",), yields=None)
        return self._then(Kind.FLAT_MAP, id, function, _given(output, function.item), on_error=on_error)

    @overload
    def peek(self, fn: Callable[[T], object] = ..., *, id: str | None = ...) -> Stream[T]: ...
    @overload
    def peek(self, fn: Callable[[], Callable[[T], object]], *, id: str | None = ...) -> Stream[T]: ...
    @_operator
    def peek(self, fn: Any = print, *, id: str | None = None) -> Stream[T]:
        """The same records, after a call of ``fn(record)`` for each. After a failure it is called again."""
        return self._then(Kind.PEEK, id, self._builder.read(fn, ("record",)), self._type)

    @overload
    def enrich(
        self, id: str, fetch: _Partial[Callable[[list[T]], Awaitable[Sequence[U]]]], *, batch: int = ...,
        in_flight: int = ..., timeout: Duration = ..., retries: int = ..., output: TypeForm[U] | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[Enriched[T, U]]: ...  # fmt: skip
    @overload
    def enrich(
        self, id: str, fetch: Callable[[list[T]], Awaitable[Sequence[U]]], *, batch: int = ...,
        in_flight: int = ..., timeout: Duration = ..., retries: int = ..., output: TypeForm[U] | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[Enriched[T, U]]: ...  # fmt: skip
    @overload
    def enrich(
        self, id: str, fetch: Callable[[], Callable[[list[T]], Awaitable[Sequence[U]]]], *, batch: int = ...,
        in_flight: int = ..., timeout: Duration = ..., retries: int = ..., output: TypeForm[U] | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[Enriched[T, U]]: ...  # fmt: skip
    @_operator
    def enrich(
        self, id: str, fetch: Any, *, batch: int = 50, in_flight: int = 200, timeout: Duration = "5s", retries: int = 3,
        output: Any = None, on_error: DeadLetterTarget | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """Each record with the answer of a service, in order: ``await fetch(records)`` returns a list of answers, one
        for each of at most *batch* records.

        >>> async def fetch(cities: list[str]) -> list[float]:
        ...     return [len(city) / 2 for city in cities]  # or a call of a service
        >>> from exactlyonce import KafkaSource
        >>> cities = Pipeline("weather").source("cities", KafkaSource("cities", value=str))
        >>> warm = cities.enrich("degrees", fetch).filter(lambda city: city.answer > 20)

        In each subtask, the calls under way have at most *in_flight* records. A call that raises is made again for each
        half, side by side, down to the records that make it fail. These, and a call that is an outage (it takes longer
        than *timeout*, or raises another OSError), are tried up to *retries* times more, after pauses. Then an outage
        restarts the job; a record that still fails goes to *on_error*, or stops the job.

        *output* is the type of an answer. Answers are logged in checkpoints, so that no replay calls the service. After
        a crash the records since the last checkpoint are asked for again, and no answer from before has been visible.
        """
        function = self._builder.read(fetch, ("records",), awaited=True)
        calls = Calls(_given(output, function.item), batch, in_flight, timeout, retries)
        type_ = enriched_type(self._type, calls.answer)
        return self._then(Kind.ENRICH, id, function, type_, calls=calls, on_error=on_error)

    @overload
    def with_broadcast(
        self, id: str, table: Table[R, V], fn: _Partial[Callable[[T, Mapping[R, V]], U]], *,
        output: TypeForm[U] | None = ..., on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @overload
    def with_broadcast(
        self, id: str, table: Table[R, V], fn: Callable[[T, Mapping[R, V]], U], *,
        output: TypeForm[U] | None = ..., on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @overload
    def with_broadcast(
        self, id: str, table: Table[R, V], fn: Callable[[], Callable[[T, Mapping[R, V]], U]], *,
        output: TypeForm[U] | None = ..., on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @_operator
    def with_broadcast(
        self, id: str, table: Table[Any, Any], fn: Any, *, output: Any = None, on_error: DeadLetterTarget | None = None
    ) -> Stream[Any]:
        """One output for each record, made with all rows of a small *table*: ``fn(record, rows)``.

        >>> from collections.abc import Mapping
        >>> from exactlyonce import KafkaSource
        >>> pipeline = Pipeline("alerts")
        >>> limits = pipeline.table("limits", KafkaSource.records("limits", key=str, value=int))
        >>> def check(name: str, limits: Mapping[str, int]) -> str:
        ...     return f"{name} of {limits.get(name, 0)}"
        >>> alerts = pipeline.source("names", KafkaSource("names", value=str)).with_broadcast("check", limits, check)

        *rows* is a read-only mapping of the rows as they are now, which each subtask has in memory. A change of a row
        counts from its arrival on, which depends on the run; before the first one, the mapping is empty.
        """
        return Stream(self._builder, self._builder.with_broadcast(id, self._origin, table, fn, output, on_error))

    @overload
    def map_batches(
        self, fn: _OfBatches | _Partial[_OfBatches] | Callable[[], _OfBatches], *, schema: TypeForm[U],
        max_rows: int = ..., id: str | None = ..., on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @overload
    def map_batches(
        self, fn: _OfBatches | _Partial[_OfBatches] | Callable[[], _OfBatches], *, schema: _Schema,
        max_rows: int = ..., id: str | None = ..., on_error: DeadLetterTarget | None = ...,
    ) -> Stream[dict[str, Any]]: ...  # fmt: skip
    @_operator
    def map_batches(
        self, fn: Any, *, schema: Any, max_rows: int = 4_096, id: str | None = None,
        on_error: DeadLetterTarget | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """The rows of ``fn(batch)``, for models and other functions of many records at a time.

        *batch* is a `pyarrow.RecordBatch` of at most *max_rows* records. Its columns are their fields, of records
        without fields one column `value`. The function returns another one, or a table or data frame that Arrow reads,
        with the columns of *schema*: a type of records, which the outputs have, or a `pyarrow.Schema`, for dicts.

        There is a row for each record, in order. Or a column `row`, of integers, has the place in the batch of the
        record that each row stems from: it may skip records, and repeat them, but does not fall.

        A batch on which the function raises, or which differs from this, is halved down to the records that cause it:
        they go to *on_error*, or the first of them stops the pipeline. Batches are cut anew after a restart, so the
        rows of a record must not depend on other records. It needs the extra `arrow`.
        """
        function = self._builder.read(fn, ("batch",))
        with needing("arrow", "pyarrow", "map_batches"):
            import pyarrow

            from exactlyonce.pipeline.arrow import record_type
        given, type_ = None, UNKNOWN if schema is None else hints.known(schema)
        if isinstance(schema, pyarrow.Schema):
            given, type_ = schema, UNKNOWN
            try:
                type_ = record_type(given)
            except UnsupportedType as error:
                self._builder.problem(f"schema= cannot be the outputs': {error}")
        calls = BatchCalls(max_rows, given)
        return self._then(Kind.MAP_BATCHES, id, function, type_, batch_calls=calls, on_error=on_error)

    @overload
    def split(
        self, fn: Callable[[T, Emit[U]], None], *, id: str | None = ..., outputs: Sequence[Output[Any]] = ...,
        output: TypeForm[U] | None = ..., on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @overload
    def split(
        self, fn: Callable[[], Callable[[T, Emit[U]], None]], *, id: str | None = ...,
        outputs: Sequence[Output[Any]] = ..., output: TypeForm[U] | None = ..., on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @_operator
    def split(
        self, fn: Any, *, id: str | None = None, outputs: Sequence[Output[Any]] = (), output: Any = None,
        on_error: DeadLetterTarget | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """Several outputs: ``fn(record, emit)`` calls ``emit(value)``, or ``emit(value, late)`` for one of *outputs*.

        The type of the main output comes from ``emit: Emit[U]`` or *output*; `side` gives the other streams.
        """
        function = self._builder.read(fn, ("record", "emit"))
        type_, sides = _given(output, function.emitted), self._builder.sides(outputs)
        return self._then(Kind.SPLIT, id, function, type_, outputs=sides, on_error=on_error)

    def side(self, output: Output[U]) -> Stream[U]:
        """The stream of a side output of the operator that gave this stream."""
        return Stream(self._builder, self._builder.side(self._origin, output))

    @_operator
    def with_time(
        self, at: str | Callable[[T], Any], *, disorder: Duration = "0s", id: str | None = None,
        on_error: DeadLetterTarget | None = None,
    ) -> Stream[T]:  # fmt: skip
        """The same records with another event time, for windows and other operators by time after it.

        *at* is as of `EventTime`: the name of a field, or a function of the record. *disorder* is how far the new
        time may lie before the old one, which for a late record is its floor; it may lie after it by any time. One
        further back is late for the operators that come next, and their ``late=`` gets it. Their results come later by
        *disorder*, and remain a function of the topics. The sources need ``time=``.

        *on_error* gets the records for which *at* raises or gives no usable time.
        """
        return Stream(self._builder, self._builder.add_time(at, disorder, id, self._origin, on_error))

    @overload
    def union(self, *others: Stream[T], id: str | None = ...) -> Stream[T]: ...
    @overload
    def union(self, *others: Stream[U], id: str | None = ...) -> Stream[T | U]: ...
    @_operator
    def union(self, *others: Stream[Any], id: str | None = None) -> Stream[Any]:
        """The records of this stream and the others. Only the order within each is kept."""
        origins = [self._origin, *(self._builder.own(other, "union") for other in others)]
        known = [origin for origin in origins if origin is not None]
        if not others:
            self._builder.problem("union() needs at least one other stream")
        type_ = hints.union(self._builder.type_of(origin) for origin in known)
        return Stream(self._builder, self._builder.add(Kind.UNION, id, tuple(known), type=type_))

    @_operator
    def key_by(
        self, fn: Callable[[T], K], *, id: str | None = None, partitioned: bool | Partitioner = False,
        on_error: DeadLetterTarget | None = None,
    ) -> KeyedStream[K, T]:  # fmt: skip
        """The stream by key, for an operator with state: each key has its own.

        A key is any value that msgspec encodes; 1, "1" and True are three keys.

        *partitioned*: the messages of the source's topic have this key, as text, bytes or an int, and are in the
        partition that their partitioner gives it, so that nothing is shuffled. True is "murmur2_random", that of Java's
        clients and of `KafkaSink`; "consistent_random" is librdkafka's own. With a parallelism above 1 each record is
        checked: one whose key belongs elsewhere ends the run, with a `RecordError`.
        """
        if partitioned not in (True, False, *get_args(Partitioner)):
            self._builder.problem(
                f"partitioned={partitioned!r} must be True or one of {', '.join(get_args(Partitioner))}, the "
                f"partitioner by which the topic was written"
            )
        function = self._builder.read(fn, ("record",))
        origin = self._builder.add(
            Kind.KEY_BY,
            id,
            (self._origin,),
            function,
            type=self._type,
            key_type=function.returns,
            partitioned=bool(partitioned),
            partitioner=None if isinstance(partitioned, bool) else partitioned,
            on_error=on_error,
        )
        return KeyedStream(self._builder, origin)

    def feed(self, loop: Feedback[T]) -> None:
        """Feed the records to *loop*, from `Pipeline.feedback`."""
        self._builder.feed(self._origin, loop)

    @_operator
    def sink(self, id: str, sink: Sink[T], *, on_error: DeadLetterTarget | None = None) -> None:
        """Write the records to *sink*. *on_error* gets those that cannot be encoded for it."""
        self._builder.add_sink(id, self._origin, sink, on_error)

    @property
    def _type(self) -> Any:
        return self._builder.type_of(self._origin)

    def _then(self, kind: Kind, id: str | None, function: Function, type_: Any, **rest: Any) -> Stream[Any]:
        return Stream(self._builder, self._builder.add(kind, id, (self._origin,), function, type=type_, **rest))


class Feedback(Stream[T]):
    """The stream of the records fed to a loop; see `Pipeline.feedback`."""


class KeyedStream(_Stream[T], Generic[K, T]):
    """A stream with a key for each record, for operators with state."""

    @overload
    def stateful_map(
        self,
        id: str,
        fn: Callable[[S | None, T], tuple[S | None, U]],
        *,
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
        ttl: Duration | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...
    @overload
    def stateful_map(
        self,
        id: str,
        fn: Callable[[], Callable[[S | None, T], tuple[S | None, U]]],
        *,
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
        ttl: Duration | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...
    @overload
    def stateful_map(
        self,
        id: str,
        fn: Callable[[S | None, T, SideEmit], tuple[S | None, U]],
        *,
        outputs: Sequence[Output[Any]],
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
        ttl: Duration | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...
    @overload
    def stateful_map(
        self,
        id: str,
        fn: Callable[[], Callable[[S | None, T, SideEmit], tuple[S | None, U]]],
        *,
        outputs: Sequence[Output[Any]],
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
        ttl: Duration | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...
    @_operator
    def stateful_map(
        self, id: str, fn: Any, *, outputs: Sequence[Output[Any]] = (), state: Any = None, output: Any = None,
        state_version: int = 1, migrations: Migrations | None = None, ttl: Duration | None = None,
        on_error: DeadLetterTarget | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """One output for each record: ``fn(state, record)`` returns the key's new state and the output.

        The state is None at a key's first record; a new state of None deletes the key. *state* is its type.
        Where the names and defaults of its fields cannot convert older states, raise *state_version* by one;
        *migrations* maps a version to the function that converts its states to the next one.

        With *ttl*, as "7d", a key's state is forgotten *ttl* after its last record, by event time: a record so long
        after it, or later, finds None. The source needs ``time=``, and a *disorder* of *ttl* at most.

        With *outputs* it is ``fn(state, record, emit)``, and ``emit(value, late)`` writes to one of them; `side`
        returns their streams.
        """
        function = self._builder.read(fn, _taken(outputs), yields="use stateful_flat_map")
        returned_state, returned = hints.pair(function.returns)
        state_type = self._builder.state_type(function, state, returned_state)
        kept = VersionedState(state_type, state_version, migrations or {})
        return self._keep(Kind.STATEFUL_MAP, id, function, kept, _given(output, returned), outputs, on_error, ttl=ttl)

    @overload
    def stateful_flat_map(
        self,
        id: str,
        fn: Callable[[S | None, T], tuple[S | None, Iterable[U]]],
        *,
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
        ttl: Duration | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...
    @overload
    def stateful_flat_map(
        self,
        id: str,
        fn: Callable[[], Callable[[S | None, T], tuple[S | None, Iterable[U]]]],
        *,
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
        ttl: Duration | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...
    @overload
    def stateful_flat_map(
        self,
        id: str,
        fn: Callable[[S | None, T, SideEmit], tuple[S | None, Iterable[U]]],
        *,
        outputs: Sequence[Output[Any]],
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
        ttl: Duration | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...
    @overload
    def stateful_flat_map(
        self,
        id: str,
        fn: Callable[[], Callable[[S | None, T, SideEmit], tuple[S | None, Iterable[U]]]],
        *,
        outputs: Sequence[Output[Any]],
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
        ttl: Duration | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[U]: ...
    @_operator
    def stateful_flat_map(
        self, id: str, fn: Any, *, outputs: Sequence[Output[Any]] = (), state: Any = None, output: Any = None,
        state_version: int = 1, migrations: Migrations | None = None, ttl: Duration | None = None,
        on_error: DeadLetterTarget | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """0 to n outputs for each record: ``fn(state, record)`` returns the key's new state and the outputs.

        *outputs*, *state*, *state_version*, *migrations* and *ttl* are as of `stateful_map`.
        """
        function = self._builder.read(fn, _taken(outputs), yields="return (state, outputs)")
        returned_state, returned = hints.pair(function.returns)
        state_type = self._builder.state_type(function, state, returned_state)
        kept = VersionedState(state_type, state_version, migrations or {})
        type_ = _given(output, hints.element(returned))
        return self._keep(Kind.STATEFUL_FLAT_MAP, id, function, kept, type_, outputs, on_error, ttl=ttl)

    @overload
    def reduce(
        self, id: str, fn: Callable[[T, T], T], *, ttl: Duration | None = ..., on_error: DeadLetterTarget | None = ...
    ) -> Stream[T]: ...
    @overload
    def reduce(
        self, id: str, fn: Callable[[], Callable[[T, T], T]], *, ttl: Duration | None = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Stream[T]: ...  # fmt: skip
    @_operator
    def reduce(
        self, id: str, fn: Any, *, ttl: Duration | None = None, on_error: DeadLetterTarget | None = None
    ) -> Stream[T]:
        """The key's records reduced so far, after each: the first one, then ``fn(reduced, record)``. *ttl* is that of
        `stateful_map`: after it, a record is the first one."""
        type_ = self._builder.type_of(self._origin)
        function = self._builder.read(fn, ("reduced", "record"))
        kept = VersionedState(hints.without_none(type_))
        return self._keep(Kind.REDUCE, id, function, kept, type_, on_error=on_error, ttl=ttl)

    @overload
    def process(
        self,
        id: str,
        handler: _Partial[Handler[K, T, S, U]],
        *,
        order: Order = ...,
        outputs: Sequence[Output[Any]] = ...,
        late: Output[T] | None = ...,
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
    ) -> Stream[U]: ...
    @overload
    def process(
        self,
        id: str,
        handler: Callable[[], Handler[K, T, S, U]],
        *,
        order: Order = ...,
        outputs: Sequence[Output[Any]] = ...,
        late: Output[T] | None = ...,
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
    ) -> Stream[U]: ...
    @_operator
    def process(
        self, id: str, handler: Any, *, order: Order = "time", outputs: Sequence[Output[Any]] = (),
        late: Output[T] | None = None, state: Any = None, output: Any = None, state_version: int = 1,
        migrations: Migrations | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """A handler with state and timers: a class with `on_record`, `on_time` and `on_clock`; see `Handler`.

        With ``order="time"`` records wait until no earlier one can come. Records and timers of event time then come by
        time, a record before a timer of its time, so that the results are a function of the topics; the source needs
        ``time=``. *late* gets the records that come too late for that; without it they are left out and counted.

        With ``order="arrival"`` no record waits. A timer goes off after all records that came before its watermark, so
        that results depend on the run; and so they do with timers of the clock, in any order.

        *outputs* and *output* are those of `split`, *state*, *state_version* and *migrations* those of
        `stateful_map`.
        """
        kept = VersionedState(state, state_version, migrations or {})
        return self._handle(
            Kind.KEYED_PROCESS, id, (self._origin,), handler, Handling(order), kept, output, outputs, late
        )

    @overload
    def co_process(
        self,
        id: str,
        right: KeyedStream[K, V],
        handler: _Partial[CoHandler[K, T, V, S, U]],
        *,
        order: Order = ...,
        outputs: Sequence[Output[Any]] = ...,
        late: Output[T] | None = ...,
        late_right: Output[V] | None = ...,
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
    ) -> Stream[U]: ...
    @overload
    def co_process(
        self,
        id: str,
        right: KeyedStream[K, V],
        handler: Callable[[], CoHandler[K, T, V, S, U]],
        *,
        order: Order = ...,
        outputs: Sequence[Output[Any]] = ...,
        late: Output[T] | None = ...,
        late_right: Output[V] | None = ...,
        state: TypeForm[S] | None = ...,
        output: TypeForm[U] | None = ...,
        state_version: int = ...,
        migrations: Migrations | None = ...,
    ) -> Stream[U]: ...
    @_operator
    def co_process(
        self, id: str, right: KeyedStream[K, V], handler: Any, *, order: Order = "time",
        outputs: Sequence[Output[Any]] = (), late: Output[T] | None = None, late_right: Output[V] | None = None,
        state: Any = None, output: Any = None, state_version: int = 1, migrations: Migrations | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """A handler of two streams with the same keys, which share the state and the timers of a key: a class with
        `on_left`, `on_right`, `on_time` and `on_clock`; see `CoHandler`.

        All else is as in `process`. With ``order="time"`` the records of both sides come by time; of one time, by
        topic, partition and offset, and of one record, which both sides have, the left one first. So the results are a
        function of the topics; both sources need ``time=``. *late* and *late_right* get the late records of each side.

        With ``order="arrival"`` no record waits, and the sides come in order of arrival: results depend on
        how fast either side is read. The order log has it, so that a replay or an audit repeats it.
        """
        inputs, _ = self._builder.both(Kind.CO_PROCESS, self._origin, right)
        kept = VersionedState(state, state_version, migrations or {})
        return self._handle(
            Kind.CO_PROCESS, id, inputs, handler, CoHandling(order), kept, output, outputs, late, late_right
        )

    def _handle(
        self, kind: Kind, id: str, inputs: tuple[Input, ...], handler: Any, timed: Handling, state: VersionedState,
        output: Any, outputs: Sequence[Output[Any]], late: Output[Any] | None, late_right: Output[Any] | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """Add the operator of *handler*; *state* and *output* are the types that the user gives, or None."""
        builder = self._builder
        read = read_handler(handler, timed.takers, caller().f_locals)
        for problem in read.call.problems:
            builder.problem(problem)
        state_type, records = builder.handler_state(read.takers, state.type), [*map(builder.type_of, inputs)]
        migrations = {
            version: migrated_entry(migrate, records, timed.order) for version, migrate in state.migrations.items()
        }
        kept = VersionedState(kept_entry(state_type, records, timed.order), state.version, migrations)
        timed = replace(timed, on_time="on_time" in read.methods, on_clock="on_clock" in read.methods)
        type_ = _given(output, read.emitted)
        return self._keep(
            kind, id, read.call, kept, type_, outputs, inputs=inputs, timed=timed, late=late, late_right=late_right
        )

    @_operator
    def in_order(self, id: str, *, late: Output[T] | None = None) -> Stream[T]:
        """The records of each key by time; of one time by topic, partition and offset.

        A record waits until no earlier one can come; then records of all keys come by time. An operator on
        the same key after it does not depend on the order of arrival. *late* gets the records that are not above their
        floor; without it they are left out and counted. The source needs ``time=``.
        """
        return self._ordered(Kind.IN_ORDER, id, InOrder(), late)

    @_operator
    def deduplicate(
        self, id: str, *, within: Duration, order: Order = "time", late: Output[T] | None = None
    ) -> Stream[T]:
        """The first record of each key, without others less than *within* after it, as "1h"; then the next first one.

        With ``order="time"`` the first is that by time; of one time, by topic, partition and offset. Records wait until
        no earlier one can come, and the results are a function of the topics. With ``order="arrival"`` a record comes
        at once, unless one less than *within* before or after it has come: which one is first then depends on the run.

        *late* gets the records that are not above their floor, whether they are duplicates or not; without it they are
        left out and counted. The source needs ``time=``.
        """
        return self._ordered(Kind.DEDUPLICATE, id, Deduplicate(within, order), late)

    @_operator
    def batches(self, id: str, count: int, *, timeout: Duration | None = None) -> Stream[list[T]]:
        """Lists of *count* records of each key, in order of arrival: ``batches("batches", 100, timeout="5s")``.

        With *timeout*, a list that is not full comes so long after its first record, by the worker's clock; without it,
        it waits. Which records are in a list depends on the run. A list has the event time of its last record, or the
        watermark.
        """
        record = self._builder.type_of(self._origin)
        batches = Batches("arrival", on_clock=timeout is not None, count=count, timeout=timeout)
        kept = VersionedState(kept_entry(batches.kept_state(record), (), "arrival"))
        type_ = UNKNOWN if record is UNKNOWN else list[record]  # type: ignore[valid-type]  # known here only
        return self._keep(Kind.BATCHES, id, batches.function, kept, type_, timed=batches)

    def _ordered(self, kind: Kind, id: str, timed: InOrder | Deduplicate, late: Output[T] | None) -> Stream[T]:
        record = self._builder.type_of(self._origin)
        origin = self._builder.add(
            kind, id, (self._origin,), type=record, timed=timed, state_type=timed.kept_state(record),
            key_type=self._builder.key_type(self._origin), **self._builder.late_sides((self._origin,), (), late),
        )  # fmt: skip
        return Stream(self._builder, origin)

    def window(self, window: Window) -> WindowedStream[K, T]:
        """The records of each key in windows of event time: ``Tumbling("10s")``, ``Hopping("1m", every="10s")`` or
        ``Session("30m")``. The source needs ``time=``."""
        return WindowedStream(self._builder, self._origin, window)

    @overload
    def join(
        self, id: str, right: KeyedStream[K, V], *, within: tuple[Duration, Duration], how: Literal["inner"] = ...,
        late: Output[T] | None = ..., late_right: Output[V] | None = ...,
    ) -> Stream[Joined[K, T, V]]: ...  # fmt: skip
    @overload
    def join(
        self, id: str, right: KeyedStream[K, V], *, within: tuple[Duration, Duration], how: Literal["left"],
        late: Output[T] | None = ..., late_right: Output[V] | None = ...,
    ) -> Stream[Joined[K, T, V | None]]: ...  # fmt: skip
    @overload
    def join(
        self, id: str, right: KeyedStream[K, V], *, within: tuple[Duration, Duration], how: Literal["right"],
        late: Output[T] | None = ..., late_right: Output[V] | None = ...,
    ) -> Stream[Joined[K, T | None, V]]: ...  # fmt: skip
    @overload
    def join(
        self, id: str, right: KeyedStream[K, V], *, within: tuple[Duration, Duration], how: Literal["full"],
        late: Output[T] | None = ..., late_right: Output[V] | None = ...,
    ) -> Stream[Joined[K, T | None, V | None]]: ...  # fmt: skip
    @overload
    def join(
        self, id: str, right: KeyedStream[K, V], *, window: Window, how: Literal["inner"] = ...,
        late: Output[T] | None = ..., late_right: Output[V] | None = ...,
    ) -> Stream[Windowed[K, Pair[T, V]]]: ...  # fmt: skip
    @overload
    def join(
        self, id: str, right: KeyedStream[K, V], *, window: Window, how: Literal["left"],
        late: Output[T] | None = ..., late_right: Output[V] | None = ...,
    ) -> Stream[Windowed[K, Pair[T, V | None]]]: ...  # fmt: skip
    @overload
    def join(
        self, id: str, right: KeyedStream[K, V], *, window: Window, how: Literal["right"],
        late: Output[T] | None = ..., late_right: Output[V] | None = ...,
    ) -> Stream[Windowed[K, Pair[T | None, V]]]: ...  # fmt: skip
    @overload
    def join(
        self, id: str, right: KeyedStream[K, V], *, window: Window, how: Literal["full"],
        late: Output[T] | None = ..., late_right: Output[V] | None = ...,
    ) -> Stream[Windowed[K, Pair[T | None, V | None]]]: ...  # fmt: skip
    @_operator
    def join(
        self, id: str, right: KeyedStream[K, V], *, within: tuple[Duration, Duration] | None = None,
        window: Window | None = None, how: How = "inner", late: Output[T] | None = None,
        late_right: Output[V] | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """Each pair of a record here and one of *right*, of the same key, whose times lie close together.

        *within* are the bounds of the right record's time less the left one's, both inclusive:
        ``within=("-5m", "1h")`` pairs an order with payments from 5 minutes before it to an hour after it. A pair comes
        as soon as both are there, and its time is the later of both. *how* "left", "right" or "full" also gives the
        records of that side, or of both, that have no partner: once none can come any more, which is the time of the
        result. *late* and *late_right* get the late records of either side, at or below the floor of their partition,
        which are not joined; without them they are left out and counted. Both sources need ``time=``.

        With *window* instead, as ``window=Tumbling("10s")``, a pair are two records of one window. Its pairs come once
        it is over, in the order of the left records, then of the right ones: each by time, topic, partition and offset.
        A record without a partner is one whose window has none of the other side. Late are the records that `window`
        would not take.
        """
        if (within is None) == (window is None):
            self._builder.problem(
                'join() needs within=, as within=("-5m", "1h"), or window=, as window=Tumbling("10s"), and not both'
            )
        join: IntervalJoin | WindowJoin
        if window is not None:
            join = WindowJoin(window, how)
        else:
            bounds: Any = ("0s", "0s") if within is None else within
            if not isinstance(bounds, tuple | list) or len(bounds) != 2:
                self._builder.problem(
                    f"within={bounds!r} must be two bounds of the right record's time less the left one's, as "
                    f'within=("-5m", "1h")'
                )
                bounds = "0s", "0s"
            join = IntervalJoin(bounds[0], bounds[1], how)
        return self._join(Kind.JOIN, id, right, join, late, late_right)

    @overload
    def as_of(
        self, id: str, versions: Versions[K, V], *, keep: Duration = ..., how: Literal["left"] = ...,
        late: Output[T] | None = ..., late_right: Output[Any] | None = ...,
    ) -> Stream[Joined[K, T, V | None]]: ...  # fmt: skip
    @overload
    def as_of(
        self, id: str, versions: Versions[K, V], *, keep: Duration = ..., how: Literal["inner"],
        late: Output[T] | None = ..., late_right: Output[Any] | None = ...,
    ) -> Stream[Joined[K, T, V]]: ...  # fmt: skip
    @_operator
    def as_of(
        self, id: str, versions: Versions[K, V], *, keep: Duration = "0s", how: Enrichment = "left",
        late: Output[T] | None = None, late_right: Output[Any] | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """Each record with the version of its key that counted at its time: the newest one at or before it.

        *versions* are a table or a keyed stream. Each of its records is a version, from its own time on; a deletion
        (None) is one, too. Of versions of one time, that with the highest partition and offset counts.
        A result has the time of its record, and comes once the watermark has reached that. *keep*, as "7d", says how
        late records of either side may be; later ones go to *late* and *late_right*. A late version counts for records
        above its floor. The newest version of each key is kept, and all of this time. *how* "inner" leaves out records
        without a version. Both sources need ``time=``; a table that rarely changes holds back the results for the
        ``idle=`` of its source.
        """
        return self._join(
            Kind.AS_OF, id, versions, AsOf(keep, how, changelog=isinstance(versions, Table)), late, late_right
        )

    @overload
    def lookup(
        self, id: str, versions: Versions[K, V], *, how: Literal["left"] = ..., ttl: Duration | None = ...
    ) -> Stream[Joined[K, T, V | None]]: ...
    @overload
    def lookup(
        self, id: str, versions: Versions[K, V], *, how: Literal["inner"], ttl: Duration | None = ...
    ) -> Stream[Joined[K, T, V]]: ...
    @_operator
    def lookup(
        self, id: str, versions: Versions[K, V], *, how: Enrichment = "left", ttl: Duration | None = None
    ) -> Stream[Any]:
        """Each record with the version of its key that came last: at once, in the order of arrival.

        Which version that is depends on the run: on how fast either side is read. `as_of` goes by event time instead.
        *how* "inner" leaves out records without a version. With *ttl*, as "7d", the version of a key is forgotten *ttl*
        after it, by event time: a record so long after it, or later, finds none. Both sources then need ``time=``.
        """
        lookup = Lookup(how, changelog=isinstance(versions, Table))
        return self._join(Kind.LOOKUP, id, versions, lookup, ttl=ttl)

    @overload
    def with_broadcast(
        self, id: str, table: Table[R, V], fn: _Partial[Callable[[T, Mapping[R, V]], U]], *,
        output: TypeForm[U] | None = ..., on_error: DeadLetterTarget | None = ...,
    ) -> KeyedStream[K, U]: ...  # fmt: skip
    @overload
    def with_broadcast(
        self, id: str, table: Table[R, V], fn: Callable[[T, Mapping[R, V]], U], *,
        output: TypeForm[U] | None = ..., on_error: DeadLetterTarget | None = ...,
    ) -> KeyedStream[K, U]: ...  # fmt: skip
    @overload
    def with_broadcast(
        self, id: str, table: Table[R, V], fn: Callable[[], Callable[[T, Mapping[R, V]], U]], *,
        output: TypeForm[U] | None = ..., on_error: DeadLetterTarget | None = ...,
    ) -> KeyedStream[K, U]: ...  # fmt: skip
    @_operator
    def with_broadcast(
        self, id: str, table: Table[Any, Any], fn: Any, *, output: Any = None, on_error: DeadLetterTarget | None = None
    ) -> KeyedStream[K, Any]:
        """Likewise as of `Stream.with_broadcast`; the outputs keep the keys of their records."""
        origin = self._builder.with_broadcast(id, self._origin, table, fn, output, on_error)
        return KeyedStream(self._builder, self._builder.keep_key(origin, self._origin))

    def _join(
        self, kind: Kind, id: str, right: Any, join: Join, late: Output[Any] | None = None,
        late_right: Output[Any] | None = None, ttl: Duration | None = None,
    ) -> Stream[Any]:  # fmt: skip
        return Stream(self._builder, self._builder.join(kind, id, self._origin, right, join, late, late_right, ttl))

    def _keep(
        self, kind: Kind, id: str, function: Function, kept: VersionedState, type_: Any,
        outputs: Sequence[Output[Any]] = (), on_error: DeadLetterTarget | None = None, *,
        inputs: tuple[Input, ...] = (), timed: Timed | None = None, late: Output[Any] | None = None,
        late_right: Output[Any] | None = None, ttl: Duration | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """Add an operator with state; *inputs* are this stream, unless given."""
        for problem in kept.problems:
            self._builder.problem(problem)
        if ttl is not None:
            kept, timed = kept_until(kept), Expiry(ttl)
        inputs = inputs or (self._origin,)
        origin = self._builder.add(
            kind, id, inputs, function, type=type_, state_type=kept.type, state_version=kept.version,
            migrations=kept.migrations, key_type=self._builder.key_type(self._origin),
            **self._builder.late_sides(inputs, outputs, late, late_right), on_error=on_error, timed=timed,
        )  # fmt: skip
        return Stream(self._builder, origin)


class Table(_Stream[V], Generic[K, V]):
    """The newest value by key of a changelog, its row; see `Pipeline.table`."""

    @overload
    def join_table(
        self, id: str, right: Table[F, U], *, by: Callable[[V], F | None], how: Literal["inner"] = ...,
        on_error: DeadLetterTarget | None = ...,
    ) -> Table[K, Joined[K, V, U]]: ...  # fmt: skip
    @overload
    def join_table(
        self, id: str, right: Table[F, U], *, by: Callable[[V], F | None], how: Literal["left"],
        on_error: DeadLetterTarget | None = ...,
    ) -> Table[K, Joined[K, V, U | None]]: ...  # fmt: skip
    @_operator
    def join_table(
        self, id: str, right: Table[Any, Any], *, by: Callable[[V], Any], how: Enrichment = "inner",
        on_error: DeadLetterTarget | None = None,
    ) -> Table[K, Any]:  # fmt: skip
        """The table of each row with the row of *right* whose key it refers to, under its own key:

        >>> from exactlyonce import KafkaSource
        >>> pipeline = Pipeline("orders-named")
        >>> names = pipeline.table("names", KafkaSource.records("customers", key=str, value=str))
        >>> orders = pipeline.table("orders", KafkaSource.records("orders", key=int, value=dict[str, str]))
        >>> named = orders.join_table("named", names, by=lambda order: order.get("customer"))

        ``by(row)`` is the foreign key; None: it refers to nothing. A change of either side gives the result anew, or
        deletes it. *how* "left" also has rows without a partner. Once all input is read, the table is the join of both
        tables; until then results of a row may be left out, and never come in another order than its versions.

        *on_error* gets changes of rows for which *by* raises: the join keeps the row as it was before.
        """
        return Table(self._builder, self._builder.join_tables(id, self._origin, right, by, how, on_error))

    def changes(self) -> Stream[Record[V | None]]:
        """Its changes, a `Record` with each key's new row, or None if that is deleted.

        A sink that knows keys, as `KafkaSink`, has the table then.
        """
        return Stream(self._builder, self._builder.changes(self._origin))


Versions = KeyedStream[K, V] | Table[Any, V]


class WindowedStream(_Stream[T], Generic[K, T]):
    """A keyed stream in windows. An operator on it gives one result for each window of a key, once the watermark has
    passed its end: no record of it can come any more, but late ones.

    With *early*, as "1m", a tumbling or hopping window has results before its end, too: at each multiple of *early*
    since 1970 in UTC, with the records of before that, if there are any since its last result. With *lateness*, as
    "10m", it takes late records whose floor is less than *lateness* after its end; each result that they change is
    given again, at multiples of *early*, or without it as soon as the watermark has passed their floor. Each result has
    the next `revision`, and all of them are a function of the topics. They may only go to sinks, through operators
    without state, which would count a window again with each. A sink that replaces rows by key and start ends with the
    last result.
    """

    def __init__(self, builder: Builder, origin: Input, window: Window) -> None:
        super().__init__(builder, origin)
        self._window = window

    @overload
    def aggregate(
        self, id: str, aggregate: Aggregate[T, V], *, late: Output[T] | None = ..., lateness: Duration | None = ...,
        early: Duration | None = ...,
    ) -> Stream[Windowed[K, V]]: ...  # fmt: skip
    @overload
    def aggregate(
        self, id: str, aggregate: type[V], *, late: Output[T] | None = ..., lateness: Duration | None = ...,
        early: Duration | None = ..., **fields: Aggregate[T, Any],
    ) -> Stream[Windowed[K, V]]: ...  # fmt: skip
    @overload
    def aggregate(
        self, id: str, aggregate: Mapping[str, Aggregate[T, Any]], *, late: Output[T] | None = ...,
        lateness: Duration | None = ..., early: Duration | None = ...,
    ) -> Stream[Windowed[K, Any]]: ...  # fmt: skip
    @_operator
    def aggregate(
        self, id: str, aggregate: Any, *, late: Output[T] | None = None, lateness: Duration | None = None,
        early: Duration | None = None, **fields: Any,
    ) -> Stream[Any]:  # fmt: skip
        """The aggregate of the records of each window, as ``Count()`` or ``Sum("amount")``.

        Several at once fill the fields of a class of yours, a dataclass, Struct, NamedTuple or attrs class:
        ``aggregate("totals", Totals, orders=Count(), spent=Sum("amount"))`` gives `Windowed[K, Totals]`. Without a
        class, ``{"orders": Count(), "spent": Sum("amount")}`` gives records with these fields, whose type is made here:
        `Any` for type checkers. Checkpoints fit both forms, with the same fields in the same order.

        *late* gets the records that no window takes any more, for `side` of the stream; without it they are left out
        and counted. *lateness* and *early* are as of `WindowedStream`.
        """

        def accumulate(record: Any, names: Mapping[str, Any]) -> Accumulator:
            if isinstance(aggregate, type) and issubclass(aggregate, Aggregate):
                raise Misuse(f"{aggregate.__name__} is a class: give one, as {aggregate.__name__}(...)")
            if not isinstance(aggregate, Aggregate) and not (isinstance(aggregate, Mapping) and aggregate):
                return several(id, aggregate, fields, record, names)
            if fields:
                raise Misuse(
                    f"{next(iter(fields))}= is a field of a class: give the class, as aggregate(id, Totals, ...)"
                )
            if isinstance(aggregate, Aggregate):
                return aggregate.named(record, names)
            return several(id, None, aggregate, record, names)

        window = revised(self._window, early, lateness)
        return Stream(self._builder, self._builder.window(id, self._origin, window, accumulate, late))

    @_operator
    def fold(
        self,
        id: str,
        new: Callable[[], S],
        add: Callable[[S, T], S],
        merge: Callable[[S, S], S] | None = None,
        *,
        state: TypeForm[S] | None = None,
        late: Output[T] | None = None,
        lateness: Duration | None = None,
        early: Duration | None = None,
        state_version: int = 1,
        migrations: Migrations | None = None,
    ) -> Stream[Windowed[K, S]]:
        """An accumulator of your own: ``new()`` makes it, ``add(accumulator, record)`` returns it with a record more.

        ``merge(one, other)`` returns that of two parts of a window; hopping windows, sessions, *early* and *lateness*
        need it. Parts come in any order: `merge` must be associative and commutative, and agree with `add`, or results
        depend on the run; `exactlyonce.testing.assert_merges` tries it. *state* is the type of the accumulator where no
        annotation tells it; *state_version* and *migrations* are those of `stateful_map`, the other options those of
        `aggregate`.
        """

        def accumulate(record: Any, names: Mapping[str, Any]) -> Accumulator:
            return folded(new, add, merge, state, names)

        window = revised(self._window, early, lateness)

        def of_kept(migrate: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def migrating(kept: Any) -> Any:
                return migrated(window, migrate, kept)

            migrating.__annotations__ = {"kept": kept_state(window, parameter_type(migrate))}
            return migrating

        kept = VersionedState(
            state, state_version, {version: of_kept(migrate) for version, migrate in (migrations or {}).items()}
        )
        for problem in kept.problems:
            self._builder.problem(problem)
        origin = self._builder.window(
            id, self._origin, window, accumulate, late, state_version=kept.version, migrations=kept.migrations
        )
        return Stream(self._builder, origin)

    @overload
    def apply(
        self, id: str, fn: Callable[[Windowed[K, list[T]]], Iterable[U]], *, output: TypeForm[U] | None = ...,
        late: Output[T] | None = ..., lateness: Duration | None = ..., early: Duration | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @overload
    def apply(
        self, id: str, fn: Callable[[], Callable[[Windowed[K, list[T]]], Iterable[U]]], *,
        output: TypeForm[U] | None = ..., late: Output[T] | None = ..., lateness: Duration | None = ...,
        early: Duration | None = ...,
    ) -> Stream[U]: ...  # fmt: skip
    @_operator
    def apply(
        self, id: str, fn: Any, *, output: Any = None, late: Output[T] | None = None, lateness: Duration | None = None,
        early: Duration | None = None,
    ) -> Stream[Any]:  # fmt: skip
        """What ``fn(window)`` returns or yields for each window: 0 to n outputs. *window* is a `Windowed`, whose value
        is the list of its records, by time; of one time by topic, partition and offset.

        All records of windows that are not over are part of the state, those of hopping windows once for each pane: an
        aggregate keeps less. *output* is the type of one output, the other options are as of `aggregate`.
        """
        function = self._builder.read(fn, ("window",), yields=None)
        window = revised(self._window, early, lateness)
        type_ = _given(output, function.item)
        return Stream(self._builder, self._builder.window(id, self._origin, window, held, late, function, type_))


_STREAMS = {KeyedStream: "keyed streams", WindowedStream: "windows"}


def _given(output: Any, declared: Any) -> Any:
    """The given type of an output, else the annotated one."""
    return declared if output is None else hints.known(output)


def _taken(outputs: Sequence[Output[Any]]) -> tuple[str, ...]:
    return ("state", "record", "emit") if outputs else ("state", "record")
