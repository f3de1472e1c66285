"""Clients whose operations make a history, in the form of Jepsen's Kafka workload: they send, poll, or do both.

A client is a process of the history. After an operation of unknown outcome (`:info`) it goes on as another process.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from edn import Keyword as K
from history_mutants import USERS
from plain_consumer import plain_consumer

ANSWER_S = 120.0
"""A client waits so long for a broker, and then takes the outcome for unknown."""
Pairs = dict[int, list[list[Any]]]
"""[offset, value] of each record of a partition."""


class Recorder:
    """The lines of a history, in the order in which operations begin and end."""

    def __init__(self, partitions: Sequence[tuple[str, int]]) -> None:
        """The number of a partition in *partitions*, (topic, partition) of each, is its key in the history."""
        self.partitions = [*partitions]
        self.keys = {partition: key for key, partition in enumerate(partitions)}
        self.lines: list[dict[K, Any]] = []
        self._lock = threading.Lock()
        self._processes = itertools.count()
        self._began_ns = time.monotonic_ns()

    def process(self) -> int:
        return next(self._processes)

    def now_ns(self) -> int:
        return time.monotonic_ns() - self._began_ns

    def note(self, process: int | str, type: str, f: str, value: Any, **more: Any) -> None:
        """Add a line; *process* is a number, or "nemesis"."""
        who = K(process) if isinstance(process, str) else process
        extra = {K(name): item for name, item in more.items()}
        with self._lock:
            line = {K("time"): self.now_ns(), K("process"): who, K("type"): K(type), K("f"): K(f), K("value"): value}
            self.lines.append({**line, **extra})

    def assigned(self, process: int, keys: Sequence[int], seek: bool) -> None:
        more = {"seek-to-beginning?": True} if seek else {}
        for type in ("invoke", "ok"):
            self.note(process, type, "assign", [*keys], **more)

    def pairs(self, messages: Sequence[Message]) -> Pairs:
        found: Pairs = defaultdict(list)
        for message in messages:
            key = self.keys[message.topic() or "", message.partition() or 0]
            found[key].append([message.offset(), value_of(message.value())])
        return dict(found)


def value_of(payload: Any) -> Any:
    """A record's value in the history: its id, with its number if it has one."""
    record = json.loads(payload)
    return [record["id"], record["number"]] if "number" in record else record["id"]


class Ids:
    """Ids of records, each used once; that modulo `USERS` is the user, all of whose records are in one partition."""

    def __init__(self) -> None:
        self._count = itertools.count(1)

    def draw(self, luck: random.Random, partitions: int) -> tuple[int, int]:
        """(key of the input's partition, id)"""
        user = luck.randrange(USERS)
        return user % partitions, next(self._count) * USERS + user


class Client(threading.Thread):
    """Does operations until it is told to stop."""

    def __init__(self, recorder: Recorder, servers: str) -> None:
        super().__init__(daemon=True)
        self.recorder, self.servers = recorder, servers
        self.process = recorder.process()
        self.is_over = threading.Event()
        self.failure = ""
        self.start()

    def run(self) -> None:
        try:
            self.work()
        except Exception as error:  # whatever it is, the round shows it
            self.failure = f"{type(self).__name__}: {type(error).__name__}: {error}"

    def work(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        self.is_over.set()
        self.join()


# --- sending ----------------------------------------------------------------------------------------------------------


class Feeder(Client):
    """Sends to the first partitions, the pipeline's input, one record an operation, by an idempotent producer.

    Of a few sends, by *luck*, it does not await the outcome.
    """

    settings: Mapping[str, Any] = {}

    def __init__(self, recorder: Recorder, servers: str, ids: Ids, inputs: int, luck: random.Random) -> None:
        self.ids, self.inputs, self.luck = ids, inputs, luck
        super().__init__(recorder, servers)

    def producer(self) -> Producer:
        return Producer({
            "bootstrap.servers": self.servers, "enable.idempotence": True, "max.in.flight": 1, "linger.ms": 0,
            "log_level": 0, "topic.metadata.propagation.max.ms": 2000, **self.settings,
        })  # fmt: skip

    def work(self) -> None:
        producer = self.producer()
        while not self.is_over.wait(self.luck.uniform(0, 0.03)):
            sends = [self.ids.draw(self.luck, self.inputs)]
            self.recorder.note(self.process, "invoke", "send", [[K("send"), *sends[0]]])
            offsets = self.send(producer, sends)
            producer.flush(0 if self.luck.random() < 0.02 else ANSWER_S)
            outcome = "ok" if len(offsets) == len(sends) else "info"
            self.recorder.note(self.process, outcome, "send", completed(sends, offsets))
            if outcome == "info":
                producer.purge()
                producer, self.process = self.producer(), self.recorder.process()
        producer.flush(ANSWER_S)

    def send(self, producer: Producer, sends: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Begin to send; the offset of each id, filled in as the broker confirms it."""
        offsets: dict[int, int] = {}

        def confirm(error: KafkaError | None, message: Message) -> None:
            offset = message.offset()
            if error is None and offset is not None:
                offsets[value_of(message.value())] = offset

        for key, id in sends:
            topic, partition = self.recorder.partitions[key]
            payload = json.dumps({"id": id, "user": id % USERS})
            with suppress(KafkaException):  # what is not confirmed is unknown
                producer.produce(topic, payload, partition=partition, on_delivery=confirm)
        return offsets


def completed(sends: Sequence[tuple[int, int]], offsets: Mapping[int, int]) -> list[Any]:
    return [[K("send"), key, [offsets.get(id), id]] for key, id in sends]


class TransactionalFeeder(Feeder):
    """Sends to several partitions in a transaction, and may poll the pipeline's outputs within it, after its sends.

    By *luck* it aborts some, commits some without awaiting the outcome, and leaves some as a crashed client would.
    """

    def work(self) -> None:
        self.settings = {"transactional.id": f"{self.recorder.partitions[0][0]}-feeder-{self.process}"}
        self.outputs = range(self.inputs, len(self.recorder.partitions))
        self.places = dict.fromkeys(self.outputs, OFFSET_END)
        producer = self.ready()
        with closing(consumer(self.servers, "read_committed")) as reader:
            self.assign(reader)
            while not self.is_over.wait(self.luck.uniform(0, 0.1)):
                outcome = self.transaction(producer, reader)
                if outcome != "ok":
                    self.assign(reader, is_known=outcome == "fail")
                if outcome == "info":
                    producer = self.ready()
        self.ready()  # it ends what was left open

    def ready(self) -> Producer:
        """A producer whose predecessors are fenced, and their transactions ended."""
        producer = self.producer()
        limit = time.monotonic() + 5 * ANSWER_S
        while True:
            try:
                producer.init_transactions(ANSWER_S)
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > limit:
                    raise
            else:
                return producer

    def assign(self, reader: Consumer, is_known: bool = False) -> None:
        """Have *reader* go back to where the last transaction that was committed has left it."""
        if not is_known:
            self.process = self.recorder.process()
        places = [
            TopicPartition(*self.recorder.partitions[key], place)
            for key, place in self.places.items()
        ]  # fmt: skip
        reader.assign(places)
        self.recorder.assigned(self.process, self.outputs, seek=False)

    def transaction(self, producer: Producer, reader: Consumer) -> str:
        """Its outcome: ok, fail or info."""
        sends = [self.ids.draw(self.luck, self.inputs) for _ in range(self.luck.randrange(1, 5))]
        is_polling = self.luck.random() < 0.3
        (fate,) = self.luck.choices(("commit", "abort", "unknown", "crash"), (80, 10, 5, 5))
        invoked = [[K("send"), key, id] for key, id in sends]
        self.recorder.note(self.process, "invoke", "txn", [*invoked, *([[K("poll")]] if is_polling else [])])
        producer.begin_transaction()
        offsets = self.send(producer, sends)
        producer.flush(ANSWER_S)
        polled = self.recorder.pairs(consumed(reader, 0.5)) if is_polling else {}
        outcome = self.ended(producer, fate if len(offsets) == len(sends) or fate == "crash" else "abort")
        if outcome == "ok":
            self.places.update({key: pairs[-1][0] + 1 for key, pairs in polled.items()})
        value = [*completed(sends, offsets), *([[K("poll"), polled]] if is_polling else [])]
        self.recorder.note(self.process, outcome, "txn", value)
        return outcome

    def ended(self, producer: Producer, fate: str) -> str:
        if fate == "crash":
            return "info"
        while True:
            try:
                if fate == "abort":
                    producer.abort_transaction(ANSWER_S)
                    return "fail"
                producer.commit_transaction(0.001 if fate == "unknown" else ANSWER_S)
                return "ok"
            except KafkaException as error:
                problem = error.args[0]
                if problem.txn_requires_abort():
                    fate = "abort"
                elif fate == "unknown" or not problem.retriable():
                    return "info"


# --- polling ----------------------------------------------------------------------------------------------------------


def consumer(servers: str, isolation: str) -> Consumer:
    settings = {"isolation.level": isolation, "enable.partition.eof": True, "fetch.wait.max.ms": 50}
    return plain_consumer(servers, settings)


def consumed(reader: Consumer, timeout_s: float) -> list[Message]:
    """What is there, at once, or what comes first; without events that are no records."""
    messages = [*reader.consume(1, timeout_s), *reader.consume(1000, 0)]
    return [message for message in messages if message.error() is None]


class Poller(Client):
    """Polls *keys* from their beginning on, through all faults."""

    def __init__(self, recorder: Recorder, servers: str, keys: Sequence[int], isolation: str) -> None:
        self.keys, self.isolation = keys, isolation
        super().__init__(recorder, servers)

    def work(self) -> None:
        with closing(consumer(self.servers, self.isolation)) as reader:
            begin(reader, self.recorder, self.process, self.keys)
            while not self.is_over.wait(0.05):
                self.recorder.note(self.process, "invoke", "poll", [[K("poll")]])
                messages = consumed(reader, 0.5)
                self.recorder.note(self.process, "ok", "poll", [[K("poll"), self.recorder.pairs(messages)]])


def begin(reader: Consumer, recorder: Recorder, process: int, keys: Sequence[int]) -> None:
    reader.assign([TopicPartition(*recorder.partitions[key], OFFSET_BEGINNING) for key in keys])
    recorder.assigned(process, keys, seek=True)


def poll_all(recorder: Recorder, servers: str, isolation: str, limit_s: float) -> Pairs:
    """Poll every partition from its beginning to its end now, as one more process; raises TimeoutError."""
    process, keys = recorder.process(), range(len(recorder.partitions))
    found: Pairs = defaultdict(list)
    limit = time.monotonic() + limit_s
    with closing(consumer(servers, isolation)) as reader:
        ends = {
            key: reader.get_watermark_offsets(TopicPartition(*recorder.partitions[key]), ANSWER_S)[1] for key in keys
        }
        begin(reader, recorder, process, keys)
        while ends:
            if time.monotonic() > limit:
                raise TimeoutError(f"{isolation} readers do not come to the ends {ends} within {limit_s} s")
            recorder.note(process, "invoke", "poll", [[K("poll")]])
            events = [*reader.consume(1, 0.5), *reader.consume(1000, 0)]
            polled = recorder.pairs([event for event in events if event.error() is None])
            recorder.note(process, "ok", "poll", [[K("poll"), polled]])
            for key, pairs in polled.items():
                found[key] += pairs
            for event in events:
                key = recorder.keys.get((event.topic() or "", event.partition() or 0), -1)
                if _is_end(event) and (event.offset() or 0) >= ends.get(key, 0):
                    ends.pop(key, None)
    return found


def _is_end(event: Message) -> bool:
    error = event.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF


# --- logs -------------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A transaction's records in one partition, or a batch of no transaction."""

    key: int
    transaction: tuple[int, int] | None
    """The producer's id and epoch, which is another one for each transaction; None: none"""
    ranges: list[tuple[int, int]]
    """first and last offset of each batch"""
    outcome: str
    """ok, fail (it was aborted) or info (it is open)"""


BATCH = struct.Struct(">qiibIhiqqqhii")
"""The header of a batch: base offset, length, leader epoch, magic, CRC, attributes, last offset delta, two timestamps,
producer's id and epoch, base sequence, number of records."""
LENGTH_FROM = 12
"""A batch's length counts what comes after it."""
TRANSACTIONAL, CONTROL = 0x10, 0x20


def logged(recorder: Recorder, folder: Path) -> list[Written]:
    """All that the broker's log, in *folder*, has of the partitions, in the order of each one's offsets."""
    return [
        written
        for key, (topic, partition) in enumerate(recorder.partitions)
        for written in _written(key, b"".join(
            path.read_bytes() for path in sorted((folder / f"{topic}-{partition}").glob("*.log"))
        ))
    ]  # fmt: skip


def _written(key: int, log: bytes) -> Iterator[Written]:
    open_: dict[tuple[int, int], list[tuple[int, int]]] = {}
    place = 0
    while place + BATCH.size <= len(log):
        first, length, _, magic, _, attributes, delta, _, _, id, epoch, _, _ = BATCH.unpack_from(log, place)
        if not length:
            break  # the rest of the file is reserved
        assert magic == 2, f"a batch of version {magic}"
        if attributes & CONTROL:
            is_committed = _marker(log, place + BATCH.size)
            for producer in [producer for producer in open_ if producer[0] == id]:
                yield Written(key, producer, open_.pop(producer), "ok" if is_committed else "fail")
        elif attributes & TRANSACTIONAL:
            open_.setdefault((id, epoch), []).append((first, first + delta))
        else:
            yield Written(key, None, [(first, first + delta)], "ok")
        place += LENGTH_FROM + length
    for producer, ranges in open_.items():
        yield Written(key, producer, ranges, "info")


def _marker(log: bytes, place: int) -> bool:
    """Whether the control record at *place* commits: after its length, attributes, time, offset and its key's length
    come the key's version and type."""
    for is_varint in (True, False, True, True, True):
        while is_varint and log[place] & 0x80:
            place += 1
        place += 1
    _, type = struct.unpack_from(">hh", log, place)
    return bool(type)
