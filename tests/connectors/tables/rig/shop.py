"""A database with tables to read, on either server; plain statements fill it."""

from __future__ import annotations

import os
from typing import Any

import psycopg
import pymysql
import pytest

from exactlyonce.connectors.mysql.address import MySQLAddress

on_postgres = pytest.mark.parametrize("shop", ["postgres"], indirect=True)
on_mariadb = pytest.mark.parametrize("shop", ["mariadb"], indirect=True)


class Server:
    """A database that tests write to; its source connects by SHOP_DSN."""

    def __init__(self, kind: str, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind, self.server = kind, server
        if kind == "postgres":
            from postgres_rows import Database

            self._database = Database(server, monkeypatch, "shared")
            monkeypatch.setenv("SHOP_DSN", server.dsn("shared"))
            self.sql = self._database.execute
        else:
            server.sql("DROP DATABASE shop")
            server.sql("CREATE DATABASE shop CHARACTER SET utf8mb4", database=None)
            monkeypatch.setenv("SHOP_DSN", server.dsn)
            self.sql = lambda statement, *values: server.sql(statement, values)

    def connection(self) -> Any:
        """A session of its own; on PostgreSQL it is in a transaction."""
        dsn = os.environ["SHOP_DSN"]
        if self.kind == "postgres":
            return psycopg.connect(dsn)
        return pymysql.connect(**MySQLAddress.parse(dsn).arguments(), autocommit=True)

    def source(self, table: str, **options: Any) -> Any:
        from exactlyonce.connectors import MySQLTableSource, PostgresTableSource

        source = {"postgres": PostgresTableSource, "mariadb": MySQLTableSource}[self.kind]
        made = source(table, **{"dsn": "env:SHOP_DSN", "key": "id", **options})
        assert list(made.problems()) == []
        return made

    def close(self) -> None:
        if self.kind == "postgres":
            self._database.close()
