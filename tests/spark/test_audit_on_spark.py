"""An audit with units on Spark, of checkpoints that both engines wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from auditing import Quiet, order_at, run_flawed
from bounded import Fed, Silent, load_pipeline
from flawed_pipelines import CHANGED, DOUBLED, DROPPED

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.audit.audit import Audit, AuditReport
from exactlyonce.engines.bounded.catch_up import CatchingUp
from exactlyonce.engines.bounded.submit import Submit, in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.spark.submit import submit_to
from exactlyonce.testing.cluster import KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.slow, pytest.mark.exhaustive]


def test_checkpoints_of_both_engines_are_audited(
    spark: SparkSession, kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """The local engine did wrong by one update of each kind, Spark went on from its checkpoint and did right: an audit
    on Spark finds the former and nothing else, exactly as one in this process does."""
    fed = Fed(kafka, topic_name)
    client = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    options = RunOptions(client, CheckpointSettings(num_retained=100), parallelism=3)
    loaded, submit = load_pipeline("flawed_pipelines", "flawed", topic_name), submit_to(spark)
    fed.feed(1500)
    run_flawed(fed, "--num-retained", "100", "--checkpoint-interval", "5s")
    fed.feed(900)
    summary = CatchingUp(loaded, options, submit, tmp_path, Silent(), chunk_records=700).run()
    assert summary.checkpoints > 1

    def audited(submit: Submit) -> AuditReport:
        return Audit(loaded, client, submit, tmp_path, Quiet()).run()

    report = audited(submit)
    assert report.checkpoints == list(range(1, summary.manifest.checkpoint + 1))
    origins = {each.finding.kind: each.finding.origin for each in report.findings}
    stems = {kind: order_at(kafka, *origin) for kind, origin in origins.items() if origin is not None}
    assert stems.pop("reordered")
    assert stems == {"missing": DROPPED, "doubled": DOUBLED, "changed": CHANGED}
    assert len(report.findings) == 4
    assert audited(in_process) == report
