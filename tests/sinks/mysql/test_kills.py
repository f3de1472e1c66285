"""Servers and appliers killed at random moments: every row is there once, counted by plain SQL."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mysql_applying import CHECKPOINTS, ROWS, SUBTASKS

from exactlyonce.pipeline.errors import Fenced

APPLYING = Path(__file__).parent / "rig" / "mysql_applying.py"


class Appliers:
    """Processes of growing incarnations, on one server."""

    def __init__(self, mariadb: Any) -> None:
        self._dsn = mariadb.dsn
        self.running: list[subprocess.Popen[bytes]] = []
        self.started = 0

    def start(self) -> None:
        """One more, of the next incarnation; those before it are not ended."""
        self.started += 1
        self.running.append(subprocess.Popen([sys.executable, str(APPLYING), self._dsn, str(self.started)]))

    def kill(self) -> None:
        """All of them."""
        for each in self.running:
            each.kill()
        for each in self.running:
            assert each.wait() in (0, -9, Fenced.exit_code), each.returncode
        self.running.clear()


@pytest.mark.parametrize(
    ("seed", "kills"),
    [(1, 4), *(pytest.param(seed, 30, marks=pytest.mark.exhaustive) for seed in range(2, 6))],
)
def test_rows_survive_kills_once(mariadb: Any, seed: int, kills: int) -> None:
    """Kill the server, kill the applier, or let a newer one take over beside it: no row is lost, none is doubled."""
    chance, appliers = random.Random(seed), Appliers(mariadb)
    try:
        for _ in range(kills):
            appliers.start()
            time.sleep(chance.uniform(0.1, 1.2))
            match chance.randrange(3):
                case 0:
                    appliers.kill()
                case 1:
                    mariadb.kill()
                    time.sleep(chance.uniform(0, 0.2))
                    mariadb.start()
        appliers.start()
        assert appliers.running[-1].wait() == 0, f"seed {seed}"
    finally:
        appliers.kill()
    counted = mariadb.sql("SELECT count(*), count(DISTINCT subtask, checkpoint, `row`) FROM applied")
    total = SUBTASKS * CHECKPOINTS * ROWS
    assert counted == [(total, total)], f"seed {seed}"
    ledger = mariadb.sql("SELECT subtask, checkpoint FROM exactlyonce_ledger WHERE subtask >= 0 ORDER BY subtask")
    assert ledger == [(subtask, CHECKPOINTS) for subtask in range(SUBTASKS)]
