"""Joins of tables by a foreign key in bounded work: intervals are computed again, and a backfill gives the join."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from auditing import audited
from bounded import catch_up, load_pipeline
from running import Job
from tables_fed import Tables

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_backfilled", [False, True], ids=["run", "backfill"])
def test_a_run_and_a_backfill_give_the_join_and_are_computed_again(
    is_backfilled: bool, run: Any, kafka: KafkaCluster, topic_name: str, failpoint: Any, tmp_path: Path
) -> None:
    job = Job(run, kafka, topic_name, "table_pipelines:joined", "--param", "how=left", "--num-retained", "100")
    tables, loaded = Tables(kafka, topic_name), load_pipeline("table_pipelines", "joined", topic_name, how="left")
    tables.feed(400)
    if is_backfilled:
        fed = cast(Any, SimpleNamespace(kafka=kafka, name=topic_name, storage=""))
        catch_up(fed, loaded, 3, tmp_path, chunk_records=300)
        tables.assert_joined("left")
    else:
        job.run_killed(failpoint("worker-frozen", nth=2), 2)
    tables.feed(100)
    job.finish("--parallelism", "2")
    tables.assert_joined("left")
    report = audited(loaded, job.config, tmp_path)
    assert (report.findings, [reason for reason in report.unjudged if "expired" not in reason]) == ([], [])
    assert report.checkpoints
