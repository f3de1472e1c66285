"""Handlers with timers in runs that are killed, at any parallelism: what comes out is what SQL says of the topic."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import duckdb
import pytest
from running import Job, visible
from test_loops import EXAMPLES
from window_clicks import FLOORED, insert

pytestmark = pytest.mark.broker

BEGIN_MS = 1_700_000_000_000
PAYMENTS = (
    FLOORED.replace("from clicks", "from payments")
    + """
    , followed as (
        select *, lead(id) over cards as next, lead(cents) over cards as next_cents, lead(ts) over cards as next_ts
        from floored where ts > coalesce(floor, ts - 1)
        window cards as (partition by card order by ts, partition, "offset"))
"""
)
ALERTS = "select id, next from followed where cents <= 100 and next_cents >= 50000 and next_ts <= ts + 60000"
PROBES = """select id, ts + 60000 from followed where cents <= 100 and ts + 60000 < coalesce(next_ts, ts + 60001)
            and ts + 60000 <= (select watermark from ending)"""
LATE = "select id from floored where ts <= floor"


class Payments:
    """The payments of a job in three partitions."""

    def __init__(self, job: Job) -> None:
        self.job, self.fed = job, 0
        job.kafka.create_topic(f"{job.name}-payments", 3)

    def feed(self, count: int) -> None:
        """Payments of 6 cards in disorder; now and then one is late, or cards rest."""
        for partition in range(3):
            chance = random.Random(partition + self.fed)
            self._produce(partition, [
                (id * 3 + partition, f"c{chance.randrange(6)}", BEGIN_MS + id * 15_000 + id // 50 * 300_000
                 - chance.choice([0, 0, 0, 500, 1_999, 2_000, 20_000, 61_000]),
                 chance.choice([50, 100, 100, 5_000, 50_000, 60_000]))
                for id in range(self.fed, self.fed + count)
            ])  # fmt: skip
        self.fed += count

    def end(self) -> None:
        """A payment in each partition a long time after all others, so that what they wait for is over."""
        for partition in range(3):
            self._produce(partition, [(-1 - partition, "end", BEGIN_MS + 10**10, 1_000)])

    def _produce(self, partition: int, made: list[tuple[int, str, int, int]]) -> None:
        records = [
            (card, json.dumps({"id": id, "card": card, "at": self._shown(ts), "cents": cents}))
            for id, card, ts, cents in made
        ]
        self.job.kafka.produce(f"{self.job.name}-payments", records, partition)

    @staticmethod
    def _shown(ts: int) -> str:
        return datetime.fromtimestamp(ts / 1000, timezone.utc).isoformat(timespec="milliseconds")

    def assert_as_by_sql(self) -> None:
        rows = []
        for record in self.job.kafka.read_committed(f"{self.job.name}-payments"):
            of = json.loads(record.value or b"")
            ts = round(datetime.fromisoformat(of["at"]).timestamp() * 1000)
            rows.append((record.partition, record.offset, of["id"], of["card"], ts, of["cents"]))
        with duckdb.connect() as database:
            database.execute(
                'create table payments (partition int, "offset" bigint, id bigint, card text, ts bigint, cents bigint)'
            )
            insert(database, "payments", rows)
            floored = PAYMENTS.format(disorder=2_000)
            alerts, probes, late = (sorted(database.sql(floored + of).fetchall()) for of in (ALERTS, PROBES, LATE))
        assert min(map(len, (alerts, probes, late))) > 5
        assert sorted((of["small"], of["large"]) for of in self._out("alerts", len(alerts))) == alerts
        ends = ((of["small"], datetime.fromisoformat(of["until"])) for of in self._out("probes", len(probes)))
        assert sorted((small, round(end.timestamp() * 1000)) for small, end in ends) == probes
        assert sorted((of["id"],) for of in self._out("late", len(late))) == late

    def _out(self, topic: str, count: int) -> list[dict[str, Any]]:
        records = visible(self.job.kafka, f"{self.job.name}-{topic}", count)
        return [json.loads(record.value or b"") for record in records]


@pytest.mark.exhaustive(but=["hashmap-0"])
@pytest.mark.parametrize(("backend", "kills"), [("hashmap", 0), ("hashmap", 3), ("rocksdb", 3)])
def test_kills_and_other_parallelism_make_no_difference(
    backend: str, kills: int, job_of: Callable[..., Job], failpoint: Any, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES["PYTHONPATH"])
    payments = Payments(job_of("fraud:pipeline", "--state-backend", backend))
    payments.feed(400)
    payments.job.finish_here()
    steps = (2, "timed-fired", 2), (3, "worker-frozen", 2), (2, "coordinator-committed", 1)
    for parallelism, name, nth in steps[:kills]:
        payments.feed(400)
        payments.job.run_killed({**EXAMPLES, **failpoint(name, nth=nth)}, parallelism)
    payments.end()
    payments.job.finish_here()
    payments.assert_as_by_sql()
