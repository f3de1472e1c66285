"""A Redis server for all tests of this folder, and servers of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exactlyonce.testing.servers.redis import RedisServer


@pytest.fixture
def server(database_server: Callable[[str], RedisServer]) -> RedisServer:
    """One for all tests, empty; a test leaves it as it is configured."""
    server = database_server("redis")
    server.client.flushall()
    server.client.script_flush()
    return server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Servers of this test, with settings of its own."""
    started: list[RedisServer] = []

    def start(**settings: str) -> RedisServer:
        folder = tmp_path / f"redis-{len(started)}"
        folder.mkdir()
        started.append(RedisServer(folder, **{name.replace("_", "-"): value for name, value in settings.items()}))
        return started[-1]

    yield start
    for server in started:
        server.kill()
