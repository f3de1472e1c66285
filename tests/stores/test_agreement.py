"""Kafka, PostgreSQL, MariaDB, Redis and files in one pipeline agree, whichever process was killed when."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from jobs import Feed, Job
from servers import FORMATS, STORES, Row
from together import table

pytestmark = pytest.mark.slow

SINKS = (
    *("files-jsonl", "files-parquet", "mariadb-append", "mariadb-upsert"),
    *("postgres-append", "postgres-upsert", "redis-stream", "redis-string"),
)
"""The checkpoints in the order in which they are committed."""
SEEDS = [int(seed) for seed in os.environ.get("EXACTLYONCE_SEEDS", "1").split(",")]
KILLS = 6


def holding(job: Job) -> list[str]:
    stored: dict[str, list[Row]] = {f"files-{each}": job.servers.filed(job.name, each) for each in FORMATS}
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
