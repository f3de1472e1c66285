"""A TCP proxy before the server that holds a COMMIT, or its answer, until the test says so."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from exactlyonce.testing.cluster import LIMIT_S

COMMIT = b"\x07\x00\x00\x00\x03COMMIT"
"""The packet of the statement."""


class CommitProxy:
    """Passes everything on, but for the next COMMIT where it was told so; the client's connection is cut then."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._what: str | None = None
        self._released = threading.Event()
        self._passed_on = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def dsn(self) -> str:
        """Of the server, through here."""
        return f"mysql://root@127.0.0.1:{self.port}/shop?ssl_mode=disabled"

    def hold_commit(self) -> None:
        """Cut the client's connection at its next COMMIT, which reaches the server only on `release`."""
        self._what = "hold"

    def lose_commit(self) -> None:
        """Cut both connections at the next COMMIT, which never reaches the server."""
        self._what = "lose"

    def lose_answer(self) -> None:
        """Pass the next COMMIT on, and cut the client's connection before its answer."""
        self._what = "answer"

    def release(self) -> None:
        """Let the COMMIT that is held reach the server; returns when the server has answered it."""
        self._released.set()
        assert self._passed_on.wait(LIMIT_S)

    def close(self) -> None:
        """Accept nobody any more."""
        self._released.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                threading.Thread(target=self._answers, args=(server, client), daemon=True).start()
                threading.Thread(target=self._requests, args=(client, server), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if self._what is not None and data == COMMIT:
                    what, self._what = self._what, None
                    self._at_commit(what, client, server)
                    return
                server.sendall(data)
        _cut(server)

    def _at_commit(self, what: str, client: socket.socket, server: socket.socket) -> None:
        _cut(client)
        if what == "lose":
            _cut(server)
            return
        if what == "hold":
            self._released.wait(LIMIT_S)
        server.sendall(COMMIT)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                try:
                    client.sendall(data)
                except OSError:
                    self._passed_on.set()
                    break
        _cut(client)
        _cut(server)


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
