"""The topics of the simulated pipeline, as `connectors.kafka.topics.Topics` tells of real ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from exactlyonce.connectors.kafka.topics import Topic
from exactlyonce.pipeline.errors import BrokerUnavailable, TopicError
from exactlyonce.testing.broker.interface import NoAnswer

if TYPE_CHECKING:
    from world import World


class SimulatedTopics:
    """Asks the broker model over the network; ends of inputs are those of their logs."""

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
        """By partition of an input."""
        return dict.fromkeys(range(self.world.partitions_of(name)), 0)

    def end_offsets(self, name: str, *, committed: bool) -> dict[int, int]:
        """By partition of an input."""
        return {partition: self.world.end_of(name, partition) for partition in self.start_offsets(name)}

    def epoch_ends(self, name: str, epochs: Mapping[int, int]) -> dict[int, int]:
        """Nobody notes epochs here."""
        return {}

    def _described(self, name: str) -> Topic | None:
        topic_id = self._id(name)
        if topic_id is None:
            return None
        return Topic(name, topic_id, self.world.partitions_of(name))

    def _id(self, name: str) -> str | None:
        """Asked twice: most often only one request is lost."""
        for _ in range(2):
            try:
                found: str | None = self.world.ask("topic_id", name)
                return found
            except NoAnswer:
                continue
        raise BrokerUnavailable(f"Nobody tells what topic {name} is.")
