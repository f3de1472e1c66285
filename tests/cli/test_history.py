"""`backfill --no-output`: state is built from a history whose outputs another application has written."""

from __future__ import annotations

import json
import signal
from contextlib import closing

import pytest
from confluent_kafka import Consumer, TopicPartition

from exactlyonce.checkpoint.records.manifest import HISTORY, HISTORY_ENDED
from tests.cli.conftest import Orders, armed

HANDLED, MORE = 700, 70
BACKFILL = ("backfill", "orders:pipeline", "--on", "driver", "--no-output")


def handled_by_another(orders: Orders) -> None:
    """The first records of the topic, with the totals that they give, and their offsets in the group `legacy-app`."""
    totals = [str(1 + number // 7) for number in range(HANDLED)]
    orders.kafka.create_topic(f"{orders.name}-totals", partitions=2)
    orders.kafka.produce(f"{orders.name}-totals", [(None, total) for total in totals])
    topics = orders.kafka.admin().list_topics(timeout=60).topics[f"{orders.name}-orders"]
    seen = [record.partition for record in orders.kafka.read_committed(f"{orders.name}-orders")]
    settings = {"bootstrap.servers": orders.kafka.bootstrap_servers, "group.id": f"{orders.name}-legacy"}
    offsets = [TopicPartition(f"{orders.name}-orders", p, seen.count(p)) for p in topics.partitions]
    with closing(Consumer(settings)) as consumer:
        consumer.commit(offsets=offsets, asynchronous=False)


def outputs(orders: Orders) -> list[int]:
    return sorted(int(record.value or b"") for record in orders.kafka.read_committed(f"{orders.name}-totals"))


@pytest.mark.broker
def test_each_record_has_its_output_once(orders: Orders) -> None:
    """Histories are begun and killed before a record of them is in a checkpoint, the first one and one after another: a
    run is refused there, and the same command goes on. Then the run writes what comes after the group's offsets, with
    the totals of all records before."""
    handled_by_another(orders)
    before = outputs(orders)
    orders.write(MORE)
    some_history = (*BACKFILL, "--to", json.dumps({f"{orders.name}-orders": {0: 10, 1: 20}}))
    begun = orders.command.process(*some_history, **armed(orders.command.folder, "unit-computed"))
    assert (begun.code, orders.newest().checkpoint) == (-signal.SIGKILL, 0), begun
    orders.run_refused("is within a history that is computed without output")
    some = orders.command.done(*some_history, "--json")
    assert (some.json["records_in"], orders.newest().kind) == (30, HISTORY_ENDED)
    history = (*BACKFILL, "--to", f"group:{orders.name}-legacy")
    killed = orders.command.process(*history, **armed(orders.command.folder, "advance-computed", "kill@2"))
    assert killed.code == -signal.SIGKILL, killed
    assert (orders.newest().kind, sum(at.offset for at in orders.newest().offsets)) == (HISTORY, 30)
    orders.run_refused("is within a history that is computed without output")
    ended = orders.command.done(*history, "--json")
    assert (ended.json["records_out"], orders.newest().kind) == (0, HISTORY_ENDED)
    assert outputs(orders) == before

    orders.ran()
    assert outputs(orders) == sorted(1 + number // 7 for number in range(HANDLED + MORE))
    report = json.loads(orders.command.done("audit", "orders:pipeline", "--on", "driver", "--json").out)
    assert report["findings"] == []
    assert any("was computed without output" in text for text in report["unjudged"])
    orders.command.refused("has written output up to checkpoint", *BACKFILL)
