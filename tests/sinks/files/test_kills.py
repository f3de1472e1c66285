"""Writer and coordinator in one process, which is killed again and again at random instants."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.testing.sink_contract.hooks import ORIGIN

ROWS, ROWS_OF_INTERVAL, KILLS = 1_500, 50, 8


def decisions(log: Path) -> list[StoreCommittable]:
    """The decided committables; a line that was cut off by a kill is no decision."""
    whole, _, _ = log.read_bytes().rpartition(b"\n")
    return [msgspec.json.decode(line, type=StoreCommittable) for line in whole.splitlines()]


def live(target: Any, log: Path, incarnation: int, stage: Any, totals: Any) -> None:
    committer = target.led(incarnation)
    decided = decisions(log)
    checkpoint, done = (decided[-1].checkpoint, len(decided) * ROWS_OF_INTERVAL) if decided else (0, 0)
    if decided:
        committer.commit([decided[-1]], incarnation, ORIGIN)
    committer.clean(incarnation, 1)
    whole = sum(len(msgspec.json.encode(each)) + 1 for each in decided)
    os.truncate(log, whole)
    opened = target.open(incarnation=incarnation)
    while done < ROWS:
        checkpoint += 1
        staged = stage(opened, checkpoint, totals(*range(done, done + ROWS_OF_INTERVAL))).staged.committable
        committable = msgspec.structs.replace(staged, previous=checkpoint - 1)
        with open(log, "ab", buffering=0) as file:
            file.write(msgspec.json.encode(committable) + b"\n")
            os.fsync(file.fileno())
        committer.commit([committable], incarnation, ORIGIN)
        done += ROWS_OF_INTERVAL


def test_rows_come_once_through_kills(make_target, totals, stage, tmp_path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    target, log = make_target(partition_by=("customer",), roll_bytes=1 << 10), tmp_path / "decisions"
    log.touch()
    for incarnation in range(1, 1_000):
        child = os.fork()
        if not child:
            try:
                live(target, log, incarnation, stage, totals)
                os._exit(0)
            finally:
                os._exit(1)
        if incarnation <= KILLS:
            threading.Event().wait(chance.uniform(0.01, 0.3))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        if not os.WIFSIGNALED(status):
            break
    assert target.cents() == list(range(ROWS))
    assert sum(entry["rows"] for entry in target.entries()) == ROWS
    committer = target.led(20_000)
    committer.clean(20_000, 1)
    assert target.waiting() == []
