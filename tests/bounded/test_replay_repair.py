"""A decided transaction that was lost, and whose records are gone from the output, is computed again from the input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from auditing import audited
from bounded import load_pipeline
from losing import QUICK_ABORTS, Lossy

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.slow


@pytest.fixture
def lossy(own_broker: Callable[..., KafkaCluster], topic_name: str, tmp_path: Path) -> Iterator[Lossy]:
    lossy = Lossy(own_broker(QUICK_ABORTS), topic_name, tmp_path / "fired")
    yield lossy
    lossy.end()


@pytest.mark.exhaustive
def test_one_of_four_is_lost_and_its_records_are_gone(lossy: Lossy, tmp_path: Path) -> None:
    lost = lossy.lose("out", f"{lossy.name}-out")
    for killed in ("repair-replayed", "repair-recorded"):
        assert lossy.incarnation(killed).wait() == -9
        assert (lossy.fired / killed).exists()
    last = lossy.incarnation()
    assert last.wait() == 0, last.said
    lossy.assert_exact()
    client = ClientConfig({"bootstrap.servers": lossy.kafka.bootstrap_servers})
    loaded = load_pipeline("pipelines", "diamond", lossy.name)
    report = audited(loaded, client, tmp_path, lost.checkpoint, lost.checkpoint)
    assert (report.checkpoints, report.findings) == ([lost.checkpoint], [])
    assert not any("subtask 1" in each for each in report.unjudged), "what was repaired is judged"
    assert any("sink out subtask 0" in each for each in report.unjudged), "the rest of that topic is gone"


@pytest.mark.exhaustive
def test_a_replay_is_not_tried_where_the_user_wants_a_halt(lossy: Lossy) -> None:
    lost = lossy.lose("copies", f"{lossy.name}-copies")
    halted = lossy.incarnation("", "--repair", "halt")
    assert halted.wait() == 6
    for part in ("sink 'copies' subtask 1", "compaction has removed them", "--repair halt", "--accept-loss"):
        assert part in halted.said
    last = lossy.incarnation()
    assert last.wait() == 0, last.said
    assert "for output that was lost and cannot be copied" in last.said
    assert f"{lost.transactional_id} repaired" in last.said
    lossy.assert_exact()
