"""A million rows in each store, through kills of processes and servers: none missing, none doubled."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import cycle

import pytest
from counting import assert_agreement
from jobs import Job
from servers import STORES

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.exhaustive(matrix=True)]

ROWS = int(os.environ.get("EXACTLYONCE_ROWS", "1000000"))
KILLS = 10
INTERVAL = ("--checkpoint-interval", "2s")


def test_a_million_rows(job: Job) -> None:
    dice, began = random.Random(7), time.monotonic()
    job.feed(ROWS)
    print(f"{ROWS:,} orders fed in {time.monotonic() - began:.0f} s")
    stores, parallelism = cycle(STORES), cycle([2, 3, 1])
    incarnation = job.start("--parallelism", "2", *INTERVAL)
    workers = incarnation.await_step("deployed")["workers"]
    for number in range(KILLS):
        incarnation.await_checkpoint()
        incarnation.await_step(dice.choice(["triggered", "acknowledged", "decided"]))
        time.sleep(dice.uniform(0, 0.3))
        if number % 3 == 0:
            incarnation.kill()
            incarnation = job.start("--parallelism", str(next(parallelism)), *INTERVAL)
            workers = incarnation.await_step("deployed")["workers"]
        elif number % 3 == 1:
            store = next(stores)
            job.servers.kill(store)
            job.servers.start(store)
        else:
            os.kill(dice.choice(workers), signal.SIGKILL)
            workers = incarnation.await_step("deployed")["workers"]
    print(f"{KILLS} kills after {time.monotonic() - began:.0f} s")
    incarnation.kill()
    last = job.start("--until", "latest", "--parallelism", "2", *INTERVAL)
    assert last.wait() == 0, last.said
    print(f"all is written after {time.monotonic() - began:.0f} s")
    assert_agreement(job.servers, job.kafka, job.name, job.fed)
    print(f"counted after {time.monotonic() - began:.0f} s")
