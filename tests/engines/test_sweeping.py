"""Leftovers of older attempts are ended once, however often it is looked, and heartbeats say what they must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from blank_manifest import blank_committable, blank_manifest
from confluent_kafka import Producer
from kafka.protocol.producer.transaction import InitProducerIdRequest
from waiting import until

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Failure, TopicInfo, Written
from exactlyonce.checkpoint.requests import Outcome
from exactlyonce.checkpoint.transactions.commit import sweep
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import LogRequests
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import Request, Wire
from exactlyonce.connectors.kafka.log import HELD, Log
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.configuration import options_from
from exactlyonce.engines.connections import Performer
from exactlyonce.engines.pipeline_connections import PipelineConnections
from exactlyonce.engines.plan import plan
from exactlyonce.pipeline.errors import BrokerRefused, BrokerUnavailable, Fenced, Halt, Undetermined
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


# --- a run that fails -------------------------------------------------------------------------------------------------

BAD = Failure(3, "A record is bad.", "t:0:1")


@contextmanager
def opened(kafka: Any, transactional_id: str, topic: str) -> Iterator[Callable[[], str]]:
    """An open transaction with a record in *topic*; the function tells its state."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": transactional_id})
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    producer.produce(topic, b"1", partition=0)
    assert producer.flush(LIMIT_S) == 0
    with closing(Transactions(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}))) as transactions:
        yield lambda: state.state if (state := transactions.describe([transactional_id])[transactional_id]) else ""


def _is_aborted(state: Callable[[], str]) -> bool:
    return state() == "CompleteAbort"


def soon(connections: PipelineConnections) -> int:
    return connections.clock.monotonic_ms() + round(LIMIT_S * 1000)


def test_a_run_that_fails_aborts_what_nothing_has_decided(
    kafka: Any, connections: PipelineConnections, monkeypatch: Any
) -> None:
    """Nothing is aborted while the outcome of an append is unknown, for a decision may name it."""
    name, leader = connections.pipeline, connections.leader
    incarnation = leader.incarnation.incarnation
    with opened(kafka, f"eo:{name}:out:0:{incarnation}.0:0", f"{name}-out") as state:
        with monkeypatch.context() as patched:
            patched.setattr(connections.log, "heartbeat", lambda **_: answered(Outcome.UNKNOWN))
            with pytest.raises(Undetermined):
                connections.drive(leader.fail(BAD, soon(connections)))
        assert state() == "Ongoing"
        connections.drive(leader.fail(BAD, soon(connections)))
        assert state() == "CompleteAbort"
    life = read_history(connections.client, name).newest_incarnation
    assert life is not None
    assert (life.exit_code, life.failure, life.skip, life.ended) == (*BAD, True)


def test_a_run_that_fails_leaves_what_is_decided(
    kafka: Any, connections: PipelineConnections, monkeypatch: Any
) -> None:
    """A decided transaction that is not known to be committed stays open for the next run."""
    name, leader = connections.pipeline, connections.leader
    first, second = (f"eo:{name}:out:0:{leader.incarnation.incarnation}.0:{slot}" for slot in range(2))
    decided = blank_committable(transactional_id=first, written=(Written(f"{name}-out", 0, 0, 1),))
    unfinalized = blank_manifest(pipeline=name, committables=(decided,))
    with opened(kafka, first, f"{name}-out") as kept, opened(kafka, second, f"{name}-out") as aborted:
        with monkeypatch.context() as patched:
            patched.setattr(History, "unfinalized", unfinalized)
            connections.drive(leader.fail(BAD, soon(connections)))
        assert (kept(), aborted()) == ("Ongoing", "CompleteAbort")


def test_a_run_that_fails_after_it_was_taken_over_aborts_and_says_nothing(
    kafka: Any, connections: PipelineConnections
) -> None:
    name, leader = connections.pipeline, connections.leader
    with opened(kafka, f"eo:{name}:out:0:{leader.incarnation.incarnation}.0:0", f"{name}-out") as state:
        physical, options = plan(load_reference(connections._reference).build(), 1), connections._options
        newer = PipelineConnections(physical, options, lambda _: None, lambda *_: None, connections._reference)
        with closing(newer):
            newer.look()
            newer.begin()
            with pytest.raises(Fenced):
                connections.drive(leader.fail(BAD, soon(connections)))
            assert state() == "Ongoing"
            newer.drive(newer.leader.recover())
            assert state() == "CompleteAbort"
    assert [life.exit_code for life in read_history(connections.client, name).incarnations.values()] == [0, 0]


def test_a_run_that_cannot_recover_says_why(connections: PipelineConnections, monkeypatch: Any) -> None:
    """A halt at the start is known to all, as one in the middle."""
    physical, options = plan(load_reference(connections._reference).build(), 1), connections._options
    newer = PipelineConnections(physical, options, lambda _: None, lambda *_: None, connections._reference)
    with closing(newer):
        newer.look()

        def recover() -> ask.Procedure[None]:
            raise Halt("Input is missing.")
            yield

        monkeypatch.setattr(newer.leader, "recover", recover)
        with pytest.raises(Halt):
            newer.recover()
    life = read_history(connections.client, connections.pipeline).newest_incarnation
    assert life is not None
    assert (life.exit_code, life.failure, life.ended) == (6, "Input is missing.", True)


def test_who_holds_readers_back_is_named(kafka: Any, topic_name: str, watched: Watched, monkeypatch: Any) -> None:
    """A look at records that another pipeline's transaction hides gives up with its name and the remedy."""
    kafka.create_topic(topic_name, 1)
    config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    monkeypatch.setattr(watched._performer, "output_log", Log(config, timeout_ms=200))
    written = (Written(topic_name, 0, 1, 1),)
    hidden = blank_committable(producer_id=1 << 40, written=written)
    for name, text in (
        (f"eo:{topic_name}-other:out:0:1.0:0", f"`exactlyonce transactions abort {topic_name}-other`"),
        (f"{topic_name}-theirs", f"It is {topic_name}-theirs, none of exactlyonce's"),
    ):
        with opened(kafka, name, topic_name) as state:
            with pytest.raises(BrokerUnavailable, match=f"{HELD} {topic_name}-0.*{text}"):
                watched(ask.Look(hidden))
            transactions = watched._performer.transactions
            found = transactions.describe([name])[name]
            assert found is not None
            transactions.end_until_answered(name, found.producer_id, found.epoch, commit=False)
            until(partial(_is_aborted, state))
        hidden = msgspec.structs.replace(hidden, written=(Written(topic_name, 0, 3, 1),))
