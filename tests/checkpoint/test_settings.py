"""Settings of checkpoints, and what they demand of the broker."""

from __future__ import annotations

import re
from typing import Any

import pytest

from exactlyonce.checkpoint.settings import CheckpointSettings
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
