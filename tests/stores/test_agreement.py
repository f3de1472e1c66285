"""Kafka, PostgreSQL, MariaDB, DuckDB, Redis and files in one pipeline agree, whichever process was killed when."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from jobs import Feed, Job, stop
from running import Run, assert_once
from servers import FORMATS, STORES, Row
from together import table
from waiting import until

pytestmark = pytest.mark.slow


SINKS = (
    *("duckdb-append", "duckdb-upsert"),
    *("files-jsonl", "files-parquet", "mariadb-append", "mariadb-upsert"),
    *("postgres-append", "postgres-upsert", "redis-stream", "redis-string"),
)
"""The checkpoints in the order in which they are committed."""
SEEDS = [int(seed) for seed in os.environ.get("EXACTLYONCE_SEEDS", "1").split(",")]
KILLS = 6


def holding(job: Job) -> list[str]:
    stored: dict[str, list[Row]] = {f"files-{each}": job.servers.filed(job.name, each) for each in FORMATS}
    for mode in ("append", "upsert"):
        stored[f"duckdb-{mode}"] = job.servers.in_duckdb(job.name, f"{mode}ed")
    for store in STORES:
        target = f"{job.name}:totals" if store == "redis" else table(job.name, "append")
        stored[f"{store}-{'stream' if store == 'redis' else 'append'}"] = job.servers.appended(store, target)
        stored[f"{store}-{'string' if store == 'redis' else 'upsert'}"] = job.servers.upserted(store, job.name)
    return [sink for sink in SINKS if stored[sink]]


@pytest.mark.exhaustive
def test_kills_in_turn(job: Job) -> None:
    job.feed()
    for parallelism, step, nth in (
        (1, "store-committing", 4), (3, "store-committed", 10),
    ):  # fmt: skip
        assert job.armed(step, "--parallelism", str(parallelism), nth=nth).wait() == -9
        if len(job.incarnations) == 1:
            assert holding(job) == list(SINKS[:3]), "some stores have it, others do not"
    worker = job.armed("worker-flushed", "--parallelism", "2", nth=3)
    worker.await_checkpoint()
    worker.kill()
    job.finish("--parallelism", "3")
    job.assert_agreement()


@pytest.mark.exhaustive(matrix=True)
@pytest.mark.parametrize("nth", range(1, len(SINKS) + 1))
def test_kills_between_the_stores(nth: int, job: Job) -> None:
    job.feed()
    assert job.armed("store-committed", nth=nth).wait() == -9
    assert holding(job) == list(SINKS[:nth])
    job.finish("--parallelism", "2")
    job.assert_agreement()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", SEEDS)
def test_random_kills(seed: int, job: Job) -> None:
    """Kills come at random instants, with another number of subtasks each time.

    Again: EXACTLYONCE_SEEDS=<seed> pytest tests/stores/test_agreement.py -k random.
    """
    dice = random.Random(seed)
    feed = Feed(job)
    feed.start()
    parallelism = [1, 3, 2]
    incarnation = job.start("--parallelism", "1")
    for number in range(1, KILLS + 1):
        workers = incarnation.await_step("deployed")["workers"]
        incarnation.await_checkpoint()
        incarnation.await_step(dice.choice(["triggered", "acknowledged", "decided", "finalized"]))
        time.sleep(dice.uniform(0, 0.1))
        if dice.random() < 0.3:
            os.kill(dice.choice(workers), signal.SIGKILL)
            continue
        incarnation.kill()
        incarnation = job.start("--parallelism", str(parallelism[number % 3]))
    incarnation.await_checkpoint()
    feed.end()
    incarnation.kill()
    job.finish("--parallelism", "2")
    job.assert_agreement()


# --- servers that are killed and away: the pipeline waits -------------------------------------------------------------


def await_waiting(incarnation: Run, store: str) -> None:
    incarnation.await_event(lambda event: f"waiting for the store of sink '{store}-" in event.get("text", ""))


@pytest.mark.broker
@pytest.mark.exhaustive(matrix=True)
@pytest.mark.parametrize("store", STORES)
def test_a_kill_while_a_server_is_away(store: str, job: Job) -> None:
    job.feed()
    incarnation = job.start("--parallelism", "2")
    incarnation.await_checkpoint()
    job.servers.kill(store)
    try:
        job.feed()
        await_waiting(incarnation, store)
        incarnation.kill()
        again = job.start("--until", "latest", "--store-timeout", "2s")
        assert again.wait() == 4, again.said
    finally:
        job.servers.start(store)
    job.finish("--parallelism", "3")
    job.assert_agreement()


@pytest.mark.broker
@pytest.mark.exhaustive(matrix=True)
@pytest.mark.parametrize("store", STORES)
def test_kills_of_a_server_at_each_commit(store: str, job: Job) -> None:
    feed = Feed(job, number=400)
    feed.start()
    incarnation = job.start("--parallelism", "2")
    for number in range(8):
        incarnation.await_step("decided")
        time.sleep(0.02 * number)
        job.servers.kill(store)
        job.servers.start(store)
        incarnation.await_checkpoint()
    feed.end()
    stop(incarnation)
    job.finish()
    job.assert_agreement()


# --- every store at least once: none is missing, and without a failure none is doubled --------------------------------


PLACES = (*STORES, *FORMATS)


@pytest.mark.exhaustive
def test_through_a_kill(job: Job) -> None:
    target = "together:weaker"
    job.feed()
    first = job.start("--parallelism", "2", target=target)
    until(lambda: all(rows_of(job, place) for place in PLACES), told=lambda: first.said, pause_s=0.05)
    job.feed()
    first.await_event(lambda event: event["event"] == "checkpoint")
    assert "restarting" not in first.said
    first.kill()
    fed_before = len(job.fed)
    job.finish(target=target)
    job.feed(500)
    job.finish("--parallelism", "3", target=target)
    for place in PLACES:
        ids = [row.id for row in rows_of(job, place)]
        assert {*ids} == {*range(len(job.fed))}, place
        assert_once([each for each in ids if each >= fed_before], job.fed[fed_before:], place)


def rows_of(job: Job, place: str) -> list[Row]:
    if place in FORMATS:
        return job.servers.filed(job.name, place)
    return job.servers.appended(place, f"{job.name}:totals" if place == "redis" else table(job.name, "append"))
