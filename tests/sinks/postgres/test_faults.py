"""The server is killed, paused and started again, and clients are killed, while rows are written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from postgres_rows import ORIGIN, Database, Total, chunks, entry
from postgres_server import PostgresServer
from table_keys import key_of

from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks.postgres.connection import Limits
from exactlyonce.sinks.postgres.store import PostgresStore
from exactlyonce.testing.cluster import LIMIT_S

QUICK = Limits(connect=2, answer=1, lock=1, grace=0.5)


def until_applied(store: PostgresStore, waiting: Any, row: Any) -> bool:
    """What the first call says that gets an answer."""
    limit = time.monotonic() + LIMIT_S
    while True:
        try:
            return store.apply(waiting, row)
        except StoreUnavailable:
            assert time.monotonic() < limit
            time.sleep(0.05)


@pytest.mark.exhaustive
def test_a_server_that_is_paused(database: Database) -> None:
    """A server that stands still holds no call for longer than the limit, whatever it is asked: to connect, to take
    rows, to commit; when it goes on, the rows come once."""
    store = database.ready(limits=QUICK)
    waiting = chunks(store, [Total("x" * 1000, number) for number in range(20_000)])

    def pausing() -> Any:
        yield waiting[0]
        database.server.pause()
        yield from waiting[1:]

    try:
        with pytest.raises(StoreUnavailable, match="did not answer for 1 s"):
            store.apply(pausing(), entry(1))
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            store.fence("p", "s", 2, ORIGIN)
    finally:
        database.server.go_on()
    assert until_applied(store, waiting, entry(1))
    database.server.pause()
    try:
        for call in (lambda: store.fence("p", "s", 2, ORIGIN), store.check, store.encoder):
            with pytest.raises(StoreUnavailable, match=r"did not answer for 1 s\.|cannot be reached"):
                call()
    finally:
        database.server.go_on()
    assert not until_applied(store, waiting, entry(1))
    assert database.execute("SELECT count(*) FROM totals") == [(20_000,)]


def test_a_server_that_shuts_down(database: Database) -> None:
    """A store whose server was stopped and started between two applies connects again."""
    store = database.ready()
    assert store.apply(chunks(store, [Total("ann", 1)]), entry(1))
    waiting = chunks(store, [Total("bob", 2)])
    database.server.kill()
    database.server.start()
    assert until_applied(store, waiting, entry(2))
    assert len(database.totals()) == 2


CLIENT = """
import sys
sys.path.insert(0, {rig!r})
from postgres_rows import ORIGIN, Total, entry
from exactlyonce.pipeline.errors import Fenced, StoreUnavailable
from exactlyonce.sinks import PostgresSink
from exactlyonce.sinks.postgres.connection import Limits
from exactlyonce.sinks.postgres.store import PostgresStore
from exactlyonce.testing.cluster import LIMIT_S

incarnation, intervals, rows = map(int, sys.argv[1:])
sink = PostgresSink("totals", dsn="env:TOTALS_DSN", mode={mode!r}, key={key!r})
store = PostgresStore(sink, Total, Limits(connect=2, answer=2, lock=1, grace=0.3))

def asked(call, *arguments):
    while True:
        try:
            return call(*arguments)
        except StoreUnavailable:
            pass

found = asked(store.fence, "p", "s", incarnation, ORIGIN)
encoder = asked(store.encoder)
for checkpoint in range(1, intervals + 1):
    for subtask in (0, 1):
        if found.get(subtask, 0) < checkpoint:
            lines = encoder.encode([Total(f"{{subtask}}", checkpoint * rows + row) for row in range(rows)])
            chunks = [b"".join(lines[at : at + 100]) for at in range(0, rows, 100)]
            asked(store.apply, chunks, entry(checkpoint, incarnation, subtask, previous=checkpoint - 1))
"""


class Clients:
    """Processes that apply all intervals, one incarnation after the other."""

    def __init__(self, mode: str, intervals: int, rows: int) -> None:
        rig = str(Path(__file__).parent / "rig")
        self._code = CLIENT.format(rig=rig, mode=mode, key=key_of(mode, "customer", "cents"))
        self._work = (str(intervals), str(rows))
        self.incarnation = 0
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """One more incarnation."""
        self.incarnation += 1
        command = [sys.executable, "-c", self._code, str(self.incarnation), *self._work]
        self.processes.append(subprocess.Popen(command, stderr=subprocess.PIPE))
        return self.processes[-1]

    def end(self) -> None:
        """Kill all that still live."""
        for process in self.processes:
            process.kill()
            process.communicate()


def reaches(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Whether a process ends within this time."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize(
    ("mode", "seed", "kills"),
    [
        ("append", 1, 5), pytest.param("upsert", 1, 5, marks=pytest.mark.exhaustive),
        *(pytest.param(mode, 2, 60, marks=[pytest.mark.exhaustive(matrix=True), pytest.mark.slow])
          for mode in ("append", "upsert")),
    ],
)  # fmt: skip
def test_every_row_once_whoever_is_killed(database: Database, mode: str, seed: int, kills: int) -> None:
    """Clients and the server are killed and paused at random moments; in the end each row is there once."""
    chance, server = random.Random(seed), database.server
    intervals, rows = 10 * kills, 300
    database.store(mode=mode, key=key_of(mode, "customer", "cents")).check()
    if mode == "append":
        database.execute("ALTER TABLE totals ALTER cents SET NOT NULL")
    clients = Clients(mode, intervals, rows)
    try:
        process = clients.start()
        for _ in range(kills):
            if reaches(process, chance.uniform(0.3, 0.9)):
                break
            process = _fault(chance, server, clients, process)
        assert reaches(process, LIMIT_S)
        assert process.returncode == 0, process.stderr.read().decode() if process.stderr else ""
    finally:
        clients.end()
    counted = database.execute("SELECT count(*), count(DISTINCT (customer, cents)), sum(cents) FROM totals")
    numbers = range(rows, (intervals + 1) * rows)
    assert counted == [(2 * len(numbers), 2 * len(numbers), 2 * sum(numbers))]


def _fault(
    chance: random.Random, server: PostgresServer, clients: Clients, process: subprocess.Popen[bytes]
) -> subprocess.Popen[bytes]:
    """One fault; -> the client that is the newest then."""
    what = chance.choice(["server", "client", "zombie", "pause"])
    if what == "server":
        server.kill()
        server.start()
    elif what == "pause":
        server.pause()
        time.sleep(chance.uniform(0, 0.3))
        server.go_on()
    elif what == "client":
        process.kill()
        return clients.start()
    else:  # a client that stands still while the next one begins, and goes on then
        os.kill(process.pid, signal.SIGSTOP)
        following = clients.start()
        threading.Timer(chance.uniform(0.2, 1.5), process.send_signal, (signal.SIGCONT,)).start()
        return following
    return process
