"""Logins that a server refuses in its own language: the code says whether they pass."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from exactlyonce.pipeline.errors import ExactlyOnceError, StoreError, StoreUnavailable
from exactlyonce.sinks.postgres.connection import Limits, PostgresConnection


def refuse_logins(listener: socket.socket, code: str, said: str) -> None:
    """A server that answers every login so, in PostgreSQL's protocol, until *listener* is closed."""
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb", buffering=0) as stream:
                while True:
                    request = stream.read(int.from_bytes(stream.read(4), "big") - 4)
                    if request.startswith(b"\0\3"):
                        break
                    stream.write(b"N")  # neither TLS nor GSSAPI
                fields = (("S", "FATAL"), ("V", "FATAL"), ("C", code), ("M", said))
                answer = "".join(f"{kind}{value}\0" for kind, value in fields).encode() + b"\0"
                stream.write(b"E" + (len(answer) + 4).to_bytes(4, "big") + answer)


@pytest.mark.parametrize(
    ("code", "said", "kind", "text"),
    [
        ("28P01", "Passwort-Authentifizierung für Benutzer »ann« fehlgeschlagen", StoreError, "correct the login"),
        ("28000", "aucune entrée dans pg_hba.conf", StoreError, "or pg_hba.conf"),
        ("3D000", "la base de datos «shop» no existe", StoreError, "create the database"),
        ("53300", "tut mir leid, schon zu viele Verbindungen", StoreUnavailable, "cannot be reached"),
        ("57P03", "das Datenbanksystem startet", StoreUnavailable, "cannot be reached"),
    ],
)
def test_a_server_that_does_not_speak_english(
    monkeypatch: pytest.MonkeyPatch, code: str, said: str, kind: type[ExactlyOnceError], text: str
) -> None:
    """What it refuses is told by its code, with no secret; only what passes is waited for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=refuse_logins, args=(listener, code, said), daemon=True).start()
        port = listener.getsockname()[1]
        monkeypatch.setenv("TOTALS_DSN", f"postgresql://ann:s3cret@127.0.0.1:{port}/shop")
        with pytest.raises(kind) as raised:
            PostgresConnection("env:TOTALS_DSN", Limits()).rows("SELECT 1")
        assert said in str(raised.value)
        assert text in str(raised.value)
        assert "s3cret" not in str(raised.value)
