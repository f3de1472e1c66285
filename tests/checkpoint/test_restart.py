"""Restart strategies."""

from __future__ import annotations

import pytest

from exactlyonce.checkpoint.settings import ExponentialDelay, FailureRate, FixedDelay, NoRestart, restart_strategy
from exactlyonce.pipeline.errors import ConfigError


def test_no_restart_gives_up_at_once() -> None:
    strategy = NoRestart()
    strategy.completed(0)
    assert strategy.failed(1) is None


def test_a_fixed_delay_gives_up_after_so_many_failures_without_progress() -> None:
    strategy = FixedDelay(attempts=2, delay_ms=70)
    assert [strategy.failed(0), strategy.failed(1)] == [70, 70]
    strategy.completed(2)
    assert [strategy.failed(3), strategy.failed(4), strategy.failed(5)] == [70, 70, None]


def test_a_failure_rate_forgets_what_is_out_of_its_window() -> None:
    strategy = FailureRate(failures=2, window_ms=100, delay_ms=7)
    assert [strategy.failed(0), strategy.failed(50)] == [7, 7]
    strategy.completed(60)
    assert strategy.failed(100) == 7  # the failure at 0 has just left the window
    assert strategy.failed(120) is None


def test_an_exponential_delay_doubles_up_to_its_maximum_and_starts_anew_after_progress() -> None:
    strategy = ExponentialDelay(initial_ms=100, max_ms=350)
    assert [strategy.failed(0) for _ in range(4)] == [100, 200, 350, 350]
    strategy.completed(1)
    assert strategy.failed(2) == 100


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sometimes", {}, "There is no restart strategy 'sometimes'. Choose one of: none, fixed_delay"),
        ("fixed_delay", {"max_ms": 5}, "'fixed_delay' does not take all of: max"),
        ("fixed_delay", {"attempts": -1}, "cannot have attempts -1"),
        ("failure_rate", {"window_ms": 0}, "cannot have window_ms 0"),
    ],
)
def test_a_wrong_strategy_is_refused(name: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        restart_strategy(name, **options)
