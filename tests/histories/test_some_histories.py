"""Short rounds whose histories are recorded and judged; `make histories` has long ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from history_checker import judged
from history_mutants import FOUND_AS, MUTANTS
from history_rounds import HistoryRound

from exactlyonce.testing.cluster import OwnCluster

pytestmark = pytest.mark.broker


@pytest.fixture
def verdict(stoppable: OwnCluster, tmp_path: Path, topic_name: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """`verdict("run", "step", weaker="")` plays a round with these faults; its history is in `tmp_path`/history."""
    rounds: list[HistoryRound] = []

    def played(*kinds: str, weaker: str = "") -> dict[str, Any]:
        round = HistoryRound(
            stoppable.broker, tmp_path / "history", 1, 0, kinds=kinds, weaker=weaker, name=topic_name
        )  # fmt: skip
        rounds.append(round)
        round.play()
        return round.verdict

    yield played
    for each in rounds:
        each.close()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_killed_run(verdict: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Its history is valid; a record that nobody polled is found."""
    found = verdict("run")
    assert found["anomalies"] == {}
    assert found["outcomes"]["ok"] > 0
    assert "lost-write" in judged(tmp_path / "history", MUTANTS["lose"])["anomalies"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_kinds_of_faults(verdict: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The history is valid; each mutant of it is not."""
    assert verdict("step", "worker", "zombie", "broker")["anomalies"] == {}
    for mutant, plant in MUTANTS.items():
        assert FOUND_AS[mutant] in judged(tmp_path / "history", plant)["anomalies"], mutant


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_weaker_delivery_is_seen(verdict: Callable[..., dict[str, Any]]) -> None:
    assert "output-duplicate" in verdict("run", "run", weaker="at_least_once")["anomalies"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_weaker_isolation_is_seen(verdict: Callable[..., dict[str, Any]]) -> None:
    assert "G1a" in verdict("run", weaker="read_uncommitted")["anomalies"]
