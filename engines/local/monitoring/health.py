"""Whether a run is well: a reporter that answers two probes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from exactlyonce.checkpoint.coordinator import JobState
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.engines.local.monitoring.serving import Answer, Asked
from exactlyonce.engines.local.reporting import Reporter

STANDBY, WAITING = "standby", "waiting"
"""The states of a run without a job: another run leads; a broker or a service is away."""
STATES = (*(state.value for state in JobState), STANDBY, WAITING)
STUCK_S = 30.0
"""A run that has not come round for so long is stuck."""


LATE_S, LATE_TIMES = 10.0, 3
"""A checkpoint is late after so many seconds, or so many times the usual time, whichever is more."""


class Verdict(NamedTuple):
    well: bool
    sentence: str


class Health(Reporter):
    """Written by one thread, read by others: each field is replaced whole."""

    def __init__(self, settings: CheckpointSettings, now_s: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._now_s = settings, now_s
        self._state = JobState.RECOVERING.value, now_s()
        """The state, and since when."""
        self._stuck_at_s = now_s() + STUCK_S
        self._completed: tuple[int, float, float] | None = None
        """The newest completed checkpoint, when it was completed, and the seconds that it took."""

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "checkpoint":
            self._completed = event["checkpoint"], self._now_s(), event["duration_ms"] / 1000

    def turned(self, state: str, rests_s: float = 0.0) -> None:
        now_s = self._now_s()
        self._stuck_at_s = now_s + rests_s + STUCK_S
        if state != self._state[0]:
            self._state = state, now_s

    @property
    def liveness(self) -> Verdict:
        """Whether the run comes round, restoring and waiting included."""
        state, since_s = self._state
        stuck_s = self._now_s() - self._stuck_at_s
        if stuck_s > 0:
            return Verdict(False, f"stuck: {state}, and it has not come round for {STUCK_S + stuck_s:.0f} s")
        return Verdict(True, f"{state}, for {self._now_s() - since_s:.1f} s")

    @property
    def readiness(self) -> Verdict:
        """Whether records are processed, and the last checkpoint was in time."""
        settings = self._settings
        return self._verdict((settings.interval_ms + settings.min_pause_ms + settings.timeout_ms) / 1000)

    @property
    def wellness(self) -> Verdict:
        """Whether it is ready, and checkpoints come about as often as they should: sooner than `readiness`."""
        usual_s = (self._settings.interval_ms + self._settings.min_pause_ms) / 1000
        took_s = self._completed[2] if self._completed is not None else 0.0
        return self._verdict(max(LATE_S, LATE_TIMES * (usual_s + took_s)))

    def _verdict(self, allowed_s: float) -> Verdict:
        """*allowed_s* may pass from one completed checkpoint to the next."""
        (state, since_s), completed, now_s = self._state, self._completed, self._now_s()
        live = self.liveness
        if not live.well or state != JobState.RUNNING.value:
            return Verdict(False, live.sentence)
        if completed is None:
            last_s, ago = since_s, "no checkpoint of this run is complete yet"
        else:
            last_s, ago = max(completed[1], since_s), f"checkpoint {completed[0]} is {now_s - completed[1]:.1f} s old"
        if now_s - last_s > allowed_s:
            return Verdict(False, f"{state}, but {ago}; one should be complete every {allowed_s:g} s at the latest")
        return Verdict(True, f"{state}; {ago}")

    def answer_live(self, _: Asked) -> Answer:
        return _answer(self.liveness)

    def answer_ready(self, _: Asked) -> Answer:
        return _answer(self.readiness)


def _answer(verdict: Verdict) -> Answer:
    return Answer(f"{verdict.sentence}\n".encode(), status=200 if verdict.well else 503)
