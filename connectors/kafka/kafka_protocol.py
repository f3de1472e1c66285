"""Requests of the Kafka protocol to the brokers, and their answers.

The one module that uses kafka-python's connection layer, in part by private names (its minor version is pinned); all
others send protocol messages through it. The library's public calls, of `kafka.admin`, were tried and are banned: its
client logs its settings with the passwords; it asks brokers one after the other, and those alone that it knew at its
start, so that a sweep could miss a transaction; one unknown transactional id hides the states of all others.
Invariants: every call ends, with an answer or an error, about within the time given; a client that failed to bring an
answer is thrown away whole, so that no state of it (a cached refusal, a stale address) outlives the fault; there is at
most one client, with one thread and one connection for each broker in use.
A `Wire` is used by one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
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
from exactlyonce.connectors.kafka.errors import UNKNOWN_TOPIC, Again, refuse, retried
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, ExactlyOnceError

T = TypeVar("T")

CONNECT_TIMEOUT_MS = 5_000
ATTEMPT_LEAST_MS = 200
"""What an attempt gets even when hardly any time is left: an attempt of no time says nothing."""
ATTEMPT_MOST_MS = 15_000
"""What it gets when there is more: an answer that was lost with its broker is asked for again."""
READ_UNCOMMITTED, READ_COMMITTED = 0, 1  # isolation levels, as requests number them
COORDINATORS_REMEMBERED = 10_000

Observe = Callable[[str, float, float], None]
"""Told of each request when its answer has come, or none will: its name, and when it began and ended, by the clock."""


class NoAnswer(Again):
    """The brokers could not be reached, or did not answer; they may have acted on the request."""


class Request(NamedTuple):
    """A protocol message, and the broker that it is for; None: any."""

    message: Any
    node_id: int | None = None


class PartitionLeader(NamedTuple):
    """The broker that leads a partition, and the id of the topic it belongs to."""

    node_id: int
    topic_id: UUID


class Places:
    """Who was right to ask the last time. What fails is looked up anew.

    Several clients of a cluster may share it, each in a thread of its own: what is forgotten is replaced, not changed.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Look everything up anew."""
        self.nodes: frozenset[int] = frozenset()
        """All brokers."""
        self.leaders: dict[tuple[str, int], PartitionLeader] = {}
        self.coordinators: dict[str, int] = {}
        """By transactional id."""

    def __bool__(self) -> bool:
        return bool(self.nodes or self.leaders or self.coordinators)


class Wire:
    """A way to ask the brokers of one cluster.

    *clock* gives seconds that only grow, *sleep* waits for seconds; a test may replace both.
    """

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
        """The result of *attempt*, made again while it raises `Again`, with growing pauses, until the time is over.

        *timeout_ms*: how long, if not as long as this client waits otherwise; there is one attempt at least.
        Raises `BrokerUnavailable`, saying what was being done and what stood in the way last.
        """
        timeout_s = (self.timeout_ms if timeout_ms is None else timeout_ms) / 1000
        deadline = self._deadline = self._clock() + timeout_s
        try:
            return retried(attempt, deadline, clock=self._clock, sleep=self._sleep)
        except Again as obstacle:
            raise self.unavailable(doing, obstacle, f"tried for {timeout_s:g} s: ") from None
        finally:
            self._deadline = None

    def once(self, attempt: Callable[[], T], doing: str, timeout_ms: int) -> T:
        """The result of *attempt*, made once; `BrokerUnavailable` if it raises `Again`, whatever the brokers did."""
        self._deadline = self._clock() + timeout_ms / 1000
        try:
            return attempt()
        except Again as obstacle:
            raise self.unavailable(doing, obstacle) from None
        finally:
            self._deadline = None

    def unavailable(self, doing: str, obstacle: Again, tried: str = "") -> BrokerUnavailable:
        """The error to raise when giving up."""
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
        """The answer to one message, or `NoAnswer`."""
        return self.ask_all([Request(message, node_id)])[0]

    def ask_all(self, requests: Sequence[Request]) -> list[Any]:
        """The answers to all, sent at once; `NoAnswer` if any is missing."""
        if self._manager is not None and self._manager.throttled:  # it would refuse the request
            self.close()
        manager = self._manager or self._connect()

        async def answers() -> list[Any]:
            futures = [self._send(manager, *request) for request in requests]
            return [await manager.wait_for(future, self._left_ms()) for future in futures]

        answered: list[Any] = self._run(answers)
        return answered

    def remembering(self, attempt: Callable[[], T]) -> T:
        """The result of *attempt*, which may go to the brokers that were right the last time; where that fails, for
        whatever reason, it is made again with what is looked up anew, and that is what counts."""
        if self.places:
            try:
                return attempt()
            except (Again, ExactlyOnceError):
                self.places.forget()
        return attempt()

    def metadata(self, topics: Iterable[str] = ()) -> Any:
        """The cluster's brokers, and these *topics* with their leaders; creates none."""
        answer = self.ask(metadata_request(topics))
        if not answer.brokers:  # the one that answers is fenced at the moment, and names none
            raise NoAnswer("no broker of the cluster is alive")
        return answer

    def metadata_of_each(self, topics: Iterable[str]) -> list[Any]:
        """What every live broker knows of *topics*: they learn of a change one after the other.

        Live are all that any of the answers names. A broker that is remembered and gone does not answer.
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
        """The metadata of each topic. Raises `TopicError` if one does not exist."""
        answers = {topic.name: topic for topic in self.metadata(names).topics}
        for name, topic in answers.items():
            refuse(topic.error_code, f"Asking for topic {name}")
        return answers

    def leaders(self, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], PartitionLeader]:
        """The broker that leads each (topic, partition). Raises `TopicError` if one does not exist."""
        wanted = list(partitions)
        topics = self.topics(sorted({topic for topic, _ in wanted})) if wanted else {}
        leaders = {}
        for name, topic in topics.items():
            for each in topic.partitions:
                leaders[name, each.partition_index] = (each.error_code, PartitionLeader(each.leader_id, topic.topic_id))
        for name, partition in wanted:
            error_code, _ = leaders.get((name, partition), (UNKNOWN_TOPIC, None))
            refuse(error_code, f"Finding the leader of {name}-{partition}")
        found = {each: leaders[each][1] for each in wanted}
        self.places.leaders.update(found)
        return found

    def leaders_remembered(self, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], PartitionLeader]:
        """As `leaders`, but those that are remembered are not asked for. Where one of them was wrong, forget `places`;
        `remembering` does."""
        wanted, known = list(partitions), self.places.leaders
        if any(each not in known for each in wanted):
            return self.leaders(wanted)
        return {each: known[each] for each in wanted}

    def coordinators(self, transactional_ids: Iterable[str]) -> dict[str, int]:
        """The broker that keeps each transactional id."""
        wanted = list(transactional_ids)
        if not wanted:
            return {}
        question = FindCoordinatorRequest(key_type=CoordinatorType.TRANSACTION.value, coordinator_keys=wanted)
        found = {}
        for each in self.ask(question).coordinators:
            refuse(each.error_code, f"Finding the coordinator of {each.key}")
            found[each.key] = each.node_id
        if len(self.places.coordinators) > COORDINATORS_REMEMBERED:
            self.places.coordinators = {}
        self.places.coordinators.update(found)
        return found

    def coordinators_remembered(self, transactional_ids: Iterable[str]) -> dict[str, int]:
        """As `coordinators`, but those that are remembered are not asked for; see `leaders_remembered`."""
        wanted, known = list(transactional_ids), self.places.coordinators
        if any(each not in known for each in wanted):
            return self.coordinators(wanted)
        return {each: known[each] for each in wanted}

    def close(self) -> None:
        """Let go of the connections, and forget `places`. The next request makes new ones."""
        net, manager = self._net, self._manager
        self._net = self._manager = None
        self.places.forget()
        if net is not None:
            if manager is not None:
                with suppress(Exception):  # a loop that crashed runs nothing more; its sockets go with it
                    net.run(manager.close)
            net.close()

    def _left_ms(self) -> float:
        """How long the current attempt may take."""
        left_ms = self.timeout_ms if self._deadline is None else (self._deadline - self._clock()) * 1000
        return min(max(ATTEMPT_LEAST_MS, left_ms), ATTEMPT_MOST_MS)

    def _send(self, manager: Any, message: Any, node_id: int | None) -> Any:
        connection = manager.get_connection(self._any(manager) if node_id is None else node_id, **_PLAIN)
        return self._observed(message, connection.send_request(message, request_timeout_ms=self._left_ms()))

    def _observed(self, message: Any, future: Any) -> Any:
        """*future*, of whose end the observer will be told."""
        if (observe := self._observe) is not None:
            name, began = type(message).__name__.removesuffix("Request"), self._clock()
            future.add_both(lambda _: observe(name, began, self._clock()))
        return future

    def _any(self, manager: Any) -> Any:
        brokers = manager.cluster.brokers()
        return brokers[self._turn % len(brokers)].node_id

    def _connect(self) -> Any:
        """A client that knows the brokers. Servers are tried in turn, one at each call."""
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
            manager.close(server)
            return manager

        net.start()
        return self._run(bootstrap)

    def _run(self, steps: Callable[[], Any]) -> Any:
        """Run *steps* on the client's thread; whatever goes wrong costs the client its life."""
        try:
            return self._net.run(steps)
        except BaseException as error:
            self.close()
            translated = self._translated(error)
            if translated is not error:
                _forget_way(error)
            raise translated from None

    def _translated(self, error: BaseException) -> BaseException:
        """What kafka-python raised, in our words; a defect, or the user's interruption, as it is."""
        servers, text = self.config.bootstrap_servers, self.config.redact(str(error))
        if isinstance(error, SaslAuthenticationFailedError | UnsupportedSaslMechanismError | AuthorizationError):
            return ConfigError(
                f"{servers} refused to let us in: {text}. Check sasl.mechanism, sasl.username and sasl.password."
            )
        if isinstance(error, IncompatibleBrokerVersion):
            return ConfigError(
                f"{servers} does not answer as a broker of Kafka 4.0 or newer does ({text}). "
                f"Name a broker's port in bootstrap.servers, not a controller's."
            )
        if isinstance(error, KafkaError | OSError):
            return NoAnswer(text or type(error).__name__)
        return error


def metadata_request(topics: Iterable[str], *, operations: bool = False) -> MetadataRequest:
    """The question for *topics* and all brokers; *operations*: also what we may do with each topic."""
    wanted = [MetadataRequest.MetadataRequestTopic(name=topic) for topic in topics]
    return MetadataRequest(
        topics=wanted, allow_auto_topic_creation=False, include_topic_authorized_operations=operations
    )


def operation_names(operations: set[int] | None) -> frozenset[str] | None:
    """Authorized operations as ACLs name them; None: the broker does not say."""
    return None if operations is None else frozenset(_OPERATIONS.get(each, str(each)) for each in operations)


_OPERATIONS = {
    2: "All", 3: "Read", 4: "Write", 5: "Create", 6: "Delete", 7: "Alter", 8: "Describe", 9: "ClusterAction",
    10: "DescribeConfigs", 11: "AlterConfigs", 12: "IdempotentWrite",
}  # fmt: skip


class _Manager(KafkaConnectionManager):  # type: ignore[misc]  # kafka-python has no types
    """Gives us a broker's last answer before the end of the connection.

    Its base drops what came together with the end: the reason why a login was refused, the answer of a broker that
    shuts down.
    """

    @property
    def throttled(self) -> bool:
        """Whether a broker has muted one of the connections for a while, because of a quota."""
        return any("throttle" in connection.paused for connection in list(self._conns.values()))

    async def _build_transport(self, node: Any, timeout_at: float | None = None) -> Any:
        transport = await super()._build_transport(node, timeout_at)
        receive = transport._sock_recv

        def receive_answer_first() -> tuple[bytes, Exception | None]:
            answer, end = receive()
            return answer, None if answer else end  # the end is seen again when there is nothing more

        transport._sock_recv = receive_answer_first
        return transport


def _forget_way(error: BaseException | None) -> None:
    """Drop the tracebacks: they would keep the client's sockets and keys until the garbage collector comes by."""
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
    """Drops the log line of a message that carries credentials: kafka-python would write them out when debugging."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not any(isinstance(each, SaslAuthenticateRequest | SaslBytesRequest) for each in arguments)


# What goes wrong is in the errors raised here; without a handler of its own, kafka-python would also print it.
logging.getLogger("kafka").addHandler(logging.NullHandler())
logging.getLogger("kafka.net.connection").addFilter(_NoCredentials())
logging.getLogger("kafka.protocol.parser").setLevel(logging.INFO)  # below that, it writes out the bytes on the wire
