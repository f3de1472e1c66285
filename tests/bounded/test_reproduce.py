"""A replay's output that could not be committed is told of."""

from __future__ import annotations

from typing import cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.replay.reproduce import _commit
from exactlyonce.pipeline.errors import BrokerUnavailable

CLIENT = ClientConfig({"bootstrap.servers": "nobody:9092"})


class Failing:
    """A producer whose commit fails."""

    def __init__(self, error: KafkaError) -> None:
        self.error = error

    def commit_transaction(self, timeout: float) -> None:
        raise KafkaException(self.error)


def said(error: KafkaError) -> str:
    """How the failure is told."""
    with pytest.raises(BrokerUnavailable) as raised:
        _commit(CLIENT, cast(Producer, Failing(error)), "again")
    return str(raised.value)


def test_a_commit_without_an_answer_is_unknown() -> None:
    """The broker may have committed before the answer was lost, or before the producer was fenced."""
    timed_out = KafkaError(KafkaError._TIMED_OUT, "no answer", retriable=True)
    fenced = KafkaError(KafkaError._FENCED, "fenced", fatal=True)
    for error in (timed_out, fenced):
        assert "all or none, is unknown" in said(error)


def test_a_commit_that_is_refused_shows_nothing() -> None:
    """An error that asks for an abort came instead of the commit."""
    refused = KafkaError(KafkaError._INCONSISTENT, "a record was not delivered", txn_requires_abort=True)
    assert "Nothing of it is visible" in said(refused)
