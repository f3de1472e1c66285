"""Faults: a store refuses, has lost, or is written by a zombie: each is named, with what to do, and tells no secret."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import running
from bounded import Silent
from jobs import Job, assert_no_secret
from running import Fed, Run, assert_updates, await_stopped, orders
from servers import DATABASE, STORES, Servers
from together import table
from waiting import until

from exactlyonce.checkpoint import leader
from exactlyonce.checkpoint.records import history
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.postgres.connection import Limits
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.submit import in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.loading import Loaded, load_reference
from exactlyonce.sinks.postgres import store as postgres_store
from exactlyonce.testing.cluster import BY_KEY, LIMIT_S, KafkaCluster

USER, RECORD, AWAY, FENCED, HALTED = 2, 3, 4, 5, 6
TABLES = ("postgres", "mariadb")


class Alone(running.Job):
    def __init__(
        self, servers: Servers, kafka: KafkaCluster, name: str, run: Callable[..., Run], store: str, target: str = ""
    ) -> None:
        self.servers, self.store = servers, store
        self.target = target or (f"{name}:totals" if store == "redis" else table(name, "alone"))
        given = ("--param", f"store={store}", "--param", f"target={self.target}")
        super().__init__(run, kafka, name, "together:alone", *given, partitions=2)
        self.feed()

    def feed(self, count: int = 500, to: str = "in", customers: int = 17, partition: int = BY_KEY) -> Fed:
        return super().feed(count, to, customers, partition)

    def finish(self, *arguments: str, code: int = 0, **options: Any) -> Run:
        incarnation = super().finish(*arguments, code=code, **options)
        assert "Traceback" not in incarnation.said
        return incarnation

    def incarnation(self) -> int:
        return max(self.history().incarnations, default=0)

    def assert_exact(self) -> None:
        rows = self.servers.appended(self.store, self.target)
        assert_updates([row._asdict() for row in rows], self.fed, self.store)


@pytest.fixture
def alone(servers: Servers, kafka: KafkaCluster, topic_name: str, run: Any) -> Callable[[str], Alone]:
    def made(store: str) -> Alone:
        pipeline = Alone(servers, kafka, topic_name, run, store)
        if store != "redis":
            servers.make_table(store, pipeline.target)
        return pipeline

    return made


@pytest.mark.exhaustive(matrix=True, in_all=["mariadb"])
@pytest.mark.parametrize("store", STORES)
def test_a_wrong_password(store: str, alone: Any) -> None:
    pipeline = alone(store)
    pipeline.finish()
    before, wrong = pipeline.incarnation(), "wr0ng/p@ss"
    said = pipeline.finish(env=pipeline.servers.addresses(wrong), code=USER).said
    assert "Sink 'rows': " in said
    assert pipeline.incarnation() == before
    pipeline.feed()
    pipeline.finish()
    pipeline.assert_exact()
    assert_no_secret(pipeline.kafka, pipeline.name, pipeline.incarnations)
    assert_no_secret(pipeline.kafka, pipeline.name, [], wrong)
    assert all(wrong not in each.said + json.dumps(each.events) for each in pipeline.incarnations)


@pytest.mark.exhaustive(matrix=True)
@pytest.mark.parametrize("store", TABLES)
def test_a_value_that_does_not_fit(store: str, alone: Any) -> None:
    pipeline = alone(store)
    pipeline.servers.sql(store, f"ALTER TABLE {pipeline.target} DROP COLUMN sum")
    pipeline.servers.sql(store, f"ALTER TABLE {pipeline.target} ADD COLUMN sum smallint NOT NULL")
    pipeline.finish()
    before = pipeline.servers.appended(store, pipeline.target)
    pipeline.feed(10)
    pipeline.fed.append(("", json.dumps({"id": len(pipeline.fed), "customer": "c0", "total": 1_000_000})))
    pipeline.kafka.produce(pipeline.topic, pipeline.fed[-1:])
    said = pipeline.finish("--parallelism", "2", code=RECORD).said
    assert re.search(rf"Sink 'rows' cannot write the record at {pipeline.name}-in\[\d\] offset \d+: sum: ", said), said
    assert re.search(rf"column of table .*{pipeline.target}.* is smallint.* nothing is lost", said), said
    assert pipeline.servers.appended(store, pipeline.target) == before
    statement = "ALTER COLUMN sum TYPE bigint" if store == "postgres" else "MODIFY COLUMN sum bigint NOT NULL"
    pipeline.servers.sql(store, f"ALTER TABLE {pipeline.target} {statement}")
    pipeline.finish()
    pipeline.assert_exact()


@pytest.mark.exhaustive(matrix=True)
@pytest.mark.parametrize("store", STORES)
def test_two_pipelines_into_one_target(
    store: str, servers: Servers, kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path
) -> None:
    first = Alone(servers, kafka, f"a-{topic_name}", run, store)
    second = Alone(servers, kafka, f"b-{topic_name}", run, store, first.target)
    if store != "redis":
        servers.make_table(store, first.target)
    both = (first, second)
    jobs = [each.start("--parallelism", "2") for each in both]
    for each in jobs:
        each.await_checkpoint()
    jobs[0].await_step("decided")
    jobs[0].kill()
    first.feed()
    kafka.produce(second.topic, orders(500, first=10_000))
    jobs[1].kill()
    for pipeline in both:
        pipeline.finish()
    ids = [row.id for row in servers.appended(store, first.target)]
    fed = [json.loads(record.value or b"")["id"] for each in both for record in kafka.read_committed(each.topic)]
    assert sorted(ids) == sorted(fed)


@pytest.mark.exhaustive(matrix=True)
@pytest.mark.parametrize("store", TABLES)
@pytest.mark.parametrize("create", ["", "yes"])
def test_a_dropped_table(store: str, create: str, alone: Any) -> None:
    pipeline = alone(store)
    pipeline.finish("--param", f"create={create}")
    pipeline.servers.sql(store, f"ALTER TABLE {pipeline.target} RENAME TO {pipeline.target}_kept")
    pipeline.feed()
    for _ in range(2):
        said = pipeline.finish("--param", f"create={create}", code=USER).said
        assert pipeline.target in said
    pipeline.servers.sql(store, f"ALTER TABLE {pipeline.target}_kept RENAME TO {pipeline.target}")
    pipeline.finish("--param", f"create={create}")
    pipeline.assert_exact()


@pytest.mark.exhaustive(matrix=True)
@pytest.mark.parametrize("store", TABLES)
def test_a_truncated_table(store: str, alone: Any) -> None:
    """Rows that somebody has removed do not come again: a table is its users'."""
    pipeline = alone(store)
    pipeline.finish()
    before = len(pipeline.fed)
    pipeline.servers.sql(store, f"TRUNCATE TABLE {pipeline.target}")
    pipeline.feed()
    pipeline.finish()
    ids = [row.id for row in pipeline.servers.appended(store, pipeline.target)]
    assert sorted(ids) == sorted(json.loads(value)["id"] for _, value in pipeline.fed[before:])


@pytest.mark.exhaustive(matrix=True)
@pytest.mark.parametrize("step", ["coordinator-decided", "store-committing", "store-committed"])
@pytest.mark.parametrize("nth", [1, 4])
def test_a_zombie_leader(step: str, nth: int, job: Job) -> None:
    """It sleeps in the middle of the commits, another finishes them, and it wakes up."""
    job.feed()
    zombie = job.armed(step, "--parallelism", "2", action="stop", nth=nth)
    await_stopped(zombie.process.pid)
    job.finish("--parallelism", "3")
    job.assert_agreement()
    os.kill(zombie.process.pid, signal.SIGCONT)
    assert zombie.wait() == FENCED, zombie.said
    job.assert_agreement()
    job.feed(500)
    job.finish()
    job.assert_agreement()


@pytest.mark.exhaustive
def test_an_apply_that_takes_longer_than_a_silence(alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store holds it up heartbeats go on, so that nobody takes the leader for dead; then the rows come."""
    monkeypatch.setattr(history, "SILENCE_MS", 3_000)
    monkeypatch.setattr(leader, "UPKEEP_INTERVAL_S", 0.2)
    monkeypatch.setattr(postgres_store, "Limits", partial(Limits, lock=LIMIT_S, answer=LIMIT_S))  # never given up
    pipeline = alone("postgres")
    client = ClientConfig({"bootstrap.servers": pipeline.kafka.bootstrap_servers})
    params = {"name": pipeline.name, "store": pipeline.store, "target": pipeline.target}
    reference: dict[str, object] = {
        "module": "together", "attribute": "alone", "params": params, "path": str(Path(__file__).parent / "rig"),
    }  # fmt: skip
    loaded, options = Loaded(load_reference(reference), reference), RunOptions(client)
    held = psycopg.connect(pipeline.servers.postgres.dsn(DATABASE))
    held.execute(f"LOCK TABLE {pipeline.target} IN EXCLUSIVE MODE".encode())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(CatchUp(loaded, options, Silent()).lead, in_process, tmp_path)
        try:
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            until(lambda: pipeline.servers.sql("postgres", waiting)[0][0], pause_s=0.05)
            long_after_ms = SystemClock().now_ms() + 2 * history.SILENCE_MS
            until(lambda: read_history(client, pipeline.name).living(long_after_ms), pause_s=0.1)  # a heartbeat comes
            assert not running.done()
        finally:
            held.close()
        assert running.result().records == len(pipeline.fed)
    assert pipeline.incarnation() == 1
    pipeline.assert_exact()
