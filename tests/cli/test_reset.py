"""`exactlyonce reset`: what goes, what stays, and when it refuses."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition

from exactlyonce.checkpoint.records.committable import coordinator_id
from exactlyonce.checkpoint.records.history import SILENCE_MS, History
from exactlyonce.checkpoint.records.manifest import Finalized, Incarnation, Manifest
from exactlyonce.checkpoint.store.topic import find_topic
from exactlyonce.checkpoint.transactions.broker_answers import ListedTransaction
from exactlyonce.cli.traces import Traces
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S

if TYPE_CHECKING:
    from tests.cli.conftest import Ended, Orders

NOW_MS = 1_000_000


def traces(history: History | None, topic: str | None = "p.checkpoints") -> Traces:
    """Of the pipeline `p`."""
    return Traces("p", topic, history, "" if history else "damaged", ())


def history(kind: str, *, heartbeat_ms: int, finalized: bool = True, ended: bool = False) -> History:
    """One incarnation that has taken one checkpoint."""
    found = History("p")
    found.admit(
        Incarnation(
            incarnation=1,
            host="box",
            process=4212,
            started_at_ms=0,
            heartbeat_ms=heartbeat_ms,
            ended=ended,
        )
    )
    found.admit(
        Manifest(
            pipeline="p",
            checkpoint=1,
            incarnation=1,
            attempt=0,
            kind=kind,
            base=0,
            previous=0,
            triggered_at_ms=0,
            completed_at_ms=0,
            fingerprint="",
            max_parallelism=128,
            parallelism=1,
            block_partitions=5,
            block_end_offsets=(),
            written_bytes=0,
            offsets=(),
            operators=(),
            order_logs=(),
            committables=(),
            sinks=(),
        )
    )
    if finalized:
        found.admit(Finalized(1, 1, 0, ()))
    return found


def test_signs_of_life() -> None:
    """A fresh heartbeat is one, unless the pipeline ended cleanly or has no checkpoint; so is an unreadable topic."""
    fresh, stale = NOW_MS - SILENCE_MS + 1, NOW_MS - SILENCE_MS
    sign = traces(history("checkpoint", heartbeat_ms=fresh)).sign_of_life(NOW_MS)
    assert sign == "process 4212 on box ran it 30.0 s ago"
    assert traces(history("final", heartbeat_ms=fresh)).sign_of_life(NOW_MS) == sign
    assert traces(history("checkpoint", heartbeat_ms=fresh, ended=True)).sign_of_life(NOW_MS) == ""
    assert traces(history("checkpoint", heartbeat_ms=stale)).sign_of_life(NOW_MS) == ""
    assert traces(history("checkpoint", heartbeat_ms=NOW_MS + 60_000)).sign_of_life(NOW_MS) != ""
    begun = History("p")
    begun.admit(Incarnation(incarnation=1, host="box", process=4212, started_at_ms=NOW_MS, heartbeat_ms=NOW_MS))
    assert traces(begun).sign_of_life(NOW_MS) == ""
    assert traces(None).sign_of_life(NOW_MS) != ""
    assert traces(None, topic=None).sign_of_life(NOW_MS) == ""


def test_what_goes() -> None:
    """Open transactions are counted, and output that may not be visible yet is pointed out."""
    listed = (ListedTransaction("eo:p:out:0:1.0:0", 1, "Ongoing"), ListedTransaction("eo:p:out:0:1.0:1", 2, "Empty"))
    going = dict(Traces("p", "p.checkpoints", history("final", heartbeat_ms=0, finalized=False), "", listed).going())
    assert going["checkpoints"] == "1, and all state: topic p.checkpoints"
    assert dict(traces(History("p")).going())["checkpoints"] == "none, and all state: topic p.checkpoints"
    assert dict(traces(None).going())["checkpoints"] == "unreadable ones: topic p.checkpoints"
    assert going["transactions"] == "1 open, which is aborted; 2 ids fenced, so that no older process can write"
    assert going[""] == "Checkpoint 1 is decided, but its output may not be visible yet: a run would finish it."


def group_offsets(orders: Orders, topic: str) -> list[int]:
    """The offsets of the pipeline's group in a topic, by partition; below 0 where there is none."""
    wanted = ConsumerGroupTopicPartitions(orders.name, [TopicPartition(topic, partition) for partition in range(2)])
    admin = orders.kafka.admin()
    answer = admin.list_consumer_group_offsets([wanted])[orders.name].result(LIMIT_S)
    return [each.offset for each in answer.topic_partitions]


def topics(orders: Orders) -> set[str]:
    """Those of this test, without the common prefix."""
    found = orders.kafka.admin().list_topics(timeout=LIMIT_S).topics
    return {name.removeprefix(orders.name) for name in found if name.startswith(orders.name)}


def run_once(orders: Orders) -> Ended:
    """Process what is there."""
    ended = orders.command("run", "orders:pipeline", "--until", "latest")
    assert ended.code == 0, ended.err
    return ended


def has_checkpoints(orders: Orders) -> bool:
    """Whether the checkpoint topic, which a reset makes anew, has a manifest."""
    decisions = orders.kafka.read_committed(f"{orders.name}.checkpoints")
    return any(record.value is not None and (record.key or b"").startswith(b"manifest/") for record in decisions)


def last_checkpoint(ended: Ended) -> dict[str, object]:
    """What a run told of its last checkpoint."""
    return [event for event in ended.events if event["event"] == "checkpoint"][-1]


@pytest.mark.broker
def test_reset(orders: Orders) -> None:
    """Checkpoints, ids and group offsets go, topics stay, and the next run computes everything anew."""
    run_once(orders)
    other, admin = f"{orders.name}-totals", orders.kafka.admin()
    elsewhere = [TopicPartition(other, partition, 3) for partition in range(2)]
    group = ConsumerGroupTopicPartitions(orders.name, elsewhere)
    admin.alter_consumer_group_offsets([group])[orders.name].result(LIMIT_S)
    assert sum(group_offsets(orders, f"{orders.name}-orders")) == 700
    ended = orders.command("reset", "orders:pipeline", "--yes")
    assert (ended.code, ended.err) == (0, "")
    assert f"topic {orders.name}.checkpoints" in ended.out.replace("\n                 ", " ")
    assert f"{orders.name} has forgotten everything; its next run begins anew.\n" in ended.out
    assert topics(orders) == {"-orders", "-totals", ".checkpoints"}
    assert not has_checkpoints(orders)
    assert max(group_offsets(orders, f"{orders.name}-orders")) < 0
    assert group_offsets(orders, other) == [3, 3]
    assert len(orders.totals()) == 700
    again = orders.command("reset", "orders:pipeline", "--yes")
    assert (again.code, again.err) == (0, "")
    assert "none, and all state" in again.out
    assert last_checkpoint(run_once(orders))["records_committed"] == 700
    assert len(orders.totals()) == 1_400


@pytest.mark.exhaustive
@pytest.mark.broker
def test_the_topic_that_is_made_anew(orders: Orders) -> None:
    """It has as many partitions as the one before."""
    config = {"bootstrap.servers": orders.kafka.bootstrap_servers}
    assert orders.command("run", "orders:pipeline", "--until", "latest", "--checkpoint-partitions", "3").code == 0
    assert orders.command("reset", orders.name, "--yes").code == 0
    assert find_topic(config, orders.name).partitions == 3


@pytest.mark.broker
def test_nothing_to_reset(orders: Orders) -> None:
    """A pipeline that has left nothing is an error: its name may be misspelt."""
    ended = orders.command("reset", orders.name, "--yes")
    assert (ended.code, ended.out) == (2, "")
    assert f"{orders.name} has no checkpoints" in ended.err


@pytest.mark.broker
def test_needs_consent(orders: Orders) -> None:
    """Without --yes and without a terminal, nothing happens; what would go is shown all the same."""
    run_once(orders)
    ended = orders.command("reset", orders.name)
    assert ended.code == 2
    assert "Add --yes" in ended.err
    assert "This stays:\n" in ended.out
    assert ".checkpoints" in topics(orders)


@pytest.mark.exhaustive(but=["no-1-True"])
@pytest.mark.broker
@pytest.mark.parametrize(("answer", "code", "left"), [("no", 1, True), ("\x04", 1, True), ("yes", 0, False)])
def test_asks(orders: Orders, answer: str, code: int, left: bool) -> None:
    """In a terminal it asks, and only a yes is one."""
    run_once(orders)
    ours, theirs = pty.openpty()
    line = [*orders.command.line, "reset", orders.name]
    process = subprocess.Popen(
        line, cwd=orders.command.folder, env=orders.command.environment, stdin=theirs, stdout=subprocess.PIPE, text=True
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    out, _ = process.communicate(timeout=LIMIT_S)
    os.close(ours)
    assert f"Reset {orders.name}? [y/N]" in out
    assert process.returncode == code
    assert ("Nothing was changed." in out) == left
    assert has_checkpoints(orders) == left


@pytest.mark.exhaustive
@pytest.mark.broker
def test_a_run_that_begins_while_it_asks(orders: Orders) -> None:
    """Nothing goes that was not shown, and no run that was not there: it is looked at again once one has agreed."""
    run_once(orders)
    for stopped in (False, True):
        ours, theirs = pty.openpty()
        line = [*orders.command.line, "reset", orders.name]
        process = subprocess.Popen(
            line, cwd=orders.command.folder, env=orders.command.environment, stdin=theirs, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(theirs)
        assert process.stdout is not None
        assert process.stderr is not None
        shown = ""
        while "This stays:" not in shown:
            shown += process.stdout.readline()
        orders.write(70)
        with orders.running() as job:
            if stopped:
                job.terminate()
                assert job.wait(LIMIT_S) == 0
            os.write(ours, b"yes\n")
            _, said = process.communicate(timeout=LIMIT_S)
            os.close(ours)
            assert process.returncode == 2, said
            assert ("has run since" if stopped else "may be running") in said
            if not stopped:
                job.terminate()
                assert job.wait(LIMIT_S) == 0
        assert has_checkpoints(orders)


@pytest.mark.exhaustive
@pytest.mark.broker
def test_refuses_while_it_runs(orders: Orders) -> None:
    """A pipeline that ran a moment ago is left alone, host and process are named; --force is for when it is dead."""
    with orders.running() as process:
        ended = orders.command("reset", orders.name, "--yes")
        assert ended.code == 2
        assert f"may be running: process {process.pid} on {socket.gethostname()} ran it" in ended.err
    assert ".checkpoints" in topics(orders)
    assert orders.command("reset", orders.name, "--yes").code == 2
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    assert not has_checkpoints(orders)


@pytest.mark.exhaustive
@pytest.mark.broker
def test_open_transactions_are_aborted(orders: Orders) -> None:
    """What a killed incarnation left open is aborted, also when the topic was deleted; ids of others are left."""
    run_once(orders)
    servers = {"bootstrap.servers": orders.kafka.bootstrap_servers}
    ours, others = f"eo:{orders.name}:out:0:7.0:0", f"eo:{orders.name}:somebody-elses"
    producers = [Producer({**servers, "transactional.id": name}) for name in (ours, others)]
    for producer in producers:
        producer.init_transactions(LIMIT_S)
        producer.begin_transaction()
        producer.produce(f"{orders.name}-totals", b"lost")
        producer.flush(LIMIT_S)
    admin, topic = orders.kafka.admin(), f"{orders.name}.checkpoints"
    admin.delete_topics([topic])[topic].result(LIMIT_S)
    ended = orders.command("reset", orders.name, "--yes")
    assert ended.code == 0, ended.err
    assert "1 open, which is aborted" in ended.out
    listed = Transactions(ClientConfig(servers)).list(f"eo:{orders.name}:")
    states = {each.transactional_id: each.state for each in listed}
    assert states[ours] == "CompleteAbort"
    assert states[others] == "Ongoing"
    assert coordinator_id(orders.name) in states
    producers[1].abort_transaction(LIMIT_S)


@pytest.mark.exhaustive
@pytest.mark.broker
def test_damaged_topic(orders: Orders) -> None:
    """Checkpoints that cannot be read stop everything but a reset with --force."""
    run_once(orders)
    orders.kafka.configure_topic(f"{orders.name}.checkpoints", cleanup_policy="delete")
    orders.kafka.delete_records(f"{orders.name}.checkpoints", {0: -1})
    listed = orders.command("checkpoints", orders.name)
    assert (listed.code, listed.out) == (6, "")
    assert f"exactlyonce reset {orders.name}" in listed.err
    refused = orders.command("reset", orders.name, "--yes")
    assert refused.code == 2
    assert "its checkpoint topic does not tell whether it runs" in refused.err
    assert orders.command("reset", orders.name, "--yes", "--force").code == 0
    assert last_checkpoint(run_once(orders))["records_committed"] == 700
