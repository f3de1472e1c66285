"""The dead letters in a topic, with the state of each: open, replayed or discarded.

Invariants: the state of a letter is a record of topic `TOPIC.states`, written in the transaction that sends its record
back, so that both are visible or none is. All commands on a topic of letters have one transactional id: a new one first
ends the transaction of an older one, and then reads the states. So a letter ends once, whatever is killed. An input
record with several letters is sent back once.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from exactlyonce.connectors.confluent import make_producer
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.range_reader import RangeReader
from exactlyonce.connectors.kafka.source import record_of
from exactlyonce.connectors.kafka.topics import Topic, Topics
from exactlyonce.pipeline.dead_letters import DeadLetter, Reason, as_input
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, Fenced, Halt, TopicError
from exactlyonce.pipeline.names import as_name

BATCH_RECORDS = 1_000
OPEN, REPLAYED, DISCARDED = STATES = ("open", "replayed", "discarded")
TIMEOUT_S = 60.0


class Outgoing(NamedTuple):
    """A record and its partition."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None


class Letter(NamedTuple):
    record: DeadLetter
    """Without the reason among its headers; its place is that in the topic of letters."""
    reason: Reason
    state: str = OPEN
    edited: DeadLetter | None = None
    """What is sent back instead of the record."""

    @property
    def place(self) -> str:
        return f"{self.record.partition}:{self.record.offset}"

    @property
    def input(self) -> str:
        """The same for all letters of one input record. Its bytes are part of it, since a topic may be made anew."""
        digest = hashlib.sha256(msgspec.msgpack.encode((self.record.key, self.record.value))).hexdigest()
        return f"{self.reason.topic}:{self.reason.partition}:{self.reason.offset}:{digest}"


class Ended(msgspec.Struct, frozen=True):
    """The value of a record of `TOPIC.states`; its key is the id of the letters' topic and the place of a letter."""

    state: str
    input: str
    """See `Letter.input`."""


class Letters:
    """The letters of *topic*; *earlier* is the name of a replay by an earlier version, a pipeline, if it had one.

    Raises `TopicError` without the topic, `RangeGone` for letters that go meanwhile, `BrokerUnavailable`, and `Halt` if
    such a replay was broken off in the middle.
    """

    def __init__(self, config: ClientConfig, topic: str, earlier: str = "") -> None:
        self.config, self.topic = config, topic
        self._earlier = earlier or as_name(f"replay-{topic}")
        self._states = f"{topic}.states"
        self.replayed = set[str]()
        """`Letter.input` of the records that were sent back, once `all` has been read."""

    def all(self) -> Iterator[Letter]:
        """By partition and offset; other records of the topic are left out."""
        with closing(Topics(self.config)) as topics:
            starts, ends = topics.start_offsets(self.topic), topics.end_offsets(self.topic, committed=True)
            topic = topics.describe([self.topic])[self.topic]
        ended, replayed = self._ended(topic), self._replayed_before(topic)
        self.replayed = {one.input for one in ended.values() if one.state == REPLAYED}
        for partition, start in sorted(starts.items()):
            for message in self._read(self.topic, partition, start, ends[partition]):
                record: DeadLetter = record_of(message, message.value(), message.key())
                if (reason := Reason.of(record.headers)) is None:
                    continue
                letter = Letter(as_input(record), reason)
                if (partition, record.offset) in ended:
                    letter = letter._replace(state=ended[partition, record.offset].state)
                elif reason.can_return and record.offset < replayed.get(partition, 0):
                    letter = letter._replace(state=REPLAYED)
                    self.replayed.add(letter.input)
                yield letter

    def at(self, place: str) -> Letter:
        """The letter at *place*. `ConfigError` if there is none."""
        for letter in self.all():
            if letter.place == place:
                return letter
        raise ConfigError(
            f"There is no dead letter at {self.topic} {place}. `exactlyonce dead-letters list {self.topic}` shows "
            f"those that there are."
        )

    def _ended(self, topic: Topic) -> dict[tuple[int, int], Ended]:
        """The letters that are not open any more, by place; not the letters of an earlier topic of this name."""
        with closing(Topics(self.config)) as topics:
            if not _found(topics, [self._states]):
                return {}
            starts, ends = topics.start_offsets(self._states), topics.end_offsets(self._states, committed=True)
        ended: dict[tuple[int, int], Ended] = {}
        for message in self._read(self._states, 0, starts[0], ends[0]):
            topic_id, partition, offset = (message.key() or b"").decode().rsplit(":", 2)
            if topic_id == topic.topic_id:
                ended[int(partition), int(offset)] = msgspec.json.decode(message.value() or b"", type=Ended)
        return ended

    def _replayed_before(self, topic: Topic) -> dict[int, int]:
        """By partition, the offset up to which a replay pipeline of an earlier version has sent letters back."""
        try:
            history = read_history(self.config, self._earlier)
        except TopicError:
            return {}
        if history.unfinalized is not None:
            raise Halt(
                f"The replay {self._earlier}, begun by an earlier version, was broken off: nobody can say which of "
                f"its letters were sent. `exactlyonce transactions commit {self._earlier}` finishes it; then run this "
                f"again."
            )
        positions = [] if history.latest is None else history.latest.offsets
        return {position.partition: position.offset for position in positions if position.topic_id == topic.topic_id}

    def _read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Message]:
        with closing(RangeReader(topic, partition, start, end, self.config)) as reader:
            while messages := reader.read(BATCH_RECORDS):
                yield from messages

    def ending(self) -> LetterEndings:
        """See `LetterEndings`."""
        with closing(Topics(self.config)) as topics:
            topic = topics.describe([self.topic])[self.topic]
            topics.create(self._states, partitions=1, settings={"cleanup.policy": "compact"})
        return LetterEndings(self.config, topic, self._states)


class LetterEndings:
    """Ends letters. Whoever makes it ends the transaction of an older one; read `Letters.all` after that."""

    def __init__(self, config: ClientConfig, topic: Topic, states: str) -> None:
        self._config, self._topic, self._states = config, topic, states
        self._undelivered: list[str] = []
        settings = {
            "transactional.id": f"{topic.name}.letters",
            "transaction.timeout.ms": round(TIMEOUT_S * 1000),
            "on_delivery": self._delivered,
            "delivery.report.only.error": True,
        }
        self._producer: Producer = make_producer(config.confluent(settings))
        self._call("init_transactions", TIMEOUT_S)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._undelivered.append(error.str())

    def end(self, letters: Sequence[Letter], state: str, replayed: Iterable[str] = ()) -> Counter[str]:
        """Note *letters* as *state*. Those `REPLAYED` are sent back, but for an input record that another letter of
        them has, or that is in *replayed*. Returns the number of records sent, by topic."""
        sent, count = set(replayed), Counter[str]()
        if state == REPLAYED:
            self._require_partitions(letters)
        for start in range(0, len(letters), BATCH_RECORDS):
            batch: list[Outgoing] = []
            for letter in letters[start : start + BATCH_RECORDS]:
                if state == REPLAYED and letter.input not in sent:
                    sent.add(letter.input)
                    batch.append(_returned(letter))
                    count[letter.reason.topic] += 1
                key, value = f"{self._topic.topic_id}:{letter.place}", Ended(state, letter.input)
                batch.append(Outgoing(self._states, 0, key.encode(), msgspec.json.encode(value), None))
            self._commit(batch)
        return count

    def _require_partitions(self, letters: Iterable[Letter]) -> None:
        with closing(Topics(self._config)) as topics:
            known = _found(topics, {letter.reason.topic for letter in letters})
        for letter in letters:
            topic, partition = letter.reason.topic, letter.reason.partition or 0
            if topic not in known or partition >= known[topic].partitions:
                raise TopicError(
                    f"The letter at {letter.place} came from {topic}[{partition}], which there is not any more. Create "
                    f"it, or discard the letter."
                )

    def _commit(self, batch: Iterable[Outgoing]) -> None:
        self._call("begin_transaction")
        try:
            for record in batch:
                _produce(self._producer, record)
            left = self._producer.flush(TIMEOUT_S)
            why = f"{left} records were not delivered in time" if left else ""
        except (KafkaException, SystemError) as error:  # the latter for a callback while the client learns of a fence
            why = str(error)
        if self._undelivered:
            why = self._undelivered[0]
        if why:
            self._call("abort_transaction", TIMEOUT_S)  # or it says that another command has begun
            raise BrokerUnavailable(f"{self._refused}: {why}. {_AGAIN}")
        self._call("commit_transaction", TIMEOUT_S)

    @property
    def _refused(self) -> str:
        return f"The letters of {self._topic.name} could not be ended"

    def _call(self, name: str, *arguments: float) -> None:
        try:
            getattr(self._producer, name)(*arguments)
        except KafkaException as failure:
            error: KafkaError = failure.args[0]
            if error.code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH):
                raise Fenced(
                    f"Another command on the letters of {self._topic.name} has begun, and this one ends. {_AGAIN}"
                ) from None
            raise BrokerUnavailable(f"{self._refused}: {error.str()}. {_AGAIN}") from None


_AGAIN = "Run it again: what is ended already is left alone, so that no record is sent twice."


def _found(topics: Topics, names: Iterable[str]) -> dict[str, Topic]:
    """The topics among *names* that there are."""
    known: dict[str, Topic] = {}
    for name in names:
        with suppress(TopicError):
            known |= topics.describe([name])
    return known


def _produce(producer: Producer, record: Outgoing) -> None:
    """Hand *record* to *producer*, once its queue has room; `BrokerUnavailable` if it has none for long."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            producer.produce(
                record.topic,
                record.value,
                record.key,
                record.partition,
                headers=None if record.headers is None else [*record.headers],
            )
            return
        except BufferError:
            if time.monotonic() > deadline_s:
                raise BrokerUnavailable("The broker takes no records now. Run again later.") from None
            producer.poll(0.1)


def _returned(letter: Letter) -> Outgoing:
    record, reason = letter.edited or letter.record, letter.reason
    return Outgoing(reason.topic, reason.partition or 0, record.key, record.value, list(record.headers))
