"""Requests to brokers that are not there, do not answer, or are none."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kafka.protocol.metadata import MetadataRequest

from exactlyonce.connectors.embedded.broker import free_port
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import Again, NoAnswer, Wire, refuse
from exactlyonce.pipeline.errors import BrokerRefused, BrokerUnavailable, ConfigError, TopicError


class Time:
    """Time that passes only by waiting."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waited_ms: list[int] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.waited_ms.append(round(duration_s * 1000))
        self.now_s += duration_s


def wire_at(address: str, timeout_ms: int = 1_000, **settings: str) -> Wire:
    dotted = {name.replace("_", "."): value for name, value in settings.items()}
    return Wire(ClientConfig({"bootstrap.servers": address, **dotted}), timeout_ms=timeout_ms)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def holdings() -> tuple[int, int]:
    """Threads and open descriptors of this process. What other tests have left may go at any time."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def assert_nothing_left(before: tuple[int, int]) -> None:
    """No more than *before*."""
    assert all(now <= then for now, then in zip(holdings(), before, strict=True))


class TestRetries:
    """How often and how long an attempt is made."""

    def test_pauses_double(self) -> None:
        """The pauses grow to a second, and the last ends with the time given."""
        passing = Time()
        config = ClientConfig({"bootstrap.servers": "127.0.0.1:1"})
        wire = Wire(config, timeout_ms=4_000, clock=passing, sleep=passing.sleep)

        def attempt() -> None:
            raise Again("the broker is busy")

        with pytest.raises(BrokerUnavailable, match=r"Waiting, for 4 s, failed at .*the broker is busy"):
            wire.retrying(attempt, "Waiting")
        assert passing.waited_ms == [5, 10, 20, 40, 80, 160, 320, 640, 1_000, 1_000, 725]

    def test_it_ends_with_success(self) -> None:
        """The first result ends it, and other errors pass through at once."""
        passing = Time()
        wire = Wire(
            ClientConfig({"bootstrap.servers": "127.0.0.1:1"}), timeout_ms=4_000, clock=passing, sleep=passing.sleep
        )
        outcomes: Iterator[Exception | int] = iter([Again("not yet"), Again("not yet"), 7, ValueError("a defect")])

        def attempt() -> int:
            outcome = next(outcomes)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        assert wire.retrying(attempt, "Waiting") == 7
        with pytest.raises(ValueError, match="a defect"):
            wire.retrying(attempt, "Waiting")
        assert passing.waited_ms == [5, 10]


class TestNobodyThere:
    """An error in time, that says what to do, and nothing left behind."""

    @pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
    def test_a_server_that_says_nothing(self, silent: str, protocol: str) -> None:
        """A connection without an answer is given up."""
        self.fails(wire_at(silent, security_protocol=protocol), f"for 1 s, failed at {silent}.*\\({protocol}\\)")

    def test_nobody_listens(self) -> None:
        """A refused connection is tried again until the time is over."""
        self.fails(wire_at(f"127.0.0.1:{free_port()}"), "ECONNREFUSED.*bootstrap.servers")

    def test_no_such_host(self) -> None:
        """A name that does not resolve is told as such."""
        self.fails(wire_at("no-such-host.invalid:9092"), "DNS")

    @staticmethod
    def fails(wire: Wire, message: str) -> None:
        gc.collect()
        before = holdings()
        gc.disable()  # so that what is left is seen
        try:
            with pytest.raises(BrokerUnavailable, match=message):
                wire.retrying(wire.metadata, "Asking")
            assert_nothing_left(before)
        finally:
            gc.enable()


class TestMemory:
    """Places that were right the last time."""

    def test_without_memory_there_is_one_attempt(self) -> None:
        """Where nothing is remembered, what an attempt raises counts."""
        attempts = iter([TopicError("gone")])

        def attempt() -> None:
            raise next(attempts)

        with pytest.raises(TopicError, match="gone"):
            wire_at("127.0.0.1:1").remembering(attempt)

    @pytest.mark.parametrize("stale", [Again("it moved"), TopicError("unknown there"), BrokerRefused("no leader")])
    def test_what_fails_by_memory_is_tried_without(self, stale: Exception) -> None:
        """What a remembered broker refuses proves nothing: all is forgotten, and the second answer counts."""
        wire = wire_at("127.0.0.1:1")
        wire.places.nodes = frozenset({1})
        outcomes: Iterator[Exception | int] = iter([stale, 7])

        def attempt() -> int:
            outcome = next(outcomes)
            if isinstance(outcome, Exception):
                raise outcome
            assert not wire.places
            return outcome

        assert wire.remembering(attempt) == 7

    def test_a_client_that_failed_takes_its_memory_along(self) -> None:
        """After a failure nothing is remembered: no stale address outlives it."""
        wire = wire_at(f"127.0.0.1:{free_port()}", timeout_ms=10)
        wire.places.nodes = frozenset({1})
        with pytest.raises(NoAnswer):
            wire.metadata()
        assert not wire.places


def test_error_codes() -> None:
    """A broker's error becomes the error that says whose fault it is."""
    refuse(0, "Asking")
    for code, error, message in (
        (3, TopicError, "no such topic"),
        (100, TopicError, "no such topic"),
        (53, ConfigError, "ACL"),
        (29, ConfigError, "ACL"),
        (16, Again, "NotCoordinator"),
        (6, Again, "NotLeader"),
        (-1, Again, "UnknownError"),
        (42, BrokerRefused, r"Asking failed: the broker answers InvalidRequestError \(42\).*run the same again"),
    ):
        with pytest.raises(error, match=message):
            refuse(code, "Asking")


@pytest.mark.broker
class TestABroker:
    """What a wire to a real broker does."""

    def test_the_second_server_is_tried(self, kafka: Any) -> None:
        """One server of several is enough."""
        wire = wire_at(f"127.0.0.1:{free_port()},{kafka.bootstrap_servers},127.0.0.1:{free_port()}", 10_000)
        for _ in range(4):
            assert wire.retrying(wire.metadata, "Asking").brokers
            wire.close()

    def test_tls_to_a_plain_port(self, kafka: Any) -> None:
        """The error names the protocol that the port does not speak."""
        wire = wire_at(kafka.bootstrap_servers, security_protocol="SSL")
        with pytest.raises(BrokerUnavailable, match=r"SSL.*security.protocol \(SSL\) is what that port speaks"):
            wire.retrying(wire.metadata, "Asking")

    def test_it_leaves_nothing_behind(self, kafka: Any) -> None:
        """A closed wire has no thread and no descriptor, and opens again when asked."""
        gc.collect()
        before = holdings()
        wire = wire_at(kafka.bootstrap_servers, 10_000)
        for _ in range(50):
            assert wire.metadata().brokers
            assert threading.active_count() <= before[0] + 1
            wire.close()
        gc.collect()
        assert_nothing_left(before)

    def test_a_failed_client_is_thrown_away(self, kafka: Any) -> None:
        """After a question to a broker that does not exist, the next question has a fresh client."""
        wire = wire_at(kafka.bootstrap_servers, 10_000)
        with pytest.raises(NoAnswer, match="12345"):
            wire.ask(MetadataRequest(topics=[]), 12345)
        assert wire.metadata().brokers
        wire.close()
