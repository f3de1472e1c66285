"""The state of an operator as a DataFrame: a checkpoint in the topic by key groups, or an export by its files.

Invariants: the checkpoint is chosen once, and every task reads it or fails; tasks read disjoint key groups or files;
nothing is changed. A row has the value of its key, or an error names the key: states of an older version are shown as
today's only by the pipeline's own migrations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from exactlyonce.checkpoint.records.manifest import Manifest, OperatorSnapshot, TopicInfo
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_topic
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.savepoints.contents import KeptEntry, SavedFile, kept_state, portions, possible_keys
from exactlyonce.engines.savepoints.exported import DamagedSavepoint, ExportedSavepoint
from exactlyonce.engines.savepoints.retained import chosen_checkpoint, unless_expired
from exactlyonce.engines.spark.shown_errors import shown_alone
from exactlyonce.engines.spark.source.read_options import StateOptions
from exactlyonce.engines.spark.source.spark_types import SparkColumn, Unfit, as_json, column
from exactlyonce.pipeline.errors import ConfigError, RecordError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.keys import described_forms, key_group
from exactlyonce.pipeline.loading import Reference, load, load_reference
from exactlyonce.pipeline.windows import moment
from exactlyonce.state.state_type import StateType, joined

BATCH_ENTRIES = 10_000
BATCH_BYTES = 16 * 1024 * 1024
PART_BYTES = 16 * 1024 * 1024
"""The approximate size of blocks for one task, which holds their states in memory."""
Part = tuple[int, list[int]]
"""The work of a task: a subtask of the checkpoint, and key groups of its state."""


class Columns:
    """Makes rows. *key* is the schema of the keys; *written* and *version* are those of the newest states; *today* is
    the pipeline's type of them, if known; *timed*: each has a slot."""

    def __init__(
        self,
        operator: str,
        checkpoint: int,
        *,
        key: Any,
        written: Any,
        version: int,
        today: StateType[Any] | None,
        in_json: bool,
        timed: bool = False,
    ) -> None:
        self._operator, self._checkpoint = operator, checkpoint
        self._written, self._version, self._today = written, version, today
        shown = written if today is None else today.schema
        self._key, self._value = (as_json(schema) if in_json else column(schema) for schema in (key, shown))
        self.schema = (
            spark.StructType()
            .add("key", self._key.type)
            .add("value", self._value.type)
            .add("key_group", spark.IntegerType())
            .add("checkpoint", spark.LongType())
        )
        if timed:
            self.schema = self.schema.add("slot", spark.TimestampType())
        self._arrow = to_arrow_schema(self.schema, timezone="UTC")

    def batches(self, entries: Iterable[KeptEntry]) -> Iterator[pa.RecordBatch]:
        """The rows of *entries*. Raises `RecordError` for a value that its column cannot hold, `StateIncompatible`."""
        for portion in portions(entries, BATCH_BYTES, BATCH_ENTRIES):
            yield self._batch(portion)

    def _batch(self, entries: Sequence[KeptEntry]) -> pa.RecordBatch:
        keys, values = [], []
        for entry, state in zip(entries, self._states(entries), strict=True):
            key = msgspec.msgpack.decode(entry.key)
            keys.append(self._fitting(self._key, "key", key, key))
            values.append(self._fitting(self._value, "state", key, msgspec.msgpack.decode(state)))
        slots = [moment(entry.slot) for entry in entries if entry.slot is not None]
        columns = [keys, values, [entry.group for entry in entries], [self._checkpoint] * len(entries), slots]
        arrays = [pa.array(items, field.type) for items, field in zip(columns, self._arrow, strict=False)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _states(self, entries: Sequence[KeptEntry]) -> list[bytes]:
        """The states in msgpack, in the shown version."""
        shown: list[bytes] = []
        for version, own in groupby(entries, key=lambda entry: entry.version):
            states = [entry.state for entry in own]
            if self._today is not None:
                self._today.require_migrations(version, self._version)
                states = self._today.split(joined(states), self._written, version)
            elif version != self._version:
                raise RecordError(
                    f"Operator {self._operator!r} has states of version {version} that no record has changed since the "
                    f"pipeline went on with version {self._version}: what they mean now the pipeline's migrations say. "
                    f"Name it by the option types, as types=orders:pipeline."
                )
            shown += states
        return shown

    def _fitting(self, column: SparkColumn, name: str, key: Any, value: Any) -> Any:
        try:
            return column.value(value)
        except (Unfit, msgspec.ValidationError, TypeError, OverflowError) as error:
            other = ", or say what it is by keyType" if name == "key" else ""
            raise RecordError(
                f"Operator {self._operator!r}: the {name} of key {key!r} is no {column.type.simpleString()}: {error}. "
                f"Read it as text, by the option json=true{other}."
            ) from None


class Written(NamedTuple):
    """The newest states as they were written."""

    checkpoint: int
    schema: Any
    version: int
    keys: Any
    """The schema of the keys, or None."""
    timed: bool


@dataclass(frozen=True)
class InTopic:
    """A checkpoint of a pipeline in its topic."""

    written: Written
    manifest: Manifest
    """The manifest, stripped to the operator's state."""
    topic: TopicInfo
    parts: list[Part]

    def entries(self, options: StateOptions, part: Part) -> Iterator[KeptEntry]:
        config, (subtask, groups) = options.client(), part
        blocks = block_storage(config, self.topic, self.manifest.storage, stays_connected=True)
        with closing(blocks), unless_expired(config, self.manifest):
            yield from kept_state(self.manifest, options.operator, blocks).entries(groups, subtask=subtask)


@dataclass(frozen=True)
class Exported:
    """A savepoint in a folder."""

    written: Written
    origin: str
    parts: tuple[SavedFile, ...]

    def entries(self, options: StateOptions, file: SavedFile) -> Iterator[KeptEntry]:
        savepoint = ExportedSavepoint.at(options.url)
        if savepoint.origin != self.origin:
            raise DamagedSavepoint(
                f"{options.url} is another savepoint than when it was looked at: load the DataFrame again."
            )
        return savepoint.read(file)


@dataclass(frozen=True)
class StatePlan:
    """A planned read of state."""

    options: StateOptions
    source: InTopic | Exported
    key: Any
    """The shown schema of the keys."""
    reference: Reference | None
    """The pipeline that knows today's type of the states."""

    def columns(self) -> Columns:
        graph = load_reference(self.reference).build() if self.reference is not None else None
        written = self.source.written
        return Columns(
            self.options.operator,
            written.checkpoint,
            key=self.key,
            written=written.schema,
            version=written.version,
            today=_type_of(graph, self.options) if graph is not None else None,
            in_json=self.options.in_json,
            timed=written.timed,
        )


def plan_state(options: StateOptions) -> StatePlan:
    """Plan the read. Errors name the existing checkpoints or operators."""
    loaded = load(options.types, options.params) if options.types else None
    graph = loaded.pipeline.build() if loaded is not None else None
    source = _exported(options) if options.url else _in_topic(options)
    written, today = source.written, _type_of(graph, options) if graph is not None else None
    if today is not None and written.schema is not None:
        today.require_readable(written.schema, written.version)
        if gone := today.dropped(written.schema, written.version):
            raise ConfigError(
                f"The states have fields that the pipeline of types does not have: {', '.join(gone)}. Name the code "
                f"that wrote them; or leave types out, to read the states as they were written."
            )
    key = options.key_schema or (today.keys if today is not None else None) or written.keys or "any"
    return StatePlan(options, source, key, loaded.reference if loaded is not None else None)


def _in_topic(options: StateOptions) -> InTopic:
    config = options.client()
    config.check()
    topic, history = read_topic(config, options.pipeline)
    manifest = chosen_checkpoint(history, options.checkpoint, options.moment)
    _require_operator(options, [snapshot.operator for snapshot in manifest.operators])
    with closing(block_storage(config, topic, manifest.storage)) as blocks, unless_expired(config, manifest):
        kept = kept_state(manifest, options.operator, blocks)
        head, present, keys = kept.head(), kept.parts(), kept.keys()
    own = tuple(snapshot for snapshot in manifest.operators if snapshot.operator == options.operator)
    parts = parts_of(present, tasks_wanted(options, own[0]))
    if options.key is not None:
        groups = {key_group(key, manifest.max_parallelism) for key in possible_keys(options.key)}
        parts = [(subtask, sorted(groups.intersection(own_groups))) for subtask, own_groups in present.items()]
    stripped = msgspec.structs.replace(
        manifest, operators=own, order_logs=(), channel_logs=(), committables=(), staged=(), block_end_offsets=()
    )
    schema, version, times = (head.schema, head.version, head.times) if head is not None else (None, 1, None)
    written = Written(manifest.checkpoint, schema, version, keys, times is not None)
    return InTopic(written, stripped, topic, [part for part in parts if part[1]])


def tasks_wanted(options: StateOptions, snapshot: OperatorSnapshot) -> int:
    """The number of tasks to read *snapshot*."""
    return max(options.partitions_min, -(-snapshot.state_bytes // PART_BYTES))


def parts_of(present: Mapping[int, list[int]], wanted: int) -> list[Part]:
    """The key groups of each subtask in at least *wanted* shares, if there are as many groups.

    >>> parts_of({0: [0, 1, 2], 1: [3]}, 3)
    [(0, [0]), (0, [1]), (0, [2]), (1, [3])]
    """
    total = sum(map(len, present.values()))
    parts = []
    for subtask, groups in present.items():
        count = min(len(groups), -(-len(groups) * wanted // max(1, total)))
        cuts = [len(groups) * part // count for part in range(count + 1)] if count else []
        parts += [(subtask, groups[start:end]) for start, end in pairwise(cuts)]
    return parts


def _exported(options: StateOptions) -> Exported:
    savepoint = ExportedSavepoint.at(options.url)
    _require_operator(options, [operator.operator for operator in savepoint.saved.operators])
    operator = savepoint.operator(options.operator)
    keys = operator.keys or described_forms(operator.key_forms)
    timed = operator.times is not None
    written = Written(savepoint.saved.checkpoint, operator.schema, operator.version, keys, timed)
    return Exported(written, savepoint.origin, operator.files)


def _require_operator(options: StateOptions, known: Sequence[str]) -> None:
    if not options.operator:
        there = f"one of {', '.join(known)}" if known else "but there is none: the pipeline keeps no state there"
        raise ConfigError(f"operator is not set. Name the operator whose state is to be read, {there}.")


def _type_of(graph: LogicalGraph, options: StateOptions) -> StateType[Any]:
    nodes = {node.id: node for node in graph.stateful}
    if options.operator not in nodes:
        raise ConfigError(
            f"The pipeline that types names has no operator {options.operator!r} with state; it has "
            f"{', '.join(nodes) or 'none'}. Leave types out, to read the states as they were written."
        )
    node = nodes[options.operator]
    return StateType(node.id, node.kept)


class StateReader(DataSourceReader):
    def __init__(self, plan: StatePlan, schema: spark.StructType) -> None:
        ours = plan.columns().schema
        if schema != ours:
            raise ConfigError(f"The schema is {ours.simpleString()}. Leave .schema(...) out, and use select.")
        self._plan = plan

    @shown_alone
    def partitions(self) -> Sequence[InputPartition]:
        """One task for each part; Spark wants one even where there is nothing."""
        return [InputPartition(part) for part in self._plan.source.parts] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        options = self._plan.options
        if partition.value is None:
            return
        entries = self._plan.source.entries(options, partition.value)
        if options.key is not None:
            keys = possible_keys(options.key)
            entries = (entry for entry in entries if entry.key in keys)
        yield from self._plan.columns().batches(entries)
