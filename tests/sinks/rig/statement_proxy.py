"""A TCP proxy before a server that meets one statement on its way, and cuts the client off."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from enum import Enum

from exactlyonce.testing.cluster import LIMIT_S


class Fate(Enum):
    ANSWER_LOST = "the server gets it; the client is cut off before the answer"
    LATE = "the client is cut off; the server gets it when it is released"
    NEVER = "both are cut off before it"


class StatementProxy:
    """Listens on the loopback and forwards to the server; `meet` names the statement by its first words."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._armed: tuple[bytes, Fate] | None = None
        self._released, self._landed = threading.Event(), threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def meet(self, words: str, fate: Fate) -> None:
        self._armed = words.encode(), fate

    def release(self) -> None:
        self._released.set()
        self.await_landed()

    def await_landed(self) -> None:
        """Wait until the server has answered a statement whose client was cut off."""
        assert self._landed.wait(LIMIT_S)

    def close(self) -> None:
        self._released.set()
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                threading.Thread(target=self._to_client, args=(server, client), daemon=True).start()
                threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if self._armed is not None and self._armed[0] in data:
                    fate, self._armed = self._armed[1], None
                    self._meet(fate, data, client, server)
                    return
                server.sendall(data)
        _cut(server)

    def _meet(self, fate: Fate, data: bytes, client: socket.socket, server: socket.socket) -> None:
        _cut(client)
        if fate is Fate.NEVER:
            _cut(server)
            return
        if fate is Fate.LATE:
            self._released.wait(LIMIT_S)
        server.sendall(data)

    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                try:
                    client.sendall(data)
                except OSError:
                    self._landed.set()
                    break
        _cut(client)
        _cut(server)


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
