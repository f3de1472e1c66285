"""State that is asked all the time, of a run and of `exactlyonce state serve`, while both and the run's workers are
killed: no answer is of state that is undone, and none is older than one before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

import pytest
from running import Job, visible, workers_of
from waiting import until

from exactlyonce.connectors.embedded.broker import HOST, free_port
from exactlyonce.testing.cluster import LIMIT_S

CUSTOMERS = 17
ROUNDS = 3


class Told(NamedTuple):
    """An answer: the sum of a customer, None without any."""

    checkpoint: int
    customer: str
    sum: int | None


class Asker:
    """Asks *port* for one customer after another, and again where nobody answers."""

    def __init__(self, port: int) -> None:
        self.told: list[Told] = []
        self._port, self._ended = port, threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._ended.is_set():
            try:
                with closing(HTTPConnection(HOST, self._port, timeout=LIMIT_S)) as connection:
                    while not self._ended.is_set():
                        self._ask_one(connection, f"c{len(self.told) % CUSTOMERS}")
            except (OSError, HTTPException):
                time.sleep(0.02)  # it is not there, or was killed

    def _ask_one(self, connection: HTTPConnection, customer: str) -> None:
        connection.request("GET", f"/state/totals?key={customer}")
        answer = json.loads(connection.getresponse().read())
        if "error" in answer:  # no checkpoint yet
            time.sleep(0.02)
            return
        states = [each["state"] for each in answer["states"]]
        self.told.append(Told(answer["checkpoint"], customer, states[0] if states else None))

    def await_more(self) -> None:
        """Each customer was asked for since."""
        now = len(self.told)
        until(lambda: len(self.told) > now + CUSTOMERS)

    def end(self) -> list[Told]:
        self._ended.set()
        self._thread.join(LIMIT_S)
        return self.told


class Server:
    """`exactlyonce state serve`."""

    def __init__(self, job: Job, port: int) -> None:
        command = [
            sys.executable,
            "-m",
            "exactlyonce.cli.main",
            "state",
            "serve",
            job.name,
            "--listen",
            f"{HOST}:{port}",
        ]
        self.process = subprocess.Popen(
            [*command, "--bootstrap-servers", job.kafka.bootstrap_servers], stdout=subprocess.DEVNULL
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def asking(port: int) -> Iterator[Asker]:
    asker = Asker(port)
    try:
        yield asker
    finally:
        asker.end()


@pytest.mark.exhaustive
def test_answers_while_all_is_killed(job_of: Callable[..., Job]) -> None:
    of_run, alone = free_port(), free_port()
    job = job_of("linear", "--parallelism", "2", "--serve", f"{HOST}:{of_run}")
    job.feed(500)
    run = job.start()
    run.await_checkpoint()
    server = Server(job, alone)
    try:
        with asking(of_run) as asker, asking(alone) as other:
            for number in range(ROUNDS):
                job.feed(700)
                run.await_checkpoint()
                os.kill(workers_of(run)[number % 2], signal.SIGKILL)
                job.feed(700)
                run.await_checkpoint()
                asker.await_more()
                job.feed(700)
                run.kill()
                run = job.start()
                server.kill()
                job.feed(700)
                run.await_checkpoint()
                server = Server(job, alone)
                asker.await_more()
                other.await_more()
            run.process.send_signal(signal.SIGTERM)
            assert run.wait() == 0, run.said
            last = job.history().latest
            assert last is not None
            until(lambda: other.told[-1].checkpoint == last.checkpoint)
            other.await_more()
            told = asker.end(), other.end()
    finally:
        server.kill()
    updates = [json.loads(record.value or b"") for record in visible(job.kafka, f"{job.name}-out", len(job.fed))]
    job.assert_totals()
    committed = defaultdict[str, set[int | None]](lambda: {None})
    for update in updates:
        committed[update["customer"]].add(update["sum"])
    for answers in told:
        numbers = [answer.checkpoint for answer in answers]
        assert numbers == sorted(numbers), "no answer is of an older checkpoint than one before"
        assert len(set(numbers)) > ROUNDS
    by_place = defaultdict[tuple[str, int], set[int | None]](set)
    for answer in (*told[0], *told[1]):
        assert answer.sum in committed[answer.customer], f"{answer}: no output was committed with it"
        by_place[answer.customer, answer.checkpoint].add(answer.sum)
    assert all(len(sums) == 1 for sums in by_place.values()), "both say the same of a checkpoint"
    for customer in committed:
        sums = [by_place[place].pop() or 0 for place in sorted(by_place) if place[0] == customer]
        assert sums == sorted(sums)
        assert sums[-1] == max(each for each in committed[customer] if each is not None)
