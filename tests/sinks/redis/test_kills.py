"""Server and applying process are killed again and again; a reader that shares no code counts."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis_applier import CHECKPOINTS, ROWS, SUBTASKS
from redis_server import RedisServer

APPLIER = Path(__file__).parent / "serving" / "redis_applier.py"


@pytest.mark.exhaustive(but=["1"])
@pytest.mark.parametrize("seed", range(1, 11))
def test_every_row_comes_once_whatever_is_killed(own_server: Callable[..., RedisServer], seed: int) -> None:
    """Rows of all checkpoints are in the streams once and in order, after SIGKILL at random moments."""
    print(f"seed {seed}")
    luck = random.Random(seed)
    server = own_server(appendfsync="always")
    whole, killed = False, 0
    incarnation = 0
    while not whole:
        incarnation += 1
        applier = subprocess.Popen(
            [sys.executable, APPLIER, server.url, str(incarnation)], stderr=subprocess.PIPE, text=True
        )
        if killed < (3 if seed == 1 else 6):
            _wait_until_it_has_fenced(server, incarnation)
            time.sleep(luck.uniform(0, 0.1))
            killed += applier.poll() is None
            if luck.random() < 0.5:
                server.restart()
            else:
                applier.kill()
        _, said = applier.communicate()
        assert applier.returncode in (0, -9) or "unavailable: " in said, said
        whole = applier.returncode == 0
    expected = [str(checkpoint * 1_000 + n) for checkpoint in range(1, CHECKPOINTS + 1) for n in range(ROWS)]
    for subtask in range(SUBTASKS):
        assert [fields["sum"] for _, fields in server.client.xrange(f"totals-{subtask}")] == expected


def _wait_until_it_has_fenced(server: RedisServer, incarnation: int) -> None:
    while server.client.hget("exactlyonce_ledger:shop:totals", "incarnation") != str(incarnation):
        time.sleep(0.005)
