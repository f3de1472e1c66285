"""The description of PostgreSQL and of a table there, without the driver: connection strings of libpq."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar

from exactlyonce.connectors.tables import Database, DatabaseTable

_PASSWORD = re.compile(r"password\s*=|://[^/@]*:[^@]*@", re.IGNORECASE)
"""Also one with a / that is not escaped."""


def quoted(name: str) -> str:
    """An identifier of SQL.

    >>> quoted('a"b')
    '"a""b"'
    """
    return f'"{name.replace(chr(34), 2 * chr(34))}"'


class PostgresDatabase(Database):
    """See `Database`."""

    extra: ClassVar[str] = "postgres"
    driver: ClassVar[str] = "psycopg"
    client: ClassVar[str] = "psql"
    schemes: ClassVar[tuple[str, ...]] = ("postgresql:", "postgres:")

    @staticmethod
    def has_password(dsn: str) -> bool:
        """Whether a password is written out in *dsn*.

        >>> PostgresDatabase.has_password("postgresql://ann:secret@db"), PostgresDatabase.has_password("host=db")
        (True, False)
        """
        return _PASSWORD.search(dsn) is not None

    @staticmethod
    def query(dsn: str, statement: str) -> Iterator[Any]:
        from exactlyonce.connectors.postgres.connection import Limits, PostgresConnection

        with closing(PostgresConnection(dsn, Limits())) as connection:
            yield from connection.objects(statement)


class PostgresTable(PostgresDatabase, DatabaseTable):
    """See `DatabaseTable`."""

    def reading_grants(self, user: str) -> tuple[str, ...]:
        schema, _, table = self.table.rpartition(".")
        role, schema, table = quoted(user), quoted(schema or "public"), quoted(table)
        return (
            f'GRANT CONNECT ON DATABASE :"DBNAME" TO {role};',
            f"GRANT USAGE ON SCHEMA {schema} TO {role};",
            f"GRANT SELECT ON {schema}.{table} TO {role};",
        )
