"""A decided transaction that the broker's timeout aborted while everything was down is repaired by copying it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import assert_copies, assert_totals, orders

from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = pytest.mark.broker

TIMEOUTS = (
    "--checkpoint-interval", "300ms", "--checkpoint-timeout", "2s", "--restart-budget", "1s",
    "--transaction-timeout", "6s",
)  # fmt: skip


@pytest.fixture
def quick_broker(own_broker: Callable[..., KafkaCluster]) -> KafkaCluster:
    """A broker that looks at transactions' timeouts every half second."""
    return own_broker({"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"})


def lose_one(kafka: KafkaCluster, name: str) -> Committable:
    """Commit all committables of the undelivered checkpoint but one, and wait until the broker has aborted that one."""
    servers = {"bootstrap.servers": kafka.bootstrap_servers}
    manifest = read_history(servers, name).unfinalized
    assert manifest is not None
    assert len(manifest.committables) == 4, "two sinks at parallelism 2"
    transactions = Transactions(ClientConfig(servers))
    lost, *others = manifest.committables
    for each in others:
        transactions.end_until_answered(each.transactional_id, each.producer_id, each.epoch, commit=True)
    deadline = time.monotonic() + LIMIT_S
    while (state := transactions.describe([lost.transactional_id])[lost.transactional_id]) is None or (
        state.state != "CompleteAbort"
    ):
        assert time.monotonic() < deadline, f"the broker aborts it: {state}"
        time.sleep(0.1)  # the broker's own timeout must pass
    transactions.close()
    return lost


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [None, "repair-copied", "repair-recorded", "coordinator-committed"])
def test_one_of_four_is_lost(
    killed: str | None, quick_broker: KafkaCluster, topic_name: str, run: Any, failpoint: Any, tmp_path: Path
) -> None:
    """Exactly the lost transaction is written again, also when the repair itself is killed; all output is exact."""
    kafka = quick_broker
    left, right = orders(4000), orders(4000, first=100_000)
    for topic, records in ((f"{topic_name}-in", left), (f"{topic_name}-more", right)):
        kafka.create_topic(topic, 3)
        kafka.produce(topic, records)

    def incarnation(env: dict[str, str] | None = None) -> Any:
        return run(
            "pipelines:diamond", "--param", f"name={topic_name}", "--parallelism", "2", "--until", "latest", *TIMEOUTS,
            servers=kafka.bootstrap_servers, env=env,
        )  # fmt: skip

    assert incarnation(failpoint("coordinator-decided")).wait() == -9
    lost = lose_one(kafka, topic_name)
    if killed is not None:
        env = failpoint(killed)
        assert incarnation(env).wait() == -9
        assert (tmp_path / "fired" / killed).exists()
    last = incarnation()
    assert last.wait() == 0, last.said
    if killed is None:
        assert f"{lost.transactional_id} repaired" in last.said
    assert_totals(kafka, f"{topic_name}-out", left + right)
    assert_copies(kafka, f"{topic_name}-copies", left + right)
    history = read_history({"bootstrap.servers": kafka.bootstrap_servers}, topic_name)
    assert history.unfinalized is None
