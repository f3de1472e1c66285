"""Each setting of checkpoints and restarts, by what it does to one job in simulated time.

The job has one subtask, restarts at once but for its strategy's delay, and completes a checkpoint some time after its
trigger; the core alone says when. What happens is a line each, so that a case reads as the timetable that it demands.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from scripted_job import manifest

from exactlyonce.checkpoint.coordinator import NEVER_MS, Coordinator
from exactlyonce.checkpoint.decision import Decided
from exactlyonce.checkpoint.events import (
    Ack,
    Acknowledged,
    CancelAsked,
    Concluded,
    Decide,
    Deploy,
    Deployed,
    Effect,
    End,
    Event,
    Failed,
    Note,
    Recovered,
    Restart,
    Stop,
    Tick,
    Trigger,
)
from exactlyonce.checkpoint.restart import restart_strategy
from exactlyonce.checkpoint.retention import Ledger
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.testing.clock import SimulatedClock

STALLED = NEVER_MS
"""A checkpoint that is never acknowledged takes so long."""


class Timetable:
    """A job with *settings*; `lines` are what has happened, each as "<milliseconds> <what>"."""

    def __init__(
        self, takes_ms: int = 10, fails_at_ms: tuple[int, ...] = (), restart: tuple[str, dict[str, int]] = ("none", {}),
        **settings: Any,
    ) -> None:  # fmt: skip
        self.clock = SimulatedClock()
        self.settings = CheckpointSettings(**settings)
        self.core = Coordinator(self.settings, restart_strategy(restart[0], **restart[1]), {("task", 0)}, set())
        self.ledger = Ledger(self.settings.num_retained)
        self.lines: list[str] = []
        self._began_ms = self.clock.monotonic_ms()
        self._takes_ms = takes_ms
        self._order = count()
        self._due: list[tuple[int, int, Event]] = []
        self._delay_ms = 0
        self.at(0, Recovered(manifest(0)))
        for each in fails_at_ms:
            self.at(each, Failed("a worker died"))

    @property
    def now_ms(self) -> int:
        return self.clock.monotonic_ms() - self._began_ms

    def at(self, at_ms: int, event: Event) -> Timetable:
        heapq.heappush(self._due, (at_ms, next(self._order), event))
        return self

    def until(self, end_ms: int) -> list[str]:
        while (now_ms := self._next_ms()) <= end_ms:
            self.clock.advance(now_ms - self.now_ms)
            event: Event = Tick()
            if self._due and self._due[0][0] <= now_ms:
                event = heapq.heappop(self._due)[2]
            for effect in self.core.handle(event, now_ms):
                self._perform(effect)
        return self.lines

    def _next_ms(self) -> int:
        event_ms = self._due[0][0] if self._due else NEVER_MS
        return max(self.now_ms, min(event_ms, self.core.wake_ms))

    def _say(self, what: str) -> None:
        self.lines.append(f"{self.now_ms} {what}")

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Trigger(checkpoint):
                after_ms = effect.overtakes_after_ms
                self._say(f"trigger {checkpoint}" + ("" if after_ms is None else f", overtakes after {after_ms}"))
                if self._takes_ms != STALLED:
                    self.at(self.now_ms + self._takes_ms, Acknowledged(Ack("task", 0, checkpoint)))
            case Decide(plan):
                self._say(f"complete {plan.checkpoint}")
                self.ledger.completed(plan.checkpoint, {})
                self.ledger.expire()
                self.at(self.now_ms, Concluded(plan.checkpoint, Decided(manifest(plan.checkpoint))))
            case Restart(_, delay_ms):
                self._say("restart")
                self._delay_ms = delay_ms
                self.at(self.now_ms, Recovered(self.core.manifest or manifest(0)))
            case Deploy():
                self._due = [each for each in self._due if not isinstance(each[2], Acknowledged)]
                heapq.heapify(self._due)
                if self.lines:
                    self.lines.append(f"{self.now_ms + self._delay_ms} deploy")
                self.at(self.now_ms + self._delay_ms, Deployed())
            case Note():
                self._say("abort")
            case End(error=error, cancelled=cancelled):
                self._say("cancelled" if cancelled else "give up" if error else "end")


CASES: dict[str, tuple[Callable[[], Timetable], int, str]] = {
    "interval": (
        lambda: Timetable(interval_ms=100), 320,
        "100 trigger 1; 110 complete 1; 200 trigger 2; 210 complete 2; 300 trigger 3; 310 complete 3",
    ),
    "interval, shorter than a checkpoint takes": (
        lambda: Timetable(interval_ms=100, takes_ms=150), 420,
        "100 trigger 1; 250 complete 1; 250 trigger 2; 400 complete 2; 400 trigger 3",
    ),
    "min_pause": (
        lambda: Timetable(interval_ms=100, takes_ms=50, min_pause_ms=80), 360,
        "100 trigger 1; 150 complete 1; 230 trigger 2; 280 complete 2; 360 trigger 3",
    ),
    "min_pause, after an aborted one": (
        lambda: Timetable(interval_ms=100, takes_ms=STALLED, timeout_ms=50, tolerable_failed=9, min_pause_ms=80), 380,
        "100 trigger 1; 150 abort; 230 trigger 2; 280 abort; 360 trigger 3",
    ),
    "timeout": (
        lambda: Timetable(interval_ms=100, takes_ms=STALLED, timeout_ms=300, restart=fixed_delay(1)), 1_000,
        "100 trigger 1; 400 abort; 400 restart; 470 deploy; 570 trigger 2; 870 abort; 870 give up",
    ),
    "timeout, in time": (
        lambda: Timetable(interval_ms=400, takes_ms=299, timeout_ms=300), 700, "400 trigger 1; 699 complete 1"
    ),
    "tolerable_failed": (
        lambda: Timetable(interval_ms=100, takes_ms=STALLED, timeout_ms=150, tolerable_failed=2), 1_000,
        "100 trigger 1; 250 abort; 250 trigger 2; 400 abort; 400 trigger 3; 550 abort; 550 give up",
    ),
    "max_concurrent": (
        lambda: Timetable(interval_ms=100, takes_ms=250, max_concurrent=2), 460,
        "100 trigger 1; 200 trigger 2; 350 complete 1; 350 trigger 3; 450 complete 2; 450 trigger 4",
    ),
    "unaligned": (lambda: Timetable(interval_ms=100, unaligned=True), 100, "100 trigger 1, overtakes after 0"),
    "unaligned, but the last one": (
        lambda: Timetable(interval_ms=100, unaligned=True).at(50, Stop()), 100, "50 trigger 1; 60 complete 1; 60 end"
    ),
    "aligned_timeout": (
        lambda: Timetable(interval_ms=100, unaligned=True, aligned_timeout_ms=40), 100,
        "100 trigger 1, overtakes after 40",
    ),
    "deploy_timeout": (lambda: never_ready(Timetable(deploy_timeout_ms=500)), 1_000, "500 give up"),
    "restart none": (lambda: Timetable(interval_ms=100, fails_at_ms=(50,)), 200, "50 give up"),
    "restart fixed_delay": (
        lambda: Timetable(interval_ms=500, fails_at_ms=(50, 200, 400), restart=fixed_delay(2)), 900,
        "50 restart; 120 deploy; 200 restart; 270 deploy; 400 give up",
    ),
    "restart fixed_delay, with progress between": (
        lambda: Timetable(interval_ms=100, fails_at_ms=(50, 300), restart=fixed_delay(1)), 370,
        "50 restart; 120 deploy; 220 trigger 1; 230 complete 1; 300 restart; 370 deploy",
    ),
    "restart failure_rate": (
        lambda: Timetable(
            interval_ms=5_000, fails_at_ms=(50, 1_100, 1_200),
            restart=("failure_rate", {"failures": 1, "window_ms": 1_000, "delay_ms": 70}),
        ), 2_000,
        "50 restart; 120 deploy; 1100 restart; 1170 deploy; 1200 give up",
    ),
    "restart exponential_delay": (
        lambda: Timetable(
            interval_ms=5_000, fails_at_ms=(50, 200, 500, 1_000),
            restart=("exponential_delay", {"initial_ms": 100, "max_ms": 300}),
        ), 1_300,
        "50 restart; 150 deploy; 200 restart; 400 deploy; 500 restart; 800 deploy; 1000 restart; 1300 deploy",
    ),
    "cancelled": (
        lambda: Timetable(interval_ms=100, takes_ms=50).at(120, CancelAsked("cancel")), 900,
        "100 trigger 1; 120 restart; 120 cancelled",
    ),
    "cancelled after a checkpoint": (
        lambda: Timetable(interval_ms=100).at(150, CancelAsked("cancel")), 900,
        "100 trigger 1; 110 complete 1; 150 restart; 150 cancelled",
    ),
}  # fmt: skip


def fixed_delay(attempts: int) -> tuple[str, dict[str, int]]:
    return "fixed_delay", {"attempts": attempts, "delay_ms": 70}


def never_ready(job: Timetable) -> Timetable:
    job._delay_ms = NEVER_MS // 2
    return job


@pytest.mark.parametrize("name", CASES)
def test_a_setting_makes_the_timetable(name: str) -> None:
    job, until_ms, expected = CASES[name]
    assert "; ".join(job().until(until_ms)) == expected


@pytest.mark.parametrize("retained", [1, 2, 5])
def test_so_many_checkpoints_are_retained(retained: int) -> None:
    job = Timetable(interval_ms=100, num_retained=retained)
    job.until(1_050)
    assert job.ledger.retained == [*range(11 - retained, 11)]
