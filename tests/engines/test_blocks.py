"""State in the checkpoint topic: written, restored in part at another parallelism, and what a manifest stands on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from blank_manifest import blank_manifest

from exactlyonce import Pipeline
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, OperatorSnapshot
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.connectors import KafkaSource
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockReader, BlockWriter
from exactlyonce.connectors.kafka.checkpoint_topic.topic import prepare_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import references
from exactlyonce.engines.plan import plan
from exactlyonce.engines.runtime.assembler import Assembler
from exactlyonce.engines.runtime.blocks import SubtaskBlocks, WorkerBlocks
from exactlyonce.engines.runtime.steps import finish
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.sinks import KafkaSink
from exactlyonce.state.backend import Table
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.key_groups import group_range
from exactlyonce.testing.cluster import LIMIT_S

KEYS = [canonical_key(number) for number in range(200_000)]


def _add(total: int | None, amount: int) -> tuple[int, int]:
    total = (total or 0) + amount
    return total, total


class CountingReader(BlockReader):
    def __init__(self, config: dict[str, Any], topic: TopicInfo) -> None:
        super().__init__(config, topic)
        self.read: list[BlockRef] = []

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        for ref, block in super().fetch(refs):
            self.read.append(ref)
            yield ref, block


class States:
    """The state of an operator, of which this test plays all subtasks."""

    def __init__(self, servers: str, pipeline: str) -> None:
        self.pipeline = Pipeline(pipeline)
        source = self.pipeline.source("in", KafkaSource("in", value=int)).key_by(lambda each: each)
        source.stateful_map("totals", _add).sink("out", KafkaSink("out"))
        self.graph = self.pipeline.build()
        self.config: dict[str, Any] = {"bootstrap.servers": servers}
        self.topic = prepare_topic(ClientConfig(self.config), pipeline)

    def manifest(self, checkpoint: int, operators: tuple[OperatorSnapshot, ...] = ()) -> Manifest:
        return blank_manifest(
            pipeline=self.graph.pipeline_id, checkpoint=checkpoint, max_parallelism=self.graph.max_parallelism,
            block_partitions=self.topic.partitions, operators=operators,
        )  # fmt: skip

    def tables(
        self, manifest: Manifest, parallelism: int, touched: Sequence[set[int] | None]
    ) -> tuple[list[Table[Any]], list[BlockRef]]:
        reader = CountingReader(self.config, self.topic)
        node = self.graph.node("totals")
        tables = [
            Assembler(plan(self.graph, parallelism), each, manifest, reader, HashMapBackend()).table(
                node, touched[each]
            )
            for each in range(parallelism)
        ]  # fmt: skip
        return tables, reader.read

    def write(self, checkpoint: int, base: int, tables: Sequence[Table[Any]]) -> tuple[Manifest, set[BlockRef]]:
        writer, indexes, acknowledged = BlockWriter.connected(self.config, self.topic, 1, 0), [], set()
        for subtask, table in enumerate(tables):
            blocks = SubtaskBlocks(WorkerBlocks(writer), checkpoint, "totals", subtask)
            snapshot = table.freeze(checkpoint, base)
            refs = finish(blocks.state("totals", snapshot.encode()), lambda: writer.wait(LIMIT_S))
            parts = blocks.index("totals", snapshot.seal(refs))
            indexes.append(tuple(finish(blocks.durable(parts), lambda: writer.wait(LIMIT_S))))
            acknowledged |= {*indexes[-1], *snapshot.chain.refs}
        operator = OperatorSnapshot("totals", len(tables), 1, tuple(indexes))
        return self.manifest(checkpoint, (operator,)), acknowledged


def _states(tables: Iterable[Table[Any]]) -> dict[bytes, int]:
    return {key: state for table in tables for key, state in table.items()}


@pytest.mark.exhaustive
def test_what_is_carried_over_is_not_read_and_stays(kafka: Any, topic_name: str) -> None:
    states = States(kafka.bootstrap_servers, topic_name)
    tables, _ = states.tables(states.manifest(0), 2, [None, None])
    for subtask, table in enumerate(tables):
        own = [key for key in KEYS if key_group(key, 128) in group_range(subtask, 2, 128)]
        table.apply(_add, own, [1] * len(own))
    first, written = states.write(1, 0, tables)
    assert references(first, BlockReader(states.config, states.topic)) == written

    touched = [{group_range(subtask, 3, 128)[2]} for subtask in range(3)]
    tables, read = states.tables(first, 3, touched)
    images = {ref for ref in written if ref not in {ref for index in first.operators[0].index for ref in index}}
    assert len(set(read) & images) <= 3 < len(images)
    assert len(set(read) - images) == 2
    assert len(read) == 3 + 4, "an index is read by those whose key groups it has"
    hot = [next(key for key in KEYS if {key_group(key, 128)} == some) for some in touched]
    for key, table in zip(hot, tables, strict=True):
        table.apply(_add, [key], [10])
    second, acknowledged = states.write(2, 1, tables)
    stands_on = references(second, BlockReader(states.config, states.topic))
    assert stands_on == acknowledged
    assert images <= stands_on

    tables, read = states.tables(second, 1, [None])
    assert set(read) == stands_on
    assert _states(tables) == dict.fromkeys(KEYS, 1) | dict.fromkeys(hot, 11)
