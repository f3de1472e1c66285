"""Units as tasks of Spark give, byte for byte, what they give in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bounded import Fed, catch_up, load_pipeline
from golden import compute_again, states_of

from exactlyonce.engines.bounded.submit import in_process
from exactlyonce.engines.spark.session import cores
from exactlyonce.engines.spark.submit import StageFailed, submit_to
from exactlyonce.pipeline.errors import RecordError

pytestmark = [pytest.mark.spark, pytest.mark.broker]


def test_every_operator_on_spark(spark: Any, kafka: Any, topic_name: str, tmp_path: Path) -> None:
    """A checkpoint that Spark takes, at more units than it has cores, comes again here: outputs and state."""
    assert cores(spark) == 2
    fed = Fed(kafka, topic_name)
    fed.feed(3_000)
    loaded = load_pipeline("bounded_pipelines", "every", topic_name)
    summary = catch_up(fed, loaded, 3, tmp_path / "staging", submit=submit_to(spark))
    assert summary.records == 7_500
    here = compute_again(fed, loaded, summary.manifest.checkpoint, in_process, tmp_path / "here")
    there = compute_again(fed, loaded, summary.manifest.checkpoint, submit_to(spark), tmp_path / "there")
    assert there == here
    assert there.states == states_of(fed, loaded, summary.manifest)


def test_what_fails_in_a_task(spark: Any, kafka: Any, topic_name: str, tmp_path: Path) -> None:
    """A record that the user's function raises on is named, and not tried again; other failures are Spark's to tell."""
    fed = Fed(kafka, topic_name)
    fed.feed(100)
    with pytest.raises(RecordError, match=r"ZeroDivisionError.*on the record at .*-in\[\d\] offset \d+"):
        catch_up(fed, load_pipeline("pipelines", "raising", topic_name), 2, tmp_path, submit=submit_to(spark))
    assert fed.history().checkpoint_latest == 0
    with pytest.raises(StageFailed, match="Spark could not finish nonsense"):
        submit_to(spark)("nonsense", [b"no work at all"])
