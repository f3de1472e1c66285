"""The topics of the simulated pipeline, as `connectors.kafka.topics.Topics` tells of real ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from exactlyonce.connectors.kafka.source import KafkaSource
from exactlyonce.connectors.kafka.topics import Topic
from exactlyonce.pipeline.errors import BrokerUnavailable, TopicError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.stream import Pipeline
from exactlyonce.sinks.kafka.sink import KafkaSink
from exactlyonce.testing.broker.interface import NoAnswer

if TYPE_CHECKING:
    from exactlyonce.testing.simulation import World

INPUT, INPUT_ID = "in", "in-id"


def _key(record: str) -> str:
    return record


def _count(count: int | None, record: str) -> tuple[int, str]:
    return (count or 0) + 1, record


@cache
def graph_of(sinks: tuple[str, ...]) -> LogicalGraph:
    """The pipeline whose worker is modelled in `simulated_worker`."""
    pipeline = Pipeline("p")
    totals = pipeline.source(INPUT, KafkaSource(INPUT, value=str)).key_by(_key).stateful_map("totals", _count)
    for sink in sinks:
        totals.sink(sink, KafkaSink(sink))
    return pipeline.build()


class SimulatedTopics:
    """Asks the broker model over the network; of the input it knows what the world has written by now."""

    def __init__(self, world: World) -> None:
        self.world = world

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        """Each topic by its name."""
        found = {name: self._described(name) for name in names}
        if missing := sorted(name for name, topic in found.items() if topic is None):
            raise TopicError(f"There is no topic {', '.join(missing)}.")
        return {name: topic for name, topic in found.items() if topic is not None}

    def seen_by_each(self, names: Iterable[str], timeout_ms: int | None = None) -> dict[str, tuple[Topic | None, ...]]:
        """Each topic by its name, as the one broker knows it."""
        return {name: (self._described(name),) for name in names}

    def start_offsets(self, name: str) -> dict[int, int]:
        """By partition of the input."""
        return dict.fromkeys(range(len(self.world.inputs)), 0)

    def end_offsets(self, name: str, *, committed: bool) -> dict[int, int]:
        """By partition of the input."""
        return {partition: self.world.available(partition) for partition in range(len(self.world.inputs))}

    def epoch_ends(self, name: str, epochs: Mapping[int, int]) -> dict[int, int]:
        """Nobody notes epochs here."""
        return {}

    def _described(self, name: str) -> Topic | None:
        topic_id = self._id(name)
        if topic_id is None:
            return None
        return Topic(name, topic_id, len(self.world.inputs) if name == INPUT else self.world.output_partitions)

    def _id(self, name: str) -> str | None:
        """Asked twice: most often only one request is lost."""
        if name == INPUT:
            return INPUT_ID
        for _ in range(2):
            try:
                found: str | None = self.world.ask("topic_id", name)
                return found
            except NoAnswer:
                continue
        raise BrokerUnavailable(f"Nobody tells what topic {name} is.")
