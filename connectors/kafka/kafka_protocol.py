"""Requests of the Kafka protocol to the brokers, and their answers.

This module alone uses kafka-python's connection layer, in part by private names (its minor version is pinned). Its
`kafka.admin` is banned: it logs passwords; it asks only the brokers known at its start, one by one; one unknown
transactional id hides the states of all others.
Invariants: every call ends about within its timeout, with an answer or an error; a client without an answer is
discarded, so that no state of it (a cached refusal, a stale address) outlives the fault; there is at most one client,
with one thread and one connection for each broker in use. A `Wire` is used by one thread at a time.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from kafka.errors import (
    AuthorizationError,
    IncompatibleBrokerVersion,
    KafkaError,
    SaslAuthenticationFailedError,
    UnsupportedSaslMechanismError,
)
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest, MetadataRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslBytesRequest

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import UNKNOWN_TOPIC, Again, refuse
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, ExactlyOnceError
from exactlyonce.pipeline.retries import OF_BROKER, retried

T = TypeVar("T")

CONNECT_TIMEOUT_MS = 5_000
ATTEMPT_LEAST_MS = 200
"""The shortest timeout of an attempt, however little time is left."""
ATTEMPT_MOST_MS = 15_000
"""The longest timeout of an attempt: an answer that was lost with its broker is asked for again."""
READ_UNCOMMITTED, READ_COMMITTED = 0, 1  # isolation levels, as requests number them
COORDINATORS_REMEMBERED = 10_000
_ERRNO = re.compile(r"KafkaConnectionError: (\d+) E[A-Z]+")
"""A failed connection, as kafka-python has it: "KafkaConnectionError: 111 ECONNREFUSED"."""

Observe = Callable[[str, float, float], None]
"""Called with the name, begin and end (by the clock) of each request, once it is answered or has failed."""


class NoAnswer(Again):
    """The brokers did not answer; they may have acted on the request."""


class Request(NamedTuple):
    """A protocol message and its broker; None: any."""

    message: Any
    node_id: int | None = None


class PartitionLeader(NamedTuple):
    """The broker that leads a partition, and the id of the topic."""

    node_id: int
    topic_id: UUID


class Places:
    """A cache of brokers, leaders and coordinators, cleared after a failure.

    Several clients, each in a thread of its own, may share it: `forget` replaces the dicts, and changes none.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.nodes: frozenset[int] = frozenset()
        """All brokers."""
        self.leaders: dict[tuple[str, int], PartitionLeader] = {}
        self.coordinators: dict[str, int] = {}
        """By transactional id."""

    def __bool__(self) -> bool:
        return bool(self.nodes or self.leaders or self.coordinators)


class Wire:
    """The requests to one cluster. *clock* gives monotonic seconds, *sleep* waits for seconds."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        timeout_ms: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        observe: Observe | None = None,
        places: Places | None = None,
    ) -> None:
        self.config, self.timeout_ms = config, timeout_ms
        self._clock, self._sleep, self._observe = clock, sleep, observe
        self._net: Any = None
        self._manager: Any = None
        self._turn = 0
        self._deadline: float | None = None
        self.places = Places() if places is None else places

    def retrying(self, attempt: Callable[[], T], doing: str, *, timeout_ms: int | None = None) -> T:
        """The result of *attempt*, retried on `Again` until *timeout_ms*, the client's own by default.

        Raises `BrokerUnavailable` with the operation and its last obstacle.
        """
        timeout_s = (self.timeout_ms if timeout_ms is None else timeout_ms) / 1000
        deadline = self._deadline = self._clock() + timeout_s
        try:
            return retried(attempt, Again, OF_BROKER, deadline, clock=self._clock, sleep=self._sleep)
        except Again as obstacle:
            raise self.unavailable(doing, obstacle, f"tried for {timeout_s:g} s: ") from None
        finally:
            self._deadline = None

    def once(self, attempt: Callable[[], T], doing: str, timeout_ms: int) -> T:
        """The result of one *attempt*; `BrokerUnavailable` if it raises `Again`."""
        self._deadline = self._clock() + timeout_ms / 1000
        try:
            return attempt()
        except Again as obstacle:
            raise self.unavailable(doing, obstacle) from None
        finally:
            self._deadline = None

    def unavailable(self, doing: str, obstacle: Again, tried: str = "") -> BrokerUnavailable:
        servers, reason = self.config.bootstrap_servers, self.config.redact(str(obstacle))
        if not isinstance(obstacle, NoAnswer):
            return BrokerUnavailable(
                f"{doing} failed at {servers} ({tried}{reason}). The brokers answer, so this may pass: try again, or "
                f"see their logs."
            )
        return BrokerUnavailable(
            f"{doing} failed: no broker answers at {servers} ({tried}{reason}). Check that the brokers run, that "
            f"bootstrap.servers names them, and that their port speaks {self.config.protocol} (security.protocol); "
            f"then try again."
        )

    def ask(self, message: Any, node_id: int | None = None) -> Any:
        return self.ask_all([Request(message, node_id)])[0]

    def ask_all(self, requests: Sequence[Request]) -> list[Any]:
        """The answers to all requests, sent at once; raises `NoAnswer` if any is missing."""
        if self._manager is not None and self._manager.throttled:  # it would refuse the request
            self.close()
        manager = self._manager or self._connect()

        async def answers() -> list[Any]:
            futures = [self._send(manager, *request) for request in requests]
            return [await manager.wait_for(future, self._left_ms()) for future in futures]

        answered: list[Any] = self._run(answers)
        return answered

    def remembering(self, attempt: Callable[[], T]) -> T:
        """The result of *attempt* with remembered brokers. If it fails, retry once with fresh metadata."""
        if self.places:
            try:
                return attempt()
            except (Again, ExactlyOnceError):
                self.places.forget()
        return attempt()

    def metadata(self, topics: Iterable[str] = ()) -> Any:
        """The cluster's brokers, and these *topics* with their leaders; creates no topic."""
        answer = self.ask(metadata_request(topics))
        if not answer.brokers:  # the one that answers is fenced at the moment, and names none
            raise NoAnswer("no broker of the cluster is alive")
        return answer

    def metadata_of_each(self, topics: Iterable[str]) -> list[Any]:
        """The metadata of *topics* at every live broker: brokers learn of a change one after the other.

        A broker is live if any answer names it. A remembered broker that is gone does not answer.
        """
        nodes = self.places.nodes or {broker.node_id for broker in self.metadata().brokers}
        question = metadata_request(topics)
        answers = self.ask_all([Request(question, node) for node in sorted(nodes)])
        live = frozenset(broker.node_id for answer in answers for broker in answer.brokers)
        self.places.nodes = live if live <= nodes else frozenset()
        if not live <= nodes:
            raise Again("a broker joined the cluster while the others were being asked")
        return answers

    def topics(self, names: Iterable[str]) -> dict[str, Any]:
        """The metadata of each topic. Raises `TopicError`, which names all that do not exist."""
        answers = {topic.name: topic for topic in self.metadata(names).topics}
        if missing := [name for name, topic in answers.items() if topic.error_code == UNKNOWN_TOPIC]:
            refuse(UNKNOWN_TOPIC, f"Asking for topic {', '.join(sorted(missing))}")
        for name, topic in answers.items():
            refuse(topic.error_code, f"Asking for topic {name}")
        return answers

    def leaders(self, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], PartitionLeader]:
        """The broker that leads each (topic, partition). Raises `TopicError` if one does not exist."""
        wanted = list(partitions)
        return self._led(self.topics(sorted({topic for topic, _ in wanted})), wanted) if wanted else {}

    def leaders_of(self, name: str) -> dict[tuple[str, int], PartitionLeader]:
        """As `leaders`, of all partitions of a topic."""
        topics = self.topics([name])
        return self._led(topics, [(name, partition.partition_index) for partition in topics[name].partitions])

    def _led(
        self, topics: Mapping[str, Any], wanted: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], PartitionLeader]:
        """The leaders of *wanted* by the metadata of their topics."""
        codes: dict[tuple[str, int], int] = {}
        leaders: dict[tuple[str, int], PartitionLeader] = {}
        for name, topic in topics.items():
            for entry in topic.partitions:
                place = name, entry.partition_index
                codes[place], leaders[place] = entry.error_code, PartitionLeader(entry.leader_id, topic.topic_id)
        for name, partition in wanted:
            refuse(codes.get((name, partition), UNKNOWN_TOPIC), f"Finding the leader of {name}-{partition}")
        led = {place: leaders[place] for place in wanted}
        self.places.leaders.update(led)
        return led

    def leaders_remembered(self, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], PartitionLeader]:
        """As `leaders`, from the cache if it has all. After a wrong one, forget `places`, as `remembering` does."""
        wanted, known = list(partitions), self.places.leaders
        if any(place not in known for place in wanted):
            return self.leaders(wanted)
        return {place: known[place] for place in wanted}

    def coordinators(self, transactional_ids: Iterable[str]) -> dict[str, int]:
        """The coordinator of each transactional id."""
        wanted = list(transactional_ids)
        if not wanted:
            return {}
        question = FindCoordinatorRequest(key_type=CoordinatorType.TRANSACTION.value, coordinator_keys=wanted)
        found = {}
        for coordinator in self.ask(question).coordinators:
            refuse(coordinator.error_code, f"Finding the coordinator of {coordinator.key}")
            found[coordinator.key] = coordinator.node_id
        if len(self.places.coordinators) > COORDINATORS_REMEMBERED:
            self.places.coordinators = {}
        self.places.coordinators.update(found)
        return found

    def coordinators_remembered(self, transactional_ids: Iterable[str]) -> dict[str, int]:
        """As `coordinators`, from the cache if it has all; see `leaders_remembered`."""
        wanted, known = list(transactional_ids), self.places.coordinators
        if any(name not in known for name in wanted):
            return self.coordinators(wanted)
        return {name: known[name] for name in wanted}

    def close(self) -> None:
        """Close the connections, and forget `places`. The next request opens new ones."""
        net, manager = self._net, self._manager
        self._net = self._manager = None
        self.places.forget()
        if net is not None:
            if manager is not None:
                with suppress(Exception):  # a crashed loop runs nothing more; its sockets go with it
                    net.run(manager.close)
            net.close()

    def _left_ms(self) -> float:
        left_ms = self.timeout_ms if self._deadline is None else (self._deadline - self._clock()) * 1000
        return min(max(ATTEMPT_LEAST_MS, left_ms), ATTEMPT_MOST_MS)

    def _send(self, manager: Any, message: Any, node_id: int | None) -> Any:
        connection = manager.get_connection(self._any(manager) if node_id is None else node_id, **_PLAIN)
        return self._observed(message, connection.send_request(message, request_timeout_ms=self._left_ms()))

    def _observed(self, message: Any, future: Any) -> Any:
        if (observe := self._observe) is not None:
            name, began = type(message).__name__.removesuffix("Request"), self._clock()
            future.add_both(lambda _: observe(name, began, self._clock()))
        return future

    def _any(self, manager: Any) -> Any:
        brokers = manager.cluster.brokers()
        return brokers[self._turn % len(brokers)].node_id

    def _connect(self) -> Any:
        """A client that knows the brokers. Each call tries the next bootstrap server."""
        arguments = {**_LIMITS, "request_timeout_ms": self.timeout_ms, **self.config.kafka_python()}
        self._net = net = NetworkSelector(client_id=arguments.get("client_id", "exactlyonce"))
        self._turn += 1

        async def bootstrap() -> Any:
            manager = self._manager = _Manager(net, **arguments)
            servers = manager.cluster.bootstrap_brokers()
            server = servers[self._turn % len(servers)].node_id
            timeout_ms = min(CONNECT_TIMEOUT_MS, self._left_ms())
            connection = manager.get_connection(server, timeout_ms=timeout_ms, **_PLAIN)
            await manager.wait_for(connection.init_future, timeout_ms)
            message = MetadataRequest(topics=[])
            question = self._observed(message, connection.send_request(message, request_timeout_ms=timeout_ms))
            manager.cluster.update_metadata(await manager.wait_for(question, timeout_ms))
            if not manager.cluster.brokers():
                raise NoAnswer("the server knows of no broker yet")
            manager.settle(servers[self._turn % len(servers)], connection)
            return manager

        net.start()
        return self._run(bootstrap)

    def _run(self, steps: Callable[[], Any]) -> Any:
        """Run *steps* on the client's thread; any failure closes the client."""
        try:
            return self._net.run(steps)
        except BaseException as error:
            self.close()
            translated = self._translated(error)
            if translated is not error:
                _forget_way(error)
            raise translated from None

    def _translated(self, error: BaseException) -> BaseException:
        """Our error for an exception of kafka-python; a defect, or an interruption, as it is."""
        servers, text = self.config.bootstrap_servers, self.config.redact(str(error))
        if isinstance(error, SaslAuthenticationFailedError | UnsupportedSaslMechanismError | AuthorizationError):
            return ConfigError(
                f"{servers} refused the login: {text}. Check sasl.mechanism, sasl.username and sasl.password."
            )
        if isinstance(error, IncompatibleBrokerVersion):
            return ConfigError(
                f"{servers} does not answer as a broker of Kafka 4.0 or newer does ({text}). "
                f"Name a broker's port in bootstrap.servers, not a controller's."
            )
        if isinstance(error, KafkaError | OSError):
            spelt_out = _ERRNO.sub(lambda number: os.strerror(int(number[1])), text)
            return NoAnswer(spelt_out or type(error).__name__)
        return error


def metadata_request(topics: Iterable[str] | None, *, operations: bool = False) -> MetadataRequest:
    """The question for *topics* (None: all) and all brokers; *operations*: also what we may do with each topic."""
    wanted = None if topics is None else [MetadataRequest.MetadataRequestTopic(name=topic) for topic in topics]
    return MetadataRequest(
        topics=wanted, allow_auto_topic_creation=False, include_topic_authorized_operations=operations
    )


def operation_names(operations: set[int] | None) -> frozenset[str] | None:
    """Authorized operations as ACLs name them; None: the broker does not say."""
    if operations is None:
        return None
    return frozenset(_OPERATIONS.get(number, str(number)) for number in operations)


_OPERATIONS = {
    2: "All", 3: "Read", 4: "Write", 5: "Create", 6: "Delete", 7: "Alter", 8: "Describe", 9: "ClusterAction",
    10: "DescribeConfigs", 11: "AlterConfigs", 12: "IdempotentWrite",
}  # fmt: skip


class _Manager(KafkaConnectionManager):  # type: ignore[misc]  # kafka-python has no types
    """Delivers a broker's last answer before the end of the connection.

    The base class drops an answer that comes together with the end: the reason of a refused login, the answer of a
    broker that shuts down.
    """

    @property
    def throttled(self) -> bool:
        """Whether a broker has muted a connection for a while, because of a quota."""
        return any("throttle" in connection.paused for connection in list(self._conns.values()))

    def settle(self, server: Any, connection: Any) -> None:
        """Keep *connection*, to a bootstrap *server*, as that to the broker of its address; close it if none has it, or
        if a quota has muted it."""
        address = server.host, server.port
        node_id = next((one.node_id for one in self.cluster.brokers() if (one.host, one.port) == address), None)
        if node_id is None or connection.paused:
            self.close(server.node_id)
            return
        self._conns[node_id] = self._conns.pop(server.node_id)
        connection.node_id = node_id
        connection.close_future.add_both(lambda _: self._conns.pop(node_id, None))

    async def _build_transport(self, node: Any, timeout_at: float | None = None) -> Any:
        transport = await super()._build_transport(node, timeout_at)
        receive = transport._sock_recv

        def receive_answer_first() -> tuple[bytes, Exception | None]:
            answer, end = receive()
            return answer, None if answer else end  # the end is seen again when there is nothing more

        transport._sock_recv = receive_answer_first
        return transport


def _forget_way(error: BaseException | None) -> None:
    """Drop the tracebacks: they would keep the client's sockets and keys until the garbage collector runs."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


_LIMITS = {
    # Many requests may wait on one connection: the manager would otherwise refuse the sixth.
    "max_in_flight_requests_per_connection": 10_000,
    "receive_message_max_bytes": 2**31 - 1,
    "client_id": "exactlyonce",
}
_PLAIN = {
    # No background refresh of metadata: what is stale goes with the client.
    "refresh_metadata_on_err": False,
}


class _NoCredentials(logging.Filter):
    """Drops the log lines of messages with credentials, which kafka-python would write at level DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not any(isinstance(argument, SaslAuthenticateRequest | SaslBytesRequest) for argument in arguments)


# Failures are raised here; without a handler of its own, kafka-python would also print them.
logging.getLogger("kafka").addHandler(logging.NullHandler())
logging.getLogger("kafka.net.connection").addFilter(_NoCredentials())
logging.getLogger("kafka.protocol.parser").setLevel(logging.INFO)  # at level DEBUG it writes the bytes on the wire
