"""A store that refuses, which is named without a secret, or holds an apply up for long."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import running
from bounded import Silent
from jobs import assert_no_secret
from running import Run, assert_updates
from servers import DATABASE, Servers
from together import table
from waiting import until

from exactlyonce.checkpoint import leader
from exactlyonce.checkpoint.records import history
from exactlyonce.connectors.postgres.connection import Limits
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.stages import in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.loading import Loaded, load_reference
from exactlyonce.sinks.postgres import store as postgres_store
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

USER = 2
"""The exit code of what a user has to correct."""


class Alone(running.Job):
    """A pipeline that appends to a table of one store, fed with 500 orders."""

    def __init__(self, servers: Servers, kafka: KafkaCluster, name: str, run: Callable[..., Run], store: str) -> None:
        self.servers, self.store, self.target = servers, store, table(name, "alone")
        given = ("--param", f"store={store}", "--param", f"target={self.target}")
        super().__init__(run, kafka, name, "together:alone", *given, partitions=2)
        servers.make_table(store, self.target)
        self.feed(500)

    def incarnation(self) -> int:
        return max(self.history().incarnations, default=0)

    def assert_exact(self) -> None:
        rows = self.servers.appended(self.store, self.target)
        assert_updates([row._asdict() for row in rows], self.fed, self.store)


@pytest.fixture
def alone(servers: Servers, kafka: KafkaCluster, topic_name: str, run: Any) -> Callable[[str], Alone]:
    return partial(Alone, servers, kafka, topic_name, run)


@pytest.mark.exhaustive
def test_a_wrong_password(alone: Any) -> None:
    pipeline = alone("mariadb")
    pipeline.finish()
    before, wrong = pipeline.incarnation(), "wr0ng/p@ss"
    said = pipeline.finish(env=pipeline.servers.addresses(wrong), code=USER).said
    assert "Sink 'rows': " in said
    assert pipeline.incarnation() == before
    assert "Traceback" not in said
    pipeline.feed(500)
    pipeline.finish()
    pipeline.assert_exact()
    assert_no_secret(pipeline.kafka, pipeline.name, pipeline.incarnations)
    assert_no_secret(pipeline.kafka, pipeline.name, [], wrong)
    assert all(wrong not in each.said + json.dumps(each.events) for each in pipeline.incarnations)


@pytest.mark.exhaustive
def test_an_apply_that_takes_longer_than_a_silence(alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store holds it up heartbeats go on, so that nobody takes the leader for dead; then the rows come."""
    monkeypatch.setattr(history, "SILENCE_MS", 3_000)
    monkeypatch.setattr(leader, "UPKEEP_INTERVAL_S", 0.2)
    monkeypatch.setattr(postgres_store, "Limits", partial(Limits, lock=LIMIT_S, answer=LIMIT_S))  # never given up
    pipeline = alone("postgres")
    params = {"name": pipeline.name, "store": pipeline.store, "target": pipeline.target}
    reference: dict[str, object] = {
        "module": "together", "attribute": "alone", "params": params, "path": str(Path(__file__).parent / "rig"),
    }  # fmt: skip
    loaded, options = Loaded(load_reference(reference), reference), RunOptions(pipeline.config)
    held = psycopg.connect(pipeline.servers.postgres.dsn(DATABASE))
    held.execute(f"LOCK TABLE {pipeline.target} IN EXCLUSIVE MODE".encode())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(CatchUp(loaded, options, Silent()).lead, in_process, tmp_path)
        try:
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            until(lambda: pipeline.servers.sql("postgres", waiting)[0][0], pause_s=0.05)
            long_after_ms = SystemClock().now_ms() + 2 * history.SILENCE_MS
            until(lambda: pipeline.history().living(long_after_ms), pause_s=0.1)  # a heartbeat comes
            assert not running.done()
        finally:
            held.close()
        assert running.result().records == len(pipeline.fed)
    assert pipeline.incarnation() == 1
    pipeline.assert_exact()
