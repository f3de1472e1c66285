"""Rules that all subtasks have, in tasks of Spark."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from auditing import audited
from bounded import catch_up, load_pipeline
from rules_fed import Rules

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.spark.submit import submit_to
from exactlyonce.testing.cluster import KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.exhaustive
def test_units_on_spark_have_all_rules_over_several_chunks(
    spark: SparkSession, kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    kafka.create_topic(f"{topic_name}-in", 3)
    rules = Rules(kafka, topic_name)
    loaded = load_pipeline("broadcast_pipelines", "ruled", topic_name)
    fed: Any = SimpleNamespace(kafka=kafka, name=topic_name, storage="")
    for events, changes, last in ((300, 100, False), (100, 0, True)):
        before = len(rules.events)
        rules.feed(events, changes)
        catch_up(fed, loaded, 3, tmp_path, submit=submit_to(spark), chunk_records=200)
        rules.assert_explained(after=before if last else None)
    report = audited(loaded, ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}), tmp_path)
    assert (report.findings, [reason for reason in report.unjudged if "expired" not in reason]) == ([], [])
