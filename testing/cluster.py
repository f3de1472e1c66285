"""A Kafka cluster for tests: create a topic, write to it, read the records that every read_committed reader sees.

It shares no code with the engine, so that it gives a second opinion on the engine's output.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # some are not in its stubs
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.cimpl import NewPartitions, NewTopic

from exactlyonce.connectors.embedded.broker import HOST, EmbeddedBroker, answers, free_port
from exactlyonce.connectors.kafka.errors import Again, Meaning, meaning_of
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.pipeline.retries import OF_BROKER, retried

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

LIMIT_S = 600
"""The time limit of tests: it ends tests that hang, and is far above what a slow machine needs."""
ANSWER_S = 10.0
"""The time after which an unanswered broker is asked again."""
PAUSE_S = 0.01
BY_KEY = -1

Value = bytes | str | None


class Committed(NamedTuple):
    """A record as a read_committed reader sees it."""

    key: bytes | None
    value: bytes | None
    partition: int
    offset: int
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...] = ()


class KafkaCluster:
    """The cluster at *bootstrap_servers*.

    ```python
    def test_totals(kafka, topic_name):
        orders = kafka.create_topic(f"{topic_name}-orders", partitions=2, cleanup_policy="compact")
        kafka.produce(orders, [("ann", b"1"), ("bob", b"2")])
        assert {record.value for record in kafka.read_committed(orders)} == {b"1", b"2"}
    ```
    """

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers

    def admin(self) -> AdminClient:
        """A client for operations that have no method here."""
        return AdminClient({"bootstrap.servers": self.bootstrap_servers})

    def create_topic(self, name: str, partitions: int = 1, **config: object) -> str:
        """Create a topic and return its name once the leaders of all partitions answer.

        `cleanup_policy="compact"` stands for the setting cleanup.policy.
        """
        settings = {setting.replace("_", "."): str(value) for setting, value in config.items()}
        admin = self.admin()
        admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(LIMIT_S)
        _await(lambda: _answers(admin, name, partitions), name)
        return name

    def topics(self) -> set[str]:
        """The names of all topics."""
        return {*self.admin().list_topics(timeout=LIMIT_S).topics}

    def delete_topics(self, names: Iterable[str]) -> None:
        """Delete the topics of *names* that are there; returns once they are gone."""
        admin, mine = self.admin(), {*names}
        if there := mine & self.topics():
            for deleted in admin.delete_topics([*there]).values():
                deleted.result(LIMIT_S)
            _await(lambda: not mine & self.topics(), f"The end of {', '.join(sorted(there))}")

    def produce(self, topic: str, records: Iterable[Value | tuple[Value, Value]], partition: int = BY_KEY) -> None:
        """Write values or (key, value) pairs in order; returns once all are durable."""
        failures: list[KafkaError] = []
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "enable.idempotence": True,
                "max.in.flight": 1,  # else it may lose records where a leader is new; see docs/settings.md
                "topic.metadata.propagation.max.ms": 2000,  # how long a missing topic may turn up yet
            }
        )
        for _ in range(2):  # asks a bootstrap server, then the broker: else the first record waits half a second
            producer.list_topics(topic, timeout=LIMIT_S)
        for record in records:
            key, value = record if isinstance(record, tuple) else (None, record)
            while not _accepted(producer, topic, key, value, partition, failures):
                producer.poll(1)
        if producer.flush(LIMIT_S) or failures:
            raise AssertionError(f"{topic}: not everything could be written: {failures[:3] or 'no answer'}")

    def configure_topic(self, topic: str, **config: object) -> None:
        """Change settings of a topic, written as for `create_topic`; brokers apply them a little later."""
        entries = [
            ConfigEntry(name.replace("_", "."), str(value), incremental_operation=AlterConfigOpType.SET)
            for name, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        admin = self.admin()
        admin.incremental_alter_configs([resource])[resource].result(LIMIT_S)

    def add_partitions(self, topic: str, partitions: int) -> None:
        """Raise the number of the topic's partitions; returns once the leaders of all of them answer."""
        admin = self.admin()
        admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(LIMIT_S)
        _await(lambda: _answers(admin, topic, partitions), f"Partition {partitions - 1} of {topic}")

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        """Delete the records below an offset of each partition (-1: all), as retention would.

        The topic's cleanup.policy must include "delete"; a call of `configure_topic` just before will do.
        """
        admin = self.admin()
        _await(lambda: _deleted(admin, topic, before), f"The right to delete records of {topic}")

    def read_committed(self, topic: str, timeout_s: float = LIMIT_S) -> list[Committed]:
        """All records that a read_committed reader sees up to the current end, by partition and offset."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": "exactlyonce-independent-reader",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 10,
            }
        )
        try:
            return _read(consumer, topic, timeout_s)
        finally:
            consumer.close()


class OwnCluster(KafkaCluster):
    """A cluster of one embedded broker that the test may stop, kill and restart."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        super().__init__(broker.bootstrap_servers)
        self.broker = broker


def _answers(admin: AdminClient, topic: str, partitions: int) -> bool:
    """Whether the leader of every partition answers; metadata may name leaders that do not know it yet.

    The library does not look for a partition missing from its metadata, and may wait for it for minutes.
    """
    latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # the library's own lack
    wanted = {TopicPartition(topic, partition): latest for partition in range(partitions)}
    try:
        if len(admin.list_topics(topic, ANSWER_S).topics[topic].partitions) < partitions:
            admin.poll(PAUSE_S)
            return False
        for future in admin.list_offsets(wanted, request_timeout=ANSWER_S).values():
            future.result(LIMIT_S)
    except KafkaException:
        admin.poll(PAUSE_S)  # a refusal comes at once
        return False
    return True


def _deleted(admin: AdminClient, topic: str, before: Mapping[int, int]) -> bool:
    """Delete the records; False: the topic's former policy still forbids it."""
    places = [TopicPartition(topic, partition, offset) for partition, offset in before.items()]
    try:
        for future in admin.delete_records(places).values():
            future.result(LIMIT_S)
    except KafkaException as problem:
        if problem.args[0].code() != KafkaError.POLICY_VIOLATION:
            raise
        admin.poll(PAUSE_S)
        return False
    return True


def _accepted(
    producer: Producer, topic: str, key: Value, value: Value, partition: int, failures: list[KafkaError]
) -> bool:
    """Queue a record; False: the producer's queue is full."""

    def report(error: KafkaError | None, message: Message) -> None:
        if error:
            failures.append(error)

    try:
        producer.produce(topic, value, key, partition, on_delivery=report)
    except BufferError:
        return False
    return True


def _read(consumer: Consumer, topic: str, timeout_s: float) -> list[Committed]:
    deadline = time.monotonic() + timeout_s
    partitions = sorted(consumer.list_topics(topic, timeout=timeout_s).topics[topic].partitions)
    until_then = partial(retried, deadline_s=deadline, clock=time.monotonic, sleep=Event().wait)
    ends = {p: until_then(partial(_end, consumer, topic, p, timeout_s), Again, OF_BROKER) for p in partitions}
    consumer.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in partitions])
    unread, records = set(partitions), []
    while unread:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{topic}: partitions {sorted(unread)} were not read to their end in {timeout_s} s.")
        # What is there is taken at once: a call that could still take more would wait for it.
        for message in [*consumer.consume(1, 0.1), *consumer.consume(1000, 0)]:
            error = message.error()
            if error and meaning_of(error) is Meaning.PASSING:
                continue
            partition, offset = _position(message)
            if error or offset + 1 >= ends[partition]:
                unread.discard(partition)
            if not error and offset < ends[partition]:
                headers: Any = tuple(message.headers() or ())
                time_ms = message.timestamp()[1]
                records.append(Committed(message.key(), message.value(), partition, offset, time_ms, headers))
    return sorted(records, key=lambda record: (record.partition, record.offset))


def _end(consumer: Consumer, topic: str, partition: int, timeout_s: float) -> int:
    """The offset after the last record. A partition that was just made may have no leader yet."""
    try:
        ends: tuple[int, int] = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=timeout_s)
    except KafkaException as error:
        if meaning_of(error.args[0]) is Meaning.PASSING:
            raise Again(f"{topic}[{partition}]: {error}") from error
        raise
    return ends[1]


def _position(message: Message) -> tuple[int, int]:
    """Partition and offset of a record or of a partition's end; other events raise."""
    error, partition, offset = message.error(), message.partition(), message.offset()
    if error and error.code() != KafkaError._PARTITION_EOF:
        raise KafkaException(error)
    assert partition is not None
    assert offset is not None
    return partition, offset


def _await(condition: Callable[[], bool], what: str) -> None:
    """Wait until all brokers know of a change that one of them has confirmed."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not appear in {LIMIT_S} s.")


INTERNAL = "INTERNAL://127.0.0.1:9094"
"""The listener at which the broker reaches itself."""


@contextlib.contextmanager
def kafka_container(image: str) -> Iterator[KafkaCluster]:
    """Run *image* by testcontainers and yield the cluster once it answers; the container is removed at the end.

    The image is built in docker/kafka: it runs the broker on port 9092, which advertises the published address of the
    loopback interface.

    Raises `BrokerUnavailable` without a Docker engine or the image, or if the broker does not come up.
    """
    from docker.errors import DockerException
    from testcontainers.core.config import testcontainers_config
    from testcontainers.core.network import Network

    address = f"{HOST}:{free_port()}"
    # Its reaper is an image to be pulled from a registry; the container is removed here, and nothing is pulled.
    testcontainers_config.ryuk_disabled = True
    with contextlib.ExitStack() as stack:
        try:
            # A network of its own: what another Docker engine left in the usual one would be in the way.
            network = stack.enter_context(Network())
            container = stack.enter_context(_container(image, address).with_network(network))
        except DockerException as problem:
            raise BrokerUnavailable(
                f"No container of {image} could be started: {problem}. Docker must run, and the image must be there: "
                "`make image` in the repository of exactlyonce makes it."
            ) from problem
        deadline = time.monotonic() + LIMIT_S
        while not answers(address, timeout_s=1):
            container.reload()
            if container.status != "running" or time.monotonic() > deadline:
                log = b"".join(container.get_logs()).decode(errors="replace")
                raise BrokerUnavailable(
                    f"The broker in the container of {image} did not come up at {address}; the container is "
                    f"{container.status}:\n{log[-2000:]}"
                )
        yield KafkaCluster(address)


def _container(image: str, address: str) -> DockerContainer:
    from testcontainers.core.container import DockerContainer

    container = DockerContainer(image)
    container.with_command(["--override", f"advertised.listeners=PLAINTEXT://{address},{INTERNAL}"])
    host, port = address.split(":")
    container.ports["9092/tcp"] = (host, int(port))  # type: ignore[assignment]  # as the engine's client takes it
    return container
