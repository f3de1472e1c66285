"""The simulated clock, and the machine's."""

from __future__ import annotations

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.testing import SimulatedClock


def test_time_passes_only_when_told(clock: SimulatedClock) -> None:
    before = clock.now_ms()
    assert (clock.now_ms(), clock.monotonic_ms()) == (before, 0)
    clock.advance(1_500)
    assert (clock.now_ms(), clock.monotonic_ms()) == (before + 1_500, 1_500)


def test_timers_fire_in_order_each_at_its_time(clock: SimulatedClock) -> None:
    fired: list[tuple[str, int]] = []

    def note(name: str) -> None:
        fired.append((name, clock.monotonic_ms()))

    def again() -> None:
        note("first")
        clock.call_after(5, lambda: note("from first"))

    clock.call_after(20, lambda: note("late"))
    clock.call_after(10, again)
    clock.call_after(10, lambda: note("second"))
    clock.call_after(99, lambda: note("too late"))
    clock.advance(50)
    assert fired == [("first", 10), ("second", 10), ("from first", 15), ("late", 20)]
    assert clock.monotonic_ms() == 50


def test_a_cancelled_timer_does_not_fire(clock: SimulatedClock) -> None:
    fired = []
    timer = clock.call_after(10, lambda: fired.append("cancelled"))
    other = clock.call_after(10, lambda: fired.append("kept"))
    timer.cancel()
    clock.advance(10)
    other.cancel()
    assert fired == ["kept"]


def test_a_jump_moves_only_the_wall_clock(clock: SimulatedClock) -> None:
    before = clock.now_ms()
    fired: list[str] = []
    clock.call_after(10, lambda: fired.append("timer"))
    clock.jump(3_600_000)
    assert (clock.now_ms() - before, clock.monotonic_ms(), fired) == (3_600_000, 0, [])


def test_the_machines_clock_grows() -> None:
    clock: Clock = SystemClock()
    times = [clock.monotonic_ms() for _ in range(1_000)]
    assert times == sorted(times)
    assert clock.now_ms() > 1_700_000_000_000
