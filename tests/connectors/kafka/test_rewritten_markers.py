"""Markers that are written again: they add nothing, and no transaction is aborted on the way.

Lost markers are met in tests/engines/test_lost_markers.py, where the broker may be killed.
"""

from __future__ import annotations

from typing import Any

import pytest

from exactlyonce.checkpoint.requests import Ending
from exactlyonce.checkpoint.transactions.broker_answers import TransactionState
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.pipeline.errors import Halt, TopicError
from exactlyonce.testing.broker.interface import Error
from exactlyonce.testing.broker.real_broker import RealBroker

pytestmark = pytest.mark.broker

VALUES = [b"%03d" % number for number in range(100)]


def state_of(transactions: Transactions, transactional_id: str) -> TransactionState:
    """What the broker takes the id for."""
    state = transactions.describe([transactional_id])[transactional_id]
    assert state is not None
    return state


@pytest.fixture
def ended(cluster: Any, topic: str) -> Ending:
    """A committed transaction with records, named as the topic is."""
    cluster.open(topic, topic, VALUES)
    opened = state_of(cluster.transactions, topic)
    ending = Ending(topic, opened.producer_id, opened.epoch)
    cluster.transactions.end_until_answered(topic, ending.producer_id, ending.epoch, commit=True)
    cluster.wait_until(lambda: state_of(cluster.transactions, topic).state == "CompleteCommit")
    return ending


@pytest.mark.parametrize("commit", [True, False])
def test_where_nothing_is_open_nothing_changes(cluster: Any, topic: str, ended: Ending, commit: bool) -> None:
    """A transaction that is complete keeps its verdict and its records, also if the wrong verdict is written again;
    only its epoch grows."""
    cluster.transactions.rewrite_markers(topic, ended.producer_id, [(topic, 0)], commit=commit)
    expected = "CompleteCommit" if commit else "CompleteAbort"
    cluster.wait_until(lambda: state_of(cluster.transactions, topic).state == expected)
    state = state_of(cluster.transactions, topic)
    assert (state.producer_id, state.epoch) == (ended.producer_id, ended.epoch + 2)
    assert cluster.visible(topic) == VALUES


def test_what_was_begun_is_taken_over(cluster: Any, topic: str, ended: Ending) -> None:
    """A transaction that was begun for this and not ended is committed, not aborted first: no epoch is skipped."""
    broker = RealBroker(cluster.config.bootstrap_servers)
    assert broker.add_to_transaction(topic, ended.producer_id, ended.epoch + 1, topic, 0) is Error.NONE
    assert state_of(cluster.transactions, topic).state == "Ongoing"
    cluster.transactions.rewrite_markers(topic, ended.producer_id, [(topic, 0)], commit=True)
    cluster.wait_until(lambda: state_of(cluster.transactions, topic).state == "CompleteCommit")
    assert state_of(cluster.transactions, topic).epoch == ended.epoch + 2
    assert cluster.visible(topic) == VALUES


@pytest.mark.parametrize("change", ["another id", "another producer"])
def test_an_id_that_is_somebody_elses_halts(cluster: Any, topic: str, ended: Ending, change: str) -> None:
    """An id that the broker does not know, or that has got another producer id, can write no marker of ours."""
    name = f"{topic}-x" if change == "another id" else topic
    producer_id = ended.producer_id + (change == "another producer")
    with pytest.raises(Halt, match=rf"lost its markers in {topic}-0 \(KAFKA-20734\)") as committed:
        cluster.transactions.rewrite_markers(name, producer_id, [(topic, 0)], commit=True)
    with pytest.raises(Halt, match="find-hanging"):
        cluster.transactions.rewrite_markers(name, producer_id, [(topic, 0)], commit=False)
    assert "find-hanging" not in str(committed.value), "an abort by hand would lose what is committed"


def test_a_partition_that_does_not_exist(cluster: Any, topic: str, ended: Ending) -> None:
    """A partition that is not there is an error at once."""
    with pytest.raises(TopicError):
        cluster.transactions.rewrite_markers(topic, ended.producer_id, [(topic, 0), (topic, 99)], commit=True)
