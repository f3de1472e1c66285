"""Appends within which the broker goes away. Once the commit was asked for, the outcome is unknown; before, it is not.

Between the log and its broker stands a proxy that speaks enough of Kafka's protocol to lose a certain request, or only
the answer to it.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.pipeline.errors import BrokerUnavailable

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PRODUCE, END_TXN = 0, 26
HASTY_MS = 10_000
"""What an append is given that is to fail: time enough to come to the request that gets lost, on any machine."""


class LossyProxy:
    """Forwards to a broker. Once armed, it loses the next such request, or its answer, and all after, until healed."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.broker_port: int | None = None
        self.armed: tuple[int, str] | None = None
        """(api key, "request" or "answer")."""
        self.lost = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        self.armed = None
        self.lost.clear()

    def close(self) -> None:
        self._server.close()
        self._drop_all()

    def _drop_all(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                if self.lost.is_set() or self.broker_port is None:
                    client.close()
                    continue
                broker = socket.create_connection(("127.0.0.1", self.broker_port))
                self._sockets += [client, broker]
                waiting: set[int] = set()
                threading.Thread(target=self._requests, args=(client, broker, waiting), daemon=True).start()
                threading.Thread(target=self._answers, args=(broker, client, waiting), daemon=True).start()

    def _requests(self, client: socket.socket, broker: socket.socket, waiting: set[int]) -> None:
        for frame in _frames(client):
            api, _, correlation = struct.unpack_from(">hhi", frame)
            if self.armed == (api, "request"):
                return self._lose()
            if self.armed == (api, "answer"):
                waiting.add(correlation)
            _send(broker, frame)
        return None

    def _answers(self, broker: socket.socket, client: socket.socket, waiting: set[int]) -> None:
        for frame in _frames(broker):
            if struct.unpack_from(">i", frame)[0] in waiting:
                return self._lose()
            _send(client, frame)
        return None

    def _lose(self) -> None:
        self.lost.set()
        self._drop_all()


def _frames(connection: socket.socket) -> Iterator[bytes]:
    """The length-prefixed messages that arrive, until the connection ends."""
    with suppress(OSError), connection.makefile("rb") as stream:
        while len(head := stream.read(4)) == 4:
            yield stream.read(struct.unpack(">i", head)[0])


def _send(connection: socket.socket, frame: bytes) -> None:
    with suppress(OSError):  # the connection may have been dropped meanwhile
        connection.sendall(struct.pack(">i", len(frame)) + frame)


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LossyProxy]:
    """A proxy, and behind it a broker that is reached through it only."""
    proxy = LossyProxy()
    settings = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}"}
    broker = EmbeddedBroker(tmp_path_factory.mktemp("broker"), port=0, settings=settings, lifetime="process")
    broker.start()
    proxy.broker_port = int(broker.bootstrap_servers.rpartition(":")[2])
    yield proxy
    proxy.close()
    broker.kill()


@pytest.fixture
def proxy(proxied: LossyProxy) -> LossyProxy:
    """One that loses nothing yet."""
    proxied.heal()
    return proxied


@pytest.fixture
def store(new_store: Any, topic_name: str, proxy: LossyProxy) -> Any:
    """A checkpoint topic that is reached through the proxy only."""
    return new_store(f"127.0.0.1:{proxy.port}", topic_name)


@pytest.mark.exhaustive(but=["request-written0"])
@pytest.mark.parametrize(("lost", "written"), [("request", []), ("answer", [0])])
def test_a_commit_without_an_answer(store: Any, proxy: LossyProxy, lost: str, written: list[int]) -> None:
    """Whether the commit or only its answer was lost cannot be told: it ends; the next incarnation reads the truth."""
    log = store.living(append_timeout_ms=HASTY_MS)
    proxy.armed = END_TXN, lost
    assert log.appended(store.manifest(0)) is Outcome.UNKNOWN
    assert proxy.lost.is_set()
    assert log.history.manifests == {}
    with pytest.raises(BrokerUnavailable, match="the next one reads what is true"):
        log.appended(store.manifest(0))
    log.close()
    proxy.heal()
    assert list(store.opened().history.manifests) == written


@pytest.mark.exhaustive
def test_records_without_an_answer(store: Any, proxy: LossyProxy) -> None:
    """Records that reached the broker are not written unless their commit was asked for; the same log goes on, once
    the broker has confirmed that it took them back."""
    log = store.living(append_timeout_ms=HASTY_MS)
    proxy.armed = PRODUCE, "answer"
    assert log.appended(store.manifest(0)) is Outcome.NOT_WRITTEN
    assert proxy.lost.is_set()
    assert log.appended(store.manifest(0)) is Outcome.NOT_WRITTEN
    proxy.heal()
    log.append_timeout_ms = 60_000
    assert log.appended(store.manifest(0, parallelism=3)) is Outcome.DONE
    assert store.opened().history.manifests == {0: store.manifest(0, parallelism=3)}


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("api", [PRODUCE, END_TXN])
def test_one_request_without_an_answer(store: Any, proxy: LossyProxy, api: int, lost: str) -> None:
    """Where the broker can be reached again in time, the same is asked again: written once, and the log goes on."""
    log = store.living()
    proxy.armed = api, lost

    def heal() -> None:
        proxy.lost.wait()
        proxy.heal()

    healer = threading.Thread(target=heal)
    healer.start()
    assert log.appended(store.manifest(0), store.mark(0)) is Outcome.DONE
    healer.join()
    assert log.appended(store.manifest(1)) is Outcome.DONE
    log.close()
    assert list(store.opened().history.manifests) == [0, 1]
