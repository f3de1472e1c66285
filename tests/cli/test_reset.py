"""`exactlyonce reset`: what goes, what stays, and when it refuses."""

from __future__ import annotations

import io
import os
import pty
import subprocess
from contextlib import closing

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition

from exactlyonce.checkpoint.records.history import SILENCE_MS, History
from exactlyonce.checkpoint.records.manifest import Finalized, Incarnation, coordinator_id
from exactlyonce.checkpoint.requests import ListedTransaction
from exactlyonce.cli.commands.reset import going
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.pipeline_resources import PipelineResources
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.conftest import Ended, Orders, manifest, wait_until

NOW_MS = 1_000_000


def resources(history: History | None, topic: str | None = "p.checkpoints") -> PipelineResources:
    return PipelineResources("p", topic, history, "" if history else "damaged", ())


def history(kind: str, *, heartbeat_ms: int, finalized: bool = True, ended: bool = False) -> History:
    found = History("p")
    found.admit(
        Incarnation(incarnation=1, host="box", process=4212, started_at_ms=0, heartbeat_ms=heartbeat_ms, ended=ended)
    )
    found.admit(manifest(kind=kind))
    if finalized:
        found.admit(Finalized(1, 1, 0, ()))
    return found


def test_signs_of_life() -> None:
    fresh, stale = NOW_MS - SILENCE_MS + 1, NOW_MS - SILENCE_MS
    sign = resources(history("checkpoint", heartbeat_ms=fresh)).sign_of_life(NOW_MS)
    assert sign == "process 4212 on box ran it 30.0 s ago"
    assert resources(history("final", heartbeat_ms=fresh)).sign_of_life(NOW_MS) == sign
    assert resources(history("checkpoint", heartbeat_ms=fresh, ended=True)).sign_of_life(NOW_MS) == ""
    assert resources(history("checkpoint", heartbeat_ms=stale)).sign_of_life(NOW_MS) == ""
    assert resources(history("checkpoint", heartbeat_ms=NOW_MS + 60_000)).sign_of_life(NOW_MS) != ""
    begun = History("p")
    begun.admit(Incarnation(incarnation=1, host="box", process=4212, started_at_ms=NOW_MS, heartbeat_ms=NOW_MS))
    assert resources(begun).sign_of_life(NOW_MS) == ""
    assert resources(None).sign_of_life(NOW_MS) != ""
    assert resources(None, topic=None).sign_of_life(NOW_MS) == ""


def test_what_goes() -> None:
    listed = (ListedTransaction("eo:p:out:0:1.0:0", 1, "Ongoing"), ListedTransaction("eo:p:out:0:1.0:1", 2, "Empty"))
    shown = dict(
        going(PipelineResources("p", "p.checkpoints", history("final", heartbeat_ms=0, finalized=False), "", listed))
    )
    assert shown["checkpoints"] == "1, and all state: topic p.checkpoints"
    assert dict(going(resources(History("p"))))["checkpoints"] == "none, and all state: topic p.checkpoints"
    assert dict(going(resources(None)))["checkpoints"] == "unreadable ones: topic p.checkpoints"
    assert shown["transactions"] == "1 open, to be aborted; 2 ids fenced, so that no older process can write"
    assert shown[""] == "Checkpoint 1 is decided, but its output may not be visible yet: a run would finish it."


def group_offsets(orders: Orders, topic: str) -> list[int]:
    wanted = ConsumerGroupTopicPartitions(orders.name, [TopicPartition(topic, partition) for partition in range(2)])
    admin = orders.kafka.admin()
    answer = admin.list_consumer_group_offsets([wanted])[orders.name].result(LIMIT_S)
    return [each.offset for each in answer.topic_partitions]


def topics(orders: Orders) -> set[str]:
    found = orders.kafka.admin().list_topics(timeout=LIMIT_S).topics
    return {name.removeprefix(orders.name) for name in found if name.startswith(orders.name)}


def has_checkpoints(orders: Orders) -> bool:
    decisions = orders.kafka.read_committed(f"{orders.name}.checkpoints")
    return any(record.value is not None and (record.key or b"").startswith(b"manifest/") for record in decisions)


def committed(ended: Ended) -> int:
    return sum(event["records_committed"] for event in ended.events if event["event"] == "checkpoint")


def test_reset(orders: Orders) -> None:
    orders.command.refused(f"{orders.name} has no checkpoints", "reset", orders.name, "--yes")
    orders.ran("--checkpoint-partitions", "3")
    other, admin = f"{orders.name}-totals", orders.kafka.admin()
    elsewhere = [TopicPartition(other, partition, 3) for partition in range(2)]
    group = ConsumerGroupTopicPartitions(orders.name, elsewhere)
    admin.alter_consumer_group_offsets([group])[orders.name].result(LIMIT_S)
    assert sum(group_offsets(orders, f"{orders.name}-orders")) == 700
    ended = orders.command.done("reset", "orders:pipeline", "--yes")
    assert ended.err == ""
    assert f"topic {orders.name}.checkpoints" in ended.said
    assert f"{orders.name} is reset; its next run starts from scratch.\n" in ended.out
    assert topics(orders) == {"-orders", "-totals", ".checkpoints"}
    assert not has_checkpoints(orders)
    assert find_topic(orders.config, orders.name).partitions == 3
    assert max(group_offsets(orders, f"{orders.name}-orders")) < 0
    assert group_offsets(orders, other) == [3, 3]
    assert len(orders.totals()) == 700
    assert "none, and all state" in orders.command.done("reset", "orders:pipeline", "--yes").out
    assert committed(orders.ran()) == 700
    assert len(orders.totals()) == 1_400


class Typed(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_consent(orders: Orders) -> None:
    orders.ran()
    assert "Kept:\n" in orders.command.refused("Add --yes", "reset", orders.name).out
    for answer, code in (("no\n", 1), ("", 1), ("yes\n", 0)):
        ended = orders.command("reset", orders.name, stdin=Typed(answer))
        assert (ended.code, f"Reset {orders.name}? [y/N]" in ended.out) == (code, True)
        assert ("Nothing was changed." in ended.out) == has_checkpoints(orders) == bool(code)


@pytest.mark.exhaustive
def test_a_run_that_begins_while_it_asks(orders: Orders) -> None:
    """Everything is looked at again after the confirmation: nothing goes that was not shown."""
    orders.ran()
    for stopped in (False, True):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*orders.command.line, "reset", orders.name], cwd=orders.command.folder, stdin=theirs,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(theirs)
        assert process.stdout is not None
        while "Kept:" not in process.stdout.readline():
            assert process.poll() is None
        orders.write(70)
        with orders.running() as run:
            if stopped:
                assert run.stop() == 0
            os.write(ours, b"yes\n")
            _, said = process.communicate(timeout=LIMIT_S)
            os.close(ours)
            assert (process.returncode, ("has run since" if stopped else "may be running") in said) == (2, True), said
            if not stopped:
                assert run.stop() == 0
        assert has_checkpoints(orders)


@pytest.mark.exhaustive
def test_open_transactions_are_aborted(orders: Orders) -> None:
    orders.ran()
    lasting = {"transaction.timeout.ms": LIMIT_S * 1000}
    ours, others = f"eo:{orders.name}:out:0:7.0:0", f"eo:{orders.name}:somebody-elses"
    producers = [Producer(orders.config.confluent({**lasting, "transactional.id": each})) for each in (ours, others)]
    for producer in producers:
        producer.init_transactions(LIMIT_S)
        producer.begin_transaction()
        producer.produce(f"{orders.name}-totals", b"lost")
        producer.flush(LIMIT_S)
    admin, topic = orders.kafka.admin(), f"{orders.name}.checkpoints"
    admin.delete_topics([topic])[topic].result(LIMIT_S)
    wait_until(lambda: ".checkpoints" not in topics(orders))
    assert "1 open, to be aborted" in orders.command.done("reset", orders.name, "--yes").said

    def states() -> dict[str, str]:
        with closing(Transactions(orders.config)) as transactions:
            return {each.transactional_id: each.state for each in transactions.list(f"eo:{orders.name}:")}

    wait_until(lambda: states()[ours] == "CompleteAbort")
    assert states()[others] == "Ongoing"
    assert coordinator_id(orders.name) in states()
    producers[1].abort_transaction(LIMIT_S)


@pytest.mark.exhaustive
def test_damaged_topic(orders: Orders) -> None:
    orders.ran()
    orders.kafka.configure_topic(f"{orders.name}.checkpoints", cleanup_policy="delete")
    orders.kafka.delete_records(f"{orders.name}.checkpoints", {0: -1})
    assert orders.command.refused(f"exactlyonce reset {orders.name}", "checkpoints", orders.name, code=6).out == ""
    orders.command.refused("its checkpoint topic does not tell whether it runs", "reset", orders.name, "--yes")
    orders.reset()
    assert committed(orders.ran()) == 700
