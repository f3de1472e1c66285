"""How long a run leaves the one that leads alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from blank_manifest import blank_manifest

from exactlyonce.checkpoint.records.history import SILENCE_MS, History
from exactlyonce.checkpoint.records.manifest import FAILURE_CHARACTERS_MAX, Failure, Incarnation
from exactlyonce.checkpoint.succession import (
    LOOK_PAUSE_MS,
    PAUSE_MAX_MS,
    Succession,
    failures_in_a_row,
    pause_ms,
    takeovers_in_a_row,
)
from exactlyonce.pipeline.errors import Halt, RecordError
from exactlyonce.testing.clock import SimulatedClock

HOUR_MS = 3_600_000
STARTING_MS = 1_500
"""How long a process takes from its start to its fence."""
HEARTBEAT_MS = 10_000


def life(
    number: int, led_ms: int = 500, *, ended: bool = False, started_at_ms: int = 0, exit_code: int = 0
) -> Incarnation:
    return Incarnation(
        incarnation=number, host="h", process=number, started_at_ms=started_at_ms,
        heartbeat_ms=started_at_ms + led_ms, ended=ended, exit_code=exit_code,
        failure="It is bad." if exit_code else "",
    )  # fmt: skip


def history(*lives: Incarnation) -> History:
    found = History("p")
    for each in lives:
        found.admit(each)
    return found


def alive(_: Incarnation) -> bool:
    return False


class TestPause:
    def test_it_doubles_with_each_takeover_in_a_row(self) -> None:
        pauses = [pause_ms(history(*map(life, range(1, 2 + count)))) for count in range(9)]
        assert pauses == [0, 1_000, 2_000, 4_000, 8_000, 16_000, PAUSE_MAX_MS, PAUSE_MAX_MS, PAUSE_MAX_MS]

    def test_a_run_that_led_for_long_is_taken_over_at_once(self) -> None:
        assert pause_ms(history(life(1), life(2), life(3, HOUR_MS))) == 0

    def test_whoever_took_over_from_it_a_moment_ago_is_left_alone(self) -> None:
        assert takeovers_in_a_row(history(life(1), life(2), life(3, HOUR_MS), life(4))) == 1

    def test_a_clean_end_ends_the_row(self) -> None:
        assert pause_ms(history(life(1), life(2), life(3, ended=True))) == 0
        assert pause_ms(history(life(1), life(2), life(3, ended=True), life(4))) == 0

    def test_who_begins_first_has_taken_over_from_nobody(self) -> None:
        assert (pause_ms(history()), pause_ms(history(life(1)))) == (0, 0)
        assert pause_ms(history(life(12), life(14))) == 1_000, "numbers may be left out"


@dataclass
class Contest:
    """Processes that are started again whenever they are fenced, each with a wall clock of its own."""

    skews_ms: tuple[int, ...]
    standby: bool = False
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    lives: list[Incarnation] = field(default_factory=list)
    begun_ms: list[int] = field(default_factory=list)

    def run(self, until_ms: int) -> list[int]:
        """The times at which one of them began."""
        leader, looks_ms = -1, dict.fromkeys(range(len(self.skews_ms)), STARTING_MS)
        waiting = {each: self._new() for each in looks_ms}
        while self.clock.monotonic_ms() < until_ms:
            now_ms = self.clock.monotonic_ms()
            for each in [each for each, at_ms in looks_ms.items() if at_ms <= now_ms]:
                if waiting[each].awaited(history(*self.lives[-10:]), alive) is not None:
                    looks_ms[each] = now_ms + LOOK_PAUSE_MS
                    continue
                del looks_ms[each]
                if leader >= 0:
                    waiting[leader], looks_ms[leader] = self._new(), now_ms + STARTING_MS
                leader = each
                own_ms = self.clock.now_ms() + self.skews_ms[each]
                self.lives.append(life(len(self.lives) + 1, 0, started_at_ms=own_ms))
                self.begun_ms.append(now_ms)
            self.clock.advance(100)
            if leader >= 0 and (now_ms - self.begun_ms[-1]) % HEARTBEAT_MS == 0:
                beat_ms = self.clock.now_ms() + self.skews_ms[leader]
                self.lives[-1] = msgspec.structs.replace(self.lives[-1], heartbeat_ms=beat_ms)
        return self.begun_ms

    def _new(self) -> Succession:
        return Succession(standby=self.standby, clock=self.clock)


@pytest.mark.parametrize("skews_ms", [(0, 0), (0, HOUR_MS), (-HOUR_MS, 40_000), (0, 20_000, -20_000)])
class TestContest:
    def test_runs_that_are_started_again_and_again_fence_each_other_ever_more_seldom(
        self, skews_ms: tuple[int, ...]
    ) -> None:
        begun_ms = Contest(skews_ms).run(10 * 60_000)
        assert sum(at_ms < 60_000 for at_ms in begun_ms) <= 2 * 7, "some begin at the same moment"
        last = [at_ms for at_ms in begun_ms if at_ms >= 5 * 60_000]
        led_ms = [after - before for before, after in pairwise(last)]
        assert max(led_ms) >= PAUSE_MAX_MS
        assert len(last) <= 2 * 5 * 60_000 // PAUSE_MAX_MS

    def test_of_standbys_one_leads_and_goes_on(self, skews_ms: tuple[int, ...]) -> None:
        begun_ms = Contest(skews_ms, standby=True).run(10 * 60_000)
        assert len(begun_ms) <= 1, "the others see it right before they would fence it"


class TestStandby:
    @pytest.mark.parametrize("skew_ms", [-HOUR_MS, 0, HOUR_MS])
    def test_it_takes_over_once_none_has_come_for_long(self, skew_ms: int) -> None:
        clock = SimulatedClock()
        succession = Succession(standby=True, clock=clock)
        dead = history(life(7, started_at_ms=clock.now_ms() + skew_ms))
        waited_ms = 0
        while succession.awaited(dead, alive) is not None:
            clock.advance(LOOK_PAUSE_MS)
            waited_ms += LOOK_PAUSE_MS
        assert waited_ms == SILENCE_MS
        assert succession.reason == "has written no heartbeat for 30 s"
        assert succession.awaited(history(life(7), life(8)), alive) is not None, "somebody else was quicker"

    def test_while_no_look_succeeds_nobody_is_taken_for_dead(self) -> None:
        """The leader cannot write a heartbeat either: it gets the time for one after the outage."""
        clock = SimulatedClock()
        succession = Succession(standby=True, clock=clock)
        assert succession.awaited(history(life(7)), alive) is not None
        clock.advance(HOUR_MS)
        assert succession.awaited(history(life(7)), alive) is not None
        clock.advance(LOOK_PAUSE_MS)
        assert succession.awaited(history(life(7, 20_000)), alive) is not None

    def test_it_takes_over_at_once_where_nobody_leads(self) -> None:
        succession = Succession(standby=True, clock=SimulatedClock())
        assert succession.awaited(history(), alive) is None
        assert succession.awaited(history(life(7, ended=True)), alive) is None
        assert succession.reason == "has ended"
        assert succession.awaited(history(life(8)), lambda other: other.incarnation == 8) is None
        assert succession.reason == "has died"


class TestFailure:
    def lives(self, failures: int) -> History:
        failed = [life(2 + number, ended=True, exit_code=3) for number in range(failures)]
        return history(life(1, ended=True), *failed)

    def test_a_standby_waits_longer_after_each_failure(self) -> None:
        """The one that takes over may meet the same record; it says why the last one ended."""
        for failures, paused_ms in ((1, 1_000), (2, 2_000), (3, 4_000), (9, PAUSE_MAX_MS)):
            succession = Succession(standby=True, clock=(clock := SimulatedClock()))
            awaited = succession.awaited(self.lives(failures), alive)
            assert awaited is not None
            assert awaited.pause_ms == paused_ms
            assert "has failed with code 3: It is bad. This run takes over in" in awaited.text("p")
            clock.advance(paused_ms - 1)
            assert succession.awaited(self.lives(failures), alive) is not None
            clock.advance(1)
            assert succession.awaited(self.lives(failures), alive) is None
            assert succession.reason == "has failed with code 3: It is bad."

    def test_the_pause_begins_with_the_failure(self) -> None:
        """A standby that has watched the leader for long does not take over at once."""
        succession = Succession(standby=True, clock=(clock := SimulatedClock()))
        assert succession.awaited(history(life(1)), alive) is not None
        clock.advance(20_000)
        failed = history(life(1, 20_000, ended=True, exit_code=3))
        assert succession.awaited(failed, alive) is not None
        clock.advance(1_000)
        assert succession.awaited(failed, alive) is None

    def test_a_checkpoint_ends_the_row(self) -> None:
        lives = self.lives(4)
        lives.admit(blank_manifest(checkpoint=1, incarnation=5, base=0, previous=0))
        assert failures_in_a_row(lives) == 1
        assert failures_in_a_row(history(*self.lives(3).incarnations.values(), life(9, ended=True))) == 0

    def test_any_other_run_begins_at_once(self) -> None:
        """Somebody has started it, who may have corrected what was wrong."""
        succession = Succession(standby=False, clock=SimulatedClock())
        assert succession.awaited(self.lives(3), alive) is None


def test_the_reason_of_a_failure_is_bounded_and_has_no_secret() -> None:
    error = RecordError("password hunter2 " + "x" * 5_000, topic="t", partition=1, offset=7)
    failed = Failure.of(error, lambda text: text.replace("hunter2", "***"))
    assert (failed.exit_code, failed.skip, len(failed.failure)) == (3, "t:1:7", FAILURE_CHARACTERS_MAX)
    assert failed.failure.startswith("password *** ")
    marked = RecordError("Leave it out: --skip file:/a:1:7@0af9", topic="file:/a", partition=1, offset=7)
    assert Failure.of(marked, str).skip == "file:/a:1:7@0af9"
    assert Failure.of(Halt("Input is missing."), str) == Failure(6, "Input is missing.")


def test_a_run_waits_no_longer_than_the_pause() -> None:
    clock = SimulatedClock()
    succession = Succession(standby=False, clock=clock)
    lives = history(life(1), life(2), life(3))
    awaited = succession.awaited(lives, alive)
    assert awaited is not None
    assert "leaves it alone for 2 s" in awaited.text("p")
    assert "--standby" in awaited.text("p")
    clock.advance(1_900)
    assert succession.awaited(lives, alive) is not None
    clock.advance(100)
    assert succession.awaited(lives, alive) is None
    assert succession.awaited(history(life(1), life(2), life(3), life(4)), alive) is not None, "another was quicker"
