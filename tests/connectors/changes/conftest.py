"""A server whose changes are captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from changing_table import Shop

from exactlyonce.testing.servers.postgres import PostgresServer


@pytest.fixture(scope="module")
def changing_server() -> Iterator[PostgresServer]:
    """One of the module's own: a slot needs the server's log from its start on."""
    server = PostgresServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture
def shop(changing_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    shop = Shop(changing_server, monkeypatch)
    yield shop
    shop.close()
