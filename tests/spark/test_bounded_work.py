"""Backfill, catch-up, audit, replay, diff and savepoint from a program, on the session that it has."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from bounded import Fed, start

from exactlyonce.engines.spark import submit
from exactlyonce.engines.spark.bounded_work import WorkProgress
from exactlyonce.engines.spark.submit import StageFailed
from exactlyonce.pipeline.errors import ConfigError, TopicError, Unavailable
from exactlyonce.spark import audit, backfill, catch_up, diff, replay, savepoint
from exactlyonce.testing.cluster import KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.broker

OF_ANOTHER_TYPE: dict[Any, list[dict[str, Any]]] = {
    backfill: [{"to": 7}, {"to": {"in": 7}}, {"chunk_records": 0}, {"take_over": "yes"}, {"progress": 7}],
    catch_up: [
        {"to": None},
        {"chunk_records": "all"},
        {"staging": 7},
        {"params": {"name": 7}},
        {"stop": True},
        {"follow": "yes"},
        {"to": {"in": {0: 1}}, "follow": True},
    ],
    audit: [{"first": "one"}, {"last": 1.5}, {"shown": 0}, {"ignore_foreign": "yes"}],
    replay: [{"checkpoint": "1"}, {"checkpoint": 1, "into": 7}, {"checkpoint": 1, "sink": b"out"}],
    diff: [{"new": "no_module:new", "to": {"in": {"a": 1}}}, {"new": "no_module:new", "checkpoint": "1"}],
    savepoint: [{"to": 7}, {"stop": "yes"}, {"timeout": 7}],
}


@pytest.mark.parametrize("work", OF_ANOTHER_TYPE, ids=lambda work: work.__name__)
def test_an_argument_of_another_type_is_named_before_spark_begins(work: Any) -> None:
    """Neither a session nor a broker is asked for anything, and no module is imported."""
    session: Any = SimpleNamespace(createDataFrame=None)
    for wrong in OF_ANOTHER_TYPE[work]:
        with pytest.raises(ConfigError, match=f"^{[*wrong][-1]}(=| is )"):
            work(session, "no_module:pipeline", **wrong)
    wanted: dict[Any, dict[str, Any]] = {replay: {"checkpoint": 1}, diff: {"new": "no_module:new"}}
    right = wanted.get(work, {})
    with pytest.raises(ConfigError, match="spark=None is no session"):
        work(None, "no_module:pipeline", **right)
    with pytest.raises(ConfigError, match="7 is no pipeline"):
        work(session, 7, **right)


MODULE = """\
from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


def double(number: int) -> int:
    return 2 * number


def make(name: str) -> Pipeline:
    pipeline = Pipeline(name)
    pipeline.source("in", KafkaSource(f"{{name}}-in", value=int)).map(double).sink("out", KafkaSink(f"{{name}}-out"))
    return pipeline


pipeline = make("{name}")
"""


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"until": "latest"}, "runs on the session of your program: give it, as spark=spark"),
    ({"spark": "a session"}, "until is not given: a run on Spark ends at the present end"),
    ({"spark": "a session", "until": "running"}, "until is running: a run on Spark ends at the present end"),
    (
        {"spark": "a session", "until": "latest", "checkpoint_interval": "1s", "on_event": print},
        "^checkpoint_interval, on_event: bounded work on Spark has no such option.*options are, .*: accept_loss",
    ),
    (
        {"spark": "a session", "until": "latest", "chunk_record": 5},
        r"^There is no option chunk_record\. Did you mean chunk_records\?",
    ),
]


def test_a_notebook_does_what_the_commands_do(
    spark: SparkSession, kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doubling.py").write_text(MODULE.format(name=topic_name))
    (tmp_path / "tripling.py").write_text(MODULE.format(name=topic_name).replace("2 * number", "number * 3"))
    monkeypatch.syspath_prepend(tmp_path)
    pipeline = importlib.import_module("doubling").pipeline
    given: dict[str, Any] = {"bootstrap_servers": kafka.bootstrap_servers, "staging": tmp_path / "staging"}
    kafka.create_topic(f"{topic_name}-in", 2)
    kafka.create_topic(f"{topic_name}-out", 2)
    with pytest.raises(ConfigError, match="has no checkpoint to go on from: begin with `exactlyonce backfill"):
        catch_up(spark, pipeline, **given)
    with pytest.raises(ConfigError, match="parallelism is '2': write a whole number"):
        backfill(spark, pipeline, parallelism="2", **given)  # type: ignore[arg-type]  # the error is what is tested
    kafka.produce(f"{topic_name}-in", [str(number) for number in range(10)])
    lines: list[str] = []
    spark.sparkContext.setJobDescription("the program's own")
    done = backfill(spark, pipeline, progress=lambda at: lines.append(str(at)), **given)
    assert spark.sparkContext.getLocalProperty("spark.job.description") == "the program's own"
    spark.sparkContext.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]  # None removes it
    assert lines[0] == f"{topic_name}: checkpoint 1, stage in, 0 of 2 units; 0 of 10 offsets"
    assert re.fullmatch(r".*: checkpoint 1, publish, (\d) of \1 units?; 0 of 10 offsets", lines[-2])
    assert lines[-1] == f"{topic_name}: checkpoint 1; 10 of 10 offsets"
    assert (done.records, done.records_out, done.checkpoints) == (10, 10, 1)
    kafka.produce(f"{topic_name}-in", [str(number) for number in range(10, 15)])
    for options, problem in REFUSED:
        if options.keys() > {"spark", "until"}:
            options = options | {"spark": spark}
        with pytest.raises(ConfigError, match=problem):
            pipeline.run("spark", **options, **given)
    with pytest.raises(ConfigError, match="params= are for a function that is named as 'module:function'"):
        catch_up(spark, pipeline, params={"name": topic_name}, **given)
    more = catch_up(spark, "doubling:make", params={"name": topic_name}, parallelism=1, **given)
    assert (more.records, more.parallelism) == (5, 1)
    values = sorted(int(record.value or b"") for record in kafka.read_committed(f"{topic_name}-out"))
    assert values == [2 * number for number in range(15)]
    with monkeypatch.context() as patch:
        patch.setattr(submit, "cores", lambda spark: pytest.fail("a job counts cores, and there is nothing to read"))
        assert catch_up(spark, pipeline, **given).checkpoints == 0
    with pytest.raises(ConfigError, match="There is no option 'parallelism' here"):
        audit(spark, pipeline, parallelism=1, **given)  # type: ignore[call-arg]  # the error is what is tested
    report = audit(spark, pipeline, **given)
    assert (report.findings, report.records_out, len(report.checkpoints)) == ([], 15, 2)
    replayed = replay(spark, pipeline, more.manifest.checkpoint, into=f"{topic_name}-again", **given)
    assert (replayed.agrees, replayed.records, replayed.produced) == (True, 5, 5)
    assert len(kafka.read_committed(f"{topic_name}-again")) == 5
    compared = diff(spark, pipeline, "tripling:pipeline", checkpoint=1, chunk_records=2, **given)
    assert (compared.agrees, compared.records, [sink.new for sink in compared.sinks]) == (False, 5, [5])
    rows = compared.frame(spark).collect()
    assert {int(row.old) % 2 for row in rows if row.old is not None} == {0}
    assert {int(row.new) % 3 for row in rows if row.new is not None} == {0}
    assert f"{topic_name}: 5 records from checkpoint 1 on: out: " in compared._repr_html_()
    kafka.produce(f"{topic_name}-in", ["15"])
    ended = pipeline.run("spark", spark=spark, until="latest", parallelism=1, **given)
    assert ended is not None
    assert (ended.pipeline, ended.checkpoint, sum(ended.offsets["in"].values())) == (topic_name, 3, 16)


def test_a_program_follows_the_input_until_it_says_stop(
    spark: SparkSession, kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "followed.py").write_text(MODULE.format(name=topic_name))
    monkeypatch.syspath_prepend(tmp_path)
    given: dict[str, Any] = {"bootstrap_servers": kafka.bootstrap_servers, "staging": tmp_path / "staging"}
    for suffix in ("in", "out"):
        kafka.create_topic(f"{topic_name}-{suffix}", 1)
    backfill(spark, "followed:pipeline", parallelism=1, **given)
    stop = Event()

    def told(at: WorkProgress) -> None:
        """Another record comes after each checkpoint; the third one is the last."""
        if at.units == 0:
            number = int(at.stage.rpartition(" ")[2])
            stop.set() if number == 3 else kafka.produce(f"{topic_name}-in", [str(number)])

    kafka.produce(f"{topic_name}-in", ["1"])
    done = catch_up(spark, "followed:pipeline", follow=True, stop=stop, parallelism=1, progress=told, **given)
    assert (done.checkpoint, done.records) == (3, 3)
    values = [int(record.value or b"") for record in kafka.read_committed(f"{topic_name}-out")]
    assert values == [2, 2, 4]


OPENING = """\
from exactlyonce import Context, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.errors import Unavailable
from exactlyonce.sinks import KafkaSink


class Priced:
    def __call__(self, number: int) -> int:
        raise Unavailable("the price list does not answer")


class Doubling:
    def open(self, context: Context) -> None:
        raise KeyError("no such price list")

    def __call__(self, number: int) -> int:
        return 2 * number


pipeline = Pipeline("{name}")
pipeline.source("in", KafkaSource("{name}-in", value=int)).map({function}).sink("out", KafkaSink("{name}-out"))
"""


@pytest.mark.exhaustive
def test_the_users_traceback_comes_first_after_retries_too(
    spark: SparkSession, kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark tries an `open()` that raises again, and passes on a text alone. An outage ends with its own class."""
    (tmp_path / "opening.py").write_text(OPENING.format(name=topic_name, function="Doubling"))
    (tmp_path / "asking.py").write_text(OPENING.format(name=topic_name, function="Priced()"))
    monkeypatch.syspath_prepend(tmp_path)
    kafka.create_topic(f"{topic_name}-in", 1)
    kafka.create_topic(f"{topic_name}-out", 1)
    kafka.produce(f"{topic_name}-in", ["1"])
    pipeline = importlib.import_module("opening").pipeline
    with pytest.raises(StageFailed, match=r"open\(\) of operator 'map-after-in' raised KeyError") as raised:
        backfill(spark, pipeline, bootstrap_servers=kafka.bootstrap_servers, staging=tmp_path / "staging")
    first, place, *_, last = str(raised.value.__cause__).strip().splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "KeyError: 'no such price list'")
    assert place.endswith("in open")
    assert "Traceback" not in str(raised.value)
    assert "org.apache" not in str(raised.value)
    with pytest.raises(Unavailable, match="the price list does not answer") as outage:
        backfill(
            spark, "asking:pipeline", bootstrap_servers=kafka.bootstrap_servers, staging=tmp_path / "staging",
            take_over=True,
        )  # fmt: skip
    assert "Spark could not finish" in str(outage.value)
    assert outage.value.facts["operator"] == "map-after-in"


def test_a_savepoint(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    """A run takes it, and ends if it is asked to; without a run the newest checkpoint can be exported."""
    fed = Fed(kafka, topic_name)
    session: Any = SimpleNamespace(createDataFrame=None)
    cluster: Any = {"bootstrap_servers": kafka.bootstrap_servers}
    fed.feed(60)
    run = start(fed, "bounded_pipelines:broad", "--checkpoint-interval", "200ms")
    try:
        run.await_checkpoint()
        kept = savepoint(session, topic_name, **cluster)
        assert (kept.pipeline, kept.checkpoint) == (topic_name, max(fed.history().savepoints))
        assert (kept.url, kept.from_savepoint) == ("", kept.checkpoint)
        assert (kept.by_run, kept.is_kept, kept.stopped) == (True, True, False)
        assert sum(kept.offsets["left"].values()) == 60
        params = {"name": topic_name}
        last = savepoint(session, "bounded_pipelines:broad", to=tmp_path / "kept", stop=True, params=params, **cluster)
        assert run.wait() == 0, run.said
    finally:
        run.process.kill()
    assert last.from_savepoint == last.url
    assert (last.by_run, last.is_kept, last.stopped) == (True, True, True)
    with pytest.raises(ConfigError, match="does not run, so it cannot take a savepoint"):
        savepoint(session, topic_name, stop=True, to=tmp_path, **cluster)
    exported = savepoint(session, topic_name, to=tmp_path / "kept", **cluster)
    assert (exported.checkpoint, exported.by_run, exported.is_kept) == (last.checkpoint, False, False)
    assert len({last.url, exported.url}) == len(list((tmp_path / "kept").iterdir())) == 2
    with pytest.raises(ConfigError, match=r"The pipeline name .* Give its name, or module:pipeline"):
        savepoint(session, "a b", **cluster)
    with pytest.raises(ConfigError, match="params= are for a function that returns a pipeline"):
        savepoint(session, topic_name, params=params, **cluster)
    with pytest.raises(TopicError, match="has no checkpoints at"):
        savepoint(session, f"{topic_name}-other", **cluster)


def test_speculation_is_refused(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "refused.py").write_text(MODULE.format(name="refused"))
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in {
        "spark.sql.legacy.setCommandRejectsSparkCoreConfs": "false",
        "spark.speculation": "true",
    }.items():
        spark.conf.set(name, value)
    try:
        with pytest.raises(ConfigError, match=r"spark\.speculation is on"):
            backfill(spark, "refused:pipeline", bootstrap_servers="127.0.0.1:1")
    finally:
        spark.conf.unset("spark.speculation")
        spark.conf.unset("spark.sql.legacy.setCommandRejectsSparkCoreConfs")
