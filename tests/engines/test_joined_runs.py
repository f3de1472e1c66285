"""Joins in runs that are killed, at any parallelism: what comes out is what a few lines of SQL say of the topics."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
from confluent_kafka import Producer
from running import Job, visible
from window_clicks import insert

from exactlyonce.testing.cluster import LIMIT_S

pytestmark = pytest.mark.broker

BEGIN_MS = 1_790_000_000_000
TABLES = """
    create table {side} as
    select *, max(ts) over (partition by partition order by "offset" rows between unbounded preceding and 1 preceding)
              - 2001 as floor
    from {side}_read;
    create table {side}_late as select * from {side} where {last} <= floor;
    delete from {side} where {last} <= floor;
"""
INTERVAL = """
    select coalesce(l.key, r.key), l.id, r.id from lefts l {how} join rights r
    on l.key = r.key and r.ts - l.ts between -1000 and 3000
"""
SELF = "select l.key, l.id, r.id from lefts l join lefts r on l.key = r.key and r.ts - l.ts between 0 and 2000"
AS_OF = """
    select l.key, l.id, r.id from lefts l asof left join
    (from rights qualify row_number() over (partition by key, ts order by "offset" desc) = 1) r
    on l.key = r.key and l.ts >= r.ts
"""
AS_OF_LATE = """
    select l.key, l.id, r.id from lefts l left join rights r on l.key = r.key and r.ts <= l.ts
    and (coalesce(r.floor < r.ts, true) or r.floor < l.ts)
    qualify row_number() over (partition by l.id order by r.ts desc nulls last, r."offset" desc) = 1
"""
STARTED = """
    with both_sides as (select *, 'l' as side from lefts union all select *, 'r' from rights),
    started as (select *, {start} as start from both_sides {windows})
    select coalesce(l.key, r.key), l.id, r.id, coalesce(l.start, r.start)
    from (from started where side = 'l') l {how} join (from started where side = 'r') r
    on l.key = r.key and l.start = r.start
"""
SESSIONS = """
    with both_sides as (select *, 'l' as side from lefts union all select *, 'r' from rights),
    begun as (
        select *, coalesce(ts - lag(ts) over (partition by key order by ts) >= 300, true) as begins from both_sides),
    started as (select *, max(case when begins then ts end) over (partition by key order by ts) as start from begun)
    select l.key, l.id, r.id, l.start from started l join started r
    on l.key = r.key and l.start = r.start and l.side = 'l' and r.side = 'r'
"""
NEWEST = """
    select l.key, l.id, r.id from lefts l asof left join
    (from rights qualify row_number() over (partition by key, ts order by "offset" desc) = 1) r
    on l.key = r.key and l.ts > r.ts
    union all
    select key, null, id from (select *, lead(ts) over (partition by key order by ts, "offset") as next from rights) r
    where coalesce(next > ts + 1000, true)
    and not exists (from lefts l where l.key = r.key and l.ts > r.ts and l.ts <= r.ts + 1000)
"""
MOVED = """
    with pairs as (
        select l.key, l.id as left_id, r.id as right_id, l.ts - l.ts % 5000 as start,
               start + 4999 <= greatest(l.ts, r.ts) - 2001 as is_late
        from lefts l join rights r on l.key = r.key and r.ts - l.ts between -1000 and 3000)
"""
LATE_PAIRS = f"{MOVED} select key, left_id, right_id from pairs where is_late"
QUERIES = {
    **{how: INTERVAL.format(how=how) for how in ("inner", "left", "right", "full")},
    "self": SELF, "as-of": AS_OF, "as-of-late": AS_OF_LATE,
    "tumbling-full": STARTED.format(how="full", start="ts - ts % 2000", windows=""),
    "hopping-left": STARTED.format(
        how="left", start="ts - ts % 2000 - before",
        windows=", (select unnest([0, 2000]) as before) where coalesce(ts - ts % 2000 - before + 3999 > floor, true)",
    ),
    "session-inner": SESSIONS,
    "co-process": NEWEST,
    "moved": f"{MOVED} select key, count(*), start from pairs where not is_late group by key, start",
}  # fmt: skip
KEEP_MS = {"as-of-late": 10_000}
LAST = {"tumbling-full": "ts - ts % 2000 + 1999", "hopping-left": "ts - ts % 2000 + 3999"}
"""The last ms for which a record of a window join counts."""


class Sides:
    """The events of a job: the left ones in three partitions, the right ones in two."""

    def __init__(self, job_of: Callable[..., Job], join: str, *arguments: str) -> None:
        self.join, self.keep_ms = join, KEEP_MS.get(join, 0)
        self.has_deletions = join.startswith(("as-of", "lookup"))
        params = f"join={join.removesuffix('-late')}", f"keep={self.keep_ms}ms"
        options = [option for param in params for option in ("--param", param)]
        self.job = job_of("join_pipelines:joined", *options, *arguments)
        self.fed = {"in": 0, "right": 0}
        self.job.kafka.create_topic(f"{self.job.name}-right", 2)

    def feed(self, side: str, count: int) -> None:
        """*count* more events of each partition in disorder, and now and then a late one or a deletion."""
        topic, first = f"{self.job.name}-{side}", self.fed[side]
        chance = random.Random(f"{side}{first}")
        producer = Producer({"bootstrap.servers": self.job.kafka.bootstrap_servers, "enable.idempotence": True})
        for number in range(first, first + count):
            for partition in range(3 if side == "in" else 2):
                step = 100 if side == "in" else 250
                at = BEGIN_MS + number * step - chance.choice([0, 0, 300, 1_900, 2_000, 2_001, 6_000, 15_000])
                id, user = number * 3 + partition, f"u{chance.randrange(3) * 6 + partition}"
                value = json.dumps({"id": id, "user": user, "at": at})
                deletes = side == "right" and self.has_deletions and chance.random() < 0.2
                producer.produce(topic, None if deletes else value, user, partition, timestamp=at)
        assert producer.flush(LIMIT_S) == 0
        self.fed[side] += count

    def by_sql(self, query: str | None = None) -> tuple[list[Any], list[int], list[int]]:
        """The results and the ids of late events that SQL finds in the topics; *query* asks for others."""
        with duckdb.connect() as database:
            for side, topic in (("lefts", "in"), ("rights", "right")):
                database.execute(
                    f'create table {side}_read (partition int, "offset" bigint, key text, ts bigint, id bigint)'
                )
                rows = []
                for record in self.job.kafka.read_committed(f"{self.job.name}-{topic}"):
                    event = (
                        {"at": record.timestamp_ms, "id": None} if record.value is None else json.loads(record.value)
                    )
                    key = (record.key or b"").decode()
                    rows.append((record.partition, record.offset, key, event["at"], event["id"]))
                if rows:
                    insert(database, f"{side}_read", rows)
                last = LAST.get(self.join, f"ts + {self.keep_ms}")
                database.execute(TABLES.format(side=side, last=last))
            results = database.sql(query or QUERIES[self.join]).fetchall()
            late, late_right = (
                [id for (id,) in database.sql(f"select id from {side}_late").fetchall()] for side in ("lefts", "rights")
            )
            return results, late, late_right

    def assert_as_by_sql(self) -> None:
        results, late, late_right = self.by_sql()
        assert len(results) > 20
        assert self._out("out", len(results)) == sorted(results, key=str)
        if self.join != "self":
            assert len(late) > 5
            assert self._ids("late", len(late)) == sorted(late)
        if self.join in ("inner", "full") or ("-" in self.join and not self.has_deletions):
            assert self._ids("late-right", len(late_right)) == sorted(late_right)
        if self.join == "moved":
            pairs, _, _ = self.by_sql(LATE_PAIRS)
            assert len(pairs) > 5
            assert self._out("late-pairs", len(pairs)) == sorted(pairs, key=str)

    def _out(self, topic: str, count: int) -> list[Any]:
        results = []
        for record in visible(self.job.kafka, f"{self.job.name}-{topic}", count):
            joined = json.loads(record.value or b"")
            value = joined.get("value", joined)
            sides = [] if isinstance(value, int) else [value["left"], value["right"]]
            given = [side and side["id"] for side in sides] or [value]
            starts = [datetime.fromisoformat(at) for name, at in joined.items() if name == "start"]
            results.append((joined["key"], *given, *(round(1000 * start.timestamp()) for start in starts)))
        return sorted(results, key=str)

    def _ids(self, topic: str, count: int) -> list[int]:
        records = visible(self.job.kafka, f"{self.job.name}-{topic}", count)
        return sorted(json.loads(record.value or b"")["id"] for record in records)


@pytest.mark.exhaustive(but=["full", "as-of"])
@pytest.mark.parametrize("join", QUERIES)
def test_results_are_those_of_sql_over_the_topics(join: str, job_of: Callable[..., Job]) -> None:
    sides = Sides(job_of, join)
    for _ in range(2):
        sides.feed("in", 150)
        sides.feed("right", 60)
        sides.job.finish_here(*["--drain"] * _)
    sides.assert_as_by_sql()


@pytest.mark.exhaustive
def test_pairs_by_the_time_of_one_side_are_counted_once_whenever_a_run_is_killed(job_of: Callable[..., Job]) -> None:
    sides, chance = Sides(job_of, "moved"), random.Random()
    for parallelism in (2, 3, 1, 4):
        incarnation = sides.job.start("--parallelism", str(parallelism))
        for _ in range(chance.randint(1, 3)):
            sides.feed("in", 50)
            sides.feed("right", 20)
            incarnation.await_checkpoint()
        time.sleep(chance.random() / 2)
        incarnation.kill()
    sides.feed("in", 200)
    sides.feed("right", 80)
    sides.job.finish("--parallelism", "2", "--drain")
    sides.assert_as_by_sql()


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("join", QUERIES)
def test_kills_and_other_parallelism_make_no_difference(
    join: str, backend: str, job_of: Callable[..., Job], failpoint: Any
) -> None:
    sides = Sides(job_of, join, "--state-backend", backend)
    steps = ("timed-fired", 2), ("timed-fired", 9), ("worker-frozen", 1), ("coordinator-committed", 1)
    for parallelism, (name, nth) in zip((2, 3, 1, 2), steps, strict=True):
        sides.feed("in", 120)
        sides.feed("right", 50)
        sides.job.run_killed(failpoint(name, nth=nth), parallelism)
    sides.job.finish("--parallelism", "2", "--drain")
    sides.assert_as_by_sql()


@pytest.mark.exhaustive
@pytest.mark.parametrize("join", ["full", "as-of", "hopping-left"])
def test_barriers_that_overtake_records_of_either_side_make_no_difference(
    join: str, job_of: Callable[..., Job], failpoint: Any
) -> None:
    sides = Sides(job_of, join, "--unaligned", "--checkpoint-interval", "200ms")
    for parallelism, name in ((3, "unaligned-captured"), (2, "timed-fired"), (3, "coordinator-decided")):
        sides.feed("in", 150)
        sides.feed("right", 60)
        sides.job.run_killed(failpoint(name), parallelism, "--param", "pause_ms=8")
    assert any(manifest.channel_logs for manifest in sides.job.history().manifests.values())
    sides.job.finish("--parallelism", "2", "--drain")
    sides.assert_as_by_sql()


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_a_lookup_has_the_last_version_of_each_key_through_kills(
    backend: str, job_of: Callable[..., Job], failpoint: Any
) -> None:
    sides = Sides(job_of, "lookup", "--state-backend", backend, "--unaligned")
    sides.feed("right", 40)
    sides.job.finish_here()
    for parallelism, armed in ((2, failpoint("worker-frozen", nth=2)), (3, failpoint("coordinator-committed"))):
        sides.feed("in", 200)
        sides.job.run_killed(armed, parallelism)
    sides.job.finish_here()
    latest = {record.key: record.value for record in sides.job.kafka.read_committed(f"{sides.job.name}-right")}
    versions = {(key or b"").decode(): value and json.loads(value)["id"] for key, value in latest.items()}
    lefts = [json.loads(record.value or b"") for record in sides.job.kafka.read_committed(f"{sides.job.name}-in")]
    expected = [(event["user"], event["id"], versions.get(event["user"])) for event in lefts]
    assert sides._out("out", len(expected)) == sorted(expected, key=str)


@pytest.mark.exhaustive
def test_the_example_prices_payments_as_of_exchange_rates(job_of: Callable[..., Job], monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    job = job_of("exchange_rates:pipeline")
    at = "2026-11-20T12:00:{:02}Z".format
    fed = {
        "rates": [("usd", {"euros": 0.9, "at": at(0)}), ("usd", {"euros": 0.8, "at": at(30)})],
        "payments": [
            ("usd", {"id": 1, "currency": "usd", "amount": 10, "at": at(40)}),
            ("usd", {"id": 2, "currency": "usd", "amount": 10, "at": at(29)}),  # late
            ("chf", {"id": 3, "currency": "chf", "amount": 10, "at": at(41)}),
        ],
    }
    for topic, records in fed.items():
        job.kafka.create_topic(f"{job.name}-{topic}", 1)
        job.kafka.produce(f"{job.name}-{topic}", [(key, json.dumps(value)) for key, value in records])
    job.finish_here("--drain")
    written = {
        topic: sorted(
            (json.loads(record.value or b"") for record in visible(job.kafka, f"{job.name}-{topic}", count)), key=str
        )
        for topic, count in (("priced", 2), ("unpriced", 1))
    }
    assert written["priced"] == [{"id": 1, "euros": 8.0}, {"id": 2, "euros": 9.0}]
    assert [payment["id"] for payment in written["unpriced"]] == [3]
