"""`map_batches` in runs that are killed, and in bounded work: each record has its rows once, for readers and audits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bounded import catch_up
from pieces import TARGET, assert_audited, assert_pieces, loaded_of
from running import Job

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker

KILLED_AT = ["worker-aligned", "worker-flushed", "worker-finalized", "worker-restored", "unaligned-overtaken"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed_at", KILLED_AT)
def test_kills_and_other_parallelism_leave_each_record_its_rows(
    killed_at: str, run: Any, kafka: KafkaCluster, topic_name: str, failpoint: Callable[..., dict[str, str]],
    tmp_path: Path,
) -> None:  # fmt: skip
    mode = ("--unaligned",) if killed_at == "unaligned-overtaken" else ()
    job = Job(run, kafka, topic_name, TARGET, "--num-retained", "100", *mode)
    for parallelism, armed in ((2, failpoint(killed_at, nth=1)), (3, failpoint("coordinator-committed"))):
        job.feed(600)
        job.run_killed(armed, parallelism)
    job.feed(100)
    job.finish_here()
    assert_pieces(kafka, topic_name, job.fed)
    assert_audited(kafka, topic_name, tmp_path, 2)


def test_a_catch_up_in_units_and_a_run_goes_on(run: Any, kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    job = Job(run, kafka, topic_name, TARGET, "--num-retained", "100")
    fed: Any = SimpleNamespace(kafka=kafka, name=topic_name, storage="")
    job.feed(300)
    catch_up(fed, loaded_of(topic_name), 2, tmp_path)
    job.feed(100)
    job.finish_here()
    assert_pieces(kafka, topic_name, job.fed)
    assert_audited(kafka, topic_name, tmp_path, 2)


@pytest.mark.exhaustive
def test_a_record_that_is_skipped_has_no_rows(run: Any, kafka: KafkaCluster, topic_name: str) -> None:
    job = Job(run, kafka, topic_name, TARGET, partitions=1)
    job.feed(20)
    job.finish_here("--skip", f"{topic_name}-in:0:7")
    assert_pieces(kafka, topic_name, [order for place, order in enumerate(job.fed) if place != 7])
