"""Clicks for `window_pipelines`, and what a few lines of SQL say of them."""

from __future__ import annotations

import json
import random
from datetime import datetime
from typing import Any

import duckdb
import pytest
from running import Job, visible
from window_pipelines import REVISIONS, WINDOWS

from exactlyonce import Session
from exactlyonce.pipeline.durations import duration_ms
from exactlyonce.testing.cluster import KafkaCluster

DISORDER_MS = 2_000
BEGIN_MS = round(datetime.fromisoformat("2026-10-24T12:00:00+00:00").timestamp() * 1000)
"""The day before one of 25 hours in Paris."""
STEP_MS = {"daily": 400_000}
"""The time between two clicks of a partition; 250 ms elsewhere."""
FLOORED = """
    with floored as (
        select *, max(ts) over (partition by partition order by "offset" rows between unbounded preceding
                                and 1 preceding) - {disorder} - 1 as floor
        from clicks),
    ending as (select min(greatest) - {disorder} - 1 as watermark from
               (select max(ts) as greatest from clicks group by partition))
"""
OVER = """
    , taken as (select * from windows where last > coalesce(floor, last - 1))
    select user, first, last + 1 as ending, count(*) as n, sum(amount) as spent, max(amount) as most from taken
    where last <= (select watermark from ending) group by user, first, last
"""
LATE = "select id from windows group by id having bool_and(last <= coalesce(floor, last - 1))"
FIXED = """
    , windows as (select *, start as first, start + {size} - 1 as last from (
        select *, unnest(range(ts - ts % {every} - {size} + {every}, ts + 1, {every})) as start from floored))
"""
PARIS = """
    , windows as (select *, epoch_ms(timezone('Europe/Paris', day)) as first,
                  epoch_ms(timezone('Europe/Paris', day + interval 1 day)) - 1 as last
                  from (select *, date_trunc('day', timezone('Europe/Paris', to_timestamp(ts / 1000))) as day
                        from floored))
"""
SESSIONS = """
    , opened as (
        select *, coalesce(ts - lag(ts) over (partition by user order by ts), {gap}) >= {gap} as opens
        from floored where ts + {wait} > coalesce(floor, ts - 1)),
    numbered as (select *, sum(opens::int) over (partition by user order by ts, opens desc
                                                 rows unbounded preceding) as number from opened),
    sessions as (select user, min(ts) as first, max(ts) + {gap} as ending, count(*) as n, sum(amount) as spent,
                        max(amount) as most from numbered group by user, number)
    select * from sessions where ending - 1 + {wait} <= (select watermark from ending)
"""
REVISED = """
    , counted as (select *, greatest(ts, coalesce(floor + 1, ts)) as since from windows),
    shown as (select *, least(last + if(since <= last, 0, {lateness}), since + {early} - 1 - since % {early}) as slot
              from counted where since <= last + {lateness}),
    parts as (select user, first, last, slot, count(*) as n, sum(amount) as spent, max(amount) as most from shown
              where slot <= (select watermark from ending) group by user, first, last, slot)
    select user, first, last + 1, sum(n) over so_far, sum(spent) over so_far, max(most) over so_far,
           row_number() over so_far - 1
    from parts window so_far as (partition by user, first order by slot)
"""
"""A result at each multiple of 4 s, and at the window's end, of the clicks that count by then, if any are new."""
REVISED_LATE = """
    select id from windows group by id having bool_and(greatest(ts, coalesce(floor + 1, ts)) > last + {lateness})
"""
SESSION_LATE = "select id from floored where ts + {wait} <= floor"


def clicks(seed: int, count: int, first: int, window: str) -> list[dict[str, Any]]:
    """Clicks of 6 users in disorder; now and then one is late, or users rest."""
    chance, step = random.Random(seed + first), STEP_MS.get(window, 250)
    made = []
    for id in range(first, first + count):
        now = BEGIN_MS + id * step + (id // 150) * 5_000
        far = [15_000 * step // 250, 40_000 * step // 250 if id % 9 == 0 else 0]
        behind = chance.choice([0, 0, 500, 1_900, 2_000, 2_001, 3_000, *far])
        made.append({"id": id, "user": f"u{chance.randrange(6)}", "at": now - behind, "amount": chance.randrange(100)})
    return made


def insert(database: duckdb.DuckDBPyConnection, table: str, rows: list[Any]) -> None:
    """Insert tuples by columns: `executemany` takes 0.4 ms a row."""
    columns = [[*column] for column in zip(*rows, strict=True)]
    values = ", ".join(f"unnest(${number})" for number in range(1, 1 + len(columns)))
    database.execute(f"insert into {table} select {values}", columns)


class Clicks:
    """The clicks of a job in three partitions, or in three topics."""

    def __init__(self, job: Job, window: str) -> None:
        self.job, self.window, self.fed = job, window, 0
        self.places = [(job.topic, partition) for partition in range(3)]
        if window == "topics":
            self.places = [(job.kafka.create_topic(f"{job.name}-in-{number}", 1), 0) for number in range(3)]

    def feed(self, count: int = 600) -> None:
        for partition in range(3):
            made = clicks(partition, count, self.fed, self.window)
            for click in made:
                click["id"] = click["id"] * 3 + partition
            self._produce(made, partition)
        self.fed += count

    def crowd(self, users: int) -> None:
        """So many users, in one window: more results than one slice of a firing has."""
        self._produce([{"id": -9 - n, "user": f"c{n}", "at": BEGIN_MS, "amount": 1} for n in range(users)], 0)

    def end(self) -> None:
        """A click in each partition a long time after all others, so that their windows are over."""
        for partition in range(3):
            self._produce([{"id": -1 - partition, "user": "end", "at": BEGIN_MS + 10**11, "amount": 0}], partition)

    def _produce(self, made: list[dict[str, Any]], partition: int) -> None:
        topic, partition = self.places[partition]
        self.job.kafka.produce(topic, [(click["user"], json.dumps(click)) for click in made], partition)

    def by_sql(self) -> tuple[list[tuple[Any, ...]], list[int]]:
        """The results and the ids of late clicks that SQL finds in the topic."""
        rows = [
            (self.places.index((topic, partition)), offset, *click.values())
            for topic, partition, offset, click in self._given()
        ]
        with duckdb.connect() as database:
            database.execute("set timezone = 'UTC'")
            database.execute(
                'create table clicks (partition int, "offset" bigint, id bigint, "user" text, ts bigint, amount bigint)'
            )
            insert(database, "clicks", rows)
            results, late = self._queries()
            return sorted(database.sql(results).fetchall()), sorted(id for (id,) in database.sql(late).fetchall())

    def _given(self) -> list[tuple[str, int, int, dict[str, Any]]]:
        """(topic, partition, offset, click) of each record."""
        return [
            (topic, record.partition, record.offset, json.loads(record.value or b""))
            for topic in sorted({topic for topic, _ in self.places})
            for record in self.job.kafka.read_committed(topic)
        ]

    def _queries(self) -> tuple[str, str]:
        floored = FLOORED.format(disorder=DISORDER_MS)
        if isinstance(session := WINDOWS[self.window], Session):
            sizes_ms = {"gap": session.gap_ms, "wait": session.wait_ms}
            return floored + SESSIONS.format(**sizes_ms), floored + SESSION_LATE.format(**sizes_ms)
        sizes = {"tumbling": (10_000, 10_000), "hopping": (30_000, 10_000), "topics": (10_000, 10_000)}
        sizes |= {"revised": sizes["hopping"], "processed": sizes["tumbling"]}
        if self.window == "daily":
            return floored + PARIS + OVER, floored + PARIS + LATE
        windows = FIXED.format(size=sizes[self.window][0], every=sizes[self.window][1])
        if self.window in REVISIONS:
            sizes_ms = {name: duration_ms(text) for name, text in REVISIONS[self.window].items()}
            results, late = REVISED.format(**sizes_ms), REVISED_LATE.format(**sizes_ms)
            return floored + windows + results, floored + windows + late
        return floored + windows + OVER, floored + windows + LATE

    def assert_as_by_sql(self) -> None:
        results, late = self.by_sql()
        assert len(results) > 5
        assert len(late) > 5
        assert sorted(self.result(record.value) for record in visible(*self.out("out", len(results)))) == results
        left_out = [json.loads(record.value or b"")["id"] for record in visible(*self.out("late", len(late)))]
        assert sorted(left_out) == late

    def assert_open(self, states: list[dict[str, Any]]) -> None:
        """*states* are those of all records that are in no result and are not late, each in its time."""
        given = [click for *_, click in self._given()]
        taken = {
            topic: [
                json.loads(record.value or b"") for record in self.job.kafka.read_committed(f"{self.job.name}-{topic}")
            ]
            for topic in ("out", "late")
        }
        lists = self.window in ("folded", "processed")
        counts = [len(state["state"]) if lists else state["state"][0] for state in states]
        assert sum(counts) > 5
        if self.window != "hopping" and self.window not in REVISIONS:  # whose states also have records of results
            results = sum(self.result(json.dumps(result).encode())[3] for result in taken["out"])
            assert sum(counts) == len(given) - len(taken["late"]) - results
        for state in states:
            start, end = (datetime.fromisoformat(state[at]) for at in ("start", "end"))
            times = [click["at"] for click in given if click["user"] == state["key"]]
            assert any(start.timestamp() * 1000 <= time < end.timestamp() * 1000 for time in times)

    def out(self, topic: str, count: int) -> tuple[KafkaCluster, str, int]:
        return self.job.kafka, f"{self.job.name}-{topic}", count

    def result(self, value: bytes | None) -> tuple[Any, ...]:
        result = json.loads(value or b"")
        start, end = (round(datetime.fromisoformat(result[at]).timestamp() * 1000) for at in ("start", "end"))
        of = result["value"]
        if self.window == "folded":
            of = of["amounts"] if isinstance(of, dict) else of
            of = {"n": len(of), "spent": sum(of), "most": max(of)}
        elif self.window != "processed":
            assert of["ids"] == pytest.approx(of["n"], rel=0.3)
            assert of["percentiles"][1] == pytest.approx(of["most"], rel=0.011)
        counted = (result["key"], start, end, of["n"], of["spent"], of["most"])
        return (*counted, result["revision"]) if self.window in REVISIONS else counted
