"""Runs of one pipeline beside each other: a standby waits for its turn, any other run now and then for a while."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exactlyonce.checkpoint import succession
from exactlyonce.checkpoint.requests import Outcome
from exactlyonce.engines.local import run
from exactlyonce.pipeline.errors import Fenced
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.conftest import Orders, Running, wait_until

WAITS = '"event": "standby"'
LEADS = '"event": "started"'
RUNS = '"event": "checkpoint"'
"""Before it, a stop finds nothing that runs, and says so by another code."""


def events(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


@pytest.mark.exhaustive
def test_a_standby_takes_over_from_a_run_that_was_killed(orders: Orders) -> None:
    leader = orders.command.start("run", "orders:pipeline", "--inline", "--checkpoint-interval", "100ms")
    try:
        wait_until(orders.lives)
        with orders.running("--standby", until=WAITS) as waiting:
            first = orders.incarnation()
            (told,) = [each for each in events(waiting.said) if each["event"] == "standby"]
            assert (told["incarnation"], told["host"], told["process"]) == (1, first.host, leader.pid)
            assert "this run stands by" in told["text"]
            leader.kill()
            leader.wait(LIMIT_S)
            waiting.await_said(LEADS)
            assert "has died: this one takes over" in waiting.said
            waiting.await_said('"event": "checkpoint"')
            assert orders.incarnation().incarnation == 2, "it has fenced nobody before"
            assert waiting.stop() == 0
    finally:
        leader.kill()
        leader.communicate()


def test_a_standby_takes_over_at_once_from_a_run_that_has_ended(orders: Orders) -> None:
    orders.ran()
    leader = orders.begun_elsewhere()
    with orders.running("--standby", until=WAITS) as waiting:
        assert leader() is Outcome.DONE
        assert leader(ended=True) is Outcome.DONE
        waiting.await_said(LEADS)
        assert "has ended: this one takes over" in waiting.said
        waiting.await_said(RUNS)
        assert waiting.stop() == 0
    with orders.running("--standby", until=RUNS) as alone:
        assert WAITS not in alone.said
        assert alone.stop() == 0


def test_a_standby_takes_over_from_a_run_that_is_silent(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "SILENCE_MS", 300)
    monkeypatch.setattr(run, "LOOK_PAUSE_MS", 50)
    orders.ran()
    leader = orders.begun_elsewhere()
    with orders.running("--standby", until=LEADS) as waiting:
        assert "has written no heartbeat for" in waiting.said
        with pytest.raises(Fenced):
            leader()


def test_a_standby_that_another_run_takes_over_from_stands_by(orders: Orders) -> None:
    """So it is when several begin at once: each finds nobody who leads, and one fences the others."""
    with orders.running("--standby", until=RUNS) as run:
        leader = orders.begun_elsewhere()
        run.await_said(WAITS)
        assert "This run stands by." in run.said
        assert leader() is Outcome.DONE
        assert leader(ended=True) is Outcome.DONE
        run.await_said("has ended: this one takes over")
        wait_until(lambda: orders.incarnation().incarnation == 3 and orders.newest().incarnation == 3)
        assert run.stop() == 0


def test_a_standby_with_an_end_says_that_it_has_not_come_there(orders: Orders) -> None:
    orders.ran()
    orders.begun_elsewhere()
    waiting = Running(orders.command.folder, "--standby", "--until", "latest")
    try:
        waiting.await_said(WAITS)
        assert waiting.stop() == 130
        assert "this one has read nothing" in waiting.said
    finally:
        waiting.kill()


def test_what_is_wrong_with_a_standby_is_told_before_it_waits(orders: Orders) -> None:
    orders.ran()
    orders.begun_elsewhere()
    orders.change((f"{orders.name}-orders", f"{orders.name}-none"))
    orders.run_refused(f"{orders.name}-none", "--standby")


def test_runs_that_fence_each_other_leave_each_other_time(orders: Orders) -> None:
    """A plain run takes over at once, but from one that has itself taken over a short time ago."""
    orders.ran()
    for _ in range(3):
        leader = orders.begun_elsewhere()
    with orders.running(until="leaves it alone for 2 s") as run:
        assert leader() is Outcome.DONE, "it goes on meanwhile"
        run.await_said(LEADS)
        with pytest.raises(Fenced):
            leader()
        run.await_said(RUNS)
        assert run.stop() == 0
