"""The Redis sink keeps the contract of a store: with a stream, which rows are added to, and with strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from contract_part import OF_KEYS, only
from table_contract import Counted, OnServer

from exactlyonce.sinks import RedisSink
from exactlyonce.testing.servers.redis import RedisServer


class OnRedis(OnServer):
    secret = "s3cret-0f-the-writer"
    awkward = (Counted(1, 2, 'line\nfeed, "quoted" \\ \0 é'), Counted(2, -(2**63), ""))
    misfits = (Counted(1, 1, "\ud800"),)
    server: RedisServer

    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.server = server
        monkeypatch.setenv("REDIS_OF_THE_SINK", server.url.replace("//", f"//writer:{self.secret}@"))
        self._let_in()
        yield
        server.client.acl_deluser("writer")

    def _let_in(self) -> None:
        """The user of the sink, whom a server forgets as it ends."""
        passwords = [f"+{self.secret}"]
        self.server.client.acl_setuser("writer", enabled=True, passwords=passwords, commands=["+@all"], keys=["*"])

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        with super().unavailable():
            yield
        self._let_in()

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
        self.server.restart()
        self._let_in()


class TestStream(OnRedis):
    ordered = True

    def sink(self) -> Any:
        return RedisSink("env:REDIS_OF_THE_SINK", kind="stream", key=lambda _: "rows")

    def read(self) -> list[Any]:
        rows = self.server.client.xrange("rows")
        return [Counted(int(r["number"]), int(r["version"]), r["note"]) for _, r in rows]


@pytest.mark.exhaustive
@only(*OF_KEYS)
class TestStrings(OnRedis):
    keyed = True

    def sink(self) -> Any:
        return RedisSink("env:REDIS_OF_THE_SINK", kind="string", key=lambda each: f"row:{each.number}")

    def read(self) -> list[Any]:
        client = self.server.client
        return [msgspec.json.decode(client.get(key), type=Counted) for key in client.keys("row:*")]
