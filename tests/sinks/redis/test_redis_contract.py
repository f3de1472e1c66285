"""The Redis sink keeps the contract of a store: with a stream, which rows are added to, and with strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from redis_server import RedisServer
from table_contract import Counted, OnServer

from exactlyonce.sinks import RedisSink


class OnRedis(OnServer):
    awkward = (Counted(1, 2, 'line\nfeed, "quoted" \\ \0 é'), Counted(2, -(2**63), ""))

    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer) -> None:
        self.server = server

    def backup(self) -> Callable[[], None]:
        client = self.server.client
        kept = {key: client.dump(key) for key in client.scan_iter()}

        def restore() -> None:
            client.flushall()
            for key, value in kept.items():
                client.restore(key, 0, value)

        return restore

    def cut(self) -> None:
        self.server.client.client_kill_filter(_type="normal", skipme=True)

    def clean_up(self) -> None:
        self.server.client.bgrewriteaof()
        self.server.kill()
        self.server.start()


class TestStream(OnRedis):
    ordered = True

    def sink(self) -> Any:
        return RedisSink(self.server.url, kind="stream", key=lambda _: "rows")

    def read(self) -> list[Any]:
        rows = self.server.client.xrange("rows")
        return [Counted(int(r["number"]), int(r["version"]), r["note"]) for _, r in rows]


@pytest.mark.exhaustive
class TestStrings(OnRedis):
    keyed = True

    def sink(self) -> Any:
        return RedisSink(self.server.url, kind="string", key=lambda each: f"row:{each.number}")

    def read(self) -> list[Any]:
        client = self.server.client
        return [msgspec.json.decode(client.get(key), type=Counted) for key in client.keys("row:*")]
