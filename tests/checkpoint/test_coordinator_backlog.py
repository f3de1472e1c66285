"""The coordinator's core in simulated time: a run to an end while what is on its way takes longer than a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from exactlyonce.checkpoint import events
from exactlyonce.checkpoint.coordinator import DRAINED_LOOK_INTERVAL_MS
from exactlyonce.checkpoint.events import Concluded, Decide, Deploy, Deployed, End, Recovered, Restart, Tick, Trigger
from exactlyonce.checkpoint.restart import FixedDelay
from tests.checkpoint.test_coordinator_endings import INTERVAL_MS, TIMEOUT_MS, Job, finalized, going_round, manifest


class Backlogged(Job):
    """Everything is read, and what is on its way takes a while: an aligned barrier comes behind it, and one that
    overtakes at once, with what is left. A restart goes on from the newest completed checkpoint."""

    def __init__(self, backlog_ms: int, **settings: Any) -> None:
        super().__init__(FixedDelay(attempts=3, delay_ms=0), unaligned=True, **settings)
        self.left_ms = self.kept_ms = backlog_ms
        self.ended: End | None = None

    def live(self, until_ms: int) -> None:
        """Until it has ended, or for so long."""
        self.perform(self(Recovered(manifest(0))))
        while self.ended is None and self.now_ms < until_ms:
            self.now_ms += INTERVAL_MS // 10
            self.left_ms = max(0, self.left_ms - INTERVAL_MS // 10)
            self.perform(self(Tick()))
            for plan in self.core.in_flight:
                if not plan.final or not self.left_ms:
                    self.perform(self.ack(plan.checkpoint))

    def perform(self, effects: list[events.Effect]) -> None:
        """As an engine does."""
        for effect in effects:
            match effect:
                case Restart():
                    self.left_ms = self.kept_ms
                    assert self.core.manifest is not None
                    self.perform(self(Recovered(self.core.manifest)))
                case Deploy():
                    self.perform(self(Deployed()))
                    self.perform(self(events.SourcesFinished()))
                case Decide(plan):
                    self.kept_ms = self.left_ms
                    verdict = going_round(plan.checkpoint) if self.left_ms else finalized(plan.checkpoint)
                    self.perform(self(Concluded(plan.checkpoint, verdict)))
                case End():
                    self.ended = effect


@pytest.mark.parametrize("backlog_ms", [0, INTERVAL_MS, 7 * TIMEOUT_MS])
def test_a_run_to_an_end_under_back_pressure(backlog_ms: int) -> None:
    """The last checkpoint overtakes nothing, and comes only once one that may has found nothing left to overtake: else
    it would be late, and behind the restart again, without end."""
    job = Backlogged(backlog_ms)
    job.live(until_ms=1_000 * TIMEOUT_MS)
    assert job.ended is not None
    assert job.ended.error is None
    assert job.now_ms <= backlog_ms + 3 * INTERVAL_MS
    assert job.core.attempt == 0


def test_what_is_still_on_its_way_at_the_end_is_looked_for_soon() -> None:
    """Not an interval later, which may be hours, nor all the time."""
    job = Job(loops=True, interval_ms=600_000).running()
    assert job(events.SourcesFinished()) == [Trigger(1, 0, final=False)]
    job.ack(1)
    job(Concluded(1, going_round(1)))
    assert job.core.wake_ms == job.now_ms + DRAINED_LOOK_INTERVAL_MS
