"""Servers and appliers are killed, paused and overtaken at random moments: each row is there once, by plain clients."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from applying import ROWS, SUBTASKS

from exactlyonce.pipeline.errors import Fenced
from exactlyonce.testing.cluster import LIMIT_S

APPLYING = Path(__file__).parent / "rig" / "applying.py"
FAULTS = {
    "postgres": ("server", "applier", "pause", "beside", "stopped"),
    "mariadb": ("server", "applier", "beside"),
    "redis": ("server", "applier", "pause", "beside", "stopped"),
}


class Target:
    """An empty place on a server, to which processes apply rows."""

    def __init__(self, store: str, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.server = store, server
        if store.startswith("postgres"):
            from postgres_rows import Database

            self._database = Database(server, monkeypatch, "shared")
        elif store == "mariadb":
            server.sql("DROP DATABASE shop")
            server.sql("CREATE DATABASE shop CHARACTER SET utf8mb4", database=None)
        else:
            server.client.flushall()
        address = {"mariadb": "dsn", "redis": "url"}.get(store)
        monkeypatch.setenv("APPLIED_AT", getattr(server, address) if address else server.dsn("shared"))

    def rows(self) -> list[tuple[int, ...]]:
        """The rows in the store: of Redis, by stream and in its order."""
        if self.store == "redis":
            streams = [self.server.client.xrange(f"applied-{subtask}") for subtask in range(SUBTASKS)]
            return [tuple(map(int, row.values())) for stream in streams for _, row in stream]
        sql = self.server.sql if self.store == "mariadb" else self._database.execute
        return sorted(sql("SELECT subtask, checkpoint, number FROM applied"))


class Appliers:
    def __init__(self, store: str, checkpoints: int) -> None:
        self._store, self._checkpoints = store, checkpoints
        self.running: list[subprocess.Popen[str]] = []
        self._incarnation = 0

    def start(self) -> subprocess.Popen[str]:
        """One more, once it has fenced; those before it are not ended."""
        self._incarnation += 1
        command = [sys.executable, str(APPLYING), self._store, str(self._incarnation), str(self._checkpoints)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "fenced\n"
        return process

    def kill(self) -> None:
        for process in self.running:
            process.kill()
            process.communicate()
            assert process.returncode in (0, -9, Fenced.exit_code)
        self.running.clear()


CASES = [
    pytest.param("postgres", 1, 4, id="postgres-1"),
    *(
        pytest.param(store, seed, 20, id=f"{store}-{seed}", marks=pytest.mark.exhaustive)
        for store in (*FAULTS, "postgres-upsert")
        for seed in (2, 3, 4)
    ),
    *(
        pytest.param(store, 5, 60, id=f"{store}-5", marks=[pytest.mark.exhaustive, pytest.mark.slow])
        for store in ("postgres", "postgres-upsert")
    ),
]


@pytest.mark.parametrize(("store", "seed", "kills"), CASES)
def test_rows_come_once_whoever_is_killed(
    database_server: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, store: str, seed: int, kills: int
) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    name = store.partition("-")[0]
    server = database_server(name)
    target, checkpoints = Target(store, server, monkeypatch), 15 * kills
    appliers = Appliers(store, checkpoints)
    try:
        for _ in range(kills):
            newest = appliers.start()
            time.sleep(chance.uniform(0, 0.3))
            match chance.choice(FAULTS[name]):
                case "applier":
                    appliers.kill()
                case "server":
                    server.kill()
                    server.start()
                case "pause":
                    server.pause()
                    time.sleep(chance.uniform(0, 0.3))
                    server.go_on()
                case "stopped":  # it stands still while the next one begins, and goes on then
                    newest.send_signal(signal.SIGSTOP)
                    appliers.start()
                    newest.send_signal(signal.SIGCONT)
        assert appliers.start().wait(LIMIT_S) == 0
    finally:
        appliers.kill()
    wanted = [
        (subtask, checkpoint, number)
        for subtask in range(SUBTASKS)
        for checkpoint in range(1, checkpoints + 1)
        for number in range(ROWS)
    ]
    assert target.rows() == wanted
