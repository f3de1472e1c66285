"""A server of tables with an empty database, for tests that are of PostgreSQL and of MariaDB."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest

from exactlyonce.testing.servers.mariadb import DATABASE


class SqlServer(ABC):
    """The variable TOTALS_DSN says where it is."""

    name: str

    def __init__(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.port, self._monkeypatch = server, server.port, monkeypatch
        self.empty()
        self.use(self.port)

    def use(self, port: int) -> None:
        """Let what connects from now on connect to this port."""
        self._monkeypatch.setenv("TOTALS_DSN", self.dsn(port))

    @abstractmethod
    def dsn(self, port: int) -> str: ...

    @abstractmethod
    def empty(self) -> None:
        """Drop what the test before has left."""

    @abstractmethod
    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Run it, sharing no code with the sinks."""


class OnPostgres(SqlServer):
    name = "postgres"

    def dsn(self, port: int) -> str:
        return str(self.server.dsn("postgres", port=port))

    def empty(self) -> None:
        self.sql("DROP SCHEMA public CASCADE")
        self.sql("CREATE SCHEMA public")

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self.server.execute(statement)
        return rows


class OnMariaDB(SqlServer):
    name = "mariadb"

    def dsn(self, port: int) -> str:
        return str(self.server.dsn.replace(str(self.port), str(port)))

    def empty(self) -> None:
        self.server.sql(f"DROP DATABASE {DATABASE}", database=None)
        self.server.sql(f"CREATE DATABASE {DATABASE} CHARACTER SET utf8mb4", database=None)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self.server.sql(statement)
        return rows
