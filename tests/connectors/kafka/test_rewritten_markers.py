"""Rewritten markers add nothing and abort no transaction. Lost markers: tests/engines/test_lost_markers.py."""

from __future__ import annotations

from typing import Any

import pytest
from real_broker import RealBroker
from waiting import until

from exactlyonce.checkpoint.requests import Ending
from exactlyonce.pipeline.errors import TopicError
from exactlyonce.testing.broker.interface import Error

VALUES = [b"%03d" % number for number in range(100)]


@pytest.fixture
def ended(cluster: Any, topic: str) -> Ending:
    """A committed transaction with records, named as the topic is."""
    cluster.open(topic, topic, VALUES)
    opened = cluster.state(topic)
    ending = Ending(topic, opened.producer_id, opened.epoch)
    cluster.transactions.end_until_answered(topic, ending.producer_id, ending.epoch, commit=True)
    until(lambda: cluster.state(topic).state == "CompleteCommit")
    return ending


def raised(ended: Ending) -> Ending:
    return Ending(ended.transactional_id, ended.producer_id, ended.epoch + 1)


@pytest.mark.parametrize("commit", [True, False])
def test_where_nothing_is_open_nothing_changes(cluster: Any, topic: str, ended: Ending, commit: bool) -> None:
    cluster.transactions.rewrite_markers(raised(ended), [(topic, 0)], commit=commit)
    expected = "CompleteCommit" if commit else "CompleteAbort"
    until(lambda: cluster.state(topic).state == expected)
    state = cluster.state(topic)
    assert (state.producer_id, state.epoch) == (ended.producer_id, ended.epoch + 2)
    assert cluster.visible(topic) == VALUES


def test_what_was_begun_is_taken_over(cluster: Any, topic: str, ended: Ending) -> None:
    broker = RealBroker(cluster.config.bootstrap_servers)
    assert broker.add_to_transaction(topic, ended.producer_id, ended.epoch + 1, topic, 0) is Error.NONE
    assert cluster.state(topic).state == "Ongoing"
    cluster.transactions.rewrite_markers(raised(ended), [(topic, 0)], commit=True)
    until(lambda: cluster.state(topic).state == "CompleteCommit")
    assert cluster.state(topic).epoch == ended.epoch + 2
    assert cluster.visible(topic) == VALUES


@pytest.mark.parametrize("past", [-1, 1])
def test_where_the_id_has_another_epoch_nothing_is_done(cluster: Any, topic: str, ended: Ending, past: int) -> None:
    last = Ending(topic, ended.producer_id, ended.epoch + 1 + past)
    cluster.transactions.rewrite_markers(last, [(topic, 0)], commit=False)
    state = cluster.state(topic)
    assert (state.state, state.epoch) == ("CompleteCommit", ended.epoch + 1)
    assert cluster.visible(topic) == VALUES


def test_a_later_transaction_of_the_id_is_not_ended(cluster: Any, topic: str, ended: Ending) -> None:
    cluster.open(topic, topic, [b"undecided"])
    cluster.transactions.rewrite_markers(raised(ended), [(topic, 0)], commit=True)
    assert cluster.state(topic).state == "Ongoing"
    assert cluster.visible_now(topic) == VALUES


def test_a_partition_that_does_not_exist(cluster: Any, topic: str, ended: Ending) -> None:
    with pytest.raises(TopicError):
        cluster.transactions.rewrite_markers(raised(ended), [(topic, 0), (topic, 99)], commit=True)
