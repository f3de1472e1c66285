"""Transactions that the broker ends, or whose broker dies, is of another version, or moves its coordinator (played)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaException
from kafka.protocol.metadata import FindCoordinatorRequest
from kafka.protocol.producer.transaction import EndTxnRequest
from waiting import until

from exactlyonce.checkpoint.requests import EndAnswer, Ending, ListedTransaction
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import Request, Wire
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.testing.cluster import LIMIT_S, OwnCluster

pytestmark = pytest.mark.broker

VALUES = [b"%03d" % number for number in range(100)]
SAFE_DOWNGRADE, UPGRADE = 2, 1


@pytest.fixture
def cluster(stoppable: OwnCluster, cluster_at: Any) -> Iterator[Any]:
    cluster = cluster_at(stoppable.bootstrap_servers)
    yield cluster
    cluster.close()


@pytest.mark.exhaustive
def test_commit_after_the_brokers_timeout(cluster: Any, topic: str) -> None:
    zombie = cluster.open(topic, topic, VALUES, transaction_timeout_ms=10_000)
    opened = cluster.state(topic)
    until(lambda: cluster.state(topic).state == "CompleteAbort")
    for _ in range(3):
        answer = cluster.transactions.end_until_answered(topic, opened.producer_id, opened.epoch, commit=True)
        assert answer is EndAnswer.REFUSED
    assert cluster.visible(topic) == []
    with pytest.raises(KafkaException):
        zombie.commit_transaction(LIMIT_S)


TOO_OLD = pytest.raises(ConfigError, match=r"upgrade --feature transaction.version=2")


class MovingCoordinator(Wire):
    """Broker 1 keeps every id until it is asked to end a transaction: it answers *code*; then broker 2 does."""

    def __init__(self, code: int) -> None:
        super().__init__(ClientConfig({"bootstrap.servers": "127.0.0.1:1"}), timeout_ms=10_000, sleep=lambda _: None)
        self.code, self.node, self.looked_up = code, 1, 0
        self.asked: list[tuple[int | None, str, int, int, bool]] = []

    def ask_all(self, requests: Sequence[Request]) -> list[Any]:
        return [self._answer(*each) for each in requests]

    def _answer(self, message: Any, node_id: int | None) -> Any:
        if isinstance(message, FindCoordinatorRequest):
            self.looked_up += 1
            keys = message.coordinator_keys
            found = [SimpleNamespace(key=key, node_id=self.node, error_code=0) for key in keys]
            return SimpleNamespace(coordinators=found)
        assert isinstance(message, EndTxnRequest)
        what = message.transactional_id, message.producer_id, message.producer_epoch, message.committed
        self.asked.append((node_id, *what))
        self.node = 2
        return SimpleNamespace(error_code=self.code if node_id == 1 else 0)


def asking(wire: Wire, version: int = 2) -> Transactions:
    """Transactions by that wire, of a cluster of that transaction version."""
    transactions = Transactions(wire.config)
    transactions._wire, transactions._version = wire, version
    return transactions


def test_nothing_is_ended_at_an_older_transaction_version() -> None:
    """There the end of a transaction would not fence its producer; the error says how to upgrade."""
    wire = MovingCoordinator(0)
    with TOO_OLD:
        asking(wire, 1).end("eo:p:out:0:1.0:0", 7, 3, commit=True)
    with TOO_OLD:
        asking(wire, 1).abort_listed([ListedTransaction("eo:p:out:0:1.0:0", 7, "Ongoing")])
    assert wire.asked == []


MOVES = {14: "loads", 15: "is not available", 16: "is another one"}


@pytest.mark.parametrize("code", MOVES, ids=MOVES.values())
def test_a_coordinator_that_moves(code: int) -> None:
    wire = MovingCoordinator(code)
    transactions, ending = asking(wire), Ending("eo:p:out:0:1.0:0", 7, 3)
    assert transactions.end_all([ending], commit=True) == [EndAnswer.BUSY]
    assert transactions.end_all([ending], commit=True) == [EndAnswer.COMPLETED]
    assert wire.asked == [(node, "eo:p:out:0:1.0:0", 7, 3, True) for node in (1, 2)]
    assert wire.looked_up == 2
    wire = MovingCoordinator(code)
    assert asking(wire).end_until_answered("eo:p:out:0:1.0:0", 7, 3, commit=True) is EndAnswer.COMPLETED
    assert wire.asked == [(node, "eo:p:out:0:1.0:0", 7, 3, True) for node in (1, 2)]


def test_a_coordinator_that_is_busy_is_not_looked_for_again() -> None:
    """The writer of the previous transaction's markers still keeps the id."""
    wire = MovingCoordinator(51)
    transactions = asking(wire)
    for _ in range(2):
        assert transactions.end("eo:p:out:0:1.0:0", 7, 3, commit=True) is EndAnswer.BUSY
    assert (wire.looked_up, [node for node, *_ in wire.asked]) == (1, [1, 1])
