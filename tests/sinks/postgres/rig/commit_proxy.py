"""A proxy before PostgreSQL that meets a COMMIT on its way, and cuts the client off."""

from __future__ import annotations

import socket
import threading
from enum import Enum

COMMIT = b"COMMIT\0"


class Fate(Enum):
    """What becomes of the next COMMIT."""

    PASSES = "it and its answer pass"
    ANSWER_LOST = "the server gets it; the client is cut off before the answer"
    LATE = "the client is cut off; the server gets it when it is released"
    NEVER = "both are cut off before it"


class CommitProxy:
    """Listens on the loopback and forwards to the server."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.fate = Fate.PASSES
        self.released = threading.Event()
        self.landed = threading.Event()
        """Set when the server has answered a COMMIT whose client was cut off."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listening]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        """Cut all off."""
        for each in self._sockets:
            _cut(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                return
            self._sockets += [client, server]
            threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()
            threading.Thread(target=self._to_client, args=(server, client), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 16):
                if COMMIT in data and self.fate is not Fate.PASSES:
                    self._meet(data, client, server)
                    return
                server.sendall(data)
        except OSError:
            pass
        _cut(server)

    def _meet(self, data: bytes, client: socket.socket, server: socket.socket) -> None:
        fate, self.fate = self.fate, Fate.PASSES
        _cut(client)
        if fate is Fate.NEVER:
            _cut(server)
            return
        if fate is Fate.LATE:
            self.released.wait(60)
        server.sendall(data)

    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                try:
                    client.sendall(data)
                except OSError:  # the client was cut off, and the server has answered
                    self.landed.set()
                    _cut(server)
                    return
        except OSError:
            pass
        _cut(client)


def _cut(each: socket.socket) -> None:
    try:
        each.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        each.close()
