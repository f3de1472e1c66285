"""Leftovers of older attempts are ended once, however often it is looked, and heartbeats say what they must."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from kafka.protocol.producer.transaction import InitProducerIdRequest
from waiting import until

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.checkpoint.transactions.commit import sweep
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import LogRequests
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import Request, Wire
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.configuration import options_from
from exactlyonce.engines.connections import Performer
from exactlyonce.engines.pipeline_connections import PipelineConnections
from exactlyonce.engines.plan import plan
from exactlyonce.pipeline.errors import BrokerRefused, BrokerUnavailable, Undetermined
from exactlyonce.pipeline.loading import load_reference
from exactlyonce.testing.cluster import LIMIT_S

IDS = 300


class Watched:
    def __init__(self, config: ClientConfig, transactions: Transactions, log: Any) -> None:
        output_log = Log(config, group="sweeping")
        self._performer = Performer(config, transactions, output_log, log, 60_000)
        self.asked: list[ask.Request] = []

    def __call__(self, request: ask.Request) -> Any:
        self.asked.append(request)
        return self._performer(request)

    @property
    def ended(self) -> set[str]:
        endings = [each for asked in self.asked if isinstance(asked, ask.EndTransactions) for each in asked.endings]
        self.asked = []
        return {each.transactional_id for each in endings}


@pytest.fixture
def watched(kafka: Any) -> Iterator[Watched]:
    config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    transactions = Transactions(config)
    yield Watched(config, transactions, LogRequests(config, TopicInfo("none", "", 2, 1)))
    transactions.close()


def initialize(kafka: Any, ids: list[str]) -> None:
    config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    transactions = Transactions(config)
    transactions.describe(ids)  # which makes the broker their coordinator
    transactions.close()
    wire = Wire(config, timeout_ms=round(LIMIT_S * 1000))
    node = wire.metadata().brokers[0].node_id
    request = partial(InitProducerIdRequest, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1)
    waiting = sorted(ids)

    def done() -> bool:
        answers = wire.ask_all([Request(request(transactional_id=each), node) for each in waiting])
        waiting[:] = [each for each, answer in zip(waiting, answers, strict=True) if answer.error_code]
        return not waiting

    until(done)
    wire.close()


def test_ids_of_an_earlier_attempt_are_ended_once(kafka: Any, topic_name: str, watched: Watched) -> None:
    ids = [f"eo:{topic_name}:out:{number}:3.0:0" for number in range(IDS)]
    initialize(kafka, ids)
    ask.drive(sweep(topic_name, 3, 1), watched)
    assert watched.ended == set(ids)
    ask.drive(sweep(topic_name, 3, 1, fenced_below=(3, 1)), watched)
    assert watched.ended == set()
    initialize(kafka, ids[7:8])
    ask.drive(sweep(topic_name, 3, 2, fenced_below=(3, 1)), watched)
    assert watched.ended == set(ids[7:8])


def test_an_answer_that_no_rule_covers_is_no_absence(watched: Watched) -> None:
    """An unknown error of EndTxn is raised, and not retried permanently."""
    with pytest.raises(BrokerRefused, match=r"the broker answers InvalidRequestError \(42\)"):
        watched(ask.EndTransactions((ask.Ending("", 1, 0),), commit=False))


@pytest.fixture
def connections(kafka: Any, topic_name: str) -> Iterator[PipelineConnections]:
    kafka.create_topic(f"{topic_name}-in", 1)
    reference: dict[str, object] = {
        "module": "pipelines", "attribute": "linear", "params": {"name": topic_name},
        "path": __file__.rpartition("/")[0],
    }  # fmt: skip
    options = options_from({"bootstrap_servers": kafka.bootstrap_servers})
    physical = plan(load_reference(reference).build(), 1)
    connections = PipelineConnections(physical, options, lambda _: None, lambda *_: None, reference)
    connections.recover()
    yield connections
    connections.close()


def answered(outcome: Outcome) -> ask.Procedure[Outcome]:
    return outcome
    yield


# What a broker seldom does is said by the log in its place.


def test_a_heartbeat_that_was_not_written_is_tried_again(connections: PipelineConnections, monkeypatch: Any) -> None:
    log, outcomes = connections.log, [Outcome.NOT_WRITTEN, Outcome.NOT_WRITTEN]
    real = log.heartbeat
    monkeypatch.setattr(log, "heartbeat", lambda **more: answered(outcomes.pop()) if outcomes else real(**more))
    leader = connections.leader
    assert connections.drive(leader.begin_attempt(1)) == leader.manifest
    assert outcomes == []


def test_a_heartbeat_that_is_never_written_is_an_absent_broker(
    connections: PipelineConnections, monkeypatch: Any
) -> None:
    monkeypatch.setattr(connections.log, "append_timeout_ms", 500)
    monkeypatch.setattr(connections.log, "heartbeat", lambda **_: answered(Outcome.NOT_WRITTEN))
    with pytest.raises(BrokerUnavailable, match="Nothing is lost: run the pipeline again"):
        connections.drive(connections.leader.begin_attempt(1))
    connections.drive(connections.leader.upkeep())


@pytest.mark.parametrize("act", [lambda leader: leader.begin_attempt(1), lambda leader: leader.upkeep()])
def test_a_heartbeat_whose_outcome_is_unknown_ends_the_incarnation(
    act: Any, connections: PipelineConnections, monkeypatch: Any
) -> None:
    monkeypatch.setattr(connections.log, "heartbeat", lambda **_: answered(Outcome.UNKNOWN))
    with pytest.raises(Undetermined, match="is not known"):
        connections.drive(act(connections.leader))
