"""Settings of checkpoints and restarts: what they demand of the broker, and their effects on a job."""

from __future__ import annotations

import re
from typing import Any

import pytest
from scripted_job import play, scripts

from exactlyonce.checkpoint.settings import (
    CheckpointSettings,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    restart_strategy,
)
from exactlyonce.pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mode", "at_most_once", "mode is 'at_most_once': choose one of exactly_once, at_least_once"),
        ("retention", "keep", "retention is 'keep': choose one of retain_on_cancellation, delete_on_cancellation"),
        ("aligned_timeout_ms", -1, "aligned_timeout (--aligned-timeout) is -1ms"),
        ("interval_ms", 9, "checkpoint_interval (--checkpoint-interval) is 9ms"),
        ("timeout_ms", 0, "checkpoint_timeout (--checkpoint-timeout) is 0s"),
        ("deploy_timeout_ms", 0, "deploy_timeout (--deploy-timeout) is 0s: it must be at least 1ms"),
        ("max_concurrent", 0, "max_concurrent (--max-concurrent) is 0:"),
        ("num_retained", 0, "num_retained (--num-retained) is 0:"),
        ("min_pause_ms", -1, "min_pause (--min-pause) is -1ms"),
        ("tolerable_failed", -1, "tolerable_failed (--tolerable-failed) is -1:"),
        ("restart_budget_ms", -1, "restart_budget (--restart-budget) is -1ms"),
        ("transaction_timeout_ms", -1, "transaction_timeout (--transaction-timeout) is -1ms: it must be at least 0s"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        CheckpointSettings(**{name: value})


def test_barriers_overtake_where_records_count_once_only() -> None:
    with pytest.raises(ConfigError, match="unaligned goes with mode exactly_once only"):
        CheckpointSettings(unaligned=True, mode="at_least_once")
    with pytest.raises(ConfigError, match=r"aligned_timeout .* is 5 ms, but .* set unaligned as well"):
        CheckpointSettings(aligned_timeout_ms=5)


def test_what_they_demand_of_the_broker() -> None:
    """Slots cover checkpoints in flight, carried ones and the next. A transaction outlives tolerated failures and a
    restart."""
    assert CheckpointSettings(max_concurrent=2, tolerable_failed=3).slots == 8
    settings = CheckpointSettings(interval_ms=1_000, timeout_ms=10_000, tolerable_failed=2, restart_budget_ms=5_000)
    assert settings.transaction_timeout_needed_ms == 3 * 11_000 + 5_000
    assert CheckpointSettings().transaction_timeout_for(900_000) == 900_000
    assert CheckpointSettings(transaction_timeout_ms=121_000).transaction_timeout_for(900_000) == 121_000


@pytest.mark.parametrize(
    ("settings", "cap_ms", "said"),
    [
        (CheckpointSettings(transaction_timeout_ms=900_001), 900_000, "the broker allows 900000 ms at most"),
        (CheckpointSettings(transaction_timeout_ms=120_999), 900_000, "transaction_timeout to 121000 ms or more"),
        (CheckpointSettings(), 179_999, "of sinks for 179999 ms. Raise .* transaction.max.timeout.ms to 180000 ms or"),
        (CheckpointSettings(timeout_ms=200_000), 120_000, "transaction.max.timeout.ms to 261000 ms or more"),
        (CheckpointSettings(timeout_ms=200_000), 180_000, "lower one of .* transaction.max.timeout.ms to 261000 ms or"),
    ],
)
def test_timeouts_that_cannot_be_brought_together_name_the_settings_to_change(
    settings: CheckpointSettings, cap_ms: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        settings.transaction_timeout_for(cap_ms)


# --- restart strategies -----------------------------------------------------------------------------------------------


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


# --- effects on a job, unless another script shows them; and cancelled runs -------------------------------------------


@scripts("""
# interval, shorter than a checkpoint takes: the next one is triggered as soon as it is complete.
job interval_ms=100
running
100 tick -> trigger 1 on 0
200 tick
250 done 1 -> announce 1 & trigger 2 on 1
260 done 2 -> announce 2
300 tick
350 tick -> trigger 3 on 2

# min_pause
job interval_ms=100 min_pause_ms=80
running
100 tick -> trigger 1 on 0
150 done 1 -> announce 1
wake -> 230
229 tick
230 tick -> trigger 2 on 1

# min_pause, after one that was late: timeout says when it is.
job interval_ms=100 min_pause_ms=80 timeout_ms=50 tolerable_failed=9
running
100 tick -> trigger 1 on 0
149 tick
150 tick -> note checkpoint 1 was not acknowledged within 50 ms...
229 tick
230 tick -> trigger 2 on 0

# restart fixed_delay: progress starts the count of attempts anew.
job restart=1
running
failed x -> restart 1 after 70: x
running
+1000 tick -> trigger 1 on 0
done 1 -> announce 1
failed x -> restart 2 after 70: x
running from 1
failed x -> end at 1: ExactlyOnceError ... gives up: x

# A run that is cancelled takes no last checkpoint: what is in flight is aborted, and no failure hides the end.
triggered
cancel a -> restart 1 after 0
cancel a
failed a worker died
recovered 0 -> end at 0 cancelled by a

# A run that is cancelled ends with its newest checkpoint.
triggered
done 1 -> announce 1
cancel a -> restart 1 after 0
recovered 1 -> end at 1 cancelled by a
""")
def test_a_setting(script: str) -> None:
    play(script)
