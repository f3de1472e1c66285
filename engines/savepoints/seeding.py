"""A savepoint made of rows: the state of operators that comes from a dict, a file, a query or a DataFrame.

Invariants: every row is checked against the types of its operator, and no key comes twice, before the first file of the
savepoint is written. Rows wait in local files by key group, so that memory holds one share of them. `exported` writes
the savepoint, so that a run restores it like any other.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import SAVEPOINT, SourceOffset
from exactlyonce.checkpoint.records.storage_url import storage_url
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.connectors.source import ReadsTopic
from exactlyonce.engines import processes
from exactlyonce.engines.configuration import absolute, client_from, read_file
from exactlyonce.engines.external_checks.input_topics import InputTopics
from exactlyonce.engines.external_checks.preflight import Inputs, by_kind
from exactlyonce.engines.savepoints.contents import KeptEntry, LoopEntry, Saved, SavedOperator, Savepoint, decoded
from exactlyonce.engines.savepoints.exported import ExportedSavepoint, export, require_place
from exactlyonce.engines.savepoints.frames import KEY, STATE, rows_of
from exactlyonce.engines.savepoints.restoring import state_type_of
from exactlyonce.engines.savepoints.retained import open_savepoint, require_savepoint
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError, RecordError, TopicError
from exactlyonce.pipeline.graph import Kind, LogicalGraph, Node
from exactlyonce.pipeline.keys import explained_key, key_groups, key_schema
from exactlyonce.pipeline.names import nearest, setting
from exactlyonce.pipeline.positions import BEGINNING, LATEST_OFFSET, START, Group, Position
from exactlyonce.pipeline.shape import Form, Shape, shape_of
from exactlyonce.state.errors import StateUnstorable

if TYPE_CHECKING:
    from exactlyonce.pipeline.stream import Pipeline

SHARES = 128
"""The shares of the key groups, one of which is in memory at a time."""
WAITING_ROWS, WAITING_BYTES = 20_000, 8 << 20
"""Rows that wait in memory for their files."""
_OFFSETS = BEGINNING.setting
SHOWN = frozenset({"operator", "checkpoint", "key_group", "version"})
"""Columns that `exactlyonce state show --json` adds, which say nothing about a row."""
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
_decode_line = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Unfit(Exception):
    """A row does not fit, with the reason."""


class _Kept(NamedTuple):
    """A checked row."""

    group: int
    number: int
    key: bytes
    """Canonical."""
    state: bytes
    """As in `KeptEntry`."""


_decode_chunk = msgspec.msgpack.Decoder(list[_Kept]).decode


class _Typed:
    """Reads values of one type, in JSON or plain."""

    def __init__(self, type_: Any) -> None:
        self._type = type_
        self._of_json = msgspec.json.Decoder(type_).decode
        has_records = type_ is not Any and b'"fields"' in msgspec.json.encode(key_schema(type_))
        self._shape = shape_of(type_) if has_records else None
        """The type, if values may have records, whose unknown fields would go unnoticed."""

    def read(self, value: Any) -> Any:
        """*value*, which is JSON, plain or of the type, as one of it; `Unfit` for a field that the type lacks."""
        is_json = _is_raw(value)
        typed = self._of_json(value) if is_json else msgspec.convert(value, self._type)
        if self._shape is not None and (is_json or isinstance(value, Mapping | list | tuple)):
            unread = _unread(self._shape, msgspec.json.decode(value) if is_json else value, "$")
            if (path := next(unread, None)) is not None:
                raise Unfit(f"the type has no field for `{path}`, which would be lost")
        return typed


class RowType:
    """What the rows of one operator have to be."""

    def __init__(self, node: Node) -> None:
        """Raises ConfigError for an operator whose state is more than a value by key."""
        if node.timed is not None:
            filling = "begin its sources before the oldest record that still counts"
            if node.kind is Kind.AS_OF:
                filling = "read its table from the beginning of a compacted topic"
            if node.kind is Kind.JOIN_TABLE:
                raise ConfigError(
                    f"Operator {node.id!r} is a step of join_table, which keep parts of both tables that belong "
                    f"together. Leave it out, and read both tables from the beginning: then they fill themselves."
                )
            raise ConfigError(
                f"Operator {node.id!r} keeps its state by time ({node.timed}), and a row of (key, state) has none. "
                f"Leave it out, and {filling}: then it fills itself."
            )
        self.node, self.state_type = node, state_type_of(node, drops_fields=False)
        self.type = node.kept.type
        self.key_type = Any if key_schema(node.key_type) is None else node.key_type
        self._key, self._state = _Typed(self.key_type), _Typed(self.type)

    def read(self, row: Any) -> tuple[bytes, bytes]:
        """The canonical key and the state in msgpack of *row*: a line of JSON, columns by name, or (key, state).

        Raises `Unfit`.
        """
        part = "the row"
        try:
            by_column = row
            if isinstance(row, bytes):
                by_column = _decode_line(row)
            if isinstance(by_column, Mapping):
                key, state = self._columns(by_column)
            else:
                key, state = _pair(row)
            part = KEY
            key = self._key.read(key)
            if key is None and self.key_type is Any:
                raise Unfit("it is null: no record has such a key, unless the function of key_by is annotated so")
            canonical = explained_key(key)
            part = STATE
            if (typed := self._state.read(state)) is None:
                raise Unfit("it is null: a key without state has no row")
            return canonical, self.state_type.pack([typed])[0]
        except StateUnstorable as error:
            why = str(error.__cause__ or error).replace("$[0]", "$")
        except (Unfit, msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            why = str(error)
        of = "" if part != STATE else f" of key {decoded(canonical)!r:.100}"
        raise Unfit(f"{part}{of}: {why}")

    def _columns(self, row: Mapping[str, Any]) -> tuple[Any, Any]:
        """The key, and the state: the column of that name, or all others as a record."""
        if KEY not in row:
            raise Unfit(f"it has no {KEY!r}, only {', '.join(map(repr, row)) or 'nothing'}")
        others = {name: value for name, value in row.items() if name != KEY}
        if STATE not in row:
            return row[KEY], msgspec.Raw(msgspec.json.encode(others)) if _is_raw(row[KEY]) else others
        if more := others.keys() - SHOWN - {STATE}:
            raise Unfit(f"beside {KEY!r} and {STATE!r} it has {min(more)!r}: the state is one of these columns, or all")
        if "version" in others and self.node.state_version != (version := _plain(others["version"])):
            raise Unfit(
                f"its state is of version {version}, and state_version of the operator is {self.node.state_version}"
            )
        return row[KEY], row[STATE]


def _is_raw(value: Any) -> bool:
    return isinstance(value, msgspec.Raw)


def _plain(value: Any) -> Any:
    return msgspec.json.decode(value) if _is_raw(value) else value


def _pair(row: Any) -> tuple[Any, Any]:
    try:
        key, state = row
    except (TypeError, ValueError):
        raise Unfit(f"it is {row!r:.100}: give (key, state), or columns by name") from None
    return key, state


def _unread(shape: Shape, value: Any, path: str) -> Iterator[str]:
    """The paths of fields in *value*, of plain values, that its type does not have."""
    match shape.form:
        case Form.UNION:
            records = [member for member in shape.parts if member.form is Form.RECORD]
            others = [member for member in shape.parts if member.form in (Form.LIST, Form.SET, Form.DICT)]
            members = records if isinstance(value, dict) and records else others
            if len(members) == 1:
                yield from _unread(members[0], value, path)
        case Form.RECORD if isinstance(value, dict):
            fields = {field.name: field.shape for field in shape.fields}
            for name, item in value.items():
                if name in fields:
                    yield from _unread(fields[name], item, f"{path}.{name}")
                elif fields and (shape.tag is None or name != shape.tag[0]):
                    yield f"{path}.{name}"
        case Form.DICT if isinstance(value, dict):
            for name, item in value.items():
                yield from _unread(shape.parts[1], item, f"{path}.{name}")
        case Form.LIST | Form.SET if isinstance(value, list | tuple):
            for number, item in enumerate(value):
                yield from _unread(shape.parts[0], item, f"{path}[{number}]")


class SeededOperator:
    """The checked rows of one operator, in files of *folder* by key group."""

    def __init__(self, type_: RowType, folder: Path, max_parallelism: int) -> None:
        self.type, self.count = type_, 0
        self._folder, self._max_parallelism = folder, max_parallelism
        self._shares = min(SHARES, max_parallelism)
        self._waiting: list[tuple[int, bytes, bytes]] = []

    def take(self, rows: Iterable[Any]) -> None:
        """Check all *rows*. Raises `RecordError`, with the number of the first row that does not fit."""
        size = 0
        for number, row in enumerate(rows, 1):
            try:
                key, state = self.type.read(row)
            except Unfit as error:
                raise self._refused(f"Row {number:,}", str(error)) from None
            self._waiting.append((number, key, state))
            size += len(key) + len(state)
            if len(self._waiting) >= WAITING_ROWS or size >= WAITING_BYTES:
                self._let_go()
                size = 0
        self._let_go()
        for share in range(self._shares):
            for one, other in pairwise(self._sorted(share)):
                if one.key == other.key:
                    rows_ = f"Rows {one.number:,} and {other.number:,}"
                    raise self._refused(rows_, f"both have key {decoded(one.key)!r:.100}")

    def _refused(self, where: str, why: str) -> RecordError:
        return RecordError(
            f"{where} for operator {self.type.node.id!r}: {why}. Nothing was written: correct the rows, and try again."
        )

    def _let_go(self) -> None:
        """Append the waiting rows to the files of their shares."""
        by_share: dict[int, list[_Kept]] = {}
        groups = key_groups([key for _, key, _ in self._waiting], self._max_parallelism) if self._waiting else []
        for group, (number, key, state) in zip(groups, self._waiting, strict=True):
            by_share.setdefault(self._share_of(group), []).append(_Kept(group, number, key, state))
        for share, kept in by_share.items():
            chunk = _encode(kept)
            with self._file(share).open("ab") as file:
                file.write(_LENGTH.pack(len(chunk)) + chunk)
        self.count += len(self._waiting)
        self._waiting = []

    def _share_of(self, group: int) -> int:
        return group * self._shares // self._max_parallelism

    def _file(self, share: int) -> Path:
        return self._folder / f"{self.type.node.id}-{share}"

    def _sorted(self, share: int) -> list[_Kept]:
        """The rows of *share*, by group and key."""
        kept: list[_Kept] = []
        if self._file(share).exists():
            with self._file(share).open("rb") as file:
                while head := file.read(_LENGTH.size):
                    kept += _decode_chunk(file.read(_LENGTH.unpack(head)[0]))
        return sorted(kept, key=itemgetter(0, 2, 1))

    def entries(self) -> Iterator[KeptEntry]:
        version = self.type.state_type.version
        for share in range(self._shares):
            for kept in self._sorted(share):
                yield KeptEntry(kept.group, kept.key, kept.state, version)

    @property
    def saved(self) -> SavedOperator:
        of = self.type.state_type
        return SavedOperator(self.type.node.id, of.schema, of.version, of.keys)


class SeededSavepoint:
    """A `Savepoint` of rows; what they do not give comes from *base*, another savepoint."""

    origin = ""
    """Nothing is restored from it before it is exported."""

    def __init__(
        self, graph: LogicalGraph, operators: Iterable[SeededOperator], cluster_id: str,
        offsets: tuple[SourceOffset, ...], base: Savepoint | None,
    ) -> None:  # fmt: skip
        self._base = base
        self._own = {seeded.type.node.id: seeded for seeded in operators}
        kept = [] if base is None else [saved for saved in base.saved.operators if saved.operator not in self._own]
        all_saved = [*kept, *(seeded.saved for seeded in self._own.values())]
        self.saved = Saved(
            pipeline=graph.pipeline_id, checkpoint=base.saved.checkpoint if base is not None else 0, kind=SAVEPOINT,
            cluster_id=cluster_id, completed_at_ms=SystemClock().now_ms(), fingerprint=graph.fingerprint(),
            max_parallelism=max_parallelism_of(graph, base), offsets=offsets,
            operators=tuple(sorted(all_saved, key=lambda saved: saved.operator)),
            loops=base.saved.loops if base is not None else (), outputs=base.saved.outputs if base is not None else (),
        )  # fmt: skip

    @property
    def name(self) -> str:
        return f"savepoint of {self.saved.pipeline} made of rows"

    def entries(self, operator: str) -> Iterator[KeptEntry]:
        if operator in self._own:
            return self._own[operator].entries()
        assert self._base is not None, "what the rows do not give is of the base"
        return self._base.entries(operator)

    def loop_entries(self, loop: str) -> Iterator[LoopEntry]:
        return self._base.loop_entries(loop) if self._base is not None else iter(())


def max_parallelism_of(graph: LogicalGraph, base: Savepoint | None) -> int:
    """A savepoint has the key groups of one `max_parallelism`."""
    return graph.max_parallelism if base is None else base.saved.max_parallelism


class Seeded(NamedTuple):
    """A savepoint that was written."""

    url: str
    rows: Mapping[str, int]
    """The number of rows by operator."""
    unchecked: tuple[str, ...]
    """The operators whose type of keys is unknown."""
    saved: Saved


def write_state(
    pipeline: Pipeline,
    states: Mapping[str, Iterable[Any]],
    *,
    to: str,
    offsets: str | datetime | Mapping[str, Mapping[int, int]] | None = None,
    base: str | int | None = None,
    bootstrap_servers: str | None = None,
    kafka: Mapping[str, str] | None = None,
    config: str | Path | None = None,
) -> str:
    """Write a savepoint whose state is given as rows, into a new folder below *to*; its URL, for ``from_savepoint=``.

    ``write_state(pipeline, {"totals": totals.items()}, to="/savepoints", offsets="group:legacy-app")``.

    - *states*: the rows by the id of their operator: pairs of (key, state), dicts with ``key`` and ``state``, or with
      ``key`` and the fields of the state; also a DataFrame of Spark with such columns, or with those of a read of
      state. Rows are read once, one by one.
      An operator without rows begins empty.
    - *to*: ``/folder``, ``hdfs://host:port/folder`` or ``s3://bucket/prefix``.
    - *offsets*: where the sources go on: ``"group:NAME"``, at the offsets of a consumer group without members;
      ``"earliest"``, ``"latest"``; an aware datetime, or a time as text; offsets by topic and partition, as
      ``{"orders": {0: 120, 1: -1}}``, where -1 is the latest; ``"start"``, where each source says itself. Without a
      *base* it has to be given.
    - *base*: a savepoint of the pipeline, its number or the URL of an exported one. All that *states* do not replace
      is taken from it, and its offsets, unless they are given.
    - *bootstrap_servers*, *kafka*, *config*: as of `Pipeline.run`.

    Raises `RecordError` for a row that does not fit the types of its operator, with its number and the field, and for a
    key that comes twice; `ConfigError` for an operator that the pipeline does not have, or keeps by time, for a
    pipeline that runs, and for one that has checkpoints, unless there is a *base*. Nothing is written then.

    Source: the State Processor API of Flink.
    """
    client = client_from({"bootstrap_servers": bootstrap_servers, "kafka": kafka}, read_file(config))
    client.check()
    return seed(pipeline.build(), states, client, to=to, offsets=offsets, base=base).url


def seed(
    graph: LogicalGraph, states: Mapping[str, Iterable[Any]], client: ClientConfig, *, to: str,
    offsets: str | datetime | Mapping[str, Mapping[int, int]] | None, base: str | int | None,
) -> Seeded:  # fmt: skip
    """See `write_state`."""
    types = [RowType(_node(graph, operator)) for operator in states]
    if not types:
        raise ConfigError("There are no rows: name an operator, and give its rows.")
    if offsets is None and base is None:
        raise ConfigError(f"{_OFFSETS} is not set: say where the sources go on, by one of: {BEGINNING}.")
    beginning = None if offsets is None else BEGINNING.read(offsets)
    url = storage_url(absolute(str(to)), setting("to"))
    require_place(url)
    with ExitStack() as stack:
        found = stack.enter_context(_base(client, graph, base))
        if beginning is not None:
            cluster_id, begun = _begun(client, graph, beginning)
        else:
            assert found is not None, "one of them is given"
            cluster_id, begun = found.saved.cluster_id, found.saved.offsets
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="exactlyonce-rows-")))
        operators = [SeededOperator(type_, folder, max_parallelism_of(graph, found)) for type_ in types]
        for operator in operators:
            operator.take(_rows(states[operator.type.node.id], operator.type))
        if isinstance(beginning, Group):
            _require_still(client, graph, beginning.name, begun)
        savepoint = SeededSavepoint(graph, operators, cluster_id, begun, found)
        counts = {operator.type.node.id: operator.count for operator in operators}
        unchecked = tuple(type_.node.id for type_ in types if type_.key_type is Any)
        return Seeded(export(savepoint, url), counts, unchecked, savepoint.saved)


def _rows(given: Iterable[Any], type_: RowType) -> Iterable[Any]:
    """The rows of an iterable, of a dict, or of a DataFrame."""
    if isinstance(given, Mapping):
        return given.items()
    return rows_of(given, type_.key_type, type_.type) if hasattr(given, "toLocalIterator") else given


def _node(graph: LogicalGraph, operator: str) -> Node:
    nodes = {node.id: node for node in graph.stateful}
    if operator in nodes:
        return nodes[operator]
    near = nearest(operator, nodes)
    meant = f" Did you mean {near!r}?" if near else ""
    there = f"It has {', '.join(map(repr, nodes))}." if nodes else "It keeps no state."
    raise ConfigError(f"{graph.pipeline_id} has no operator {operator!r} with state.{meant} {there}")


@contextmanager
def _base(client: ClientConfig, graph: LogicalGraph, base: str | int | None) -> Iterator[Savepoint | None]:
    """The savepoint that the rows complete. ConfigError for a pipeline that may not begin from one."""
    name, history = graph.pipeline_id, History(graph.pipeline_id)
    with suppress(TopicError):  # it has never run
        history = read_history(client, name)
    if (living := processes.living(history, SystemClock().now_ms())) is not None:
        raise ConfigError(
            f"{name} runs: process {living.process} on {living.host}. Nothing was written: stop it, by `exactlyonce "
            f"savepoint {name} --stop` say, whose savepoint can be the base."
        )
    if history.latest is not None and base is None:
        raise ConfigError(
            f"{name} has checkpoints, the newest is {history.latest.checkpoint}, and a savepoint that was written out "
            f"begins a pipeline that has none. Nothing was written: `exactlyonce reset {name}` first; or name the "
            f"savepoint whose other state and offsets are taken over by {setting('base')}; or give the pipeline "
            f"another name."
        )
    if base is None:
        yield None
    elif str(base).isdecimal():
        with open_savepoint(client, require_savepoint(history, int(base))) as in_topic:
            yield in_topic
    else:
        yield ExportedSavepoint.at(absolute(str(base)))


def _begun(client: ClientConfig, graph: LogicalGraph, beginning: Position) -> tuple[str, tuple[SourceOffset, ...]]:
    """The id of the cluster, and the first offset of each split of each source."""
    in_topics, others = by_kind(graph)
    if isinstance(beginning, Mapping):
        for id, source in in_topics.items():
            if source.place not in beginning:
                raise ConfigError(f"{_OFFSETS} has none of topic {source.place!r}, which source {id!r} reads.")
        if unread := beginning.keys() - {source.place for source in in_topics.values()}:
            raise ConfigError(f"{_OFFSETS} names topic {min(unread)!r}, which the pipeline does not read.")
    with (
        closing(Transactions(client)) as transactions,
        closing(Topics(client)) as own,
        closing(InputTopics(own)) as topics,
    ):
        described = topics.describe(in_topics.values())
        sources = {id: _placed(id, source, topics.of(source), beginning) for id, source in in_topics.items()}
        with closing(Inputs(topics, sources, described, {}, others)) as inputs:
            return transactions.cluster_id(), inputs.start_offsets()


def _require_still(client: ClientConfig, graph: LogicalGraph, group: str, begun: Iterable[SourceOffset]) -> None:
    """ConfigError if *group* has members now, or has committed since the sources have *begun* at its offsets: the rows
    were read meanwhile, and may count what comes after these."""
    noted = {(at.topic, at.partition): at.offset for at in begun}
    sources = by_kind(graph)[0]
    with closing(Topics(client)) as own, closing(InputTopics(own)) as topics:
        topics.describe(sources.values())
        for id, source in sources.items():
            for partition, offset in source.group_offsets(id, topics.of(source), group, BEGINNING.setting).items():
                if (before := noted.get((source.place, partition), 0)) != offset:
                    raise ConfigError(
                        f"Group {group!r} has moved from offset {before} of {source.place}[{partition}] to {offset} "
                        f"while the rows were read, so they may count records that would count again. Nothing was "
                        f"written: stop the program that commits for the group, and try again with its last rows."
                    )


def _placed(id: str, source: ReadsTopic, topics: Topics, beginning: Position) -> ReadsTopic:
    """*source*, which begins at *beginning*."""
    match beginning:
        case Group(group):
            offsets = source.group_offsets(id, topics, group, BEGINNING.setting)
            return source.starting(source.first_offsets(id, topics) | offsets)
        case Mapping():
            return source.starting(_within(topics, source, beginning[source.place]))
    return source if beginning == START else source.starting(beginning)


def _within(topics: Topics, source: ReadsTopic, given: Mapping[int, int]) -> dict[int, int]:
    """The *given* offsets, one of every partition, in the log; else a ConfigError."""
    first, end = topics.start_offsets(source.topic), topics.end_offsets(source.topic, committed=True)
    if missing := first.keys() - given.keys():
        raise ConfigError(f"{_OFFSETS}: every partition of {source.place} needs one; {min(missing)} has none.")
    if unknown := given.keys() - first.keys():
        raise ConfigError(f"{_OFFSETS}: {source.place} has no partition {min(unknown)}.")
    within = {partition: end[partition] if offset == LATEST_OFFSET else offset for partition, offset in given.items()}
    for partition, offset in within.items():
        if not first[partition] <= offset <= end[partition]:
            raise ConfigError(
                f"{_OFFSETS}: {source.place}[{partition}] has offsets {first[partition]} to {end[partition]}, and not "
                f"{offset}."
            )
    return within
