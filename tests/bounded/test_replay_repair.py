"""A decided transaction that was lost, and whose records are gone from the output, is computed again from the input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from losing import QUICK_ABORTS, Lossy

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]

@pytest.fixture
def lossy(own_broker: Callable[..., KafkaCluster], topic_name: str, tmp_path: Path) -> Iterator[Lossy]:
    """On a broker of its own."""
    made = Lossy(own_broker(QUICK_ABORTS), topic_name, tmp_path / "fired")
    yield made
    for each in made.runs:
        if each.process.poll() is None:
            each.kill()


def test_one_of_four_is_lost_and_its_records_are_gone(lossy: Lossy) -> None:
    """The interval is replayed from the checkpoint before, along the order logs, and exactly what the lost subtask had
    written becomes visible, though the repair itself is killed: before it is recorded, and before it is committed."""
    lossy.lose("out", f"{lossy.name}-out")
    for killed in ("repair-replayed", "repair-recorded"):
        assert lossy.life(killed).wait() == -9
        assert (lossy.fired / killed).exists()
    last = lossy.life()
    assert last.wait() == 0, last.said
    lossy.assert_exact()


def test_a_replay_is_not_tried_where_the_user_wants_a_halt(lossy: Lossy) -> None:
    """--repair halt ends with what is affected and the choices; without it the next run repairs."""
    lost = lossy.lose("copies", f"{lossy.name}-copies")
    halted = lossy.life("", "--repair", "halt")
    assert halted.wait() == 6
    for part in ("sink 'copies' subtask 1", "compaction has removed them", "--repair halt", "--accept-loss"):
        assert part in halted.said
    last = lossy.life()
    assert last.wait() == 0, last.said
    assert "for output that was lost and cannot be copied" in last.said
    assert f"{lost.transactional_id} repaired" in last.said
    lossy.assert_exact()
