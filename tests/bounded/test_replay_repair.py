"""A decided transaction that was lost, and whose records are gone from the output, is computed again from the input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from losing import QUICK_ABORTS, Together, arguments, expire, lose_one
from running import Run, assert_copies, assert_totals, orders

from exactlyonce.checkpoint.committable import Committable
from exactlyonce.checkpoint.store import read_history
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]

Env = dict[str, str]


class Lossy:
    """`diamond` at parallelism 2, with a decided checkpoint of which one transaction of four is lost for good."""

    def __init__(self, kafka: KafkaCluster, name: str, fired: Path) -> None:
        self.kafka, self.name, self.fired = kafka, name, fired
        self.fed: list[tuple[str, str]] = []
        self.runs: list[Run] = []
        self.seen_before: Any = {}
        fired.mkdir(exist_ok=True)
        for topic in ("in", "more"):
            kafka.create_topic(f"{name}-{topic}", 3)

    def feed(self, count: int) -> None:
        """As many to each source."""
        for topic, first in (("in", 0), ("more", 100_000)):
            records = orders(count, first=first + len(self.fed))
            self.kafka.produce(f"{self.name}-{topic}", records)
            self.fed += records

    def life(self, killed_at: str = "", *more: str) -> Run:
        """A run to the end, or until it is killed."""
        armed = {"EXACTLYONCE_FAILPOINTS": f"{killed_at}=kill@1"} if killed_at else {}
        env = {**armed, "EXACTLYONCE_FAILPOINTS_FIRED": str(self.fired)}
        self.runs.append(Run(self.kafka.bootstrap_servers, *arguments(self.name, *more), env=env))
        return self.runs[-1]

    def lose(self, sink: str, topic: str) -> Committable:
        """One checkpoint completes; of the next, which is decided, subtask 1 of *sink* loses its transaction, and the
        output topic all its records."""
        self.feed(2000)
        first = self.life()
        assert first.wait() == 0, first.said
        self.feed(1500)
        assert self.life("coordinator-decided").wait() == -9
        manifest = read_history({"bootstrap.servers": self.kafka.bootstrap_servers}, self.name).unfinalized
        assert manifest is not None
        assert len(manifest.committables) == 4, "two sinks at parallelism 2"
        assert manifest.previous > 0, "the interval begins with state"
        lost = lose_one(self.kafka, self.name, (sink, 1))
        self.seen_before = {topic: expire(self.kafka, topic)}
        return lost

    def assert_exact(self) -> None:
        """Readers that have read on all the time have seen every update once, in order."""
        seen = Together(self.kafka, self.seen_before)
        assert_totals(seen, f"{self.name}-out", self.fed)
        assert_copies(seen, f"{self.name}-copies", self.fed)
        assert read_history({"bootstrap.servers": self.kafka.bootstrap_servers}, self.name).unfinalized is None


@pytest.fixture
def lossy(own_broker: Callable[..., KafkaCluster], topic_name: str, tmp_path: Path) -> Iterator[Lossy]:
    """On a broker of its own."""
    made = Lossy(own_broker(QUICK_ABORTS), topic_name, tmp_path / "fired")
    yield made
    for each in made.runs:
        if each.process.poll() is None:
            each.kill()


def test_one_of_four_is_lost_and_its_records_are_gone(lossy: Lossy) -> None:
    """The interval is replayed from the checkpoint before, along the order logs, and exactly what the lost subtask had
    written becomes visible, though the repair itself is killed: before it is recorded, and before it is committed."""
    lossy.lose("out", f"{lossy.name}-out")
    for killed in ("repair-replayed", "repair-recorded"):
        assert lossy.life(killed).wait() == -9
        assert (lossy.fired / killed).exists()
    last = lossy.life()
    assert last.wait() == 0, last.said
    lossy.assert_exact()


def test_a_replay_is_not_tried_where_the_user_wants_a_halt(lossy: Lossy) -> None:
    """--repair halt ends with what is affected and the choices; without it the next run repairs."""
    lost = lossy.lose("copies", f"{lossy.name}-copies")
    halted = lossy.life("", "--repair", "halt")
    assert halted.wait() == 6
    for part in ("sink 'copies' subtask 1", "compaction has removed them", "--repair halt", "--accept-loss"):
        assert part in halted.said
    last = lossy.life()
    assert last.wait() == 0, last.said
    assert "for output that was lost and cannot be copied" in last.said
    assert f"{lost.transactional_id} repaired" in last.said
    lossy.assert_exact()
