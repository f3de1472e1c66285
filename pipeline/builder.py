"""The nodes and mistakes of a pipeline under construction: a mistake is noted with its line, and building goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

from exactlyonce.pipeline import functions, hints, shape
from exactlyonce.pipeline.aggregates import Accumulator, Misuse
from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.dead_letters import DEAD_LETTERS, DeadLetterTarget
from exactlyonce.pipeline.durations import Duration, duration_ms
from exactlyonce.pipeline.errors import ConfigError, GraphError
from exactlyonce.pipeline.foreign_keys import (
    ROW_VERSIONS,
    Answer,
    Answering,
    Resolving,
    RowVersion,
    Subscribing,
    Subscription,
    key_of_row,
    key_of_subscription,
    row_type,
)
from exactlyonce.pipeline.foreign_keys import result_type as table_type
from exactlyonce.pipeline.functions import Function, Output
from exactlyonce.pipeline.graph import SIDED_KINDS, Input, Kind, LogicalGraph, Node
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.joins import Join, Lookup, result_type
from exactlyonce.pipeline.location import caller, location
from exactlyonce.pipeline.names import as_name, name_problem
from exactlyonce.pipeline.records import key_before, key_of_message
from exactlyonce.pipeline.sink import Routes, Sink
from exactlyonce.pipeline.source import PartSource, SharedSource, Source, time_of, time_problems
from exactlyonce.pipeline.timed import Expiry, entry_type
from exactlyonce.pipeline.validation import check
from exactlyonce.pipeline.windows import Revised, Window, Windowed, kept_state, window_problems


class Builder:
    """The graph of one pipeline under construction."""

    def __init__(self, pipeline_id: str, max_parallelism: int) -> None:
        self.pipeline_id = pipeline_id
        self.max_parallelism = max_parallelism
        self.location = location(caller())
        self._nodes: dict[str, Node] = {}
        self._anchors: dict[str, str] = {}
        """The nearest node above each node whose id the user gave."""
        self._problems: list[str] = []

    def build(self) -> LogicalGraph:
        graph = LogicalGraph(self.pipeline_id, self.max_parallelism, tuple(self._used()))
        problems = [*self._problems, *check(graph, self.location)]
        if problems:
            lines = "\n".join(f"  {problem}" for problem in problems)
            raise GraphError(f"pipeline {self.pipeline_id!r} cannot be built:\n{lines}")
        return graph

    def _used(self) -> Iterator[Node]:
        """All nodes, without the keys of tables of which only the changes are used."""
        reads = Counter(read for node in self._nodes.values() for read in node.inputs)
        for node in self._nodes.values():
            if node.fn is not key_of_message or reads[Input(node.id)] or reads[node.inputs[0]] == 1:
                yield node

    def problem(self, text: str) -> None:
        """Note a mistake at the user's line."""
        self._problems.append(f"{location(caller())}: {text}")

    def read(
        self, fn: Any, takes: tuple[str, ...], yields: str | None = "return a value", *, awaited: bool = False
    ) -> Function:
        """Read a user's function; *yields* is the remedy for a generator, None allows one. *awaited*: it is async."""
        function = functions.read(fn, takes, caller().f_locals, awaited=awaited)
        for problem in function.problems:
            self.problem(problem)
        if function.generator and yields:
            self.problem(f"{function.name} is a generator, which this operator cannot take: {yields}")
        return function

    def type_of(self, origin: Input) -> Any:
        node = self._nodes[origin.node]
        return node.type if origin.output is None else node.outputs.get(origin.output, UNKNOWN)

    def add(
        self,
        kind: Kind,
        id: str | None,
        inputs: tuple[Input, ...],
        function: Function | None = None,
        on_error: Any = None,
        **rest: Any,
    ) -> Input:
        """Add a node; without an id it gets one from its kind and the nearest id above that the user gave.

        *on_error* is the target of its dead letters, for which a sink is added; None: it has none.
        """
        anchor = self._anchors[inputs[0].node] if inputs else ""
        if id is None:
            node_id = self._derived(f"{kind.value}-after-{anchor}")
        else:
            node_id = anchor = self._claimed(id, kind)
        fn, factory = (function.call, function.factory) if function else (None, False)
        self._anchors[node_id] = anchor
        target = on_error if isinstance(on_error, DeadLetterTarget) else None
        self._nodes[node_id] = Node(
            node_id, kind, inputs, fn, factory, location=location(caller()), dead_letters=target, **rest
        )
        if target is not None:
            for problem in target.limits.problems():
                self.problem(problem)
            letters = self._derived(f"{node_id}-dead-letters")
            self.add(Kind.SINK, letters, (Input(node_id, DEAD_LETTERS),), sink=target.sink())
        elif on_error is not None:
            self.problem(f'on_error={on_error!r} must be DeadLetters("topic"), or be left out')
        return Input(node_id)

    def key_type(self, origin: Input) -> Any:
        return self._nodes[origin.node].key_type

    def add_source(self, id: str, source: Any) -> Input:
        if isinstance(source, PartSource):
            return self._add_part(id, source)
        if isinstance(source, Source) and source.parts:
            streams = [self.add_source(f"{id}-{as_name(topic)}", part) for topic, part in source.parts.items()]
            return self.add(Kind.UNION, id, tuple(streams), type=hints.known(source.type))
        if isinstance(source, Source):
            return self.add(
                Kind.SOURCE, id, (), type=hints.known(source.type), source=source, on_error=source.dead_letters
            )
        self.problem(f"expected a source, as KafkaSource(...), got {source!r}")
        return self.add(Kind.SOURCE, id, ())

    def _add_part(self, id: str, part: PartSource[Any]) -> Input:
        """Add a member to the source that reads it, whose node comes with the first one."""
        whole, type_ = part.whole(self.pipeline_id).with_member(id, part), hints.known(part.type)
        node = self._nodes.get(whole.id)
        if node is None:
            self.add(
                Kind.SOURCE, whole.id, (), source=whole, on_error=whole.dead_letters, type=hints.known(whole.type),
                outputs={id: type_},
            )  # fmt: skip
        elif isinstance(node.source, SharedSource) and node.source.dsn == whole.dsn:
            whole = node.source.with_member(id, part)
            outputs = {**node.outputs, id: type_}
            self._nodes[whole.id] = replace(node, source=whole, type=hints.known(whole.type), outputs=outputs)
        elif not isinstance(node.source, SharedSource):
            self._claimed(whole.id, Kind.SOURCE)  # which notes the problem
        else:
            self.problem(
                f"{whole.place} is of another database than at {node.location}: give this source its own slot="
            )
        return self.add(Kind.PART, id, (Input(whole.id, id),), type=type_, source=part)

    def add_table(self, id: str, source: Any) -> Input:
        """Add the source of a changelog, by the key of its records."""
        changelog = source.changelog() if isinstance(source, Source) else None
        if changelog is None:
            without = " without them" if isinstance(source, Source) else ""
            self.problem(
                f"a table needs a source of messages with their keys, as "
                f'KafkaSource.records("customers", key=str, value=Customer), or PostgresChanges, got '
                f"{_shown(source)}{without}"
            )
        origin = self.add_source(id, source if changelog is None else changelog)
        return self._as_table(origin, UNKNOWN if changelog is None else changelog.key_type)

    def _as_table(self, origin: Input, key_type: Any) -> Input:
        function = Function(call=key_of_message, name="the key of its messages")
        return self.add(Kind.KEY_BY, None, (origin,), function, type=self.type_of(origin), key_type=key_type)

    def changes(self, table: Input) -> Input:
        """The records of *table*, without its key."""
        return self._nodes[table.node].inputs[0]

    def join_tables(self, id: str, left: Input, right: Any, by: Any, how: str, on_error: Any) -> Input:
        """Add the steps of a join of tables, with their exchanges; see `pipeline.foreign_keys`."""
        function, key = self.read(by, ("row",)), self.key_type(left)
        other = self._table(
            right,
            "join_table()",
            "and both sides are tables: read the right one by pipeline.table(id, source); or use "
            "key_by(...).lookup(id, table), which joins the records of a stream",
        )
        foreign = hints.without_none(function.returns)
        declared = UNKNOWN if other is None else self.key_type(other)
        if UNKNOWN not in (foreign, declared) and {*hints.members(foreign)} != {*hints.members(declared)}:
            names = shape.type_name(foreign), shape.type_name(declared)
            self.problem(
                f"by= gives keys of type {names[0]}, and those of the right table are {names[1]}: none would ever be "
                f"equal. Convert the key in by=, or declare that of the table by its source's key="
            )
        other = left if other is None else other
        row, partner = (row_type(self.type_of(table)) for table in (left, other))
        versions = UNKNOWN if row is UNKNOWN else RowVersion[row]  # type: ignore[valid-type]  # known here only
        answers = UNKNOWN if partner is UNKNOWN else Answer[partner]  # type: ignore[valid-type]  # likewise
        subscribing, answering, resolving = Subscribing(declared), Answering(), Resolving(how)
        subscribe = self.add(
            Kind.JOIN_TABLE, f"{id}-subscribe", (left,), function, on_error, timed=subscribing, key_type=key,
            state_type=subscribing.kept_state(), type=Subscription, outputs={ROW_VERSIONS: versions},
        )  # fmt: skip
        subscriptions = self._sent(subscribe, key_of_subscription, foreign)
        answer = self.add(
            Kind.JOIN_TABLE, f"{id}-answer", (subscriptions, other), timed=answering, key_type=foreign,
            state_type=answering.kept_state(partner), type=answers,
        )  # fmt: skip
        inputs = self._sent(Input(subscribe.node, ROW_VERSIONS), key_of_row, key), self._sent(answer, key_of_row, key)
        result = self.add(
            Kind.JOIN_TABLE, id, inputs, timed=resolving, key_type=key, state_type=resolving.kept_state(row, partner),
            type=table_type(how, key, row, partner),
        )  # fmt: skip
        return self._as_table(result, key)

    def _sent(self, origin: Input, key: Callable[[Any], bytes], key_type: Any) -> Input:
        """Messages of a step, by *key*, which is canonical already."""
        function = Function(call=key, name="the key of its messages")
        return self.add(Kind.KEY_BY, None, (origin,), function, type=self.type_of(origin), key_type=key_type)

    def with_broadcast(self, id: str, origin: Input, table: Any, fn: Any, output: Any, on_error: Any) -> Input:
        """Add an operator that calls *fn* with each record of *origin* and all rows of *table*, and one that keeps
        these. *output* is the type of what comes out, or None."""
        if _is_stream(fn) and callable(table):
            self.problem("with_broadcast(id, table, fn) takes the table before the function, and got them swapped")
            table, fn = fn, table
        function = self.read(fn, ("record", "rows"))
        rows = self._table(table, "with_broadcast()", "and it takes a table, pipeline.table(id, source)")
        type_ = function.returns if output is None else hints.known(output)
        if rows is None:
            return self.add(Kind.MAP, id, (origin,), function, on_error, type=type_)
        row = row_type(self.type_of(rows))
        change = UNKNOWN if row is UNKNOWN else hints.union((row, type(None)))
        kept = self.add(
            Kind.BROADCAST, f"{id}-rows", (rows,), type=change, state_type=row, key_type=self.key_type(rows)
        )
        return self.add(Kind.WITH_BROADCAST, id, (origin, kept), function, on_error, type=type_)

    def keep_key(self, origin: Input, keyed: Input) -> Input:
        """Add the key of *keyed* to the records of *origin*, each made of one of *keyed*."""
        node, function = self._nodes[keyed.node], Function(call=key_before, name="the key that they have")
        return self.add(
            Kind.KEY_BY, None, (origin,), function, type=self.type_of(origin), key_type=node.key_type,
            partitioned=node.partitioned, partitioner=node.partitioner,
        )  # fmt: skip

    def _table(self, other: Any, method: str, remedy: str) -> Input | None:
        """The origin of another table of this pipeline; else None, with a problem and its *remedy*."""
        origin = self._keyed(other, f"{method} with", "a table", f", {remedy}")
        if origin is None or self._nodes[origin.node].fn is key_of_message:
            return origin
        self.problem(f"{method} with a keyed stream, {remedy}")
        return None

    def add_sink(self, id: str, origin: Input, sink: Any, on_error: Any) -> None:
        if not isinstance(sink, Sink):
            self.problem(f"expected a sink, as KafkaSink(...), got {sink!r}")
        elif sink.routes is not None:
            self._add_routes(id, origin, sink.routes, on_error)
            return
        self.add(Kind.SINK, id, (origin,), sink=sink if isinstance(sink, Sink) else None, on_error=on_error)

    def _add_routes(self, id: str, origin: Input, routes: Routes[Any], on_error: Any) -> None:
        """Add an operator that chooses a topic for each record, and a sink for each topic."""
        _, *others = routes.sinks
        type_ = self.type_of(origin)
        outputs = {topic: Output(as_name(topic), type_) for topic in others}

        def route(record: Any, emit: Any) -> None:
            output = outputs.get(routes.topic(record))
            emit(record) if output is None else emit(record, output)

        function = Function(call=route, name="topic=")
        sides = {output.name: type_ for output in outputs.values()}
        router = self.add(Kind.SPLIT, id, (origin,), function, on_error, type=type_, outputs=sides)
        for topic, sink in routes.sinks.items():
            output = outputs.get(topic)
            routed = router if output is None else Input(router.node, output.name)
            self.add_sink(f"{id}-{as_name(topic)}", routed, sink, on_error)

    def add_loop(self, id: str, type_: Any, pause: Duration) -> Input:
        """Add a feedback node; `feed` sets its input."""
        return self.add(Kind.FEEDBACK, id, (), type=hints.known(type_), pause_ms=self._duration_ms(pause, "pause"))

    def add_time(self, at: Any, disorder: Duration, id: str | None, origin: Input, on_error: Any) -> Input:
        """Add an operator that gives records the event time *at*, as `EventTime.at`."""
        type_ = self.type_of(origin)
        if isinstance(at, str):
            for problem in time_problems(at, type_):
                self.problem(f"with_time: {problem}")
            function = Function(call=time_of(at, type_), name=f"field {at!r}")
        else:
            function = self.read(at, ("record",))
        disorder_ms = self._duration_ms(disorder, "disorder")
        return self.add(Kind.WITH_TIME, id, (origin,), function, on_error, type=type_, disorder_ms=disorder_ms)

    def _duration_ms(self, duration: Duration, name: str) -> int:
        """The ms of *duration*, the argument *name*; 0, with a problem, if it is none."""
        try:
            return duration_ms(duration, name)
        except ConfigError as error:
            self.problem(str(error))
            return 0

    def feed(self, origin: Input, loop: Any) -> None:
        known = self.own(loop, "feed() of the records")
        node = self._nodes[known.node] if known is not None else None
        if known is None or node is None:
            return
        if node.kind is not Kind.FEEDBACK:
            self.problem("feed() takes a stream of pipeline.feedback(id, type), and this is another stream")
        elif node.inputs:
            self.problem(f"loop {node.id!r} already has an input: unite the streams by .union(...), and feed the union")
        else:
            fed = self.type_of(origin)
            foreign = [] if UNKNOWN in (fed, node.type) else set(hints.members(fed)) - set(hints.members(node.type))
            if foreign:
                names = shape.type_name(fed), shape.type_name(node.type)
                self.problem(f"loop {node.id!r} gets records of type {names[0]}, but is declared with {names[1]}")
            self._nodes[node.id] = replace(node, inputs=(origin,))

    def sides(self, outputs: Sequence[Output[Any]]) -> dict[str, Any]:
        """The types of side outputs, by name."""
        wrong = [output for output in outputs if not isinstance(output, Output)]
        for output in wrong:
            self.problem(f'expected an output, as Output("late", Order), got {output!r:.100}')
        outputs = [output for output in outputs if output not in wrong]
        for output in outputs:
            if problem := name_problem(output.name):
                self.problem(f"the name of an output, {problem}")
        sides = {output.name: hints.known(output.type) for output in outputs}
        if len(sides) < len(outputs):
            self.problem("two outputs have the same name")
        return sides

    def late_sides(
        self, inputs: Sequence[Input], outputs: Sequence[Output[Any]], late: Output[Any] | None,
        late_right: Output[Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The fields of a node that reads *inputs*, with side *outputs* and those for late records of each input."""
        given = [
            (origin, output) for origin, output in zip(inputs, (late, late_right), strict=False) if output is not None
        ]
        for origin, output in given:
            self._late(output, self.type_of(origin))
        sides = self.sides([*outputs, *(output for _, output in given)])
        return {
            "outputs": sides, "late": getattr(late, "name", None), "late_right": getattr(late_right, "name", None)
        }  # fmt: skip

    def side(self, origin: Input, output: Output[Any]) -> Input:
        node = self._nodes[origin.node]
        if node.kind not in SIDED_KINDS or origin.output is not None:
            names = ", ".join(sorted(kind.value for kind in SIDED_KINDS))
            self.problem(
                f"side() needs the main stream of an operator with outputs=[...] ({names}), and this is one of "
                f"{node.kind.value if origin.output is None else 'a side output'}"
            )
        elif output.name not in node.outputs:
            declare = (
                "late="
                if node.kind is Kind.WINDOW or (node.timed is not None and node.fn is None)
                else f"{node.kind.value}(..., outputs=[...])"
            )
            self.problem(f"{output.name!r} is not an output of {node.id!r}: declare it in {declare}")
        return Input(origin.node, output.name)

    def window(
        self, id: str, origin: Input, window: Any, accumulate: Callable[[Any, Mapping[str, Any]], Accumulator],
        late: Output[Any] | None, function: Function | None = None, type: Any = None, **rest: Any,
    ) -> Input:  # fmt: skip
        """Add a window operator; *accumulate* takes the type of records and the names at the user's line. *function*
        takes a result and gives outputs of *type*."""
        if not isinstance(window, Window | Revised):
            for problem in window_problems(window):
                self.problem(problem)
            window = None
        record, accumulator = self.type_of(origin), None
        try:
            accumulator = accumulate(record, caller().f_locals)
        except Misuse as misuse:
            self.problem(str(misuse))
        key_type = self.key_type(origin)
        value = Any if accumulator is None else accumulator.value
        key = Any if key_type is UNKNOWN else key_type
        windowed = Windowed[key, value]  # type: ignore[valid-type]  # a type that is made here
        return self.add(
            Kind.WINDOW, id, (origin,), function, timed=window, accumulator=accumulator, key_type=key_type,
            type=windowed if function is None else type,
            state_type=UNKNOWN if accumulator is None else kept_state(window, accumulator.state),
            **self.late_sides((origin,), (), late), **rest,
        )  # fmt: skip

    def join(
        self, kind: Kind, id: str, left: Input, right: Any, join: Join, late: Output[Any] | None,
        late_right: Output[Any] | None, ttl: Duration | None = None,
    ) -> Input:  # fmt: skip
        """Add the operator of *join*; *right* is a keyed stream or a table. *ttl* is for a lookup."""
        inputs, key = self.both(kind, left, right)
        record, version = self.type_of(inputs[0]), join.right(self.type_of(inputs[1]))
        is_known = UNKNOWN not in (record, version)
        state_type = join.kept_state(record, version) if is_known else UNKNOWN
        kept: dict[str, Any] = {"lookup": join} if isinstance(join, Lookup) else {"timed": join}
        if ttl is not None:
            state_type, kept = entry_type(state_type), kept | {"timed": Expiry(ttl)}
        return self.add(
            kind, id, inputs, None, None, **kept, key_type=key, state_type=state_type,
            type=result_type(join, Any if key is UNKNOWN else key, record, version) if is_known else UNKNOWN,
            **self.late_sides(inputs, (), late, late_right),
        )  # fmt: skip

    def both(self, kind: Kind, left: Input, right: Any) -> tuple[tuple[Input, Input], Any]:
        """The inputs of an operator of two sides, and the type of their keys; *right* is a keyed stream or a table."""
        other = self._keyed(right, f"{kind.value}() of")
        inputs = left, left if other is None else other
        known = [key for origin in inputs if (key := self.key_type(origin)) is not UNKNOWN]
        if len({frozenset(hints.members(key)) for key in known}) > 1:
            names = [*map(shape.type_name, known)]
            self.problem(
                f"the keys of the left side are {names[0]}, and those of the right one {names[1]}: none would ever be "
                f"equal. Convert one of them in its key_by, or declare the key of a table by its source's key="
            )
        return inputs, known[0] if known else UNKNOWN

    def _late(self, late: Output[Any], record: Any) -> None:
        """Check that late records, of type *record*, may go to *late*."""
        if not isinstance(late, Output):
            return  # a problem of `sides`
        declared = hints.known(late.type)
        if UNKNOWN not in (record, declared) and {*hints.members(declared)} != {*hints.members(record)}:
            names = shape.type_name(late.type), shape.type_name(record)
            self.problem(
                f"late records are {names[1]}, and {late.name!r} is declared with {names[0]}: give it {names[1]}"
            )

    def _keyed(
        self, other: Any, where: str, wanted: str = "a keyed stream", remedy: str = ": put .key_by(...) after it"
    ) -> Input | None:
        """The origin of another keyed stream of this pipeline; else None, with a problem. *remedy* is for a stream
        without keys."""
        builder: Any = getattr(other, "_builder", None)
        origin: Input | None = getattr(other, "_origin", None)
        if not isinstance(builder, Builder) or origin is None:
            self.problem(f"{where} {_shown(other)}, which is not {wanted}{_reading(other, wanted)}")
        elif builder is not self:
            self.problem(f"{where} a stream of another pipeline, {builder.pipeline_id!r}: streams do not cross")
        elif self._nodes[origin.node].kind is not Kind.KEY_BY:
            self.problem(f"{where} a stream without keys{remedy}")
        else:
            return origin
        return None

    def own(self, other: Any, where: str) -> Input | None:
        """The origin of another stream of this pipeline; else None, with a problem."""
        builder: Any = getattr(other, "_builder", None)
        origin: Input | None = getattr(other, "_origin", None)
        if builder is self and origin and self._nodes[origin.node].kind is not Kind.KEY_BY:
            return origin
        if builder is self:
            self.problem(f"{where} of a keyed stream: put it before .key_by(...)")
        elif isinstance(builder, Builder):
            self.problem(f"{where} of a stream of another pipeline, {builder.pipeline_id!r}: streams do not cross")
        else:
            self.problem(f"{where} of {other!r}, which is not a stream")
        return None

    def state_type(self, function: Function, given: Any, returned: Any) -> Any:
        """The type of a key's state, without None: as given, or by the function's annotations."""
        if isinstance(given, Codec):
            self.problem(
                f"state= is a codec, {given.name!r}, and a state is kept by its type, which may change by the names "
                f"and defaults of its fields, or by migrations: give the type"
            )
            return given.type
        if given is not None:
            return hints.without_none(hints.known(given))
        taken = function.parameters[0] if function.parameters else UNKNOWN
        if taken is not UNKNOWN and not hints.admits_none(taken):
            name = shape.type_name(taken)
            self.problem(f"{function.name} takes state {name}, but a new key has None: make it {name} | None")
        stated = {hints.without_none(type_) for type_ in (taken, returned)} - {UNKNOWN}
        if len(stated) > 1:
            names = " and ".join(sorted(map(shape.type_name, stated)))
            self.problem(f"{function.name} takes and returns state of two types, {names}: annotate one, or give state=")
        return stated.pop() if stated else UNKNOWN

    def handler_state(self, takers: Sequence[Function], given: Any) -> Any:
        """The type of a key's state, as given or by the annotations of *takers*, methods of a handler. NoneType: it has
        no state."""
        stated = set()
        for function in takers:
            has_none = given is None and function.parameters[:1] == (type(None),)
            stated.add(type(None) if has_none else self.state_type(function, given, function.returns))
        if len(stated := stated - {UNKNOWN}) > 1:
            names = " and ".join(sorted(map(shape.type_name, stated)))
            self.problem(f"{' and '.join(of.name for of in takers)} take state of two types, {names}: annotate one")
        return stated.pop() if stated else UNKNOWN

    def _derived(self, stem: str) -> str:
        number = 1
        while (node_id := stem if number == 1 else f"{stem}-{number}") in self._nodes:
            number += 1
        return node_id

    def _claimed(self, id: str, kind: Kind) -> str:
        """*id*, for a node of *kind*; or another that is free, with a problem."""
        if problem := name_problem(id):
            self.problem(f"id {problem}")
            return self._derived(str(id))
        if (first := self._nodes.get(id)) is None:
            return id
        stem = {Kind.SINK: "out", Kind.SOURCE: "in", Kind.PART: "in"}.get(kind, kind.value)
        free = self._derived(f"{id}-{stem}")
        self.problem(
            f"id {id!r} of this {kind.value} is that of the {first.kind.value} at {first.location}, and each of a "
            f"pipeline has its own: {free!r} is free"
        )
        return free


def _is_stream(value: Any) -> bool:
    return isinstance(getattr(value, "_builder", None), Builder)


def _shown(value: Any) -> str:
    """*value* in a problem: what a source or a function is, for it is long or tells nothing."""
    if isinstance(value, Source):
        return f"a {type(value).__name__}"
    return f"the function {value.__name__}" if isinstance(value, FunctionType) else f"{value!r:.200}"


def _reading(value: Any, wanted: str) -> str:
    """How *value* is read, if it is a source where *wanted* was expected."""
    if not isinstance(value, Source):
        return ""
    keyed = "" if wanted == "a table" else "pipeline.source(id, source).key_by(...), or "
    return f': read it by {keyed}pipeline.table("rules", KafkaSource.records(...))'
