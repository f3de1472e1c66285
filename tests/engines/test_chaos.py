"""SIGKILL at random instants while input flows, in every role: exact, seed by seed."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import pytest
from running import QUICK, Run, assert_copies, assert_totals, orders

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
def test_random_kills(seed: int, kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """Everything counts once, whoever is killed. Again: EXACTLYONCE_SEEDS=<seed> pytest tests/engines/test_chaos.py."""
    dice = random.Random(seed)
    feeds = []
    for topic, first in ((f"{topic_name}-in", 0), (f"{topic_name}-more", 1_000_000)):
        kafka.create_topic(topic, 2)
        feeds.append(Feed(kafka, topic, first))
        feeds[-1].start()
    arguments = ("pipelines:diamond", "--param", f"name={topic_name}", "--parallelism", "2", *QUICK)
    job: Run = run(*arguments)
    for _ in range(KILLS):
        workers = job.await_step("deployed")["workers"]
        job.await_checkpoint()
        job.await_step(dice.choice(["triggered", "acknowledged", "decided", "finalized"]))
        threading.Event().wait(dice.uniform(0, 0.05))
        if dice.random() < 0.5:
            job.kill()
            job = run(*arguments)
        else:
            os.kill(dice.choice(workers), signal.SIGKILL)
    job.await_checkpoint()
    for feed in feeds:
        feed.ended.set()
        feed.join()
    job.kill()
    assert run(*arguments, "--until", "latest").wait() == 0
    fed = feeds[0].fed + feeds[1].fed
    assert_totals(kafka, f"{topic_name}-out", fed)
    assert_copies(kafka, f"{topic_name}-copies", fed)
