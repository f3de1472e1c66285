"""A proxy that speaks enough of Kafka's protocol to lose a certain request or its answer, or to deliver it late.

A request is recognised by its kind and its bytes.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

PRODUCE, END_TXN = 0, 26
NOT_LEADER = 6


class Fate(Enum):
    REQUEST_LOST = "request lost"
    ANSWER_LOST = "answer lost"
    ANSWER_LATE = "answer late"
    """The client waits for it, and for all that comes behind it, until the fault is released."""
    LATE = "late"
    """The client is cut off before the broker gets it, which it does once the fault is released."""


@dataclass
class Fault:
    """Order a fault for the next request of kind *api* whose bytes hold *holding*, and nothing of *lacking*."""

    api: int
    fate: Fate
    holding: bytes = b""
    lacking: bytes | None = None
    dark: bool = False
    """Whether nobody gets through from then on, until the proxy is healed."""
    met: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)
    """A late one has been handed to the broker, or a late answer to the client."""

    def fits(self, frame: bytes) -> bool:
        (api,) = struct.unpack_from(">h", frame)
        return api == self.api and self.holding in frame and (self.lacking is None or self.lacking not in frame)


class KafkaProxy:
    """Forwards to a broker. A fault meets the first request of any client that fits it."""

    def __init__(self, shared_port: int | None = None) -> None:
        """Before a broker on *shared_port*, which others reach directly, its answers name the proxy in its place."""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.broker_port = shared_port
        ports = (shared_port or self.port, self.port)
        self._before, self._after = (b"127.0.0.1" + struct.pack(">i", port) for port in ports)
        self._faults: list[Fault] = []
        self._dark = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def arm(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def disarm(self, fault: Fault) -> None:
        fault.released.set()
        with self._lock:
            self._faults = [each for each in self._faults if each is not fault]

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()
        self._dark = False

    def close(self) -> None:
        self._server.close()
        self._cut_all()

    def _cut_all(self) -> None:
        for each in self._sockets:
            _cut(each)
        self._sockets.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                if self._dark or self.broker_port is None:
                    client.close()
                    continue
                try:
                    broker = socket.create_connection(("127.0.0.1", self.broker_port))
                except ConnectionRefusedError:  # it is down
                    client.close()
                    continue
                self._sockets += [client, broker]
                awaited: dict[int, Fault] = {}
                threading.Thread(target=self._requests, args=(client, broker, awaited), daemon=True).start()
                threading.Thread(target=self._answers, args=(broker, client, awaited), daemon=True).start()

    def _requests(self, client: socket.socket, broker: socket.socket, awaited: dict[int, Fault]) -> None:
        for frame in _frames(client):
            fault = self._met_by(frame)
            if fault is None:
                _send(broker, frame)
            elif fault.fate in (Fate.ANSWER_LOST, Fate.ANSWER_LATE):
                (awaited_id,) = struct.unpack_from(">i", frame, 4)
                awaited[awaited_id] = fault
                _send(broker, frame)
            else:
                self._lose(fault, client, broker)
                if fault.fate is Fate.LATE and fault.released.wait(LIMIT_S):
                    self._deliver(frame)
                    fault.arrived.set()
                return
        _cut(broker)

    def _answers(self, broker: socket.socket, client: socket.socket, awaited: dict[int, Fault]) -> None:
        for frame in _frames(broker):
            fault = awaited.pop(struct.unpack_from(">i", frame)[0], None)
            if fault is not None and fault.fate is Fate.ANSWER_LOST:
                self._lose(fault, client, broker)
                return
            if fault is not None:
                fault.met.set()
                fault.released.wait(LIMIT_S)
                fault.arrived.set()
            _send(client, frame.replace(self._before, self._after))
        _cut(client)

    def _met_by(self, frame: bytes) -> Fault | None:
        with self._lock:
            fault = next((each for each in self._faults if each.fits(frame)), None)
            if fault is not None:
                self._faults.remove(fault)
            return fault

    def _lose(self, fault: Fault, client: socket.socket, broker: socket.socket) -> None:
        self._dark = self._dark or fault.dark
        _cut(client)
        _cut(broker)
        if fault.dark:
            self._cut_all()
        fault.met.set()

    def _deliver(self, frame: bytes) -> None:
        """Over a connection of its own, for the client's is gone; until the broker has answered."""
        assert self.broker_port is not None
        with socket.create_connection(("127.0.0.1", self.broker_port)) as connection:
            _send(connection, frame)
            next(_frames(connection), None)


class RefusingProxy(KafkaProxy):
    """Answers the first request to write to partition 0 of *topic* as a broker does that is not its leader yet.

    If the client sends another request within *wait_s*, without waiting for that answer, the broker gets it.
    """

    def __init__(self, topic: str, wait_s: float, shared_port: int | None = None) -> None:
        super().__init__(shared_port)
        self._topic, self._wait_s = topic, wait_s
        self._refusal: threading.Timer | None = None

    def _requests(self, client: socket.socket, broker: socket.socket, awaited: dict[int, Fault]) -> None:
        for frame in _frames(client):
            (api,) = struct.unpack_from(">h", frame)
            if api == PRODUCE and self._refusal is None:
                refusal = partial(_send, client, self._refused(frame))
                self._refusal = threading.Timer(self._wait_s, refusal)
                self._refusal.start()
                continue
            if api == PRODUCE and self._refusal is not None and self._refusal.is_alive():
                self._refusal.cancel()
                self._refusal.function()
            _send(broker, frame)
        _cut(broker)

    def _refused(self, request: bytes) -> bytes:
        """The answer in versions 9 to 12 of the protocol; a count in it is one more than that of what follows."""
        name = self._topic.encode()
        partition = struct.pack(">ihqqqBBB", 0, NOT_LEADER, -1, -1, -1, 1, 0, 0)
        return request[4:8] + b"\0\2" + bytes([len(name) + 1]) + name + b"\2" + partition + b"\0" + bytes(4) + b"\0"


@contextmanager
def proxy_before(
    cluster: KafkaCluster, folder: Path, make: Callable[[int | None], KafkaProxy] = KafkaProxy
) -> Iterator[KafkaProxy]:
    """A proxy before *cluster* or, where that is not on this machine, before a broker of its own, in *folder*."""
    host, _, port = cluster.bootstrap_servers.rpartition(":")
    proxy = make(int(port) if host == "127.0.0.1" else None)
    broker = proxied_broker(folder, proxy)[1] if proxy.broker_port is None else None
    yield proxy
    proxy.close()
    if broker is not None:
        broker.kill()


def proxied_broker(folder: Path, proxy: KafkaProxy | None = None) -> tuple[KafkaProxy, EmbeddedBroker]:
    proxy = proxy or KafkaProxy()
    settings = {"advertised.listeners": f"PLAINTEXT://{proxy.bootstrap_servers}"}
    broker = EmbeddedBroker(folder, port=0, settings=settings, lifetime="process")
    broker.start()
    proxy.broker_port = int(broker.bootstrap_servers.rpartition(":")[2])
    return proxy, broker


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _frames(connection: socket.socket) -> Iterator[bytes]:
    with suppress(OSError), connection.makefile("rb") as stream:
        while len(head := stream.read(4)) == 4:
            yield stream.read(struct.unpack(">i", head)[0])


def _send(connection: socket.socket, frame: bytes) -> None:
    with suppress(OSError):  # the connection may have been cut meanwhile
        connection.sendall(struct.pack(">i", len(frame)) + frame)
