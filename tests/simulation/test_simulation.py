"""Simulated incarnations of a pipeline: no fault breaks an invariant, and every kind of fault is met.

More seeds than here: `make simulate SEEDS=10000`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from luck import HARMS, LUCK
from mutants import MUTANTS, SAMPLE
from simulate import main, shapes_of
from topologies import (
    ANY_STORE,
    BROADCAST_SHAPES,
    JOIN_SHAPES,
    LOOP_SHAPES,
    PAIR_SHAPES,
    SHAPES,
    TIMED_LOAD_SHAPES,
    WINDOW_SHAPES,
)
from world import lived, replay_command, simulate

FAULTS = {
    "coordinator crashed", "zombie coordinator", "coordinator slept", "worker crashed", "zombie worker",
    "slow subtask", "broker restarted", "downtime", "ids expired", "compacted", "stop asked for", "delivery lost",
    "request lost", "answer lost", "delayed", "applied twice", "markers lost",
    "markers of a decision lost", "aborted output removed",
    "leader moved", "one broker away", "not leader", "partitions added", "topic made anew",
}  # fmt: skip
"""Faults of the job."""
INTERRUPTED = {
    f"at {request}"
    for request in (
        "DescribeTransactions", "DescribeProducers", "EndTransactions", "ListTransactions",
        "CopyTransaction", "ReplayTransaction", "Look", "Pause", "RewriteMarkers", "InitTransactions", "LogEnds",
        "ReadLog", "ProduceBatches", "EndTransaction", "LookOnce", "LookAtInputs", "LookAtTopics", "ScanBlocks",
    )
}  # fmt: skip
"""The requests of procedures before which a coordinator ended or slept."""
CONSEQUENCES = {
    "checkpoint", "clean end", "aborted checkpoint", "carried", "finish", "committed", "proven", "repaired",
    "copy", "replay", "replay of a part", "look", "unknown commit", "markers rewritten", "halt",
    "Fenced", "Undetermined", "BrokerUnavailable",
}  # fmt: skip
"""Reactions of the job."""
DRAWN = {f"topology {name}" for name in SHAPES}
ALL = FAULTS | INTERRUPTED | CONSEQUENCES | DRAWN
RARE = {
    "at CopyTransaction", "at Look", "at LookAtInputs", "at ReplayTransaction", "aborted checkpoint",
    "aborted output removed", "broker restarted", "carried", "compacted", "copy", "delivery lost", "halt",
    "leader moved", "not leader",
    "one broker away", "partitions added", "proven", "repaired", "replay", "replay of a part", "slow subtask",
    "stop asked for",
    "topic made anew", "unknown commit", "worker crashed",
}  # fmt: skip
"""Events that fewer than three seeds of a dozen meet: were a request more or less sent, none might."""
SHAPES_OF = {
    "cycles": "cycle", "rescaled cycles": "nested", "unaligned cycles": "mutual", "cycles at least once": "nested",
    "cycles from savepoint": "cycle",
}  # fmt: skip
"""A topology with loops for each luck of loops."""
ELSEWHERE = {
    "at least once", "cancelled and deleted", "stores", "carried", "slow stores", "unaligned load", *HARMS,
    *(MUTANTS[name].luck for name in SAMPLE),
}  # fmt: skip
"""Luck that the sample of another test has; unaligned load is met there in two parts."""


@pytest.mark.slow
@pytest.mark.exhaustive(matrix=True, but=["sample"])
@pytest.mark.parametrize(
    ("seeds", "met"), [pytest.param(12, ALL - RARE - DRAWN, id="sample"), pytest.param(400, ALL, id="hundreds")]
)
def test_no_fault_breaks_an_invariant(seeds: int, met: set[str]) -> None:
    seen = lived(range(seeds)) + lived(range(seeds // 20), luck="naps")
    print(f"{seeds} seeds: {dict(sorted(seen.items()))}")
    assert [each for each in sorted(met) if not seen[each]] == []


@pytest.mark.exhaustive(but=[luck for luck in LUCK if luck not in ELSEWHERE])
@pytest.mark.parametrize("luck", LUCK)
def test_no_luck_breaks_an_invariant(luck: str) -> None:
    """The lucks that go with any topology go round all of them."""
    drawn = [*SHAPES][[*LUCK].index(luck) % len(SHAPES)]
    simulate(0, SHAPES_OF.get(luck, shapes_of(luck)[0] or drawn), luck)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("luck", SHAPES_OF)
def test_what_goes_round_breaks_no_invariant(luck: str) -> None:
    seen = sum((lived(range(4), shape, luck) for shape in LOOP_SHAPES), Counter())
    assert seen["record on its way"] or luck == "cycles at least once"
    assert seen["savepoint restored with records on their way"] or luck != "cycles from savepoint"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", WINDOW_SHAPES)
@pytest.mark.parametrize(
    ("luck", "met"), [("windows", ["stop asked for"]), ("unaligned windows", ["restored records on their way"])]
)
def test_windows_take_each_record_once_whatever_happens(shape: str, luck: str, met: list[str]) -> None:
    seen = lived(range(20), shape, luck)
    wanted = ("worker crashed", "rescaled", "clean end", *met)
    if shape != "expiring":
        wanted += ("record in a window",)
    assert [each for each in wanted if not seen[each]] == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", BROADCAST_SHAPES)
@pytest.mark.parametrize("luck", ["network", "unaligned", "crowded", "savepoints between", "unaligned replays"])
def test_rows_that_all_subtasks_have_are_those_of_the_checkpoint(shape: str, luck: str) -> None:
    seen = lived(range(12), shape, luck)
    wanted = ["worker crashed"] * (luck != "network" and "replays" not in luck) + ["rules of a checkpoint"]
    assert [each for each in wanted if not seen[each]] == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", JOIN_SHAPES)
@pytest.mark.parametrize(("luck", "met"), [("joins", ["stop asked for"]), ("unaligned joins", ["record on its way"])])
def test_tables_are_joined_as_they_are_at_each_checkpoint(shape: str, luck: str, met: list[str]) -> None:
    seen = lived(range(40), shape, luck)
    wanted = ("worker crashed", "rescaled", "clean end", "join judged", "result gone", *met)
    assert [each for each in wanted if not seen[each]] == []


@pytest.mark.slow
@pytest.mark.exhaustive(but=["windows-pairs-full"])
@pytest.mark.parametrize("shape", PAIR_SHAPES)
@pytest.mark.parametrize("luck", ["windows", "unaligned windows", "window replays"])
def test_pairs_of_each_checkpoint_are_all_of_the_records_before_it(shape: str, luck: str) -> None:
    seen = lived(range(2 if luck == "windows" else 20), shape, luck)
    wanted = ["rescaled", "clean end", "pairs judged"]
    wanted += ["replay"] if luck == "window replays" else ["worker crashed"]
    wanted += ["record without a partner"] * (shape == "pairs-full")
    wanted += ["restored records on their way"] * (luck == "unaligned windows")
    assert [each for each in wanted if not seen[each]] == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", TIMED_LOAD_SHAPES)
@pytest.mark.parametrize("luck", ["constant load", "unaligned load", "load and crashes"])
def test_timers_and_pairs_keep_up_with_constant_load(shape: str, luck: str) -> None:
    seen = lived(range(12), shape, luck)
    assert seen["checkpoint"] > 12


def test_at_least_once_comes_again_where_streams_meet_and_nothing_is_missing() -> None:
    """A chain of maps and filters is exact, by the judge of exactly once."""
    doubled = sum(simulate(seed, ANY_STORE, "at least once").oracle.readers.doubled for seed in (2, 9))
    assert doubled > 0
    assert lived(range(2), "stateless", "at least once")["worker crashed"] > 0


def test_first_runs_end_before_their_first_checkpoint_and_begin_again() -> None:
    seen = lived(range(4), luck="beginnings")
    wanted = ("ended before manifest 0", "ended before its first checkpoint", "clean end")
    assert [each for each in wanted if not seen[each]] == []


@pytest.mark.exhaustive
def test_what_barriers_overtake_counts_once() -> None:
    seen = lived(range(10, 20), luck="unaligned replays")
    for luck in ("unaligned", "overtaken late", "crowded", "savepoints between"):
        seen += lived(range(10), luck=luck)
    wanted = (
        "unaligned checkpoint", "record on its way", "restored records on their way", "rescaled",
        "aligned among unaligned", "replay behind records on their way", "replay up to records on their way",
    )  # fmt: skip
    assert [each for each in wanted if not seen[each]] == []


@pytest.mark.exhaustive(but=["cancelled and deleted"])
@pytest.mark.parametrize("luck", ["cancelled", "cancelled and deleted"])
def test_checkpoints_go_where_the_retention_says_so(luck: str) -> None:
    seen = lived(range(3), luck=luck)
    assert seen["cancelled"] > 0
    assert bool(seen["condemned"]) == (luck == "cancelled and deleted")


def test_a_seed_gives_the_same_history_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, str(Path(__file__).parent / "simulate.py"), "--seed", "0"]
    hashing = {**os.environ, "PYTHONHASHSEED": "1"}
    elsewhere = subprocess.run(command, env=hashing, capture_output=True, text=True, check=True).stdout
    assert main(["--seed", "0"]) == 0
    assert capsys.readouterr().out == elsewhere
    assert "all invariants hold" in elsewhere


def test_a_failure_is_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    first = MUTANTS["no alignment"].first
    seeds = ["--start", str(first), "--seeds", "1"]
    assert main([*seeds, "--mutant", "no alignment"]) == 1
    shown = capsys.readouterr().out
    seed = int(shown.rsplit("SEED=", 1)[1].split()[0])
    assert replay_command(seed) in shown
    assert main(["--seed", str(seed), "--mutant", "no alignment"]) == 1
    again = capsys.readouterr().out
    broken = next(line for line in again.splitlines() if line.startswith(f"seed {seed}: "))
    assert broken in shown
    assert main(seeds) == 0
    assert "1 seeds, all invariants hold" in capsys.readouterr().out
