"""The writer of decisions on a real broker, met by late, repeated and lost requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from real_broker import RealBroker
from settled import await_readable

from exactlyonce.checkpoint.records.manifest import TopicInfo
from exactlyonce.checkpoint.requests import (
    DescribeProducers,
    EndAnswer,
    EndTransaction,
    Outcome,
    Procedure,
    R,
    Request,
    Write,
    drive,
)
from exactlyonce.checkpoint.transactions import transactional_writer
from exactlyonce.checkpoint.transactions.transactional_writer import TransactionalWriter
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import LogRequests
from exactlyonce.connectors.kafka.checkpoint_topic.topic import as_topic, find_topic, prepare_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import Wire
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable, Fenced, Halt, TopicError
from exactlyonce.testing.broker.interface import Error
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster


class RealWriter:
    """A writer whose requests a real broker answers."""

    def __init__(self, transactional_id: str, requests: LogRequests, transactions: Transactions) -> None:
        self._transactions = transactions
        self.pure = TransactionalWriter(transactional_id, requests.topic.name, SystemClock())
        self._requests = requests
        self._before_the_commit: Callable[[], Any] | None = None
        self.lost: list[bool] = []
        """Fates of the next aborts, which have no answer: whether the broker carries them out all the same."""
        self.do(self.pure.open())

    @property
    def refusal(self) -> str:
        return self.pure.refusal

    def write(self, writes: list[Write], timeout_s: float) -> Outcome:
        return self.do(self.pure.write(writes, round(timeout_s * 1000)))

    def take_back(self, writes: list[Write]) -> None:
        assert self.do(self.pure.produce(writes, SystemClock().monotonic_ms() + round(LIMIT_S * 1000)))
        self.do(self.pure.take_back("it is not wanted"))

    def do(self, procedure: Procedure[R]) -> R:
        return drive(procedure, self._answer)

    def before_the_commit(self, action: Callable[[], Any]) -> None:
        """Run *action* once, when the next transaction is produced and its commit is not asked for."""
        self._before_the_commit = action

    def _answer(self, request: Request) -> Any:
        if isinstance(request, EndTransaction) and request.commit and self._before_the_commit is not None:
            action, self._before_the_commit = self._before_the_commit, None
            action()
        if isinstance(request, EndTransaction) and not request.commit and self.lost:
            if self.lost.pop(0):
                self._requests(request)
            raise BrokerUnavailable("the answer is lost")
        if isinstance(request, DescribeProducers):
            return self._transactions.producers(request.partitions)
        return self._requests(request)


class Place:
    """A checkpoint topic that no other test has, and who writes to it."""

    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.kafka, self.id = kafka, f"eo:{name}:coordinator"
        self.config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
        self.topic: TopicInfo = prepare_topic(self.config, name)
        self.transactions = Transactions(self.config)

    def writer(self) -> RealWriter:
        """One that has fenced all older ones."""
        return RealWriter(self.id, LogRequests(self.config, self.topic), self.transactions)

    def readable(self) -> list[str]:
        """The keys that readers see, of all partitions in turn, once the markers of what was ended are written."""
        await_readable(self.kafka, self.topic.name)
        return self.readable_now()

    def readable_now(self) -> list[str]:
        """The keys that readers see while a transaction is open."""
        records = sorted(self.kafka.read_committed(self.topic.name), key=lambda each: (each.partition, each.offset))
        return [(each.key or b"").decode() for each in records]

    def writer_of_now(self) -> tuple[int, int]:
        state = self.transactions.describe([self.id])[self.id]
        assert state is not None
        return state.producer_id, state.epoch


@pytest.fixture
def place(kafka: KafkaCluster, topic_name: str) -> Place:
    return Place(kafka, topic_name)


def record(key: str, partition: int = 0, size: int = 10) -> Write:
    return Write(partition, key, b"x" * size)


@pytest.mark.parametrize("commit", [True, False])
def test_an_end_that_arrives_late(place: Place, commit: bool) -> None:
    writer = place.writer()
    writer.before_the_commit(lambda: olds.append(place.writer_of_now()))
    olds: list[tuple[int, int]] = []
    assert writer.write([record("first")], LIMIT_S) is Outcome.DONE
    answers: list[EndAnswer] = []
    seen: list[list[str]] = []

    def late() -> None:
        answers.append(place.transactions.end_until_answered(place.id, *olds[0], commit=commit))
        seen.append(place.readable_now())

    writer.before_the_commit(late)
    assert writer.write([record("second")], LIMIT_S) is Outcome.DONE
    assert (answers, seen) == ([EndAnswer.UNKNOWN], [["first"]])
    assert place.readable() == ["first", "second"]


def test_a_batch_that_arrives_late(place: Place, kafka: KafkaCluster) -> None:
    writer = place.writer()
    old: list[tuple[int, int]] = []
    writer.before_the_commit(lambda: old.append(place.writer_of_now()))
    assert writer.write([record("first")], LIMIT_S) is Outcome.DONE
    assert place.readable() == ["first"]  # until its markers are written, a batch that is repeated is known as such
    broker = RealBroker(kafka.bootstrap_servers)
    for partition in (0, 1):
        answer = broker.produce(place.id, *old[0], place.topic.name, partition, [(b"late", b"x")], added=True)
        assert answer.error in (Error.INVALID_PRODUCER_EPOCH, Error.INVALID_TXN_STATE, Error.PRODUCER_FENCED)
    broker.close()
    assert writer.write([record("second", partition=1)], LIMIT_S) is Outcome.DONE
    assert place.readable() == ["first", "second"]


def test_more_than_a_batch_holds(place: Place) -> None:
    writes = [Write(number % 3, f"{number:06}", None, ()) for number in range(30_000)]
    wide = [record(f"wide-{number}", size=300_000) for number in range(5)]
    seen: list[list[str]] = []
    writer = place.writer()
    writer.before_the_commit(lambda: seen.append(place.readable_now()))
    assert writer.write([*writes, *wide], LIMIT_S) is Outcome.DONE
    assert seen == [[]]
    expected = [key for partition in range(3) for part, key, _, _ in [*writes, *wide] if part == partition]
    assert place.readable() == expected


@pytest.mark.exhaustive
def test_the_last_epoch_of_a_producer_id(place: Place, kafka: KafkaCluster) -> None:
    """The writer goes on under the next id: the end of a transaction at the last epoch would take this one."""
    broker = RealBroker(kafka.bootstrap_servers)
    assert broker.init_transactions(place.id).error is Error.NONE
    broker.use_up_epochs(place.id, 32_764)
    broker.close()
    writer = place.writer()
    first = place.writer_of_now()
    assert first[1] >= 32_765
    epochs = []
    for number in range(4):
        writer.before_the_commit(lambda: epochs.append(place.writer_of_now()[1]))
        assert writer.write([record(str(number))], LIMIT_S) is Outcome.DONE
    assert epochs == [32_765, 0, 1, 2]
    now = place.writer_of_now()
    assert now[0] != first[0]
    assert now[1] < 5
    assert place.readable() == ["0", "1", "2", "3"]


def test_an_older_writer(place: Place) -> None:
    older = place.writer()
    older.before_the_commit(place.writer)
    with pytest.raises(Fenced):
        older.write([record("older")], LIMIT_S)
    with pytest.raises(Fenced):
        older.write([record("older")], LIMIT_S)
    assert place.writer().write([record("newer")], LIMIT_S) is Outcome.DONE
    assert place.readable() == ["newer"]


def test_a_broker_that_does_not_know_the_topic_yet(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers learn of a new topic one after the other: one that knows nothing of it has not deleted it."""
    real, asked = Wire.leaders, list[int]()

    def lagging(self: Wire, partitions: Any) -> Any:
        asked.append(1)
        if len(asked) <= 2:
            raise TopicError("there is no such topic")
        return real(self, partitions)

    monkeypatch.setattr(Wire, "leaders", lagging)
    assert place.writer().write([record("first")], LIMIT_S) is Outcome.DONE
    assert place.readable() == ["first"]


def test_a_topic_made_anew(place: Place) -> None:
    writer = place.writer()
    assert writer.write([record("first")], LIMIT_S) is Outcome.DONE
    pipeline = place.topic.name.removesuffix(".checkpoints")
    Topics(place.config).delete(as_topic(find_topic(place.config, pipeline)))
    prepare_topic(place.config, pipeline)
    with pytest.raises(Halt, match="was deleted and created again"):
        writer.write([record("second")], LIMIT_S)
    assert place.readable() == []


@pytest.mark.parametrize("lost", [[], [True], [False], [True, False, True]])
def test_what_is_taken_back(place: Place, lost: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactional_writer, "ABORT_TIMEOUT_MS", 0)
    writer = place.writer()
    for key in ("first", "second"):
        writer.lost = [*lost]
        writer.take_back([record("unwanted"), record("unwanted", partition=1)])
        assert writer.write([record(key)], LIMIT_S) is Outcome.DONE
        assert writer.lost == []
    assert place.readable() == ["first", "second"]
