"""The contract of a store on a server, and of tables of PostgreSQL and of MySQL: what the server has to do for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import msgspec

from exactlyonce.pipeline.sink import Sink
from exactlyonce.sinks import MySQLSink, PostgresSink
from exactlyonce.testing.sink_contract import StoreContract

DSN = "CONTRACT_DSN"
"""The variable that says where the server is."""


class Server(Protocol):
    """One with an empty database, which a plain client asks that shares no code with the sinks."""

    def sql(self, statement: str, values: Sequence[Any] = (), /) -> list[tuple[Any, ...]]:
        """The rows of a statement, which is committed."""

    def kill(self) -> None:
        """SIGKILL; its data stay."""

    def start(self) -> None:
        """Start it on its data, and wait until it answers."""


@contextmanager
def killed(server: Any) -> Iterator[None]:
    """While a server is killed; it starts again."""
    server.kill()
    try:
        yield
    finally:
        server.start()


class Counted(msgspec.Struct):
    number: int
    version: int
    note: str = ""


class OnServer(StoreContract):
    type = Counted
    server: Any

    def record(self, number: int, version: int = 0) -> Counted:
        return Counted(number, version)

    def unavailable(self) -> Any:
        return killed(self.server)


class OnTable(OnServer):
    """A table `counted`, and the ledger beside it, on `server`."""

    mode = "append"
    awkward = (Counted(1, 2, 'line\nfeed, "quoted" \\ \\N \t é'), Counted(2, -(2**63), ""))
    server: Server

    def table_sink(self, **options: Any) -> Sink[Any]:
        raise NotImplementedError

    def sink(self) -> Any:
        key = ("number",) if self.mode == "upsert" else ()
        return self.table_sink(dsn=f"env:{DSN}", mode=self.mode, key=key, create=True)

    def read(self) -> list[Any]:
        return [Counted(*row) for row in self.server.sql("SELECT number, version, note FROM counted")]

    def backup(self) -> Callable[[], None]:
        kept = {name: self.server.sql(f"SELECT * FROM {name}") for name in ("counted", "exactlyonce_ledger")}

        def restore() -> None:
            for name, rows in kept.items():
                self.server.sql(f"DELETE FROM {name}")
                for row in rows:
                    self.server.sql(f"INSERT INTO {name} VALUES ({', '.join(['%s'] * len(row))})", row)

        return restore


class OnPostgres(OnTable):
    misfits = (Counted(1, 2**63), Counted(1, 1, "\0"))

    def table_sink(self, **options: Any) -> Sink[Any]:
        return PostgresSink[Any]("counted", **options)

    def cut(self) -> None:
        self.server.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid()"
        )

    def clean_up(self) -> None:
        self.server.sql("VACUUM FULL")


class OnMySQL(OnTable):
    misfits = (Counted(1, 2**63),)

    def table_sink(self, **options: Any) -> Sink[Any]:
        return MySQLSink[Any]("counted", **options)

    def cut(self) -> None:
        shown = "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND db = DATABASE()"
        for (each,) in self.server.sql(shown):
            with suppress(Exception):  # it has ended by itself meanwhile, which each driver says in its own way
                self.server.sql(f"KILL {each}")

    def clean_up(self) -> None:
        self.server.sql("OPTIMIZE TABLE counted, exactlyonce_ledger")
        self.server.kill()
        self.server.start()
