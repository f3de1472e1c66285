"""Splits and sources that are read in step: the one furthest behind goes first, and nobody waits without end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exactlyonce import Count, EventTime, Pipeline, Tumbling
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors import KafkaSource
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.reader import Consumers, KafkaReader, exact_consumer
from exactlyonce.connectors.source import ReaderContext
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local.inputs import Pace, Slices, SourceInput
from exactlyonce.engines.local.pacing import WAIT_MAX_S, Group, LowestWatermarks, SourcePacing
from exactlyonce.engines.local.worker import Worker
from exactlyonce.engines.runtime.activity import Activity
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.source_decoder import SourceDecoder, SourceTimes
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR
from exactlyonce.sinks import KafkaSink
from exactlyonce.testing.cluster import LIMIT_S

DRIFT_MS = 60_000


class Reading:
    """A source of one worker, whose splits have records every so many ms; each is fetched in pieces."""

    def __init__(self, every_ms: Sequence[int], now: list[float], group: Group | None = None) -> None:
        event_time = EventTime(lambda record: record, max_drift="1m")
        self.times = SourceTimes(event_time)
        starts = [SourceOffset("in", "in", "id", split, 0) for split in range(len(every_ms))]
        self.times.rest(starts, [], 0.0, behind=True)
        self.pacing = SourcePacing(self.times, event_time.max_drift_ms, lambda: now[0], group or Group())
        self.pacing.group.members.append(self.pacing)
        self.every_ms, self.read = every_ms, [0] * len(every_ms)
        self.fetched: dict[int, int] = {}

    def take(self, records_max: int = 2_000, ended: Sequence[int] = ()) -> int:
        """Take a batch; returns the number of its records."""
        if self.pacing.waits_for_sources:
            return 0
        missing = [split for split in range(len(self.read)) if split not in self.fetched and split not in ended]
        runs = self.pacing.divide(self.fetched, missing, records_max)
        for split, count in runs:
            times = [self.every_ms[split] * (self.read[split] + number) for number in range(count)]
            self.times.late(times, [(split, count)])
            self.read[split] += count
            self.fetched[split] -= count
        self.fetched = {split: count for split, count in self.fetched.items() if count}
        self.times.advanced(0.0)
        taken = sum(count for _, count in runs)
        self.pacing.took(taken, records_max)
        return taken

    @property
    def drift_ms(self) -> int:
        floors = [self.times.floor_of(split) for split in range(len(self.read))]
        return max(floors) - min(floors)


@pytest.mark.parametrize("seed", range(20))
def test_splits_go_on_together(seed: int) -> None:
    """However dense each is, and in what pieces it comes, no split is ahead by more than a batch."""
    rng = random.Random(seed)
    reading = Reading([rng.choice((1, 2, 5, 50)) for _ in range(rng.randint(2, 6))], [0.0])
    drifts = []
    for _ in range(200):
        for split in range(len(reading.read)):
            if (there := reading.fetched.get(split, 0)) < 2_000:
                reading.fetched[split] = there + rng.randint(2_000, 9_000)
        assert reading.take(), "there is always something to take"
        drifts.append(reading.drift_ms)
    together_ms = 2_000 / sum(1 / every_ms for every_ms in reading.every_ms)
    assert max(drifts[20:]) <= together_ms + 2_000 / 16 * max(reading.every_ms)


def test_a_split_whose_records_have_not_come_is_waited_for() -> None:
    now = [100.0]
    reading = Reading([1, 1], now)
    reading.fetched = {0: 100, 1: 500_000}
    while reading.take():
        pass
    assert reading.read[0] == 100
    assert 0 <= reading.times.floor_of(1) - reading.times.floor_of(0) - DRIFT_MS <= 2_000
    reading.fetched[0] = 10_000
    ahead = reading.read[1]
    while reading.read[0] < 10_000:
        assert reading.take()
    assert reading.read[1] <= ahead + 2_000 // 16, "the one that is behind goes first"


@pytest.mark.parametrize("why", ["at its end", "late"])
def test_nobody_waits_without_end(why: str) -> None:
    now = [100.0]
    reading = Reading([1, 1], now)
    reading.fetched = {0: 100, 1: 500_000}
    ended = [0] if why == "at its end" else []
    while reading.take(ended=ended):
        pass
    if why == "late":
        assert reading.fetched
        now[0] += WAIT_MAX_S
        while reading.take():
            pass
    assert not reading.fetched


def test_no_split_waits_for_an_idle_one() -> None:
    reading = Reading([1, 1], [100.0])
    reading.fetched = {1: 500_000}
    reading.times.resting.add(0)
    while reading.take():
        pass
    assert reading.fetched == {}


def test_sources_that_meet_go_on_together() -> None:
    now, group = [100.0], Group()
    dense, sparse = Reading([1], now, group), Reading([10], now, group)
    dense.fetched, sparse.fetched = {0: 500_000}, {0: 50_000}
    while dense.fetched and sparse.fetched:
        assert dense.take(500) + sparse.take(500), "one of them goes on"
        if min(dense.read[0], sparse.read[0]):
            assert abs(dense.times.watermark - sparse.times.watermark) <= 500 * 10
    for reading in (dense, sparse):
        while reading.take(500, ended=[0]):
            pass
    assert (dense.fetched, sparse.fetched) == ({}, {}), "one that is at its end holds up no other"


@pytest.mark.parametrize("empty", [(1,), (0,), (0, 1)], ids=str)
def test_an_empty_split_changes_nothing_for_other_sources(empty: tuple[int, ...]) -> None:
    """The watermark of its source waits for it, and the other source does not, nor does it run ahead."""
    now, group = [100.0], Group()
    readings = [Reading([every_ms, 1] if number in empty else [every_ms], now, group)
                for number, every_ms in enumerate((1, 10))]  # fmt: skip
    dense, sparse = readings
    dense.fetched, sparse.fetched = {0: 500_000}, {0: 50_000}
    while dense.fetched and sparse.fetched:
        assert dense.take(500, ended=[1]) + sparse.take(500, ended=[1]), "one of them goes on"
        assert abs(dense.read[0] - 10 * sparse.read[0]) <= 2 * 500 * 10


def test_a_source_that_gives_nothing_is_waited_for_a_while() -> None:
    now, group = [100.0], Group()
    there, away = Reading([1], now, group), Reading([1], now, group)
    there.fetched, away.fetched = {0: 500_000}, {0: 10}
    away.take()
    while there.take(ended=[0]):
        away.take()
    assert there.pacing.waits_for_sources
    assert there.times.watermark - away.times.watermark - DRIFT_MS <= 2_000
    now[0] += WAIT_MAX_S
    assert there.take()
    assert not there.pacing.waits_for_sources
    away.pacing.rests()
    assert there.take()


def test_other_workers_are_waited_for() -> None:
    now, group = [100.0], Group()
    reading = Reading([1], now, group)
    reading.fetched = {0: 10_000_000}
    assert reading.take()
    group.hear(0, now[0])
    while reading.take():
        pass
    held = reading.times.watermark
    assert held - DRIFT_MS <= 2_000
    for heard_ms in (50_000, 100_000):
        group.hear(heard_ms, now[0])
        while reading.take():
            pass
        reach = heard_ms + 2 * 50_000 + DRIFT_MS
        assert reach < reading.times.watermark <= reach + 2_000, "it went on meanwhile, as it did before"
    assert group.lowest_ms == reading.times.watermark, "it may be waited for, too"
    group.hear(END_OF_TIME, now[0])
    assert reading.take()
    group.hear(100_000, now[0])
    assert not reading.take()
    now[0] += WAIT_MAX_S
    assert reading.take()


def test_a_backlog_is_read_in_step(kafka: Any, topic_name: str) -> None:
    """Partitions that were written one after the other, of which one is denser, are read together, each in order."""
    topic, ends = kafka.create_topic(topic_name, 3), {0: 40_000, 1: 40_000, 2: 80_000}
    for split, count in ends.items():
        every_ms = 100_000 // count
        values = [b"%d" % (every_ms * number) + b" " * 90 for number in range(count)]
        kafka.produce(topic, values, partition=split)
    event_time = EventTime(int, max_drift="5s", ahead=None)
    source = KafkaSource(topic, value=bytes, time=event_time)
    config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    starts = [SourceOffset("in", topic, "id", split, 0) for split in ends]
    clients = SimpleNamespace(consumers=lambda *_: Consumers(config.confluent(), exact_consumer))
    decoder = SourceDecoder("in", source, before=starts)
    assert decoder.times is not None
    pacing = SourcePacing(decoder.times, event_time.max_drift_ms, monotonic)
    context = ReaderContext(source="in", positions=starts, targets=None, clients=clients, divide=pacing.divide)
    reader = cast(KafkaReader, source.open_reader(context))
    activity, slices = Activity(monotonic), Slices(Pace(0.1, 4, 2_000), monotonic)
    read = SourceInput("in", reader, decoder, lambda _: None, activity, slices, pacing=pacing)
    drift_ms, deadline = 0, monotonic() + LIMIT_S
    reader.open()
    try:
        while dict(reader.offsets) != ends:
            assert monotonic() < deadline, reader.offsets
            batch = read.next(2_000)
            if not isinstance(batch, Batch):
                continue
            read.processed()
            floors = decoder.times.floors
            if min(floors.values()) != NO_FLOOR and all(reader.offsets[split] < ends[split] for split in ends):
                drift_ms = max(drift_ms, max(floors.values()) - min(floors.values()))
    finally:
        reader.close()
    assert 0 < drift_ms <= 5_000 + 2 * 2_000


def test_what_a_worker_hears_of_the_others() -> None:
    """The lowest of each group that has changed, but for what it reads itself."""
    lowest, workers = LowestWatermarks(), range(3)
    assert lowest.report(0, {"a": 5, "b": 9}, workers) == {1: {"a": 5, "b": 9}, 2: {"a": 5, "b": 9}}
    assert lowest.report(1, {"a": 3}, workers) == {0: {"a": 3}, 2: {"a": 3}}
    assert lowest.report(2, {"a": 4}, workers) == {1: {"a": 4}}
    assert lowest.report(2, {"a": 4}, workers) == {}
    assert lowest.report(0, {"a": 7, "b": 9}, workers) == {}, "it is not the lowest for anyone"
    assert lowest.report(1, {"a": 6}, workers) == {0: {"a": 4}, 2: {"a": 6}}
    assert lowest.report(0, {}, workers) == {1: {"b": END_OF_TIME}, 2: {"b": END_OF_TIME}}


@pytest.mark.parametrize("seed", range(20))
def test_each_worker_has_heard_the_lowest_of_all_others(seed: int) -> None:
    rng, lowest = random.Random(seed), LowestWatermarks()
    reports = [dict[str, int]() for _ in range(rng.randint(1, 5))]
    heard = [dict[str, int]() for _ in reports]
    for _ in range(100):
        worker = rng.randrange(len(reports))
        reports[worker] = {group: rng.randrange(9) for group in "abc" if rng.random() < 0.7}
        for other, changes in lowest.report(worker, reports[worker], range(len(reports))).items():
            assert other != worker
            assert all(heard[other].get(group, END_OF_TIME) != ms for group, ms in changes.items())
            heard[other] |= changes
        for number, known in enumerate(heard):
            others = reports[:number] + reports[number + 1 :]
            for group in "abc":
                expected = min(report.get(group, END_OF_TIME) for report in [*others, {}])
                assert known.get(group, END_OF_TIME) == expected


def test_groups_do_not_disturb_each_other() -> None:
    """What changes in one group neither slows another one down nor keeps it waiting for a silent worker."""
    now, lowest, groups = [100.0], LowestWatermarks(), {"a": Group(), "b": Group()}
    start: Any = SimpleNamespace(subtask=0)
    clients: Any = SimpleNamespace(monotonic_s=lambda: now[0])
    worker = Worker(cast(Any, None), start, clients, Activity(lambda: now[0]))
    worker.parts = cast(Any, SimpleNamespace(groups=groups))

    def tell(subtask: int, lowest_ms: dict[str, int]) -> None:
        worker._obey(msg.Elsewhere(lowest.report(subtask, lowest_ms, range(3)).get(0, {})))

    tell(1, {"a": 0})
    tell(2, {"b": 0})
    tell(2, {"b": 50_000})
    assert groups["b"].elsewhere_ms(now[0]) == 150_000
    for second in range(int(WAIT_MAX_S)):
        tell(1, {"a": 1_000 * (1 + second)})
        assert groups["b"].elsewhere_ms(now[0]) == 150_000
        now[0] += 1.0
    assert groups["a"].elsewhere_ms(now[0]) == 7_000
    assert groups["b"].elsewhere_ms(now[0]) == END_OF_TIME


def test_which_sources_meet() -> None:
    pipeline = Pipeline("in-step")
    source = {name: pipeline.source(name, KafkaSource(name, value=dict, time="ts")) for name in "abcd"}
    keyed = {name: stream.key_by(lambda record: 1) for name, stream in source.items()}
    keyed["a"].join("ab", keyed["b"], within=("-5m", "5m")).sink("pairs", KafkaSink("pairs", value=list))
    counts = keyed["c"].window(Tumbling("1m")).aggregate("counts", Count())
    counts.sink("counts-out", KafkaSink("counts"))
    keyed["b"].window(Tumbling("1m")).aggregate("of-b", Count()).sink("b-out", KafkaSink("b"))
    keyed["d"].reduce("of-d", lambda one, other: other).sink("d-out", KafkaSink("d"))
    graph = pipeline.build()
    assert graph.time_groups == {"a": "a", "b": "a", "c": "c", "d": "d"}
