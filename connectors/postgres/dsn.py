"""The description of a table of PostgreSQL, without its driver: connection strings of libpq."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar

from exactlyonce.connectors.tables import DatabaseTable

_PASSWORD = re.compile(r"password\s*=|://[^/@]*:[^@]*@", re.IGNORECASE)
"""Also one with a / that is not escaped."""


class PostgresTable(DatabaseTable):
    """See `DatabaseTable`."""

    extra: ClassVar[str] = "postgres"
    driver: ClassVar[str] = "psycopg"
    client: ClassVar[str] = "psql"
    schemes: ClassVar[tuple[str, ...]] = ("postgresql:", "postgres:")

    @staticmethod
    def has_password(dsn: str) -> bool:
        """Whether a password is written out in *dsn*.

        >>> PostgresTable.has_password("postgresql://ann:secret@db"), PostgresTable.has_password("host=db user=ann")
        (True, False)
        """
        return _PASSWORD.search(dsn) is not None

    @staticmethod
    def query(dsn: str, statement: str) -> Iterator[Any]:
        from exactlyonce.connectors.postgres.connection import Limits, PostgresConnection

        with closing(PostgresConnection(dsn, Limits())) as connection:
            yield from connection.objects(statement)
