"""Checkpoints of thousands of subtasks and hundreds of output partitions, on the model of a broker."""

from __future__ import annotations

import pytest
from made_up_receipts import TOPIC, BoundedLeader

from exactlyonce.checkpoint.decision import Decided
from exactlyonce.checkpoint.decision_log import DECISIONS
from exactlyonce.checkpoint.records.encoding import DecisionKey
from exactlyonce.checkpoint.records.manifest import MANIFEST_SIZE_MAX


def live_keys(leader: BoundedLeader) -> list[str]:
    leader.broker.compact(TOPIC, drop_tombstones=True)
    return [record.key for record in leader.broker.fetch(TOPIC, DECISIONS).records]


@pytest.mark.exhaustive(but=["2000-200-2"])
@pytest.mark.parametrize(("subtasks", "partitions", "parts"), [(40, 10, 0), (2_000, 200, 2), (10_000, 1_000, 7)])
def test_wide_checkpoints(subtasks: int, partitions: int, parts: int) -> None:
    """They are decided, finalized, read by the next incarnation, and dropped with all of their records."""
    leader = BoundedLeader(subtasks, partitions)
    for checkpoint in (1, 2, 3):
        verdict = leader.decided(leader.pending())
        assert isinstance(verdict, Decided)
        assert (verdict.manifest.checkpoint, verdict.finalized) == (checkpoint, True)
        assert (len(verdict.fates), set(verdict.fates.values())) == (partitions, {"committed"})
    numbers = range(1, 1 + parts)
    kept = [[*(f"manifest/{n}/{number}" for number in numbers), f"manifest/{n}", f"finalized/{n}"] for n in (2, 3)]
    assert [key for key in live_keys(leader) if not key.startswith("incarnation/")] == [*kept[0], *kept[1]]
    records = leader.broker.fetch(TOPIC, DECISIONS).records
    assert max(len(record.value[0]) for record in records) <= MANIFEST_SIZE_MAX
    written = leader.leader.manifest
    leader.begin()
    assert leader.leader.manifest == written
    assert leader.log.history.damaged == {}
    assert len(written.order_logs) == 2 * subtasks
    assert sum(committable.records for committable in written.committables) == partitions
    assert [str(key) for key in leader.log.history.keys_of(3) if key != DecisionKey.of(written)] == [
        *kept[1][:parts], "finalized/3"
    ]  # fmt: skip
