"""Simulated pipelines that write to a store with a ledger: no fault breaks an invariant, and every kind is met.

More seeds than here: `make simulate SEEDS=10000 SHAPE=stores`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from luck import LUCK
from simulate import main
from topologies import ANY_STORE, STORE_SHAPES
from world import simulate

FAULTS = {
    "store request lost", "store request answer lost", "store request late", "store away", "store under way",
    "late apply: True", "late apply: False", "late apply: Fenced", "late fence: fence", "apply: True", "apply: Fenced",
    "at FenceStore", "at CommitStaged", "at store-committing", "at store-committed",
    "zombie coordinator", "zombie worker", "rescaled",
}  # fmt: skip
"""What is done to the job: what became of a request that nobody heard the answer to comes behind its name."""
CONSEQUENCES = {
    "applied",
    "applied before",
    "rows carried",
    "held",
    "held no more",
    "finish",
    "StoreUnavailable",
    "Fenced",
    "clean end",
}
"""What the job had to do about it."""
HARMS = ("restored while down", "restored while away", "topic made anew")
"""Luck: what people do to the store or to the checkpoint topic."""


def lived(seeds: range, luck: str | None = None) -> Iterator[Counter[str]]:
    """What was met in each history."""
    for seed in seeds:
        yield simulate(seed, ANY_STORE, luck).seen


@pytest.mark.slow
@pytest.mark.exhaustive(but=["sample"])
@pytest.mark.parametrize("seeds", [pytest.param(20, id="sample"), pytest.param(400, id="hundreds")])
def test_no_fault_breaks_an_invariant_of_stores(seeds: int) -> None:
    """Through many histories a store shows each row once and none that is undecided, in the order of its subtask, and
    in the end what Kafka shows; its ledger only grows; every kind of fault, of consequence and of topology is met."""
    seen: Counter[str] = Counter()
    for each in (
        *lived(range(seeds)),
        *lived(range(seeds * 3 // 4), "stores"),
        *lived(range(9 + seeds // 20), "carried"),
        *lived(range(3), "slow stores"),
    ):
        seen.update(each)
    print(f"{seeds} seeds: {dict(sorted(seen.items()))}")
    drawn = {f"topology {name}" for name in STORE_SHAPES}
    assert {each for each in FAULTS | CONSEQUENCES | drawn if not seen[each]} == set()


@pytest.mark.parametrize("luck", HARMS)
def test_every_run_halts_once_the_store_or_the_topic_is_another_one(luck: str) -> None:
    """A store that is put back to an earlier state, while the pipeline is down or only while the store is away, and a
    checkpoint topic that is made anew under an old ledger: nothing is written again or left out, the run halts."""
    halted = sum(each["halt for a store"] for each in lived(range(20), luck))
    assert halted >= 5


def test_who_has_lived_on_through_a_reset_applies_nothing() -> None:
    """Topic, target and ledger are emptied, and checkpoints and incarnations count from 1 again, while an older leader
    sleeps right before it asks the store: what it asks then is refused, for the ledger is of another topic."""
    assert sum(each["reset"] for each in lived(range(8), "reset")) >= 4


@pytest.mark.exhaustive(but=[f"{shape}-0" for shape in STORE_SHAPES])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", STORE_SHAPES)
def test_every_topology_with_a_store_comes_to_its_end(shape: str, seed: int) -> None:
    """Whatever the seed draws beside it."""
    simulate(seed, shape)


def test_one_command_soaks_stores(capsys: pytest.CaptureFixture[str]) -> None:
    """A run over shapes with stores tells what became of what was sent to them."""
    assert main(["--seeds", "3", "--shape", ANY_STORE, "--luck", "stores"]) == 0
    shown = capsys.readouterr().out
    assert "topology store-" in shown
    assert "applied" in shown
    assert set(HARMS) <= set(LUCK)
