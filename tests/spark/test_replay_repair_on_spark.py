"""Replay repair with units on Spark: the manifest's subtasks, whatever Spark's own parallelism is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bounded import Silent, load_pipeline
from losing import QUICK_ABORTS, Lossy

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.catch_up import CatchingUp
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.spark.submit import submit_to
from exactlyonce.testing.cluster import KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture
def lossy(own_broker: Callable[..., KafkaCluster], topic_name: str, tmp_path: Path) -> Iterator[Lossy]:
    """On a broker of its own."""
    made = Lossy(own_broker(QUICK_ABORTS), topic_name, tmp_path / "fired")
    yield made
    for each in made.runs:
        if each.process.poll() is None:
            each.kill()


def test_a_lost_transaction_is_computed_again_on_spark(spark: SparkSession, lossy: Lossy, tmp_path: Path) -> None:
    """A checkpoint of parallelism 2 has lost one of four transactions and its output log; a catch-up with three units
    a stage repairs it first, with two, and goes on: all output is exact, in order."""
    lost = lossy.lose("out", f"{lossy.name}-out")
    lossy.feed(500)
    stages: list[tuple[str, int]] = []
    client = ClientConfig({"bootstrap.servers": lossy.kafka.bootstrap_servers})
    options = RunOptions(client, parallelism=3, repair="spark")
    loaded, progress = load_pipeline("pipelines", "diamond", lossy.name), Silent()
    submit = submit_to(spark, lambda stage, units: stages.append((stage, units)))
    summary = CatchingUp(loaded, options, submit, tmp_path / "staged", progress).run()
    assert any(f"{lost.transactional_id} repaired" in note for note in progress.notes)
    assert [units for stage, units in stages if stage.startswith("stage")] == [2, 2, 3, 3]
    assert summary.manifest.parallelism == 3
    lossy.assert_exact()
    assert list((tmp_path / "staged").iterdir()) == []
