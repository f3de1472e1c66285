"""Rows that the tests of the PostgreSQL sink write, and the database that they go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from table_rows import ORIGIN, Total

from exactlyonce.connectors.postgres.connection import Limits
from exactlyonce.sinks import PostgresSink
from exactlyonce.sinks.postgres.store import PostgresStore
from exactlyonce.testing.servers.postgres import PostgresServer


class Database:
    """A database, empty, and stores that write to it; its connection string is in a variable of the environment."""

    def __init__(self, server: PostgresServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.server, self.name = server, name
        if not server.execute("SELECT 1 FROM pg_database WHERE datname = %s", name):
            server.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        else:
            self._empty()
        self._monkeypatch = monkeypatch
        self._stores: list[PostgresStore] = []
        self.use(server.dsn(self.name))

    def _empty(self) -> None:
        """Drop what the test before has left, and end its sessions."""
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
            self.name,
        )
        schemas = self.execute("SELECT quote_ident(nspname) FROM pg_namespace WHERE nspname !~ '^(pg_|information_)'")
        for (schema,) in schemas:
            self.execute(f"DROP SCHEMA {schema} CASCADE")
        for (publication,) in self.execute("SELECT quote_ident(pubname) FROM pg_publication"):
            self.execute(f"DROP PUBLICATION {publication}")
        self.execute("CREATE SCHEMA public")

    def use(self, dsn: str) -> None:
        """Let stores that connect from now on take this connection string."""
        self._monkeypatch.setenv("TOTALS_DSN", dsn)

    def execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement as the owner, sharing no code with the sink."""
        return self.server.execute(statement, *values, database=self.name)

    def store(self, type_: Any = Total, limits: Limits | None = None, **arguments: Any) -> PostgresStore:
        arguments = {"table": "totals", "dsn": "env:TOTALS_DSN", "create": True, **arguments}
        sink: PostgresSink[Any] = PostgresSink(arguments.pop("table"), **arguments)
        assert list(sink.problems(type_)) == []
        self._stores.append(PostgresStore(sink, type_, limits))
        return self._stores[-1]

    def ready(self, type_: Any = Total, incarnation: int = 1, **arguments: Any) -> PostgresStore:
        store = self.store(type_, **arguments)
        store.check()
        store.fence("p", "s", incarnation, ORIGIN)
        return store

    def totals(self) -> list[tuple[Any, ...]]:
        return self.execute("SELECT customer, cents FROM totals ORDER BY 1, 2")

    def ledger(self) -> dict[int, tuple[int, int]]:
        rows = self.execute("SELECT subtask, checkpoint, incarnation FROM exactlyonce_ledger")
        return {subtask: (checkpoint, incarnation) for subtask, checkpoint, incarnation in rows}

    def close(self) -> None:
        for store in self._stores:
            store.close()


def chunks(store: PostgresStore, records: Sequence[Any], rows: int = 1000) -> list[bytes]:
    """Records as they wait in the checkpoint topic."""
    lines = store.encoder().encode(records)
    return [b"".join(lines[start : start + rows]) for start in range(0, len(lines), rows)]
