"""Event time handed from Spark to runs and back, each of them killed: results are those of a fold of the topics."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from drivers import Driver
from running import HERE, Job, visible

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.exhaustive(matrix=True)]
BEGIN_MS = 1_790_000_000_000
PARTITIONS, STEP_MS = {"in": 3, "right": 2}, {"in": 30, "right": 75}
BEHIND = [0, 0, 300, 1_900, 2_000, 2_001, 6_000, 15_000]
"""How far in ms an event may lie behind the others."""
OUTPUTS = ("counts", "pairs", "sorted", "once")
LATE = ("counts", "pairs", "rights", "sorted", "once")


class Taken(NamedTuple):
    at: int
    partition: int
    offset: int
    id: int


class Handed:
    def __init__(self, run: Any, kafka: KafkaCluster, name: str, folder: Path) -> None:
        self.job = Job(run, kafka, name, "handed_pipelines:handed", partitions=PARTITIONS["in"])
        self.kafka, self.name, self.folder = kafka, name, folder
        self._fed = {"in": 0, "right": 0}
        kafka.create_topic(f"{name}-right", PARTITIONS["right"])
        for topic in (*OUTPUTS, *(f"late-{id}" for id in LATE)):
            kafka.create_topic(f"{name}-{topic}", 2)

    def feed(self, count: int) -> None:
        """*count* more events of the left, two fifths as many of the right: users are in all partitions."""
        for side, share in (("in", count), ("right", count * 2 // 5)):
            chance, first = random.Random(f"{side} {self._fed[side]}"), self._fed[side]
            events: dict[int, list[tuple[str, str]]] = defaultdict(list)
            for id in range(first, first + share):
                at, user = BEGIN_MS + id * STEP_MS[side] - chance.choice(BEHIND), f"u{chance.randrange(9)}"
                value = json.dumps({"id": id, "user": user, "at": at})
                events[chance.randrange(PARTITIONS[side])].append((user, value))
            self._produce(side, events)
            self._fed[side] += share

    def end(self) -> None:
        """An event in each partition long after all others, by which every result is due."""
        value = json.dumps({"id": -1, "user": "end", "at": BEGIN_MS + 10**11})
        for side, partitions in PARTITIONS.items():
            self._produce(side, {partition: [("end", value)] for partition in range(partitions)})

    def _produce(self, side: str, events: dict[int, list[tuple[str, str]]]) -> None:
        for partition, records in events.items():
            self.kafka.produce(f"{self.name}-{side}", records, partition)

    def on_spark(self, command: str, *options: str, armed: str, code: int = 0) -> None:
        """A backfill or a catch-up by a driver of its own, whose processes meet the failpoints *armed*."""
        line = ["-m", "exactlyonce.cli.main", command, "handed_pipelines:handed", "--param", f"name={self.name}"]
        line += ["--bootstrap-servers", self.kafka.bootstrap_servers, "--staging", str(self.folder / "staging")]
        line += ["--master", "local[2,4]", "--chunk-records", "300", "--parallelism", "2", *options]
        with Driver(self.folder, armed, *line, cwd=HERE) as driver:
            driver.end(code)
        for failpoint in armed.split(","):
            assert (driver.fired / failpoint.partition("=")[0]).exists(), driver.said()

    def _events(self, side: str) -> Iterator[tuple[str, Taken, int | None]]:
        """(user, event, floor) in the order of each partition; the last events have no user."""
        greatest: dict[int, int] = {}
        records = self.kafka.read_committed(f"{self.name}-{side}")
        for record in sorted(records, key=lambda record: (record.partition, record.offset)):
            event = json.loads(record.value or b"")
            before = greatest.get(record.partition)
            greatest[record.partition] = max(event["at"], before or 0)
            taken = Taken(event["at"], record.partition, record.offset, event["id"])
            yield event["user"].replace("end", ""), taken, None if before is None else before - 2_001

    def assert_exact(self) -> None:
        counts: dict[tuple[str, int], int] = defaultdict(int)
        lefts, rights = defaultdict[str, list[Taken]](list), defaultdict[str, list[Taken]](list)
        late: dict[str, list[int]] = {id: [] for id in LATE}
        for user, event, floor in filter(lambda event: event[0], self._events("in")):
            start = event.at - event.at % 10_000
            if floor is None or start + 9_999 > floor:
                counts[user, start] += 1
            else:
                late["counts"].append(event.id)
            if floor is None or event.at > floor:
                lefts[user].append(event)
            else:
                for id in ("pairs", "sorted", "once"):
                    late[id].append(event.id)
        for user, event, floor in filter(lambda event: event[0], self._events("right")):
            if floor is None or event.at > floor:
                rights[user].append(event)
            else:
                late["rights"].append(event.id)
        by_time = {user: [event.id for event in sorted(events)] for user, events in lefts.items()}
        first = {user: [event.id for event in _first_of_3s(sorted(events))] for user, events in lefts.items()}
        pairs = sorted(pair for user in lefts | rights for pair in _paired(user, lefts[user], rights[user]))
        for id in LATE:
            assert len(late[id]) > 5
            assert sorted(result["id"] for result in self._results(f"late-{id}", len(late[id]))) == sorted(late[id])
        windows = {(of["key"], _ms(of["start"])): of["value"] for of in self._results("counts", len(counts))}
        assert windows == counts
        assert sorted(map(_ids, self._results("pairs", len(pairs)))) == pairs
        for id, wanted in (("sorted", by_time), ("once", first)):
            given = defaultdict[str, list[int]](list)
            for result in self._results(id, sum(map(len, wanted.values()))):
                given[result["user"]].append(result["id"])
            assert given == wanted, "each user's events in order, each once"

    def _results(self, topic: str, count: int) -> list[Any]:
        """The results in *topic*, but for those of the last events."""
        found = [json.loads(record.value or b"") for record in visible(self.kafka, f"{self.name}-{topic}", count)]
        results = [result for result in found if "end" not in (result.get("key"), result.get("user"))]
        assert len(results) == count
        return results


def _ms(at: str) -> int:
    return round(datetime.fromisoformat(at).timestamp() * 1000)


def _ids(joined: Any) -> tuple[str, int, int]:
    return joined["key"], *(-1 if joined[side] is None else joined[side]["id"] for side in ("left", "right"))


def _first_of_3s(events: list[Taken]) -> Iterator[Taken]:
    last = None
    for event in events:
        if last is None or event.at >= last + 3_000:
            last = event.at
            yield event


def _paired(user: str, lefts: list[Taken], rights: list[Taken]) -> Iterator[tuple[str, int, int]]:
    """The ids of each pair of *user*; -1 where there is no partner."""
    pairs = [(left.id, right.id) for left in lefts for right in rights if -1_000 <= right.at - left.at <= 3_000]
    paired_lefts, paired_rights = {left for left, _ in pairs}, {right for _, right in pairs}
    yield from ((user, *pair) for pair in pairs)
    yield from ((user, left.id, -1) for left in lefts if left.id not in paired_lefts)
    yield from ((user, -1, right.id) for right in rights if right.id not in paired_rights)


def test_windows_joins_and_orders_are_exact_whoever_computes_and_whatever_is_killed(
    run: Any, kafka: KafkaCluster, topic_name: str, failpoint: Any, tmp_path: Path
) -> None:
    handed = Handed(run, kafka, topic_name, tmp_path)
    handed.feed(400)
    handed.on_spark("backfill", armed="unit-computed=kill@2,publication-flushed=kill")
    handed.feed(200)
    handed.job.run_killed(failpoint("timed-fired"), 3)
    handed.feed(400)
    handed.on_spark("catch-up", "--take-over", armed="advance-published=kill@2", code=-9)
    handed.end()
    handed.job.finish("--parallelism", "2")
    handed.assert_exact()
    handed.job.audited()
