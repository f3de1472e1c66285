"""Kafka Streams as an oracle: its own test driver and our operators, on the same records, give the same windows, joins
and tables, or differ by a rule that is named here, and in docs/comparison.md."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
from running import Job
from test_foreign_keys import Cluster
from test_foreign_keys import play as play_tables
from test_joins import play as play_join
from test_windows import Arrived, Seen, as_ms, expected, in_batches, operator_of
from timed_rig import advance

from exactlyonce.connectors.embedded.programs import find_java
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR
from exactlyonce.pipeline.joins import AsOf, IntervalJoin
from exactlyonce.pipeline.windows import Hopping, Session, Tumbling, Window
from exactlyonce.testing.servers.programs import copy_jars, downloaded

PROGRAM = Path(__file__).with_name("StreamsOracle.java")
VERSION = "4.3.1"
ARTIFACTS = f"org.apache.kafka:kafka-streams-test-utils:{VERSION}", "org.slf4j:slf4j-nop:1.7.36"
FEW, MANY = 8, 1_500
EPOCH, END = 1_000, 1_000_000
"""No window begins before 0 in Kafka Streams."""


@dataclass
class Case:
    """Lines for `StreamsOracle`: a topology, and its records, (topic, key, time, value or None)."""

    topology: str
    records: Sequence[tuple[str, str, int, object]]

    def __str__(self) -> str:
        lines = [f"{topic} {key} {time} {'-' if value is None else value}" for topic, key, time, value in self.records]
        return "\n".join([self.topology, *lines, "end", ""])


class Streams:
    """The oracle, as a process."""

    def __init__(self, folder: Path) -> None:
        jars = downloaded(f"kafka-streams-{VERSION}", lambda part: copy_jars(ARTIFACTS, part, folder, "ORACLE MISSING"))
        command = [str(find_java()), "-Xmx512m", "-XX:+UseSerialGC", "-cp", f"{jars}/*", str(PROGRAM), str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def results(self, case: Case) -> list[list[str]]:
        """What Kafka Streams gives, as the words of lines."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(str(case))
        self._process.stdin.flush()
        lines = []
        while (line := self._process.stdout.readline()) != "end\n":
            assert line, f"the oracle ended at:\n{case}"
            lines.append(line.split())
        return lines

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streams]:
    oracle = Streams(tmp_path_factory.mktemp("streams"))
    yield oracle
    oracle.close()


@pytest.fixture(params=[FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def seeds(request: pytest.FixtureRequest) -> range:
    """Of the inputs: the many begin after the few."""
    return range(FEW) if request.param == FEW else range(FEW, FEW + MANY)


def times(chance: Random, count: int, disorder: int) -> Iterator[int]:
    """Times with ties and gaps, of which none is further than *disorder* behind those before."""
    greatest = EPOCH
    for _ in range(count):
        time = max(EPOCH, greatest + chance.choice([0, 1, 5, 10, 11, chance.randint(-disorder, 30)]))
        greatest = max(greatest, time)
        yield time


WINDOWS: dict[str, Window] = {
    "tumbling 10": Tumbling("10ms"), "hopping 30 10": Hopping("30ms", every="10ms"),
    "hopping 25 10": Hopping("25ms", every="10ms"), "session 10": Session("11ms"),
}  # fmt: skip
"""A window of Kafka Streams, and ours that equals it: its sessions hold records exactly a gap apart."""


def windowed(window: Window, records: Sequence[tuple[str, int]], disorder: int, cuts: set[int]) -> Seen:
    """Our windows of *records*, (key, time), of one partition: those of the definition."""
    seen, floor, stream = Seen(), NO_FLOOR, list[tuple[Arrived, int]]()
    for number, (key, time) in enumerate(records):
        watermark = max(floor, time - disorder - 1)
        stream.append((Arrived(number, key, time, floor), watermark))
        floor = watermark
    stream[-1] = stream[-1][0], END_OF_TIME
    operator = operator_of(window, seen.take, seen.take_late)
    for batch, watermark in in_batches(stream, cuts):
        operator(batch)
        advance(operator, watermark, 1)
    assert seen.counted() == expected(window, [record for record, _ in stream])[0]
    return seen


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str, seeds: range, streams: Streams) -> None:
    """They are equal; sessions of a key may differ in two cases. A late record that falls into an open session belongs
    to it in Kafka Streams, and is late here. Of two records exactly a gap apart, the second belongs to the session
    there, too, but not if a record of another key has closed it, which one of the same time does. Half of the inputs
    have neither."""
    kind, size, *every = name.split()
    for seed in seeds:
        chance = Random(seed)
        disorder, count = chance.choice([0, 5, 20]), chance.randint(1, 40)
        records = [(chance.choice("ab"), time) for time in times(chance, count, 2 * disorder)]
        if kind == "session" and seed % 2:
            records = _cleared(records, disorder, int(size))
        arrived = [("left", key, time, number) for number, (key, time) in enumerate(records)]
        case = Case(" ".join([kind, size, str(disorder), *every]), [*arrived, ("left", "~", END, "~")])
        seen = windowed(WINDOWS[name], records, disorder, {*chance.sample(range(40), 9)})
        longer = 11 if kind == "session" else 0  # Kafka Streams ends a session at its last record
        ours = Counter((one.key, start, end - longer, *sorted(one.value)) for one, start, end in _bounds(seen))
        theirs = Counter(
            (key, int(start), int(end), *sorted(map(int, ids.split(","))))
            for key, start, end, ids in streams.results(case)
        )
        excused = set[str]()
        if kind == "session":
            excused = {record.key for record in seen.late} | _apart(records, int(size))
            assert not (excused and seed % 2)
        assert {key for key, *_ in (ours - theirs) + (theirs - ours)} <= excused, f"seed {seed}:\n{case}"


def _apart(records: Sequence[tuple[str, int]], gap_ms: int) -> set[str]:
    """The keys of which two records are exactly so far apart."""
    return {key for key, time in records if (key, time + gap_ms) in {*records}}


def _cleared(records: Sequence[tuple[str, int]], disorder: int, gap_ms: int) -> list[tuple[str, int]]:
    """*records* without those that are late, or exactly a gap away from an earlier one of their key."""
    kept, greatest = list[tuple[str, int]](), EPOCH
    for key, time in records:
        if time >= greatest - disorder and not {(key, time - gap_ms), (key, time + gap_ms)}.intersection(kept):
            kept.append((key, time))
            greatest = max(greatest, time)
    return kept


def _bounds(seen: Seen) -> Iterator[tuple[Any, int, int]]:
    for one in seen.results:
        yield one, as_ms(one.start), as_ms(one.end)


WITHIN = (-20, 40), (0, 0), (10, 30), (-30, -10)


@pytest.mark.parametrize("how", ["inner", "left", "full"])
def test_joins_of_streams(how: Any, seeds: range, streams: Streams) -> None:
    """They are equal, but for two cases. Kafka Streams keeps a record for the length of the window and the grace, and
    so forgets those whose window lies further away. And it gives a record alone that has a partner, too."""
    for seed in seeds:
        chance = Random(seed)
        (earliest, latest), disorder = chance.choice(WITHIN), chance.choice([0, 5, 20])
        arrivals = [
            (chance.choice("lr"), chance.choice("ab"), time, False)
            for time in times(chance, chance.randint(1, 40), disorder)
        ]
        seen = play_join(IntervalJoin(f"{earliest}ms", f"{latest}ms", how), arrivals, disorder, _cuts(chance), 2)
        sides = {"l": "left", "r": "right"}
        sent = [(sides[side], key, time, number) for number, (side, key, time, _) in enumerate(arrivals)]
        case = Case(
            f"streams {'outer' if how == 'full' else how} {earliest} {latest} {disorder}",
            [*sent, *((side, "~", END, "~") for side in ("left", "right"))],
        )
        theirs = Counter((key, *pair.split(",")) for key, pair in streams.results(case) if key != "~")
        ours = Counter((key, *("-" if one is None else str(one) for one in pair)) for key, *pair, _ in seen.results)
        assert not seen.late
        kept_ms = latest - earliest + disorder
        pairs, alone = _divided(ours)
        their_pairs, their_alone = _divided(theirs)
        assert {*ours.values(), *theirs.values()} <= {1}, f"seed {seed}:\n{case}"
        forgotten = {pair for pair in pairs if _behind(arrivals, int(pair[1]), int(pair[2])) >= kept_ms}
        assert their_pairs <= pairs, f"seed {seed}:\n{case}"
        assert pairs - their_pairs <= forgotten, f"seed {seed}:\n{case}"
        assert alone <= their_alone, f"seed {seed}:\n{case}"
        paired = {(key, place, one) for key, *pair in pairs for place, one in enumerate(pair)}
        spurious = their_alone - alone
        assert paired.issuperset(
            (key, place, one) for key, *pair in spurious for place, one in enumerate(pair) if one != "-"
        )


def _behind(arrivals: Sequence[tuple[str, str, int, bool]], *pair: int) -> int:
    """How far the first of a pair lies behind the greatest time, in ms, when the second one comes."""
    return max(time for _, _, time, _ in arrivals[: max(pair) + 1]) - arrivals[min(pair)][2]


def _divided(results: Iterable[Any]) -> tuple[set[Any], set[Any]]:
    """Pairs, and records without a partner."""
    return {one for one in results if "-" not in one}, {one for one in results if "-" in one}


@pytest.mark.parametrize("how", ["inner", "left"])
def test_versions_as_of_a_time(how: str, seeds: range, streams: Streams) -> None:
    """A versioned table of Kafka Streams, whose grace is 1 ms more than the disorder: it does not wait for a version of
    the very same time."""
    for seed in seeds:
        chance = Random(seed)
        disorder, count = chance.choice([0, 5, 20]), chance.randint(1, 40)
        arrivals = [
            (chance.choice("llr"), chance.choice("ab"), time, chance.random() < 0.2)
            for time in times(chance, count, disorder)
        ]
        seen = play_join(AsOf("0s", how), arrivals, disorder, _cuts(chance), 2)
        sent = [
            ("left" if side == "l" else "right", key, time, None if deletes and side == "r" else number)
            for number, (side, key, time, deletes) in enumerate(arrivals)
        ]
        case = Case(f"versions {how} {disorder + 1}", [*sent, ("left", "~", END, "~")])
        theirs = Counter((key, *pair.split(",")) for key, pair in streams.results(case) if key != "~")
        ours = Counter((key, str(left), "-" if right is None else str(right)) for key, left, right, _ in seen.results)
        assert ours == theirs, f"seed {seed}:\n{case}"


def _cuts(chance: Random) -> set[int]:
    return {*chance.sample(range(40), 9)}


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("key", ["foreign", "own"])
def test_joins_of_tables(how: Any, key: str, seeds: range, streams: Streams) -> None:
    for seed in seeds:
        chance, sent = Random(seed), list[tuple[str, str, int, object]]()
        cluster, actions = Cluster(how, chance.randint(1, 3), seed), list[Any]()
        for number in range(chance.randint(1, 60)):
            name = chance.choice(["left", "left", "right", "deliver", "deliver", "restore"])
            one, deletes = chance.randrange(4 if name == "left" else 3), chance.random() < 0.25
            other = chance.choice([0, 1, 2, None]) if key == "foreign" else one
            actions.append((name, one + (name in ("deliver", "restore")), other, deletes))
            if name == "left":
                row = f"{name}{number}:{'' if other is None else f'f{other}'}"
                own = f"l{one}" if key == "foreign" else f"f{one}"
                sent.append(("left", own, number, None if deletes else row))
            elif name == "right":
                sent.append(("right", f"f{one}", number, None if deletes else f"right{number}"))
        play_tables(cluster, actions)
        theirs = dict(streams.results(Case(f"tables {how} {key}", sent)))
        numbers = {value: count for count, (*_, value) in enumerate(sent, 1)} | {"-": None}
        latest = {
            name.replace("f", "l"): tuple(numbers[row] for row in pair.split(","))
            for name, pair in theirs.items() if pair != "-"
        }  # fmt: skip
        assert cluster.table == latest, f"seed {seed}:\n{Case(f'tables {how} {key}', sent)}"


@pytest.mark.broker
@pytest.mark.exhaustive
def test_a_run_that_is_killed(job_of: Callable[..., Job], failpoint: Any, streams: Streams) -> None:
    """Its sessions, of the records of a partition, are those of Kafka Streams."""
    job = job_of("window_pipelines:windowed", "--param", "window=folded", partitions=1)
    chance, sent = Random(7), list[tuple[str, str, int, object]]()
    for number, time in enumerate(times(chance, 900, 50)):
        sent.append(("left", chance.choice("abcdefg"), time * 40, number))
    runs = (2, "timed-fired"), (3, "worker-frozen"), (1, "coordinator-decided")
    for index, (parallelism, failing) in enumerate(runs):
        _feed(job, sent[300 * index : 300 * (index + 1)])
        job.run_killed(failpoint(failing), parallelism)
    last = ("left", "~", END * 100, 0)
    _feed(job, [last])
    job.finish_here()
    ours = Counter[Any]()
    for record in job.kafka.read_committed(f"{job.name}-out"):
        window = json.loads(record.value or b"")
        start = as_ms(datetime.fromisoformat(window["start"]))
        ours[(window["key"], start, *sorted(window["value"]))] += 1
    theirs = Counter(
        (key, int(start), *sorted(map(int, ids.split(","))))
        for key, start, _, ids in streams.results(Case("session 2999 2000", [*sent, last]))
    )
    assert ours == theirs
    assert not job.kafka.read_committed(f"{job.name}-late")


def _feed(job: Job, records: Sequence[tuple[str, str, int, object]]) -> None:
    job.kafka.produce(
        job.topic,
        [(user, json.dumps({"id": n, "user": user, "at": time, "amount": n})) for _, user, time, n in records],
        0,
    )
