"""Joins of tables by a foreign key in runs that are killed: the last results are what SQL says of the last rows."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from running import Job, stop, visible, workers_of
from tables_fed import Tables

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.savepoints.shown_state import state_at
from exactlyonce.engines.savepoints.state_reader import StateReader

pytestmark = pytest.mark.broker
RECORD = 3
"""The exit code of a run that a record has stopped."""


def tables_of(job: Job) -> Tables:
    return Tables(job.kafka, job.name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("how", ["inner", "left"])
def test_kills_and_other_parallelism_make_no_difference(
    how: str, backend: str, job_of: Callable[..., Job], failpoint: Any
) -> None:
    timed = ("--param", "timed=yes") if how == "left" else ()
    job = job_of("table_pipelines:joined", "--param", f"how={how}", "--state-backend", backend, *timed)
    tables = tables_of(job)
    steps = ("worker-frozen", 2), ("worker-acknowledged", 4), ("coordinator-decided", 1), ("coordinator-committed", 1)
    for parallelism, (name, nth) in zip((2, 3, 1, 2), steps, strict=True):
        tables.feed(150)
        job.run_killed(failpoint(name, nth=nth), parallelism)
    tables.feed(100)
    job.finish("--parallelism", "3")
    tables.assert_joined(how)


@pytest.mark.exhaustive
def test_barriers_that_overtake_records_make_no_difference(job_of: Callable[..., Job], failpoint: Any) -> None:
    job = job_of(
        "table_pipelines:joined", "--param", "how=left", "--unaligned", "--checkpoint-interval", "200ms",
        "--num-retained", "100",
    )  # fmt: skip
    tables = tables_of(job)
    for parallelism, name in ((3, "unaligned-captured"), (2, "worker-frozen"), (3, "coordinator-decided")):
        tables.feed(200)
        job.run_killed(failpoint(name), parallelism, "--param", "pause_ms=4")
    assert any(manifest.channel_logs for manifest in job.history().manifests.values())
    tables.feed(100)
    job.finish("--parallelism", "2")
    tables.assert_joined("left")


@pytest.mark.exhaustive
def test_a_run_that_is_killed_at_any_time_goes_on(job_of: Callable[..., Job]) -> None:
    job, chance = job_of("table_pipelines:joined", "--unaligned"), random.Random()
    tables = tables_of(job)
    for parallelism in (2, 3, 1, 4):
        incarnation = job.start("--parallelism", str(parallelism))
        for _ in range(chance.randint(1, 3)):
            tables.feed(80)
            incarnation.await_checkpoint()
        time.sleep(chance.random() / 2)
        incarnation.kill()
    job.finish("--parallelism", "2")
    tables.assert_joined("inner")


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("more", [(), ("--unaligned",)], ids=["aligned", "unaligned"])
def test_workers_that_are_killed_alone_make_no_difference(
    more: tuple[str, ...], how: str, job_of: Callable[..., Job]
) -> None:
    """At any time, again and again: the coordinator lives, and begins anew at the last checkpoint."""
    job, chance = job_of("table_pipelines:joined", "--param", f"how={how}", *more), random.Random()
    tables = tables_of(job)
    run = job.start("--parallelism", "3", "--param", "pause_ms=1")
    for _ in range(8):
        tables.feed(80)
        run.await_checkpoint()
        time.sleep(chance.random() / 2)
        os.kill(chance.choice(workers_of(run)), signal.SIGKILL)
        run.await_event(lambda event: event["event"] == "running")
    tables.feed(80)
    run.await_checkpoint()
    assert sum(event["event"] == "running" for event in run.events) == 9
    stop(run)
    job.finish("--parallelism", "2")
    tables.assert_joined(how)


def test_its_state_is_shown_by_key(job_of: Callable[..., Job]) -> None:
    job = job_of("table_pipelines:joined", "--param", "how=left")
    job.kafka.create_topic(f"{job.name}-right", 2)
    job.kafka.produce(f"{job.name}-in", [("rex", '{"id": 1, "owner": "ann"}'), ("tom", '{"id": 2, "owner": "bob"}')])
    job.kafka.produce(f"{job.name}-right", [("ann", '{"id": 3}')])
    job.finish_here()
    with StateReader(job.name, bootstrap_servers=job.kafka.bootstrap_servers) as reader:
        states = {
            step: [view.state for view in reader.get(f"owned{step}", key)]
            for step, key in (("-subscribe", "rex"), ("-answer", "ann"), ("", "rex"), ("", "tom"))
        }
        assert states["-subscribe"] == [{"foreign_key": "ann"}]
        assert states["-answer"] == [{"right": {"id": 3}}, {"rows": ["rex"]}]
        (tom,) = states[""]
        assert (tom["left"], tom["has_result"]) == ({"id": 2, "owner": "bob"}, True)
    with state_at(ClientConfig({"bootstrap.servers": job.kafka.bootstrap_servers}), job.name) as view:
        assert {operator.operator for operator in view.operators()} == {"owned", "owned-subscribe", "owned-answer"}
        assert sorted(key.key for key in view.keys("owned")) == ["rex", "tom"]
    shown = job.command("state", "show", job.name, "owned", "--key", "rex")
    assert '"has_result":true' in shown


def test_a_row_that_has_no_foreign_key_is_a_dead_letter_and_the_row_before_stays(job_of: Callable[..., Job]) -> None:
    job = job_of("table_pipelines:joined", "--param", "dead=yes")
    job.kafka.create_topic(f"{job.name}-right", 2)
    job.kafka.produce(
        f"{job.name}-in", [("rex", '{"id": 1, "owner": "ann"}'), ("rex", '{"id": 2, "owner": "nobody"}')], 0
    )
    job.kafka.produce(f"{job.name}-right", [("ann", '{"id": 3}')])
    job.finish_here()
    (result,) = visible(job.kafka, f"{job.name}-out", 1)
    assert json.loads(result.value or b"") == {"key": "rex", "left": {"id": 1, "owner": "ann"}, "right": {"id": 3}}
    (letter,) = visible(job.kafka, f"{job.name}-dead", 1)
    assert json.loads(letter.value or b"")["value"] == {"id": 2, "owner": "nobody"}


def test_a_row_on_which_the_function_raises_stops_the_run_and_is_named(job_of: Callable[..., Job]) -> None:
    job = job_of("table_pipelines:joined")
    job.kafka.create_topic(f"{job.name}-right", 2)
    job.kafka.produce(f"{job.name}-in", [("rex", '{"id": 2, "owner": "nobody"}')], 0)
    said = job.finish_here(code=RECORD)
    assert "Operator 'owned-subscribe' raised ValueError: an owner is nobody" in said
    assert f"{job.name}-in[0] offset 0" in said
