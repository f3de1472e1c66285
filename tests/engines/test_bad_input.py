"""Mistakes of a user and of the world get one clear message each and an exit code; nothing is lost."""

from __future__ import annotations

import json
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import closing

import pytest
from pipelines import linear
from running import QUICK, Ended, Job, run_here, visible
from test_input_topics import delete
from waiting import succeeds, until

from exactlyonce.checkpoint.records.manifest import RecordPlace, transaction_prefix
from exactlyonce.connectors.kafka.checkpoint_topic.topic import prepare_topic
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.local.workers import refuse_too_many
from exactlyonce.engines.plan import plan
from exactlyonce.pipeline.errors import INTERRUPTED, ConfigError, TopicError
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker

USER, RECORD, NO_BROKER, HALT = 2, 3, 4, 6
JobOf = Callable[..., Job]


def ended(servers: str, name: str, *arguments: str, target: str = "linear") -> Ended:
    bounded = ("--param", f"name={name}", "--until", "latest", *QUICK)
    return run_here(servers, f"pipelines:{target}", *bounded, *arguments)


def test_no_broker() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{other.getsockname()[1]}"
        code, said = ended(address, "nobody", "--inline")
    assert code == NO_BROKER, said
    assert address in said
    assert "exactlyonce broker start" in said or "bootstrap" in said


@pytest.mark.parametrize(
    ("topics", "target", "arguments", "texts"),
    [
        ((), "linear", (), ("{}-in",)),
        ((), "strict", (), ("{}-in", "{}-out", "create_partitions")),
        (("in",), "strict", (), ("{}-out", "create_partitions")),
        (("in",), "linear", ("--transaction-timeout", "30s"), ("transaction_timeout", "120200 ms")),
        (("in",), "linear", ("--transaction-timeout", "2h"), ("transaction.max.timeout.ms", "900000 ms")),
    ],
    ids=["no input topic", "no topic at all", "no output topic", "below what restarts need", "above the broker's cap"],
)
def test_what_is_refused_at_the_start(
    topics: tuple[str, ...], target: str, arguments: tuple[str, ...], texts: tuple[str, ...], kafka: KafkaCluster,
    topic_name: str,
) -> None:  # fmt: skip
    for topic in topics:
        kafka.create_topic(f"{topic_name}-{topic}")
    code, said = ended(kafka.bootstrap_servers, topic_name, "--inline", *arguments, target=target)
    assert code == USER, said
    assert [text for text in texts if text.format(topic_name) not in said] == [], said
    there = kafka.admin().list_topics().topics
    assert f"{topic_name}-out" not in there
    assert ("in" in topics) == (f"{topic_name}-in" in there), "no input topic is created"


def test_a_missing_variable_is_named_before_missing_topics(
    kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOP_DSN", raising=False)
    target = "source_pipelines:table_and_topic"
    code, said = run_here(kafka.bootstrap_servers, target, "--param", f"name={topic_name}", "--inline", *QUICK)
    assert code == USER, said
    assert "Source 'old': dsn is env:SHOP_DSN, but the environment has no variable SHOP_DSN. Export it." in said


def test_a_checkpoint_topic_that_is_not_compacted(kafka: KafkaCluster, job_of: JobOf) -> None:
    job = job_of("linear")
    kafka.create_topic(f"{job.name}.checkpoints", 5)
    assert "cleanup.policy" in job.finish_here(code=USER)


def test_more_subtasks_than_state_can_be_spread_over() -> None:
    code, said = ended("127.0.0.1:1", "nobody", "--parallelism", "1000")
    assert code == USER, said
    assert "max_parallelism" in said


def test_more_workers_than_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    graph = linear("nobody").build()
    refuse_too_many(plan(graph, 16))
    with pytest.raises(ConfigError, match="parallelism 128 takes about 32,868 open files"):
        refuse_too_many(plan(graph, 128))


def test_a_record_that_does_not_decode(kafka: KafkaCluster, job_of: JobOf) -> None:
    job = job_of("linear", partitions=1)
    job.feed(50)
    kafka.produce(job.topic, [("k", json.dumps({"id": 7, "customer": 12, "total": 1}))])
    job.feed(50)
    said = job.finish_here(code=RECORD)
    assert f"{job.topic}[0] offset 50" in said
    assert "$.customer" in said
    assert "skipped" in job.finish_here(target="skipping")
    job.assert_totals()


def test_a_record_that_is_skipped(kafka: KafkaCluster, job_of: JobOf) -> None:
    """The error names it; the next run, an audit and a replay leave it out, and the checkpoint says so."""
    job = job_of("raising", partitions=1)
    job.feed(100)
    choice = f"--skip {job.topic}:0:42"
    assert f"; or leave the record out: {choice}." in job.finish_here(code=RECORD)
    said = job.finish_here("--skip", f"{job.topic}:0:7000", *choice.split())
    assert f"skipped: source 'orders': the record at {job.topic}[0] offset 42, as asked for by --skip" in said
    job.feed(10)
    assert f"{choice}: the run goes on after that record" in job.finish_here(*choice.split())
    del job.fed[42]
    job.assert_totals()
    history = job.history()
    assert [each.skips for each in history.retained if each.skips] == [(RecordPlace(job.topic, 0, 42),)]
    checked = ("pipelines:raising", "--param", f"name={job.name}", "--on", "driver", "--json")
    skipping = next(each.checkpoint for each in history.retained if each.skips)
    said = job.command("audit", *checked) + job.command("replay", *checked, "--checkpoint", str(skipping))
    assert [json.loads(line)["skipped"] for line in said.splitlines()] == [1, 1]
    assert "the pipeline reads no such partition" in job.finish_here("--skip", "elsewhere:0:1", code=USER)


def test_an_operator_that_cannot_be_opened(job_of: JobOf) -> None:
    said = job_of("unopened").finish_here("--restart", "fixed_delay:attempts=1,delay=10ms", code=1)
    assert "open() of operator 'enrich' raised OSError: no database today" in said
    assert "pipelines.py:" in said
    remedy = "provide what it opens where the workers run, or correct it."
    assert said.count(remedy) == 2, "at the restart, and at the end"
    assert "restarting" in said


@pytest.mark.parametrize(
    ("target", "arguments", "texts"),
    [
        ("raising", ("--parallelism", "2"), ("ZeroDivisionError", "'totals'", "pipelines.py", "offset 42")),
        ("exiting", ("--inline",), ("'copy' raised SystemExit: enough", "offset 42")),
    ],
)
def test_a_function_that_raises(
    target: str, arguments: tuple[str, ...], texts: tuple[str, ...], kafka: KafkaCluster, job_of: JobOf
) -> None:
    job = job_of(target, partitions=1)
    job.feed(100)
    code, said = ended(kafka.bootstrap_servers, job.name, *arguments, target=target)
    assert code == RECORD, said
    assert [text for text in (*texts, f"{job.topic}[0] offset 42") if text not in said] == [], said


def open_transactions(job: Job) -> list[str]:
    """The job's transactions with records, which hold readers back."""
    with closing(Transactions(job.config)) as transactions:
        listed = transactions.list(transaction_prefix(job.name))
    return [each.transactional_id for each in listed if each.state in ("Ongoing", "PrepareAbort")]


def test_a_run_that_fails_says_why_and_leaves_nothing_open(kafka: KafkaCluster, job_of: JobOf) -> None:
    """Readers go on after it, and everybody can read the reason; a standby waits before it tries the same record."""
    job = job_of("raising", partitions=1)
    job.feed(30)
    run = job.start("--checkpoint-interval", "10m")
    until(lambda: open_transactions(job))
    job.feed(30)
    assert run.wait() == RECORD
    assert open_transactions(job) == []
    with closing(Topics(job.config)) as topics:
        out = f"{job.name}-out"
        until(lambda: topics.end_offsets(out, committed=True) == topics.end_offsets(out, committed=False))
    life = job.history().newest_incarnation
    assert life is not None
    assert (life.exit_code, life.skip, life.ended) == (RECORD, f"{job.topic}:0:42", True)
    assert "ZeroDivisionError" in life.failure
    seen = json.loads(job.command("top", job.name, "--json"))
    assert (seen["state"], seen["well"]) == ("failed", False)
    assert seen["sentence"].startswith(f"its last run has failed with code {RECORD}: ")
    first, *_ = json.loads(job.command("doctor", job.name, "--json", code=1))["findings"]
    assert f"failed with code {RECORD}" in first["what"]
    assert f"--skip {job.topic}:0:42" in first["do"]
    said = job.finish_here("--standby", code=RECORD)
    assert f"has failed with code {RECORD}: " in said
    assert "This run takes over in 1 s" in said
    job.finish_here("--skip", f"{job.topic}:0:42")
    del job.fed[42]
    job.assert_totals()


@pytest.mark.exhaustive
def test_a_stop_before_the_end_that_was_asked_for(job_of: JobOf) -> None:
    job = job_of("slow")
    job.feed(2_000)
    first = job.start("--param", "pause_ms=10", "--until", "latest")
    first.await_checkpoint()
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == INTERRUPTED
    assert "before all was read" in first.said
    ended = next(event for event in first.events if event["event"] == "ended")
    assert ended["records_in"] + ended["lag"] == len(job.fed)
    job.finish_here("--param", "pause_ms=0")
    job.assert_totals()


def test_input_that_retention_has_taken(kafka: KafkaCluster, job_of: JobOf) -> None:
    job = job_of("linear", partitions=1)
    job.feed(100)
    job.finish_here()
    job.feed(100)
    kafka.delete_records(job.topic, {0: 150})
    said = job.finish_here(code=HALT)
    assert "offset 100" in said.replace("offsets 100", "offset 100")
    assert "149" in said
    assert "exactlyonce reset" in said


@pytest.mark.exhaustive
def test_blocks_that_are_gone_halt_the_next_run(job_of: JobOf) -> None:
    job = job_of("linear", partitions=1)
    job.feed(100)
    job.finish_here()
    topic = f"{job.name}.checkpoints"
    job.kafka.configure_topic(topic, cleanup_policy="compact,delete")
    job.kafka.delete_records(topic, dict.fromkeys(range(1, 5), -1))
    job.kafka.configure_topic(topic, cleanup_policy="compact")
    until(
        lambda: succeeds(lambda: prepare_topic(job.config, job.name), unless=TopicError)
    )  # settings come a little later
    said = job.finish_here(code=HALT)
    assert "cannot be restored" in said
    assert "Choices: restore the topic" in said


@pytest.mark.exhaustive
def test_a_checkpoint_topic_that_is_gone(kafka: KafkaCluster, job_of: JobOf) -> None:
    """It is a halt, until a reset begins anew."""
    job = job_of("linear", partitions=1)
    job.feed(50)
    job.finish_here()
    delete(kafka, f"{job.name}.checkpoints")
    assert "exactlyonce reset" in job.finish_here(code=HALT)
    job.command("reset", job.name, "--yes", "--force")
    job.finish_here()
    assert len(visible(kafka, f"{job.name}-out", 100)) == 100


def test_a_renamed_operator(job_of: JobOf) -> None:
    job = job_of("linear")
    job.feed(100)
    job.finish_here()
    said = job.finish_here(code=USER, target="renamed")
    assert "'sums'" in said
    assert "totals" in said
