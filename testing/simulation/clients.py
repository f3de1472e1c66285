"""Stand-ins for client libraries: producers, consumers, blocks and channels over the broker model.

Only these and the processes are not shipped code in a simulated worker. A client's own simulated thread sends one
request a step: the process can be killed or paused between any two, and a request or its answer can be lost. Requests
of a killed process that are in flight may still be applied.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaError, Message, TopicPartition

from exactlyonce.checkpoint.block_storage import AttemptBlocks, DamagedBlock
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.connectors.confluent import ANY_PARTITION
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockWriter, OnDelivery, verified
from exactlyonce.connectors.kafka.reader import Consumers
from exactlyonce.pipeline.errors import BrokerUnavailable, StorageUnavailable, require
from exactlyonce.sinks.kafka.open_transaction import OnFailure, OnThrottle, OpenTransaction, ProducerFailure
from exactlyonce.testing.broker.interface import Error, Isolation, NoAnswer

if TYPE_CHECKING:
    from exactlyonce.testing.simulation.world import Process, SimulatedWorld

Steps = Generator[int | None, None, Any]
"""A thread of control: yields between steps, and the time before which it need not be continued."""

QUEUE_MAX = 40
"""Records that a producer holds."""
FETCH_PAUSE_MS = 6
RETRY_PAUSE_MS = 10
PIPE_BYTES = (200, 2_000, 60_000)
AWAY = "the broker is away"


def output_partition(key: bytes | None, partitions: int) -> int:
    return zlib.crc32(key or b"") % partitions


class Produced:
    """The sending thread of an idempotent producer: batches in order within a partition, one request at a time."""

    def __init__(self, process: Process, transactional_id: str | None, producer_id: int, epoch: int) -> None:
        self.process, self.world = process, process.world
        self.transactional_id, self.producer_id, self.epoch = transactional_id, producer_id, epoch
        self.failure = ""
        self._sequences: dict[tuple[str, int], int] = {}
        self._queues: dict[tuple[str, int], deque[tuple[Any, Any]]] = {}
        self._batch: tuple[tuple[str, int], list[tuple[Any, Any]]] | None = None
        self._sending = False
        self.queued = 0

    def put(self, place: tuple[str, int], record: tuple[Any, Any]) -> None:
        self._queues.setdefault(place, deque()).append(record)
        self.queued += 1
        if not self._sending:
            self._sending = True
            self.world.spawn(self.process, self._send())

    def _send(self) -> Steps:
        while self.queued and not self.failure:
            yield None
            place, batch = self._batch = self._batch or self._next_batch()
            if self.gives_up():
                self.fail(f"{self.transactional_id}: timed out")
                continue
            if self.loses(batch):
                self._taken(place, batch, -1)
                continue
            if muted_ms := self.muted_ms(batch):
                self.throttled()
                yield self.world.clock.monotonic_ms() + muted_ms
            try:
                answer = self._request(place, batch)
            except NoAnswer:
                yield self.world.clock.monotonic_ms() + RETRY_PAUSE_MS
                continue
            if answer.error is Error.CONCURRENT_TRANSACTIONS:
                yield self.world.clock.monotonic_ms() + 1
            elif answer.error is Error.NONE:
                self._sequences[place] = self._sequences.get(place, 0) + len(batch)
                self._taken(place, batch, answer.first_offset)
            else:
                self.fail(f"{self.transactional_id or 'blocks'}: {answer.error.name}")
        self._sending = False

    def _request(self, place: tuple[str, int], batch: list[tuple[Any, Any]]) -> Any:
        sequence = self._sequences.get(place, 0)
        return self.world.ask(
            "produce", self.transactional_id, self.producer_id, self.epoch, *place, batch,
            sequence=sequence, added=bool(sequence),
        )  # fmt: skip

    def _next_batch(self) -> tuple[tuple[str, int], list[tuple[Any, Any]]]:
        rng = self.world.rng
        place = rng.choice([each for each, queue in self._queues.items() if queue])
        queue = self._queues[place]
        return place, [queue[i] for i in range(min(len(queue), rng.randint(1, 6)))]

    def _taken(self, place: tuple[str, int], batch: list[tuple[Any, Any]], offset: int) -> None:
        queue = self._queues[place]
        for i in range(len(batch)):
            self.delivered(queue.popleft(), place[1], -1 if offset < 0 else offset + i)
        self.queued -= len(batch)
        self._batch = None
        self.process.wake()

    def last_request(self) -> None:
        """The process was killed while a request was under way, which arrives now."""
        if self.queued and self.producer_id >= 0 and not self.failure:
            try:
                self._request(*(self._batch or self._next_batch()))
            except NoAnswer:
                return

    def loses(self, batch: list[tuple[Any, Any]]) -> bool:
        """Whether the batch is never sent though the client believes that it was."""
        return False

    def gives_up(self) -> bool:
        return False

    def muted_ms(self, batch: list[tuple[Any, Any]]) -> int:
        """How long the broker lets its sender wait."""
        return 0

    def throttled(self) -> None:
        """The broker lets its sender wait."""

    def delivered(self, record: tuple[Any, Any], partition: int, offset: int) -> None:
        pass

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.process.wake()


class SinkProducer(Produced):
    """A `SinkProducer` of `sinks.kafka.open_transaction`."""

    topic: str
    told: OnFailure
    told_throttled: OnThrottle

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """The broker in memory keeps neither *timestamp* nor *headers*."""
        if self.queued >= QUEUE_MAX:
            raise BufferError
        if partition == ANY_PARTITION:
            partition = output_partition(key, self.world.partitions_of(topic))
        self.put((topic, partition), (key, value))

    def poll(self, timeout_s: float) -> int:
        if self.failure:
            self.told(ProducerFailure(self.failure))
        return 0

    def __len__(self) -> int:
        return self.queued

    def loses(self, batch: list[tuple[Any, Any]]) -> bool:
        return self.world.faults.on_delivery()

    def gives_up(self) -> bool:
        return self.world.faults.fails_delivery()

    def muted_ms(self, batch: list[tuple[Any, Any]]) -> int:
        return self.world.load.muted_ms(self.process.subtask, batch) if self.world.load else 0

    def throttled(self) -> None:
        self.told_throttled()

    def delivered(self, record: tuple[Any, Any], partition: int, offset: int) -> None:
        if self.world.load:
            self.world.load.leaves(self.topic, self.process.attempt)


class Flushing:
    def __init__(self, producer: SinkProducer) -> None:
        self._producer = producer

    def done(self) -> bool:
        self._producer.poll(0)
        return bool(self._producer.failure) or not self._producer.queued

    def result(self) -> int:
        return self._producer.queued


class SimulatedProducers:
    """The `Producers` of one sink subtask; one thread of the process makes all of them, one after the other."""

    def __init__(self, process: Process, topic: str) -> None:
        self.process, self.world, self.topic = process, process.world, topic

    def make(self, transactional_id: str | None, failed: OnFailure, throttled: OnThrottle) -> Future[SinkProducer]:
        making = Future[SinkProducer]()
        assert transactional_id is not None, "the sinks of a simulation deliver exactly once"

        def initialise() -> Steps:
            answer = yield from self.world.until_answered(
                "init_transactions", transactional_id, self.process.transaction_timeout_ms,
                again=(Error.CONCURRENT_TRANSACTIONS,),
            )  # fmt: skip
            producer = SinkProducer(self.process, transactional_id, answer.producer_id, answer.epoch)
            producer.topic, producer.told, producer.told_throttled = self.topic, failed, throttled
            self.process.producers.append(producer)
            making.set_result(producer)
            self.process.wake()

        self.process.execute(initialise())
        return making

    def flush(self, producer: Any) -> Flushing:
        return Flushing(producer)

    def wait(self, pending: Any, timeout_s: float) -> None:
        return None

    def drop(self, transaction: OpenTransaction) -> None:
        producer: Any = transaction.producer
        self.process.producers.remove(producer)

    def abandon(self) -> None:
        return None


class SimulatedBlockProducer(Produced):
    """A `BlockProducer`: idempotent; it gets its producer id with the first block."""

    def __init__(self, process: Process) -> None:
        super().__init__(process, None, -1, -1)
        self._callbacks: deque[Callable[[], None]] = deque()
        self._awaited: dict[int, deque[OnDelivery]] = {}
        """Callbacks by partition, in the order of the records."""

    def produce(self, topic: str, value: bytes, key: str, partition: int, on_delivery: OnDelivery) -> None:
        self._awaited.setdefault(partition, deque()).append(on_delivery)
        self.put((topic, partition), (key, value))

    def _send(self) -> Steps:
        if self.producer_id < 0:
            answer = yield from self.world.until_answered("init_transactions", None)
            self.producer_id, self.epoch = answer.producer_id, answer.epoch
        yield from super()._send()

    def delivered(self, record: tuple[Any, Any], partition: int, offset: int) -> None:
        told = self._awaited[partition].popleft()
        self._callbacks.append(partial(told, None, Message(partition=partition, offset=offset)))

    def fail(self, reason: str) -> None:
        super().fail(reason)
        for told in chain.from_iterable(self._awaited.values()):
            undelivered = KafkaError(KafkaError._MSG_TIMED_OUT, reason)
            self._callbacks.append(partial(told, undelivered, Message(partition=0, offset=0)))

    def poll(self, timeout_s: float) -> None:
        while self._callbacks:
            self._callbacks.popleft()()


AT_ONCE_TRIES = 20
R = TypeVar("R")


def at_once(ask: Callable[[], R]) -> R:
    """The answer, in the midst of a step; where nobody answers for long, whoever wants it has failed."""
    for _ in range(AT_ONCE_TRIES):
        with suppress(NoAnswer, StorageUnavailable):
            return ask()
    raise BrokerUnavailable("nobody answers, and the answer is needed at once")


class Awaited(BaseException):
    """Blocks are wanted that are not here yet; no error of the code that asked for them."""

    def __init__(self, refs: list[BlockRef]) -> None:
        self.refs = refs


class FetchedBlocks:
    """The `Blocks` of one process: what is not here yet is asked for, and whoever wanted it begins again."""

    def __init__(self) -> None:
        self.found: dict[BlockRef, Block] = {}
        self.at_once: SimulatedWorld | None = None
        """The world if blocks are read in the midst of a step: by a table that reads them when a record wants them."""

    def fetch(self, refs: Iterable[BlockRef]) -> Iterable[tuple[BlockRef, Block]]:
        wanted = list(dict.fromkeys(refs))
        missing = [ref for ref in wanted if ref not in self.found]
        if missing and self.at_once is None:
            raise Awaited(missing)
        for ref in missing:
            assert self.at_once is not None
            at_once(partial(self._read, self.at_once, ref))
        return ((ref, self.found[ref]) for ref in wanted)

    def _read(self, world: SimulatedWorld, ref: BlockRef) -> None:
        if world.outside is not None:
            self.found[ref] = world.outside.block(ref)
        else:
            place = world.topic.name, ref.partition, ref.offset
            self._take(ref, world.ask("fetch", *place, Isolation.READ_UNCOMMITTED))

    def _take(self, ref: BlockRef, answer: Any) -> None:
        record = next((each for each in answer.records[:1] if each.offset == ref.offset), None)
        if record is None:
            raise DamagedBlock(f"block {ref.key} is gone", ref)
        self.found[ref] = verified(ref, record.key.encode(), record.value or b"")

    def get(self, world: SimulatedWorld, refs: list[BlockRef]) -> Steps:
        for ref in refs:
            if world.outside is not None:
                self.found[ref] = yield from world.outside.until_answered(partial(world.outside.block, ref))
                continue
            answer = yield from world.until_answered(
                "fetch", world.topic.name, ref.partition, ref.offset, Isolation.READ_UNCOMMITTED
            )
            self._take(ref, answer)


class SimulatedConsumer:
    """The consumer of a `KafkaReader`: a thread fetches what is committed, a partition at a time."""

    def __init__(self, process: Process, topic: str) -> None:
        self.process, self.world, self.topic = process, process.world, topic
        self._positions: dict[int, int] = {}
        """After the fetched records, by partition."""
        self._consumed: dict[int, TopicPartition] = {}
        """After the consumed records, by partition."""
        self._messages: deque[Message] = deque()
        self._ended: dict[int, int] = {}
        self._fetching = False

    def incremental_assign(self, places: list[TopicPartition]) -> None:
        for place in places:
            self._positions[place.partition] = place.offset
        if not self._fetching:
            self._fetching = True
            self.world.spawn(self.process, self._fetch())

    def _fetch(self) -> Steps:
        while True:
            waiting = [p for p in self._positions if self._is_due(p)]
            if not waiting or len(self._messages) > 30:
                yield self.world.clock.monotonic_ms() + FETCH_PAUSE_MS
                continue
            partition = self.world.rng.choice(waiting)
            yield None
            try:
                answer = self.world.ask("fetch", self.topic, partition, self._positions[partition])
            except NoAnswer:
                yield self.world.clock.monotonic_ms() + RETRY_PAUSE_MS
                continue
            self._take(partition, answer)
            self.process.wake()
            yield None

    def _is_due(self, partition: int) -> bool:
        """Whether there is anything to fetch, or an end of partition to tell; a known answer costs nothing."""
        at = self._positions[partition]
        return self.world.end_of(self.topic, partition) != at or self._ended.get(partition) != at

    def _take(self, partition: int, answer: Any) -> None:
        if answer.error is not Error.NONE:
            code = {
                Error.UNKNOWN_TOPIC_OR_PARTITION: KafkaError.UNKNOWN_TOPIC_OR_PART,
                Error.OFFSET_OUT_OF_RANGE: KafkaError.OFFSET_OUT_OF_RANGE,
            }[answer.error]
            self._event(partition, self._positions[partition], code)
            self._ended[partition] = self._positions[partition]
            return
        for record in answer.records[: self.world.rng.randint(1, 12)]:
            self._messages.append(self.world.message(self.topic, partition, record))
            self._positions[partition] = record.offset + 1
        if self._positions[partition] == answer.last_stable_offset:
            self._ended[partition] = self._positions[partition]
            self._event(partition, self._positions[partition], KafkaError._PARTITION_EOF)

    def _event(self, partition: int, offset: int, code: int) -> None:
        self._messages.append(Message(topic=self.topic, partition=partition, offset=offset, error=KafkaError(code)))

    def consume(self, records_max: int, timeout_s: float) -> list[Message]:
        count = min(len(self._messages), records_max, self.world.rng.randint(1, 6))
        messages = [self._messages.popleft() for _ in range(count)]
        self.world.consumed(messages)
        for message in messages:
            self._pass(message)
        return messages

    def _pass(self, message: Message) -> None:
        error, partition, offset = message.error(), message.partition(), message.offset()
        if error is None or error.code() == KafkaError._PARTITION_EOF:
            assert partition is not None
            assert offset is not None
            after = offset + 1 if error is None else offset
            self._consumed[partition] = TopicPartition(self.topic, partition, after)

    def position(self, places: list[TopicPartition]) -> list[TopicPartition]:
        return [self._consumed[place.partition] for place in places]

    def get_watermark_offsets(self, place: TopicPartition, **_: Any) -> tuple[int, int]:
        return 0, self.world.end_of(place.topic, place.partition)

    def offsets_for_times(self, places: list[TopicPartition], timeout_s: float) -> list[TopicPartition]:
        """The ends: nobody asks for another time."""
        ends = [self.world.end_of(place.topic, place.partition) for place in places]
        return [TopicPartition(place.topic, place.partition, end) for place, end in zip(places, ends, strict=True)]

    def close(self) -> None:
        return None


class Pipe:
    """One end of a Unix socket pair between two processes: a bounded buffer each way."""

    def __init__(self, process: Process, size: int) -> None:
        self.process, self.size = process, size
        self.buffer = bytearray()
        """Bytes that the other end has written."""
        self.peer: Pipe

    def send(self, data: memoryview, /) -> int:
        if self.peer.process.is_gone:
            raise BrokenPipeError("the other end is gone")
        room = self.size - len(self.peer.buffer)
        if room <= 0:
            raise BlockingIOError
        part = data[:room]
        self.peer.buffer += part
        self.peer.process.wake()
        return len(part)

    def recv(self, size: int, /) -> bytes:
        if not self.buffer:
            if self.peer.process.is_gone:
                return b""
            raise BlockingIOError
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        self.peer.process.wake()
        return data

    def fileno(self) -> int:
        return -1


class SimulatedClients:
    def __init__(self, process: Process) -> None:
        self.process, self.world = process, process.world
        self.clock = process.world.clock
        self.blocks = FetchedBlocks()
        self._cost_s, self._spent_s = process.world.rng.choice((0.0, 0.0005, 0.01)), 0.0
        if process.world.load:
            self._cost_s = 0.0  # there time passes with what is worked

    def monotonic_s(self) -> float:
        """Looking at it takes time, on some machines more than on others: so slices vary."""
        self._spent_s += self._cost_s
        return (self.clock.monotonic_ms() + self.process.busy_ms) / 1000 + self._spent_s

    @property
    def processing_s(self) -> Callable[[], float]:
        return self.monotonic_s

    def block_writer(self) -> AttemptBlocks:
        process = self.process
        if self.world.outside is not None:
            return self.world.outside.writer(process)
        producer = SimulatedBlockProducer(process)
        process.producers = [each for each in process.producers if not isinstance(each, SimulatedBlockProducer)]
        process.producers.append(producer)
        attempt = process.attempt
        nonce = f"{self.world.rng.getrandbits(48):x}"
        return BlockWriter(producer, self.world.topic, attempt.incarnation, attempt.number, nonce)

    def block_reader(self) -> FetchedBlocks:
        return self.blocks

    def consumers(self, topic: str, client: Any = None) -> Consumers:
        def make(_: Mapping[str, Any]) -> Any:
            return SimulatedConsumer(self.process, topic)

        return Consumers({}, make)

    def producers(self, topic: str, partitioner: str | None) -> SimulatedProducers:
        """The broker's model distributes by keys in a way of its own."""
        return SimulatedProducers(self.process, topic)

    def pipe(self, name: str) -> Pipe:
        end = self.process.attempt.pipes[self.process.subtask, name]
        require(end.process is self.process, "a process has its own ends")
        return end
