"""A Redis server for all tests of this folder, and servers of a test's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "serving"))

from redis_server import RedisServer, skip_without_a_server


@pytest.fixture(scope="session")
def _shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    skip_without_a_server()
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def server(_shared_redis: RedisServer) -> RedisServer:
    """One for all tests, empty; a test leaves it as it is configured."""
    _shared_redis.client.flushall()
    _shared_redis.client.script_flush()
    return _shared_redis


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Servers of this test, with settings of its own."""
    skip_without_a_server()
    started: list[RedisServer] = []

    def start(**settings: str) -> RedisServer:
        folder = tmp_path / f"redis-{len(started)}"
        folder.mkdir()
        started.append(RedisServer(folder, **{name.replace("_", "-"): value for name, value in settings.items()}))
        return started[-1]

    yield start
    for server in started:
        server.kill()
