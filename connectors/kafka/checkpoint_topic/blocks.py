"""Blocks in the checkpoint topic: its partitions but the first are a `BlockStorage`.

A block is written by a plain idempotent producer, and is read uncommitted. It is dropped by a tombstone, which counts
once it is committed: the decision log writes it in the transaction that finalizes a manifest without the block.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Protocol

from confluent_kafka import Consumer, Message, TopicPartition

from exactlyonce.checkpoint.block_storage import DamagedBlock, KeysWritten, Scanned, Ticket, verified_value
from exactlyonce.checkpoint.records.encoding import Block, BlockKey, encode
from exactlyonce.checkpoint.records.manifest import BlockRef, TopicInfo
from exactlyonce.connectors.kafka import client as store_client
from exactlyonce.connectors.kafka.checkpoint_topic.scan import IDLE_TIMEOUT_S, is_damaged, next_offset, read_range
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import Meaning, explained, meaning_of
from exactlyonce.pipeline.errors import BrokerUnavailable

DELIVERY_TIMEOUT_MS = 60_000
"""A block that is not durable by then fails its checkpoint."""
_GAP_BYTES_MAX = 4 * 1024 * 1024
"""The gap between two wanted blocks that is read in about the 5 ms of a seek."""
OnDelivery = Callable[[Any, Any], None]
"""Called with the error, or None, and the message that was delivered, as confluent-kafka does."""


class BlockProducer(Protocol):
    """The idempotent writer of blocks."""

    def produce(self, topic: str, value: bytes, key: str, partition: int, on_delivery: OnDelivery) -> None:
        """Send it, and return at once. Raises BufferError while the queue is full."""

    def poll(self, timeout_s: float) -> None:
        """Call the callbacks of deliveries; waits up to *timeout_s* for the first."""


class KafkaBlockProducer:
    """The `BlockProducer` of confluent-kafka."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._producer = store_client.producer(config, message_timeout_ms=DELIVERY_TIMEOUT_MS)

    @classmethod
    def connected(cls, config: Mapping[str, Any], topic: str) -> KafkaBlockProducer:
        """A producer to whom the broker has answered."""
        producer = cls(config)
        with explained(config, f"connecting to write to {topic}"):
            store_client.connect(producer._producer, topic)
        return producer

    def produce(self, topic: str, value: bytes, key: str, partition: int, on_delivery: OnDelivery) -> None:
        with explained(self._config, "writing a block"):
            self._producer.produce(topic, value, key, partition, on_delivery=on_delivery)

    def poll(self, timeout_s: float) -> None:
        with explained(self._config, "writing blocks"):
            self._producer.poll(timeout_s)


class BlockWriter:
    """The `AttemptBlocks` of one attempt of one process."""

    def __init__(self, producer: BlockProducer, topic: TopicInfo, incarnation: int, attempt: int, nonce: str) -> None:
        """*nonce*: no two processes have the same."""
        self.topic = topic
        self.incarnation = incarnation
        self.attempt = attempt
        self._nonce = nonce
        self._producer = producer
        self._unresolved: deque[Ticket] = deque()
        self._keys = KeysWritten()

    @classmethod
    def connected(cls, config: Mapping[str, Any], topic: TopicInfo, incarnation: int, attempt: int) -> BlockWriter:
        """A writer by confluent-kafka; the broker has answered."""
        return cls.of(KafkaBlockProducer.connected(config, topic.name), topic, incarnation, attempt)

    @classmethod
    def of(cls, producer: BlockProducer, topic: TopicInfo, incarnation: int, attempt: int) -> BlockWriter:
        """A writer whose keys no other has; no other writer uses *producer* meanwhile."""
        return cls(producer, topic, incarnation, attempt, secrets.token_hex(6))

    @property
    def pending(self) -> int:
        """The number of blocks that are not resolved yet."""
        return len(self._unresolved)

    @property
    def waiting(self) -> str:
        """Empty: sources and sinks already report a silent broker."""
        return ""

    def write(self, block: Block, key_group: int, part: int = 0) -> Ticket:
        """Send *block*, once for every (operator, checkpoint, key group, part), and return at once."""
        key = BlockKey(self.incarnation, block.checkpoint, block.operator, key_group, part, self.attempt, self._nonce)
        value = encode(block)
        self._keys.add(key)
        ticket = Ticket(str(key), value)
        partition = self.topic.partition_of(key_group)
        try:
            self._producer.produce(self.topic.name, value, ticket.key, partition, partial(_told, ticket))
        except BufferError as error:
            self._keys.forget(key)
            raise BrokerUnavailable(f"{self.pending} blocks wait for the broker; there is no room for more.") from error
        self._unresolved.append(ticket)
        return ticket

    def poll(self, timeout_s: float = 0.0) -> int:
        """Resolve tickets; the number still pending. To be called regularly while any is pending."""
        self._producer.poll(timeout_s)
        self._unresolved = deque(ticket for ticket in self._unresolved if not ticket.resolved)
        return self.pending

    def wait(self, timeout_s: float, look: Callable[[], None] = lambda: None, *, left: int = 0) -> None:
        """See `AttemptBlocks`. The client tries for `DELIVERY_TIMEOUT_MS` at most."""
        deadline = time.monotonic() + timeout_s
        while self.pending > left and self.poll(0.05) > left:
            look()
            if time.monotonic() > deadline:
                raise BrokerUnavailable(f"{self.pending} blocks were not written within {timeout_s:.0f} s.")


def _told(ticket: Ticket, error: Any, message: Any) -> None:
    """A block was delivered, or not. librdkafka gives no offset for a record that it takes for delivered."""
    partition, offset = message.partition(), message.offset()
    if error is not None:
        ticket.failed(error.str())
    elif partition is None or offset is None:
        ticket.failed("the broker did not say at which offset it took it")
    else:
        ticket.written(partition, offset)


class BlockReader:
    """Reads blocks by reference, wherever they lie."""

    def __init__(
        self,
        config: Mapping[str, Any],
        topic: TopicInfo,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        *,
        stays_connected: bool = False,
    ) -> None:
        """*stays_connected*: for one thread that reads a few blocks repeatedly, and closes the reader at the end."""
        self.topic = topic
        self._config = config
        self._idle_timeout_s = idle_timeout_s
        self._stays_connected = stays_connected
        self._idle: Consumer | None = None
        """A connected consumer that has read all that was assigned to it."""

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        """Each of *refs* with its block, in no particular order. Raises `DamagedBlock` for the first damaged one.

        ```python
        for ref, block in BlockReader(config, topic).fetch(refs):
            restore(block.schema, zlib.decompress(block.body))
        ```
        """
        wanted = _by_partition(refs)
        if not wanted:
            return
        while wanted:
            consumer, self._idle = self._idle or self._connected(wanted), None
            try:
                begin = [
                    TopicPartition(self.topic.name, partition, queue[0].offset) for partition, queue in wanted.items()
                ]
                consumer.assign(begin)
                yield from self._read(consumer, wanted)
            finally:
                if self._stays_connected and not wanted and self._idle is None:
                    self._idle = consumer
                else:
                    consumer.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.close()

    def _connected(self, wanted: dict[int, deque[BlockRef]]) -> Consumer:
        most = max(sum(ref.size for ref in queue) for queue in wanted.values())
        size = store_client.FETCH_SIZE_MAX if self._stays_connected else most
        return store_client.consumer(self._config, self.topic.name, "read_uncommitted", partition_bytes=size)

    def _read(self, consumer: Consumer, wanted: dict[int, deque[BlockRef]]) -> Iterator[tuple[BlockRef, Block]]:
        """Read until nothing is *wanted*, or until a damaged batch before the next wanted block."""
        begun = {queue[0] for queue in wanted.values()}
        deadline = time.monotonic() + self._idle_timeout_s
        at_end: set[int] = set()
        sought: set[BlockRef] = set()
        while wanted:
            message = consumer.poll(0.1)
            if message is not None and message.partition() in wanted:
                partition = message.partition() or 0
                queue = wanted[partition]
                if is_damaged(message):
                    _require_elsewhere(queue[0], begun, message)
                    return
                _require_there(queue[0], message)
                reached = next_offset(self._config, message)
                if reached is not None:
                    (at_end.discard if message.error() is None else at_end.add)(partition)
                    yield from _taken(queue, message, reached)
                    deadline = time.monotonic() + self._idle_timeout_s  # the caller may have taken any time
                if not queue:
                    del wanted[partition]
                    consumer.incremental_unassign([TopicPartition(self.topic.name, partition)])
                elif _is_far(queue[0], message) and queue[0] not in sought:
                    sought.add(queue[0])
                    consumer.seek(TopicPartition(self.topic.name, partition, queue[0].offset))
            if time.monotonic() > deadline:
                raise self._silent(next(iter(wanted.values()))[0], at_end)

    def _silent(self, ref: BlockRef, at_end: set[int]) -> Exception:
        """The error for *ref*, not read in time. After a change of leaders a partition may seem to end early."""
        if ref.partition in at_end:
            return DamagedBlock(f"{_named(ref)} is gone: the partition ends before it.", ref)
        return BrokerUnavailable(f"{_named(ref)} could not be read for {self._idle_timeout_s:.0f} s. Check the broker.")


def _by_partition(refs: Iterable[BlockRef]) -> dict[int, deque[BlockRef]]:
    wanted: dict[int, deque[BlockRef]] = {}
    for ref in sorted(set(refs), key=lambda ref: (ref.partition, ref.offset)):
        wanted.setdefault(ref.partition, deque()).append(ref)
    return wanted


def _require_there(ref: BlockRef, message: Message) -> None:
    error = message.error()
    if error is not None and meaning_of(error) is Meaning.REMOVED:
        raise DamagedBlock(f"{_named(ref)} is gone: the partition does not hold that offset.", ref)


def _require_elsewhere(ref: BlockRef, begun: set[BlockRef], damage: Message) -> None:
    """Raise if the reading began at *ref*: then it lies in the damaged batch. Else another reading begins there."""
    error = damage.error()
    if ref in begun and error is not None:
        raise DamagedBlock(f"{_named(ref)} is damaged: {error.str()}.", ref)


def _is_far(ref: BlockRef, message: Message) -> bool:
    """Whether a seek to *ref* is faster than reading on from *message*, by an estimate from its size."""
    if message.error() is not None:
        return False
    return (ref.offset - (message.offset() or 0) - 1) * len(message.value() or b"") > _GAP_BYTES_MAX


def _taken(queue: deque[BlockRef], message: Message, reached: int) -> Iterator[tuple[BlockRef, Block]]:
    """Take from *queue* the blocks below *reached*, up to which *message* shows the partition."""
    while queue and queue[0].offset < reached:
        ref = queue.popleft()
        if message.error() is not None or message.offset() != ref.offset:
            raise DamagedBlock(f"{_named(ref)} is gone: deleted or compacted away.", ref)
        yield ref, verified(ref, message.key(), message.value() or b"")


def verified(ref: BlockRef, key: object, value: bytes) -> Block:
    """The block of a record at the place of *ref*; `DamagedBlock` unless it is the one that was written."""
    if key != ref.key.encode():
        raise DamagedBlock(f"{_named(ref)}: another record lies there, with key {key!r}.", ref)
    return verified_value(ref, value, _named(ref))


def _named(ref: BlockRef) -> str:
    return f"Block {ref.key} at partition {ref.partition} offset {ref.offset}"


def scan_blocks(client: ClientConfig, topic: TopicInfo, start_offsets: Iterable[int]) -> Scanned:
    """The blocks from *start_offsets*, one for each partition, to the end of the topic that are not tombstoned yet.

    Records without the key of a block are ignored. A tombstone counts once it is committed: below the last
    stable offset that is known. Above it, tombstones hide nothing.
    """
    from exactlyonce.connectors.kafka.topics import Topics  # workers, which scan nothing, start without kafka-python

    refs: dict[str, BlockRef] = {}
    written_at_ms: dict[str, int] = {}
    unreadable: list[str] = []
    config = client.confluent()
    with closing(Topics(client)) as topics:
        offsets = topics.log_offsets(topic.name, range(topic.partitions))
    for partition, start in list(enumerate(start_offsets))[1:]:
        end = offsets.end[partition]
        begin, known = max(start, offsets.first[partition]), min(offsets.stable[partition], end)

        def skipped(first: int, after: int, partition: int = partition) -> None:
            unreadable.append(f"partition {partition} of {topic.name}, offsets {first} to {after - 1}")

        settled = read_range(config, topic.name, partition, begin, known, "read_committed", skipped)
        for message in settled:
            _note(refs, written_at_ms, message)
        rest = read_range(config, topic.name, partition, max(begin, known), end, "read_uncommitted", skipped)
        for message in rest:
            if message.value() is not None:
                _note(refs, written_at_ms, message)
    return Scanned(tuple(refs.values()), tuple(offsets.end.values()), tuple(unreadable), written_at_ms)


def _note(refs: dict[str, BlockRef], written_at_ms: dict[str, int], message: Message) -> None:
    """Add the next record of a partition to *refs*, and its time to *written_at_ms*, by key."""
    key, value = (message.key() or b"").decode(errors="replace"), message.value()
    refs.pop(key, None)
    written_at_ms.pop(key, None)
    if value is not None and BlockKey.parse(key) is not None:
        digest = hashlib.sha256(value).digest()
        refs[key] = BlockRef(message.partition() or 0, message.offset() or 0, key, len(value), digest)
        _, written_at_ms[key] = message.timestamp()


class TopicStorage:
    """The `BlockStorage` that keeps blocks in the pipeline's checkpoint topic."""

    def __init__(
        self, client: ClientConfig, topic: TopicInfo, *, stays_connected: bool = False, keeps_producer: bool = False
    ) -> None:
        """Nothing is connected yet. *stays_connected*: see `BlockReader`.

        *keeps_producer*: all writers share a producer. Each begins once the blocks of the one before are durable; after
        a failure the storage is closed, and begins no other.
        """
        self._client, self._topic = client, topic
        self._keeps_producer = keeps_producer
        self._producer: KafkaBlockProducer | None = None
        self._reader = BlockReader(client.confluent(), topic, stays_connected=stays_connected)

    def check(self, *, in_use: bool = False) -> None:
        """`topic.prepare_topic` has checked the topic."""

    def begin(self, incarnation: int, attempt: int) -> BlockWriter:
        producer = self._producer or KafkaBlockProducer.connected(self._client.confluent(), self._topic.name)
        if self._keeps_producer:
            self._producer = producer
        return BlockWriter.of(producer, self._topic, incarnation, attempt)

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        """The blocks by partition, in the order of their offsets."""
        return self._reader.fetch(refs)

    def since(self, ends: Iterable[int]) -> Scanned:
        """The blocks from *ends* on, by partition."""
        return scan_blocks(self._client, self._topic, ends)

    def dropped(self, refs: Iterable[BlockRef]) -> None:
        """Nothing: tombstones have dropped them."""

    def erase(self) -> None:
        """Nothing: they go with the topic."""

    def close(self) -> None:
        """Close the reader; a writer's producer ends with the writer."""
        self._producer = None
        self._reader.close()
