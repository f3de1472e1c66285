"""SIGKILL at random instants while input flows, in every role: exact, seed by seed."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable

import pytest
from running import Job, orders, workers_of

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]

SEEDS = [int(seed) for seed in os.environ.get("EXACTLYONCE_SEEDS", "1,2").split(",")]
KILLS = 4


class Feed(threading.Thread):
    """Produces a batch after each pause, until told to end."""

    def __init__(self, kafka: KafkaCluster, topic: str, first: int) -> None:
        super().__init__(daemon=True)
        self.kafka, self.topic, self.next = kafka, topic, first
        self.fed: list[tuple[str, str]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            batch = orders(100, first=self.next)
            self.kafka.produce(self.topic, batch)
            self.fed += batch
            self.next += 100


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", SEEDS)
def test_random_kills(seed: int, job_of: Callable[..., Job]) -> None:
    """Everything counts once, whoever is killed. Again: EXACTLYONCE_SEEDS=<seed> pytest tests/engines/test_chaos.py."""
    dice = random.Random(seed)
    job = job_of("diamond", "--parallelism", "2")
    job.kafka.create_topic(f"{job.name}-more", 2)
    feeds = [Feed(job.kafka, f"{job.name}-{topic}", first) for topic, first in (("in", 0), ("more", 1_000_000))]
    for feed in feeds:
        feed.start()
    run = job.start()
    for _ in range(KILLS):
        run.await_step("deployed")
        workers = workers_of(run)
        run.await_checkpoint()
        run.await_step(dice.choice(["triggered", "acknowledged", "decided", "finalized"]))
        threading.Event().wait(dice.uniform(0, 0.05))
        if dice.random() < 0.5:
            run.kill()
            run = job.start()
        else:
            os.kill(dice.choice(workers), signal.SIGKILL)
    run.await_checkpoint()
    for feed in feeds:
        feed.ended.set()
        feed.join()
        job.fed += feed.fed
    run.kill()
    job.finish()
    job.assert_totals()
    job.assert_copies()
