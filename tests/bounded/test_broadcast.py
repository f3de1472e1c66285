"""Rules that all subtasks have, in bounded work: a backfill has all of them, and intervals are computed again alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from auditing import audited
from bounded import catch_up, load_pipeline
from rules_fed import Rules
from running import Job

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["run", "unaligned run", "backfill"])
@pytest.mark.parametrize("keyed", ["yes", ""])
def test_a_run_and_a_backfill_are_computed_again_with_the_same_rules(
    keyed: str, case: str, run: Any, kafka: KafkaCluster, topic_name: str, failpoint: Any, tmp_path: Path
) -> None:
    unaligned = ("--unaligned", "--param", "pause_ms=2") if case == "unaligned run" else ()
    job = Job(
        run, kafka, topic_name, "broadcast_pipelines:ruled", "--param", f"keyed={keyed}", "--num-retained", "100",
        *unaligned,
    )  # fmt: skip
    rules, loaded = Rules(kafka, topic_name), load_pipeline("broadcast_pipelines", "ruled", topic_name, keyed=keyed)
    rules.feed(300, 100)
    if case == "backfill":
        fed = cast(Any, SimpleNamespace(kafka=kafka, name=topic_name, storage=""))
        catch_up(fed, loaded, 3, tmp_path, chunk_records=150)
        rules.assert_explained(in_order=not keyed)
    else:
        job.run_killed(failpoint("worker-frozen", nth=3), 3)
    rules.feed(200, 100)
    job.finish("--parallelism", "2")
    before = len(rules.events)
    rules.feed(50, 0)
    job.finish("--parallelism", "3")
    rules.assert_explained(after=before, in_order=not keyed)
    report = audited(loaded, job.config, tmp_path)
    assert (report.findings, [reason for reason in report.unjudged if "expired" not in reason]) == ([], [])
    assert report.checkpoints
