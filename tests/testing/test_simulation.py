"""Simulated lives of a pipeline, and planted defects that the simulator must find.

More seeds than here: `python -m exactlyonce.testing.simulation --start 10000 --seeds 10000`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from exactlyonce.testing.simulation import main, replay_command, simulate
from exactlyonce.testing.simulation_mutants import MUTANTS, planted
from exactlyonce.testing.simulation_oracle import Broken

SEEDS = 400
MUTANT_SEEDS = 500
"""Within so many seeds every planted defect is found."""

FAULTS = {
    "coordinator crashed", "zombie coordinator", "coordinator slept", "worker crashed", "zombie worker",
    "slow subtask", "broker restarted", "downtime", "ids expired", "compacted", "stop asked for", "delivery lost",
    "request lost", "answer lost", "delayed", "applied twice", "markers lost",
    "markers of a decision lost", "aborted output removed",
}  # fmt: skip
"""What is done to the job."""
INTERRUPTED = {
    f"at {request}"
    for request in (
        "DescribeTransactions", "DescribeProducers", "BlockEndOffsets", "EndTransactions", "ListTransactions",
        "CopyTransaction", "ReplayTransaction", "Look", "Pause", "RewriteMarkers", "InitTransactions", "LogEnds",
        "ReadLog", "ProduceBatches", "EndTransaction", "LookOnce", "LookAtInputs", "LookAtOutputs", "ScanBlocks",
    )
}  # fmt: skip
"""The requests of procedures before which a coordinator ended or slept."""
CONSEQUENCES = {
    "checkpoint", "clean end", "aborted checkpoint", "carried", "finish", "committed", "proven", "repaired",
    "chain repaired", "copy", "replay", "replay of a part", "look", "refused commit", "unknown commit",
    "markers rewritten", "Fenced", "Undetermined", "BrokerUnavailable",
}  # fmt: skip
"""What the job had to do about it."""


@pytest.mark.slow
def test_no_fault_breaks_an_invariant() -> None:
    """Through hundreds of histories every invariant holds at every request and the job comes to its end with all of
    the input counted once, in order; and every kind of faults, and of consequence, has been met."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen.update(simulate(seed).seen)
    print(f"{SEEDS} seeds: {dict(sorted(seen.items()))}")
    assert {each for each in FAULTS | INTERRUPTED | CONSEQUENCES if not seen[each]} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    """A defect that is planted breaks an invariant within a bounded number of seeds."""
    with planted(name):
        for seed in range(MUTANT_SEEDS):
            try:
                simulate(seed)
            except Broken as broken:
                print(f"{name}: {broken}")
                return
    pytest.fail(f"{MUTANT_SEEDS} seeds did not find it")


def test_there_are_a_dozen_planted_defects_and_more() -> None:
    """At least twelve rules of the protocol are left out in turn."""
    assert len(MUTANTS) >= 12


@pytest.mark.parametrize("seed", [3, 8])
def test_a_seed_gives_the_same_history_again(seed: int) -> None:
    """Two worlds of one seed live through the same, step by step."""
    first, second = simulate(seed), simulate(seed)
    assert first.trace == second.trace
    assert (first.steps, first.seen, first.clock.monotonic_ms()) == (
        second.steps, second.seen, second.clock.monotonic_ms()
    )  # fmt: skip


def test_a_failure_is_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """What breaks is printed with the command that replays it, and the replay breaks in the same way."""
    assert main(["--seeds", "50", "--mutant", "no alignment"]) == 1
    shown = capsys.readouterr().out
    seed = int(shown.rsplit("--seed ", 1)[1])
    assert shown.rstrip().endswith(replay_command(seed))
    assert main(["--seed", str(seed), "--mutant", "no alignment"]) == 1
    assert capsys.readouterr().out == shown


def test_a_defect_is_gone_when_it_is_no_longer_planted(capsys: pytest.CaptureFixture[str]) -> None:
    """Planting a defect leaves nothing behind."""
    assert main(["--seeds", "50", "--mutant", "no alignment"]) == 1
    assert main(["--seeds", "3"]) == 0
    assert "3 seeds, all invariants hold" in capsys.readouterr().out
