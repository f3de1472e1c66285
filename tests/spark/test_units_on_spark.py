"""Units as tasks of Spark: catch-up, audit and replay repair give what they give in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pieces
import pytest
from auditing import audited, order_at, run_flawed
from bounded import Fed, Silent, catch_up, load_pipeline
from flawed_pipelines import CHANGED, DOUBLED, DROPPED
from golden import compute_again, states_of
from losing import QUICK_ABORTS, Lossy
from running import orders

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.stages import in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.spark.session import cores
from exactlyonce.engines.spark.submit import TASKS_PER_CORE, StageFailed, submit_to
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.testing.cluster import KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def fed(kafka: KafkaCluster, topic_name: str) -> Fed:
    return Fed(kafka, topic_name)


@pytest.mark.exhaustive(but=["broad"])
@pytest.mark.parametrize("attribute", ["broad", "every"])
def test_every_operator_on_spark(attribute: str, spark: SparkSession, fed: Fed, tmp_path: Path) -> None:
    """A checkpoint by Spark, with more units than cores, comes again here, byte for byte, state and output."""
    assert cores(spark) == 2
    fed.feed(300)
    loaded = load_pipeline("bounded_pipelines", attribute, fed.name)
    summary = catch_up(fed, loaded, 3, tmp_path / "staging", submit=submit_to(spark))
    assert summary.records == (750 if attribute == "every" else 450)
    here = compute_again(fed, loaded, summary.manifest.checkpoint, in_process, tmp_path / "here")
    assert here.states == states_of(fed, loaded, summary.manifest)
    report = audited(loaded, fed.config, tmp_path)
    assert (report.findings, report.unjudged, report.checkpoints) == ([], [], [summary.manifest.checkpoint])
    if attribute == "every":
        there = compute_again(fed, loaded, summary.manifest.checkpoint, submit_to(spark), tmp_path / "there")
        assert there == here


@pytest.mark.exhaustive
def test_batches_of_arrow_on_spark(spark: SparkSession, kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    """Units of Spark call a function of Arrow batches as units here do, and an audit here finds the same."""
    fed: Any = SimpleNamespace(kafka=kafka, name=topic_name, storage="")
    kafka.create_topic(f"{topic_name}-in", 3)
    kafka.produce(f"{topic_name}-in", given := orders(300))
    summary = catch_up(fed, pieces.loaded_of(topic_name), 3, tmp_path / "staging", submit=submit_to(spark))
    assert summary.records == 300
    pieces.assert_pieces(kafka, topic_name, given)
    pieces.assert_audited(kafka, topic_name, tmp_path, 1)


@pytest.mark.exhaustive
def test_units_share_tasks(spark: SparkSession, fed: Fed, tmp_path: Path) -> None:
    """Twenty units a stage are eight tasks on two cores, with a label for each unit; output and state are exact."""
    fed.feed(300)
    loaded, progress = load_pipeline("bounded_pipelines", "broad", fed.name), Silent()
    summary = catch_up(fed, loaded, 20, tmp_path / "staging", submit=submit_to(spark), progress=progress)
    (advanced,) = progress.advances
    labels = [receipt.label for receipt in advanced.receipts]
    assert len(set(labels)) == len(labels) == 20 * len({receipt.ack.task for receipt in advanced.receipts})
    tasks = {tuple(label.split("-")[:2]) for label in labels}
    assert len(tasks) == TASKS_PER_CORE * 2 * len({stage for stage, _ in tasks})
    fed.assert_output()
    fed.assert_state(loaded, summary.manifest)


def test_what_fails_in_a_task(spark: SparkSession, fed: Fed, tmp_path: Path) -> None:
    """A record that the user's function raises on is named, and not tried again; other failures are Spark's to tell."""
    fed.feed(100)
    with pytest.raises(RecordError, match=r"ZeroDivisionError.*on the record at .*-in\[\d\] offset \d+") as raised:
        catch_up(fed, load_pipeline("pipelines", "raising", fed.name), 2, tmp_path, submit=submit_to(spark))
    assert {"operator", "topic", "partition", "offset"} <= raised.value.facts.keys()
    first, place, *_, last = str(raised.value.__cause__).strip().splitlines()
    assert first == "Traceback (most recent call last):"
    assert place.endswith("in fail"), "the user's frames come first"
    assert last == "ZeroDivisionError: integer division or modulo by zero"
    assert fed.history().checkpoint_latest == 0
    with pytest.raises(StageFailed, match="Spark could not finish nonsense"):
        submit_to(spark)("nonsense", [b"no work at all"])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_checkpoints_of_both_engines_are_audited(spark: SparkSession, fed: Fed, tmp_path: Path) -> None:
    """An audit on Spark finds the local engine's planted defects and nothing else, as one in this process."""
    client = fed.config
    options = RunOptions(client, CheckpointSettings(num_retained=100), parallelism=3)
    loaded, submit = load_pipeline("flawed_pipelines", "flawed", fed.name), submit_to(spark)
    fed.feed(1500)
    run_flawed(fed, "--num-retained", "100", interval="10m")  # the pipeline's flaw does not outlive a checkpoint
    fed.feed(900)
    summary = CatchUp(loaded, options, Silent(), chunk_records=700).lead(submit, tmp_path)
    assert summary.checkpoints > 1

    report = audited(loaded, client, tmp_path, submit=submit)
    assert report.checkpoints == list(range(1, summary.manifest.checkpoint + 1))
    origins = {each.finding.kind: each.finding.origin for each in report.findings}
    stems = {kind: order_at(fed.kafka, *origin) for kind, origin in origins.items() if origin is not None}
    assert stems.pop("reordered")
    assert stems == {"missing": DROPPED, "doubled": DOUBLED, "changed": CHANGED}
    assert len(report.findings) == 4
    assert audited(loaded, client, tmp_path) == report


@pytest.fixture
def lossy(own_broker: Callable[..., KafkaCluster], topic_name: str, tmp_path: Path) -> Iterator[Lossy]:
    lossy = Lossy(own_broker(QUICK_ABORTS), topic_name, tmp_path / "fired")
    yield lossy
    lossy.end()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_lost_transaction_is_computed_again_on_spark(spark: SparkSession, lossy: Lossy, tmp_path: Path) -> None:
    """A checkpoint of parallelism 2 has lost one of four transactions and its output log; a catch-up with three units
    a stage repairs it first, with two, and goes on: all output is exact, in order."""
    lost = lossy.lose("out", f"{lossy.name}-out")
    lossy.feed(500)
    stages: list[tuple[str, int]] = []
    client = ClientConfig({"bootstrap.servers": lossy.kafka.bootstrap_servers})
    options = RunOptions(client, parallelism=3, repair="spark")
    loaded, progress = load_pipeline("pipelines", "diamond", lossy.name), Silent()
    submit = submit_to(spark, lambda stage, done, units: None if done else stages.append((stage, units)))
    summary = CatchUp(loaded, options, progress).lead(submit, tmp_path / "staged")
    assert any(f"{lost.transactional_id} repaired" in note for note in progress.notes)
    assert [units for stage, units in stages if ", stage " in stage] == [2, 2, 3, 3]
    assert summary.manifest.parallelism == 3
    lossy.assert_exact()
    assert list((tmp_path / "staged").iterdir()) == []
