"""The state of an operator as a DataFrame: a checkpoint in the topic by key groups, or an export by its files.

Invariants: the checkpoint is chosen once, where the DataFrame is made, and every task reads that one or fails; nothing
is changed and nobody disturbed. What one task reads, key groups or a file, no other does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSourceReader, InputPartition

from exactlyonce.checkpoint.records.manifest import Manifest, OperatorSnapshot
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.savepoints.contents import SavedFile
from exactlyonce.engines.savepoints.exported import DamagedSavepoint, ExportedSavepoint
from exactlyonce.engines.savepoints.kept_state import KeptEntry, kept_state, keys_meant
from exactlyonce.engines.savepoints.retained import chosen, unless_expired
from exactlyonce.engines.spark.source.state_columns import Columns
from exactlyonce.engines.spark.source.state_options import StateOptions
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.key_types import described_forms
from exactlyonce.pipeline.keys import key_group
from exactlyonce.pipeline.loading import Reference, load, load_reference
from exactlyonce.state.state_type import StateType

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

PART_BYTES = 16 * 1024 * 1024
"""Of blocks for one task, about: it holds their states in memory."""


Part = tuple[int, list[int]]
"""What a task reads: the subtask of the checkpoint, and key groups of which that has state."""


@dataclass(frozen=True)
class InTopic:
    """A checkpoint of a pipeline in its topic."""

    manifest: Manifest
    """Of which only the operator's state is left."""
    topic: TopicInfo
    parts: list[Part]

    def entries(self, options: StateOptions, part: Part) -> Iterator[KeptEntry]:
        """The states of a *part*."""
        config, (subtask, groups) = options.client(), part
        blocks = block_storage(config, self.topic, self.manifest.storage, stays_connected=True)
        with closing(blocks), unless_expired(config, self.manifest):
            yield from kept_state(self.manifest, options.operator, blocks).entries(groups, subtask=subtask)


@dataclass(frozen=True)
class Exported:
    """A savepoint in a folder."""

    origin: str
    files: tuple[SavedFile, ...]

    @property
    def parts(self) -> tuple[SavedFile, ...]:
        """A file for each task."""
        return self.files

    def entries(self, options: StateOptions, file: SavedFile) -> Iterator[KeptEntry]:
        """The states in *file*."""
        savepoint = ExportedSavepoint.at(options.url)
        if savepoint.origin != self.origin:
            raise DamagedSavepoint(
                f"{options.url} is another savepoint than when it was looked at: load the DataFrame again."
            )
        return savepoint.read(file)


@dataclass(frozen=True)
class StatePlan:
    """What is read, all of it known: how the states lie there, and what they are shown as."""

    options: StateOptions
    source: InTopic | Exported
    checkpoint: int
    key: Any
    """The schema of the keys."""
    written: Any
    version: int
    reference: Reference | None
    """Of the pipeline that knows today's type of the states."""

    def columns(self) -> Columns:
        """What makes rows."""
        graph = load_reference(self.reference).build() if self.reference is not None else None
        return Columns(
            self.options.operator,
            self.checkpoint,
            key=self.key,
            written=self.written,
            version=self.version,
            today=_type_of(graph, self.options) if graph is not None else None,
            in_json=self.options.in_json,
        )


def plan_state(options: StateOptions) -> StatePlan:
    """Look at what there is. Raises what stands in the way, with what there is instead."""
    loaded = load(options.types, options.params) if options.types else None
    graph = loaded.pipeline.build() if loaded is not None else None
    source, checkpoint, written, version, keys = _exported(options) if options.url else _in_topic(options)
    today = _type_of(graph, options) if graph is not None else None
    if today is not None and written is not None:
        today.require_readable(written, version)
        if gone := today.dropped(written, version):
            raise ConfigError(
                f"The states have fields that the pipeline of types does not have: {', '.join(gone)}. Name the code "
                f"that wrote them; or leave types out, to read the states as they were written."
            )
    return StatePlan(
        options=options,
        source=source,
        checkpoint=checkpoint,
        key=options.key_schema or (today.keys if today is not None else None) or keys or "any",
        written=written,
        version=version,
        reference=loaded.reference if loaded is not None else None,
    )


Found = tuple[InTopic | Exported, int, Any, int, Any]
"""Where the states are, at which checkpoint, their schema and their version, and the schema of the keys, or None."""


def _in_topic(options: StateOptions) -> Found:
    config = options.client()
    config.check()
    history = read_history(config.confluent(), options.pipeline)
    topic = find_topic(config.confluent(), options.pipeline)
    manifest = chosen(history, options.checkpoint)
    _require_operator(options, [each.operator for each in manifest.operators])
    with closing(block_storage(config, topic, manifest.storage)) as blocks, unless_expired(config, manifest):
        kept = kept_state(manifest, options.operator, blocks)
        head, present, keys = kept.head(), kept.parts(), kept.keys()
    own = tuple(each for each in manifest.operators if each.operator == options.operator)
    parts = parts_of(present, tasks_wanted(options, own[0]))
    if options.key is not None:
        groups = {key_group(key, manifest.max_parallelism) for key in keys_meant(options.key)}
        parts = [(subtask, sorted(groups.intersection(some))) for subtask, some in present.items()]
    stripped = msgspec.structs.replace(
        manifest, operators=own, order_logs=(), channel_logs=(), committables=(), staged=(), block_end_offsets=()
    )
    found = (head.schema, head.version) if head is not None else (None, 1)
    return InTopic(stripped, topic, [each for each in parts if each[1]]), manifest.checkpoint, *found, keys


def tasks_wanted(options: StateOptions, snapshot: OperatorSnapshot) -> int:
    """How many tasks are to read *snapshot*."""
    return max(options.partitions_min, -(-snapshot.state_bytes // PART_BYTES))


def parts_of(present: Mapping[int, list[int]], wanted: int) -> list[Part]:
    """The key groups of each subtask in shares, so that there are *wanted* at least, if there are as many groups.

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


def _exported(options: StateOptions) -> Found:
    savepoint = ExportedSavepoint.at(options.url)
    _require_operator(options, [each.operator for each in savepoint.saved.operators])
    operator = savepoint.operator(options.operator)
    found = Exported(savepoint.origin, operator.files)
    keys = operator.keys or described_forms(operator.key_forms)
    return found, savepoint.saved.checkpoint, operator.schema, operator.version, keys


def _require_operator(options: StateOptions, known: Sequence[str]) -> None:
    if not options.operator:
        there = f"one of {', '.join(known)}" if known else "but there is none: the pipeline keeps no state there"
        raise ConfigError(f"operator is not set. Name the operator whose state is to be read, {there}.")


def _type_of(graph: LogicalGraph, options: StateOptions) -> StateType[Any]:
    node = next((each for each in graph.stateful if each.id == options.operator), None)
    if node is None:
        known = ", ".join(each.id for each in graph.stateful) or "none"
        raise ConfigError(
            f"The pipeline that types names has no operator {options.operator!r} with state; it has {known}. Leave "
            f"types out, to read the states as they were written."
        )
    return StateType(node.id, node.kept)


class StateReader(DataSourceReader):
    """A batch read of state."""

    def __init__(self, plan: StatePlan, schema: StructType) -> None:
        ours = plan.columns().schema
        if schema != ours:
            raise ConfigError(f"The schema is {ours.simpleString()}. Leave .schema(...) out, and use select.")
        self._plan = plan

    def partitions(self) -> Sequence[InputPartition]:
        """One task for some key groups each, or for a file; Spark wants one where there is nothing as well."""
        return [InputPartition(each) for each in self._plan.source.parts] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        options = self._plan.options
        if partition.value is None:
            return
        entries = self._plan.source.entries(options, partition.value)
        if options.key is not None:
            keys = keys_meant(options.key)
            entries = (each for each in entries if each.key in keys)
        yield from self._plan.columns().batches(entries)
