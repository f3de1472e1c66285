"""Servers that are killed, paused and away while a pipeline writes to all stores: it waits, and all agree."""

from __future__ import annotations

import time

import pytest
from jobs import Feed, Job, stop
from running import Run
from servers import STORES

pytestmark = [pytest.mark.broker, pytest.mark.slow]


def await_waiting(incarnation: Run, store: str) -> None:
    incarnation.await_event(lambda event: f"waiting for the store of sink '{store}-" in event.get("text", ""))


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
