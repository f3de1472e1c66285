"""Simulated pipelines that write to a store with a ledger: no fault breaks an invariant, and every kind is met.

More seeds than here: `make simulate SEEDS=10000 SHAPE=stores`.
"""

from __future__ import annotations

import pytest
from luck import HARMS
from topologies import ANY_STORE, STORE_SHAPES
from world import lived

FAULTS = {
    "store request lost", "store request answer lost", "store request late", "store away", "store under way",
    "late apply: True", "late apply: False", "late apply: Fenced", "late fence: fence", "apply: True", "apply: Fenced",
    "at FenceStore", "at CommitStaged", "at store-committing", "at store-committed",
    "zombie coordinator", "zombie worker", "rescaled",
}  # fmt: skip
"""Faults of the job: what became of a request that nobody heard the answer to comes behind its name."""
CONSEQUENCES = {
    "applied", "applied before", "rows carried", "held", "held no more", "finish", "StoreUnavailable", "Fenced",
    "clean end",
}  # fmt: skip
"""Reactions of the job."""
RARE = {
    "apply: Fenced", "apply: True", "at CommitStaged", "at store-committed", "held no more", "late apply: False",
    "late apply: True", "rows carried", "store under way",
}  # fmt: skip
"""Events that fewer than three seeds of a dozen meet: were a request more or less sent, none might."""
MET = FAULTS | CONSEQUENCES
DRAWN = {f"topology {name}" for name in STORE_SHAPES}


@pytest.mark.slow
@pytest.mark.exhaustive(matrix=True, but=["sample"])
@pytest.mark.parametrize(
    ("seeds", "met"), [pytest.param(6, MET - RARE, id="sample"), pytest.param(400, MET | DRAWN, id="hundreds")]
)
def test_no_fault_breaks_an_invariant_of_stores(seeds: int, met: set[str]) -> None:
    seen = lived(range(seeds), ANY_STORE) + lived(range(seeds * 3 // 4), ANY_STORE, "stores")
    seen += lived(range(3 + seeds // 15), ANY_STORE, "carried")
    seen += lived(range(2 + seeds // 400), ANY_STORE, "slow stores")
    print(f"{seeds} seeds: {dict(sorted(seen.items()))}")
    assert [each for each in sorted(met) if not seen[each]] == []


@pytest.mark.parametrize("luck", HARMS)
def test_every_run_halts_once_the_store_or_the_topic_is_another_one(luck: str) -> None:
    """After a reset, which empties topic, target and ledger, an older leader that sleeps before it asks is refused."""
    assert lived(range(3), ANY_STORE, luck)["reset" if luck == "reset" else "halt for a store"] > 0
