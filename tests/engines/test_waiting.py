"""A broker that is away is waited for at the end of a decision, and that is said."""

from __future__ import annotations

from typing import Any

from exactlyonce.checkpoint.requests import DescribeProducers, Ending, EndTransactions, answered
from exactlyonce.checkpoint.transactions.broker_answers import EndAnswer
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.performer import Performer
from exactlyonce.pipeline.errors import BrokerUnavailable


class Away:
    """Connections to brokers of which none answers."""

    def end_all(self, endings: Any, *, commit: bool) -> Any:
        """Nobody is there."""
        raise BrokerUnavailable("127.0.0.1:9092 does not answer")

    def producers(self, partitions: Any) -> Any:
        """Nobody is there."""
        raise BrokerUnavailable("127.0.0.1:9092 does not answer")


def test_what_is_waited_for_is_said_once_in_a_while() -> None:
    """An end without an answer is asked for again, and a partition that nobody leads is looked at again: whoever looks
    at the run learns what it waits for, and not at every try."""
    notes: list[str] = []
    nobody: Any = Away()
    nothing: Any = None
    performer = Performer(
        ClientConfig({"bootstrap.servers": "127.0.0.1:9092"}), nobody, nothing, nothing, 1_000, note=notes.append
    )
    assert performer(EndTransactions((Ending("a", 1, 0),), commit=True)) == [EndAnswer.BUSY]
    assert isinstance(answered(DescribeProducers((("t", 0),)), performer).error, BrokerUnavailable)
    assert notes == ["waiting for a broker: 127.0.0.1:9092 does not answer"]
    performer.close()
