"""Mistakes of a user and of the world get one clear message each and an exit code; nothing is lost."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs hide some
    NewPartitions,
)
from pipelines import linear
from running import QUICK, Run, assert_totals, orders

from exactlyonce.engines.local.workers import refuse_too_many
from exactlyonce.engines.plan import plan
from exactlyonce.pipeline.errors import INTERRUPTED, ConfigError
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker

USER, RECORD, NO_BROKER, HALT = 2, 3, 4, 6


def ended(run: Any, name: str, *arguments: str, target: str = "linear", **options: Any) -> tuple[int, str]:
    """(exit code, what it said) of a bounded run."""
    bounded = ("--param", f"name={name}", "--until", "latest", *QUICK)
    incarnation: Run = run(f"pipelines:{target}", *bounded, *arguments, **options)
    code = incarnation.wait()
    assert "Traceback" not in incarnation.said
    return code, incarnation.said


def test_no_broker(run: Any) -> None:
    """Where nothing listens, the message names the address and what to do, and comes soon."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        code, said = ended(run, "nobody", servers=address)
    assert code == NO_BROKER
    assert address in said
    assert "exactlyonce broker start" in said or "bootstrap" in said


@pytest.mark.exhaustive
def test_the_port_of_something_else(run: Any) -> None:
    """A port on which something else listens is no broker either."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, said = ended(run, "nobody", servers=f"127.0.0.1:{other.getsockname()[1]}")
    assert code == NO_BROKER, said


def test_a_missing_input_topic(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """A missing input topic is named, and not created."""
    code, said = ended(run, topic_name)
    assert code == USER
    assert f"{topic_name}-in" in said
    assert f"{topic_name}-in" not in kafka.admin().list_topics().topics


def test_a_missing_output_topic_that_must_exist(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """With create_partitions=None a missing output topic is an error that says how to fix it."""
    kafka.create_topic(f"{topic_name}-in")
    code, said = ended(run, topic_name, target="strict")
    assert code == USER
    assert f"{topic_name}-out" in said
    assert "create_partitions" in said


def test_a_record_that_does_not_decode(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """The message names topic, partition, offset and field; fixed by skipping, everything else is counted once."""
    kafka.create_topic(f"{topic_name}-in")
    fed = orders(100)
    kafka.produce(f"{topic_name}-in", fed[:50])
    kafka.produce(f"{topic_name}-in", [("k", json.dumps({"id": 7, "customer": 12, "total": 1}))])
    kafka.produce(f"{topic_name}-in", fed[50:])
    code, said = ended(run, topic_name)
    assert code == RECORD
    assert f"{topic_name}-in[0] offset 50" in said
    assert "$.customer" in said
    code, said = ended(run, topic_name, target="skipping")
    assert code == 0
    assert "skipped" in said
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
def test_many_records_that_do_not_decode(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """1,500 bad records in a row are skipped and counted, in a few lines, and all else counts once."""
    kafka.create_topic(f"{topic_name}-in")
    fed = orders(100)
    kafka.produce(f"{topic_name}-in", fed[:50])
    kafka.produce(f"{topic_name}-in", [b"{"] * 1_500)
    kafka.produce(f"{topic_name}-in", fed[50:])
    job = run("pipelines:skipping", "--param", f"name={topic_name}", "--until", "latest", *QUICK)
    assert job.wait() == 0, job.said
    assert next(event["skipped"] for event in job.events if event["event"] == "ended") == 1_500
    assert 1 < job.said.count("skipped: ") <= 100, "a few for each batch"
    assert job.text == []
    assert_totals(kafka, f"{topic_name}-out", fed)


def test_an_operator_that_cannot_be_opened(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """Why open() raised, and where, is said without a traceback; the job tries again as its strategy says."""
    kafka.create_topic(f"{topic_name}-in")
    arguments = ("--restart", "fixed_delay:attempts=1,delay=10ms")
    job = run("pipelines:unopened", "--param", f"name={topic_name}", *QUICK, *arguments)
    assert job.wait() == 1, job.said
    assert "open() of operator 'enrich' raised OSError: no database today" in job.said
    assert "pipelines.py:" in job.said
    assert "Traceback" not in job.said


def test_a_user_function_that_raises(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """The message names operator, error, the user's line and the record's coordinates, also behind a shuffle."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.produce(f"{topic_name}-in", orders(100))
    for arguments in ((), ("--parallelism", "2")):
        code, said = ended(run, topic_name, *arguments, target="raising")
        assert code == RECORD
        assert "ZeroDivisionError" in said
        assert "'totals'" in said
        assert "pipelines.py" in said
        assert f"{topic_name}-in[0] offset 42" in said


def test_a_user_function_that_exits(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """It is an error of the function like any: named, with the record's coordinates, and not tried without end."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.produce(f"{topic_name}-in", orders(100))
    code, said = ended(run, topic_name, target="exiting")
    assert code == RECORD
    assert "'copy' raised SystemExit: enough" in said
    assert f"{topic_name}-in[0] offset 42" in said


def test_more_subtasks_than_state_can_be_spread_over(run: Any) -> None:
    """Refused before anything is asked of a broker."""
    code, said = ended(run, "nobody", "--parallelism", "1000", servers="127.0.0.1:1")
    assert code == USER
    assert "max_parallelism" in said


def test_more_workers_than_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels between many workers are more files than a process may have open: the message says how many."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    graph = linear("nobody").build()
    refuse_too_many(plan(graph, 16))
    with pytest.raises(ConfigError, match="parallelism 128 takes about 32,868 open files"):
        refuse_too_many(plan(graph, 128))


@pytest.mark.exhaustive
def test_a_stop_before_the_end_that_was_asked_for(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """It ends cleanly, but says, also by its exit code, that it has not read all; another run does."""
    kafka.create_topic(f"{topic_name}-in")
    fed = orders(2_000)
    kafka.produce(f"{topic_name}-in", fed)
    arguments = ("pipelines:slow", "--param", f"name={topic_name}", "--param", "pause_ms=10", "--until", "latest")
    job = run(*arguments, *QUICK)
    job.await_checkpoint()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == INTERRUPTED
    assert "before all was read" in job.said
    ended = next(event for event in job.events if event["event"] == "ended")
    assert ended["records_in"] + ended["lag"] == len(fed)
    assert run(*arguments[:4], "pause_ms=0", *arguments[5:], *QUICK).wait() == 0
    assert_totals(kafka, f"{topic_name}-out", fed)


def test_a_transaction_timeout_that_is_too_short(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """Refused at start with the exact settings: below what restarts need, or above the broker's cap."""
    kafka.create_topic(f"{topic_name}-in")
    code, said = ended(run, topic_name, "--transaction-timeout", "30s")
    assert code == USER
    assert "transaction_timeout" in said
    assert "120200 ms" in said
    code, said = ended(run, topic_name, "--transaction-timeout", "2h")
    assert code == USER
    assert "transaction.max.timeout.ms" in said
    assert "900000 ms" in said


@pytest.mark.exhaustive
def test_input_that_retention_has_taken(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """The gap is named, with the choices."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.produce(f"{topic_name}-in", orders(100))
    assert ended(run, topic_name)[0] == 0
    kafka.produce(f"{topic_name}-in", orders(100, first=100))
    kafka.delete_records(f"{topic_name}-in", {0: 150})
    code, said = ended(run, topic_name)
    assert code == HALT
    assert "offset 100" in said.replace("offsets 100", "offset 100")
    assert "149" in said
    assert "exactlyonce reset" in said


@pytest.mark.exhaustive
def test_an_input_topic_made_anew(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """A topic that was deleted and created again is another one, even where the offsets would fit."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.produce(f"{topic_name}-in", orders(10))
    assert ended(run, topic_name)[0] == 0
    admin = kafka.admin()
    admin.delete_topics([f"{topic_name}-in"])[f"{topic_name}-in"].result()
    kafka.create_topic(f"{topic_name}-in")
    kafka.produce(f"{topic_name}-in", orders(20))
    code, said = ended(run, topic_name)
    assert code == HALT
    assert "created again" in said


def test_a_checkpoint_topic_that_is_not_compacted(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """Refused, with the command that fixes it."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.create_topic(f"{topic_name}.checkpoints", 5)
    code, said = ended(run, topic_name)
    assert code == USER
    assert "cleanup.policy" in said


@pytest.mark.exhaustive
def test_a_damaged_manifest(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """A manifest that cannot be read halts the pipeline: its output may be visible, so nothing is guessed."""
    kafka.create_topic(f"{topic_name}-in")
    fed = orders(100)
    kafka.produce(f"{topic_name}-in", fed)
    assert ended(run, topic_name)[0] == 0
    latest = max(_manifests(kafka, topic_name))
    kafka.produce(f"{topic_name}.checkpoints", [(f"manifest/{latest}", b"\xc3\x01garbage")], partition=0)
    code, said = ended(run, topic_name)
    assert code == HALT
    assert "damaged" in said
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
def test_a_damaged_block(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """A block of state that is gone halts the pipeline, named."""
    kafka.create_topic(f"{topic_name}-in")
    fed = orders(100)
    kafka.produce(f"{topic_name}-in", fed)
    assert ended(run, topic_name)[0] == 0
    topic = f"{topic_name}.checkpoints"
    kafka.configure_topic(topic, cleanup_policy="compact,delete")
    kafka.delete_records(topic, dict.fromkeys(range(1, 5), -1))
    kafka.configure_topic(topic, cleanup_policy="compact")
    code, said = ended(run, topic_name)
    assert code == HALT
    assert "cannot be restored" in said
    assert "Choices: restore the topic" in said
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
def test_a_lost_checkpoint_topic(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """A deleted checkpoint topic does not make the pipeline begin anew in silence; a reset does."""
    kafka.create_topic(f"{topic_name}-in")
    fed = orders(50)
    kafka.produce(f"{topic_name}-in", fed)
    assert ended(run, topic_name)[0] == 0
    admin = kafka.admin()
    admin.delete_topics([f"{topic_name}.checkpoints"])[f"{topic_name}.checkpoints"].result()
    code, said = ended(run, topic_name)
    assert code == HALT
    assert "exactlyonce reset" in said
    assert_totals(kafka, f"{topic_name}-out", fed)
    command = [sys.executable, "-m", "exactlyonce.cli.main", "reset", topic_name, "--yes", "--force"]
    subprocess.run([*command, "--bootstrap-servers", kafka.bootstrap_servers], check=True, capture_output=True)
    assert ended(run, topic_name)[0] == 0
    assert len(kafka.read_committed(f"{topic_name}-out")) == 100


def test_a_renamed_operator(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """State is found by the operator's id; another id is refused, with both named."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.produce(f"{topic_name}-in", orders(100))
    assert ended(run, topic_name)[0] == 0
    code, said = ended(run, topic_name, target="renamed")
    assert code == USER
    assert "'sums'" in said
    assert "totals" in said


@pytest.mark.exhaustive
def test_operators_come_but_do_not_go_unnoticed(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """A new operator begins without state beside one that goes on with its own; one that is gone is refused."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.produce(f"{topic_name}-in", orders(100))
    assert ended(run, topic_name)[0] == 0
    kafka.produce(f"{topic_name}-in", orders(17, first=100))
    assert ended(run, topic_name, target="grown")[0] == 0
    assert_totals(kafka, f"{topic_name}-out", orders(117))
    assert [record.value for record in kafka.read_committed(f"{topic_name}-count")] == [b"1"] * 17
    code, said = ended(run, topic_name)
    assert code == USER
    assert "'count'" in said


def test_two_instances(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """The newer one takes over; the older one ends and says who fenced it."""
    kafka.create_topic(f"{topic_name}-in", 3)
    fed = orders(1000)
    kafka.produce(f"{topic_name}-in", fed)
    older = run("pipelines:linear", "--param", f"name={topic_name}", *QUICK)
    older.await_checkpoint()
    newer = run("pipelines:linear", "--param", f"name={topic_name}", *QUICK)
    newer.await_event(lambda event: event["event"] == "started")
    kafka.produce(f"{topic_name}-in", more := orders(1000, first=1000))
    assert older.wait() == 5
    assert f"process {newer.process.pid}" in older.said
    newer.await_checkpoint()
    newer.process.send_signal(2)
    assert newer.wait() == 0
    assert ended(run, topic_name)[0] == 0
    assert_totals(kafka, f"{topic_name}-out", fed + more)


@pytest.mark.exhaustive
def test_an_aborted_and_an_open_foreign_transaction_in_the_input(
    kafka: KafkaCluster, topic_name: str, run: Any
) -> None:
    """Aborted records are not read, and a bounded run ends at the last stable offset."""
    kafka.create_topic(f"{topic_name}-in")
    fed = orders(50)
    kafka.produce(f"{topic_name}-in", fed)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": f"{topic_name}-foreign"})
    producer.init_transactions()
    producer.begin_transaction()
    for key, value in orders(10, first=50):
        producer.produce(f"{topic_name}-in", value, key)
    producer.flush()
    producer.abort_transaction()
    producer.begin_transaction()
    for key, value in orders(10, first=60):
        producer.produce(f"{topic_name}-in", value, key)
    producer.flush()
    assert ended(run, topic_name)[0] == 0
    assert_totals(kafka, f"{topic_name}-out", fed)
    producer.commit_transaction()
    assert ended(run, topic_name)[0] == 0
    assert_totals(kafka, f"{topic_name}-out", fed + orders(10, first=60))


@pytest.mark.exhaustive
def test_a_partition_added_to_the_input(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """A new partition is read from its beginning."""
    kafka.create_topic(f"{topic_name}-in")
    fed = orders(50)
    kafka.produce(f"{topic_name}-in", fed)
    assert ended(run, topic_name)[0] == 0
    admin = kafka.admin()
    admin.create_partitions([NewPartitions(f"{topic_name}-in", 2)])[f"{topic_name}-in"].result()
    more = orders(50, first=50)
    kafka.produce(f"{topic_name}-in", more, partition=1)
    assert ended(run, topic_name)[0] == 0
    assert_totals(kafka, f"{topic_name}-out", fed + more)


def _manifests(kafka: KafkaCluster, name: str) -> list[int]:
    keys = [record.key or b"" for record in kafka.read_committed(f"{name}.checkpoints") if record.value is not None]
    return [int(key.split(b"/")[1]) for key in keys if key.startswith(b"manifest/")]
