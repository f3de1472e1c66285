"""The inputs as `exactlyonce doctor` judges them by what brokers answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.cli.doctor.findings import Findings
from exactlyonce.cli.doctor.inputs import check_inputs
from exactlyonce.cli.doctor.questions import TopicFacts


def test_input_that_was_truncated() -> None:
    """Where a log ends before what was read of it, or in another leader epoch, the doctor says what a run says."""
    read = SourceOffset("s", "t", "id", 0, 10, leader_epoch=3)
    newest = SimpleNamespace(checkpoint=4, pipeline="p", offsets=(read,))
    subject: Any = SimpleNamespace(
        inputs=["t"], newest=newest, history=None, name="p", traces=SimpleNamespace(is_sink=False)
    )
    facts = {"t": TopicFacts("t", "id", (1,), (1,), None)}
    for end, epoch_end, why in (
        (3, 10, "the topic ends at 3"),
        (20, 7, "what leader epoch 3 wrote there ends at offset 7"),
    ):
        topics: Any = SimpleNamespace(
            start_offsets=lambda topic: {0: 0},
            end_offsets=lambda topic, committed, end=end: {0: end},
            epoch_ends=lambda topic, epochs, epoch_end=epoch_end: {0: epoch_end},
        )
        found = Findings()
        check_inputs(subject, topics, facts, found)
        (lost,) = found.diagnoses
        assert f"has read t[0] up to offset 10, but {why}" in lost.what
        assert lost.do.startswith("restore it from a replica or backup")
