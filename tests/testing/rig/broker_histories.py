"""Histories: steps that producers, a sweeper and a reader take against a broker, and the answers they see.

A history is a list of steps; the model and a real broker must answer it alike. Answers leave out everything in which
two correct brokers differ: topics and transactional ids have their short names, producer ids are numbered by their
first appearance, times are dropped. A step that ends or initialises a transaction waits for its markers, unless it has
`settle=False`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from exactlyonce.pipeline.errors import TopicError, require
from exactlyonce.testing.broker.interface import Error, Isolation, TransactionalBroker

AWAIT_LIMIT_MS = 60_000
PAUSE_MS = 1


@dataclass
class Stage:
    """The broker on which a history is played. *pause* lets milliseconds pass on the broker's clock."""

    broker: TransactionalBroker
    pause: Callable[[int], None]
    prefix: str
    """Begins all topics and transactional ids, so that histories can share a broker."""
    lives: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """The (producer id, epoch) of each initialisation, by producer."""
    idempotent: set[str] = field(default_factory=set)
    """Producers without a transactional id."""
    killed: set[str] = field(default_factory=set)
    _aliases: dict[int, str] = field(default_factory=dict)
    _topic_ids: dict[str, str] = field(default_factory=dict)

    def name(self, short: str) -> str:
        """The name on the broker."""
        return self.prefix + short

    def transactional_id(self, producer: str) -> str | None:
        return None if producer in self.idempotent else self.name(producer)

    def alias(self, producer_id: int) -> str:
        """p0, p1, ... in the order in which the producer ids appeared."""
        return self._aliases.setdefault(producer_id, f"p{len(self._aliases)}") if producer_id >= 0 else "none"

    def topic_alias(self, topic_id: str | None) -> str:
        """t0, t1, ... in the order in which the topics appeared."""
        return "none" if topic_id is None else self._topic_ids.setdefault(topic_id, f"t{len(self._topic_ids)}")

    def await_state(self, producer: str, *states: str) -> str:
        """Wait until the transactional id is in one of *states*; "none" stands for an id the broker does not know."""
        name = self.name(producer)
        for _ in range(AWAIT_LIMIT_MS // PAUSE_MS):
            described = self.broker.describe_transactions([name])[name]
            state = "none" if described is None else described.state
            if state in states:
                return state
            self.pause(PAUSE_MS)
        raise TimeoutError(f"{producer} is still {state}, not {' or '.join(states)}")

    def settle(self, producer: str) -> None:
        """Wait until the id's markers are written."""
        self.await_state(producer, "none", "Empty", "Ongoing", "CompleteCommit", "CompleteAbort")

    def until_not_busy(self, ask: Callable[[], Any]) -> Any:
        """The first answer of *ask* whose error is not CONCURRENT_TRANSACTIONS."""
        for _ in range(AWAIT_LIMIT_MS // PAUSE_MS):
            answer = ask()
            if (answer if isinstance(answer, Error) else answer.error) is not Error.CONCURRENT_TRANSACTIONS:
                return answer
            self.pause(PAUSE_MS)
        raise TimeoutError("the broker stays busy")


class Step(Protocol):
    """One step. `play` takes it and returns the answer."""

    def play(self, stage: Stage) -> object: ...


@dataclass(frozen=True)
class Init:
    """The producer starts: it asks until it is given a producer id and an epoch."""

    producer: str
    timeout_ms: int = 60_000
    transactional: bool = True

    def play(self, stage: Stage) -> object:
        (stage.idempotent.discard if self.transactional else stage.idempotent.add)(self.producer)
        stage.killed.discard(self.producer)
        name = stage.transactional_id(self.producer)
        answer = stage.until_not_busy(lambda: stage.broker.init_transactions(name, self.timeout_ms))
        if answer.error is Error.NONE:
            stage.lives.setdefault(self.producer, []).append((answer.producer_id, answer.epoch))
        return answer.error.name, stage.alias(answer.producer_id), answer.epoch


@dataclass(frozen=True)
class Produce:
    """The producer, in one of its lives, appends values or (key, value) pairs as one batch."""

    producer: str
    topic: str
    partition: int
    values: Sequence[str | tuple[str | None, str | None]]
    life: int = -1
    sequence: int | None = None
    added: bool = False

    def play(self, stage: Stage) -> object:
        require(self.producer not in stage.killed or self.life != -1, f"{self.producer} has been killed")
        producer_id, epoch = stage.lives[self.producer][self.life]
        answer = stage.broker.produce(
            stage.transactional_id(self.producer),
            producer_id,
            epoch,
            stage.name(self.topic),
            self.partition,
            [_encoded(value) for value in self.values],
            sequence=self.sequence,
            added=self.added,
        )
        return answer.error.name, answer.first_offset


@dataclass(frozen=True)
class Add:
    """The producer makes a partition part of its transaction, before any record."""

    producer: str
    topic: str
    partition: int

    def play(self, stage: Stage) -> object:
        producer_id, epoch = stage.lives[self.producer][-1]
        transaction = (stage.name(self.producer), producer_id, epoch)
        return stage.broker.add_to_transaction(*transaction, stage.name(self.topic), self.partition).name


@dataclass(frozen=True)
class End:
    """A request to end the transaction that the producer had open in one of its lives.

    *epochs_later* is added to that life's epoch; with *of*, producer id and epoch are those of another producer.
    """

    producer: str
    commit: bool
    life: int = -1
    epochs_later: int = 0
    of: str | None = None
    settle: bool = True

    def play(self, stage: Stage) -> object:
        producer_id, epoch = stage.lives[self.of or self.producer][self.life]
        name = stage.name(self.producer)
        ending = (name, producer_id, epoch + self.epochs_later, self.commit)
        if not self.settle:
            return stage.broker.end_txn(*ending).name
        answer = stage.until_not_busy(lambda: stage.broker.end_txn(*ending))
        stage.settle(self.producer)
        return answer.name


@dataclass(frozen=True)
class Fence:
    """A sweeper aborts the id at the producer id and epoch that it has now, whatever its state."""

    producer: str

    def play(self, stage: Stage) -> object:
        name = stage.name(self.producer)
        described = stage.broker.describe_transactions([name])[name]
        if described is None:
            return "none"
        ending = (name, described.producer_id, described.epoch, False)
        answer = stage.until_not_busy(lambda: stage.broker.end_txn(*ending))
        stage.settle(self.producer)
        return answer.name


@dataclass(frozen=True)
class Kill:
    """The producer dies by SIGKILL: the broker hears nothing of it."""

    producer: str

    def play(self, stage: Stage) -> object:
        stage.killed.add(self.producer)
        return "killed"


@dataclass(frozen=True)
class Await:
    """Wait until the transactional id is in *state*."""

    producer: str
    state: str

    def play(self, stage: Stage) -> object:
        return stage.await_state(self.producer, self.state)


@dataclass(frozen=True)
class Describe:
    """The answer to DescribeTransactions for one id."""

    producer: str

    def play(self, stage: Stage) -> object:
        name = stage.name(self.producer)
        state = stage.broker.describe_transactions([name])[name]
        if state is None:
            return "none"
        partitions = sorted((topic.removeprefix(stage.prefix), partition) for topic, partition in state.partitions)
        began = state.start_time_ms >= 0
        return state.state, stage.alias(state.producer_id), state.epoch, state.timeout_ms, began, partitions


@dataclass(frozen=True)
class Listed:
    """The answer to ListTransactions."""

    def play(self, stage: Stage) -> object:
        return [
            (listed.transactional_id.removeprefix(stage.prefix), stage.alias(listed.producer_id), listed.state)
            for listed in stage.broker.list_transactions(stage.prefix)
        ]


@dataclass(frozen=True)
class Producers:
    """The answer to DescribeProducers for one partition."""

    topic: str
    partition: int

    def play(self, stage: Stage) -> object:
        try:
            states = stage.broker.describe_producers([(stage.name(self.topic), self.partition)])
        except TopicError:
            return "none"
        return [
            (stage.alias(state.producer_id), state.epoch, state.last_sequence, state.transaction_start_offset)
            for state in states
        ]


@dataclass(frozen=True)
class Read:
    """A reader's view from *offset* on: log start, last stable and end offset, and the records."""

    topic: str
    partition: int
    offset: int = 0
    committed: bool = True

    def play(self, stage: Stage) -> object:
        isolation = Isolation.READ_COMMITTED if self.committed else Isolation.READ_UNCOMMITTED
        fetched = stage.broker.fetch(stage.name(self.topic), self.partition, self.offset, isolation)
        records = [(record.offset, _decoded(record.key), _decoded(record.value)) for record in fetched.records]
        # Where retention cuts an open transaction's batch in two, a real broker shows the whole batch's offset.
        stable_offset = max(fetched.last_stable_offset, fetched.log_start_offset)
        ends = (fetched.log_start_offset, stable_offset, fetched.high_watermark)
        return fetched.error.name, ends, records


@dataclass(frozen=True)
class CreateTopic:
    topic: str
    partitions: int = 1
    compact: bool = False

    def play(self, stage: Stage) -> object:
        answer = stage.broker.create_topic(stage.name(self.topic), self.partitions, compact=self.compact)
        return answer.name, stage.topic_alias(stage.broker.topic_id(stage.name(self.topic)))


@dataclass(frozen=True)
class DeleteTopic:
    topic: str

    def play(self, stage: Stage) -> object:
        answer = stage.broker.delete_topic(stage.name(self.topic))
        return answer.name, stage.topic_alias(stage.broker.topic_id(stage.name(self.topic)))


@dataclass(frozen=True)
class AddPartitions:
    topic: str
    total: int

    def play(self, stage: Stage) -> object:
        return stage.broker.add_partitions(stage.name(self.topic), self.total).name


@dataclass(frozen=True)
class DeleteRecords:
    """Retention removes the records before an offset; -1: all of them."""

    topic: str
    partition: int
    before_offset: int

    def play(self, stage: Stage) -> object:
        return stage.broker.delete_records(stage.name(self.topic), self.partition, self.before_offset).name


def play(history: Iterable[Step], stage: Stage) -> list[Any]:
    """The answer to each step of *history*.

    >>> from exactlyonce.testing import BrokerModel, SimulatedClock
    >>> clock = SimulatedClock()
    >>> stage = Stage(BrokerModel(clock), clock.advance, prefix="example-")
    >>> play([CreateTopic("t"), Init("a"), Produce("a", "t", 0, ["x"]), End("a", commit=True), Read("t", 0)], stage)[2:]
    [('NONE', 0), 'NONE', ('NONE', (0, 2, 2), [(0, None, 'x')])]
    """
    return [step.play(stage) for step in history]


def difference(history: Sequence[Step], one: Stage, other: Stage) -> str | None:
    """Play *history* on both stages and describe the first step whose answers differ; None: no step does."""
    for number, step in enumerate(history):
        seen, seen_by_other = step.play(one), step.play(other)
        if seen != seen_by_other:
            before = "".join(f"  {index:3} {earlier}\n" for index, earlier in enumerate(history[:number]))
            return f"{before}  {number:3} {step}\n      one sees    {seen}\n      other sees  {seen_by_other}"
    return None


def shortest(history: Sequence[Step], fails: Callable[[Sequence[Step]], bool]) -> Sequence[Step]:
    """*history* without the steps that it does not need to *fail*."""
    index = 0
    while index < len(history):
        shorter = [*history[:index], *history[index + 1 :]]
        if fails(shorter):
            history = shorter
        else:
            index += 1
    return history


def _encoded(value: str | tuple[str | None, str | None]) -> tuple[bytes | None, bytes | None]:
    key, text = value if isinstance(value, tuple) else (None, value)
    return (None if key is None else key.encode()), (None if text is None else text.encode())


def _decoded(data: bytes | None) -> str | None:
    return None if data is None else data.decode()
