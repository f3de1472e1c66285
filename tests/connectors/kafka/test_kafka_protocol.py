"""Requests to brokers that are not there, do not answer, or are none."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from kafka.protocol.metadata import MetadataRequest
from quotas import quota
from waiting import until

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import Again
from exactlyonce.connectors.kafka.kafka_protocol import NoAnswer, Wire, _Manager
from exactlyonce.pipeline.errors import BrokerRefused, BrokerUnavailable, TopicError
from exactlyonce.testing.cluster import LIMIT_S

LONG_MS = LIMIT_S * 1000
NOWHERE = ClientConfig({"bootstrap.servers": "127.0.0.1:1"})


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.waited_ms: list[int] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.waited_ms.append(round(duration_s * 1000))
        self.now_s += duration_s


def wire_at(address: str, timeout_ms: int = 100, **settings: str) -> Wire:
    dotted = {name.replace("_", "."): value for name, value in settings.items()}
    return Wire(ClientConfig({"bootstrap.servers": address, **dotted}), timeout_ms=timeout_ms)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def holdings() -> tuple[int, int]:
    """Threads and open descriptors of this process. Those that other tests have left may go at any time."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def await_nothing_left(before: tuple[int, int]) -> None:
    """No more than *before*: what is left stays, and what a client of another test opens meanwhile does not."""
    until(lambda: all(now <= then for now, then in zip(holdings(), before, strict=True)), told=holdings)


class TestRetries:
    def test_pauses_double(self) -> None:
        passing = Time()
        wire = Wire(NOWHERE, timeout_ms=4_000, clock=passing, sleep=passing.sleep)
        attempt = Mock(side_effect=Again("the broker is busy"))
        with pytest.raises(BrokerUnavailable, match=r"Waiting failed at .*tried for 4 s: the broker is busy"):
            wire.retrying(attempt, "Waiting")
        assert passing.waited_ms == [5, 10, 20, 40, 80, 160, 320, 640, 1_000, 1_000, 725]

    def test_it_ends_with_success(self) -> None:
        passing = Time()
        wire = Wire(NOWHERE, timeout_ms=4_000, clock=passing, sleep=passing.sleep)
        attempt = Mock(side_effect=[Again("not yet"), Again("not yet"), 7, ValueError("a defect")])
        assert wire.retrying(attempt, "Waiting") == 7
        with pytest.raises(ValueError, match="a defect"):
            wire.retrying(attempt, "Waiting")
        assert passing.waited_ms == [5, 10]


class TestNobodyThere:
    """An error in time, that says what to do, and nothing left behind."""

    @pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
    def test_a_server_that_says_nothing(self, silent: str, protocol: str) -> None:
        said = f"no broker answers at {silent} .tried for 0.1 s: .*speaks {protocol} "
        self.fails(wire_at(silent, security_protocol=protocol), said)

    @pytest.mark.usefixtures("unhurried")
    def test_nobody_listens(self, nobody: str) -> None:
        self.fails(wire_at(nobody), "Connection refused.*bootstrap.servers")

    @pytest.mark.usefixtures("unhurried")
    def test_no_such_host(self) -> None:
        self.fails(wire_at("no-such-host.invalid:9092"), "DNS")

    @staticmethod
    def fails(wire: Wire, message: str) -> None:
        gc.collect()
        before = holdings()
        gc.disable()  # so that what is left is seen
        try:
            with pytest.raises(BrokerUnavailable, match=message):
                wire.retrying(wire.metadata, "Asking")
            await_nothing_left(before)
        finally:
            gc.enable()


class TestMemory:
    @pytest.mark.parametrize("stale", [Again("it moved"), TopicError("unknown there"), BrokerRefused("no leader")])
    def test_what_fails_by_memory_is_tried_without(self, stale: Exception) -> None:
        """A remembered broker's refusal proves nothing: all is forgotten, and the second answer counts."""
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


class TestABroker:
    def test_the_second_server_is_tried(self, kafka: Any, nobody: str) -> None:
        wire = wire_at(f"{nobody},{kafka.bootstrap_servers},{nobody}", LONG_MS)
        for _ in range(4):
            assert wire.retrying(wire.metadata, "Asking").brokers
            wire.close()

    @pytest.mark.usefixtures("unhurried")
    def test_tls_to_a_plain_port(self, kafka: Any) -> None:
        wire = wire_at(kafka.bootstrap_servers, security_protocol="SSL")
        with pytest.raises(BrokerUnavailable, match=r"SSL.*their port speaks SSL \(security.protocol\)"):
            wire.retrying(wire.metadata, "Asking")

    def test_it_leaves_nothing_behind(self, kafka: Any) -> None:
        gc.collect()
        before = holdings()
        wire = wire_at(kafka.bootstrap_servers, LONG_MS)
        for _ in range(10):
            assert wire.metadata().brokers
            assert threading.active_count() <= before[0] + 1
            wire.close()
        gc.collect()
        await_nothing_left(before)

    @pytest.mark.parametrize(("host", "connections"), [("127.0.0.1", 1), ("localhost", 2)])
    def test_a_client_has_one_connection(
        self, kafka: Any, monkeypatch: pytest.MonkeyPatch, host: str, connections: int
    ) -> None:
        """The one to a bootstrap server stays, where that is the address by which a broker is known."""
        opened: list[object] = []
        build = _Manager._build_transport

        async def counted(manager: _Manager, node: Any, timeout_at: float | None = None) -> Any:
            opened.append(node.node_id)
            return await build(manager, node, timeout_at)

        monkeypatch.setattr(_Manager, "_build_transport", counted)
        wire = wire_at(kafka.bootstrap_servers.replace("127.0.0.1", host), LONG_MS)
        (broker,) = wire.metadata().brokers
        assert wire.ask(MetadataRequest(topics=[]), broker.node_id).brokers
        assert len(opened) == connections
        wire.close()

    def test_a_connection_that_a_quota_has_muted_is_replaced(self, kafka: Any, topic_name: str) -> None:
        """A request after a throttled answer is asked of a new connection; it was said to have no answer."""
        wire = wire_at(kafka.bootstrap_servers, LONG_MS, client_id=topic_name)
        with quota(kafka.bootstrap_servers, topic_name, request_percentage=0.001):
            until(lambda: wire.metadata().throttle_time_ms, pause_s=0)
            assert wire.metadata().brokers
        wire.close()

    def test_a_failed_client_is_thrown_away(self, kafka: Any) -> None:
        wire = wire_at(kafka.bootstrap_servers, LONG_MS)
        with pytest.raises(NoAnswer, match="12345"):
            wire.ask(MetadataRequest(topics=[]), 12345)
        assert wire.metadata().brokers
        wire.close()
