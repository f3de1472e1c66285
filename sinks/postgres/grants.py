"""The rights that a role needs in PostgreSQL, as statements for psql."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from psycopg import sql

from exactlyonce.connectors.postgres.connection import Limits, PostgresConnection
from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.sinks.postgres.catalogue import RIGHTS
from exactlyonce.sinks.postgres.sink import PostgresSink
from exactlyonce.sinks.postgres.store import ledger_table

SCHEMA = "public"
"""In place of one that only the server would find."""


def statements(sink: PostgresSink[Any], user: str, *, creates: bool) -> Iterator[str]:
    """They make the tables of exactlyonce, if these are missing; with *creates* the role makes its own table."""
    schema, table = sink.place[0] or SCHEMA, sink.place[1]
    role, in_schema, target = (
        sql.Identifier(*names).as_string(None) for names in ((user,), (schema,), (schema, table))
    )
    on_database = "CONNECT" if sink.mode == "append" else "CONNECT, TEMPORARY"
    yield f'GRANT {on_database} ON DATABASE :"DBNAME" TO {role};'
    yield f"GRANT {'USAGE, CREATE' if creates else 'USAGE'} ON SCHEMA {in_schema} TO {role};"
    if not creates:
        yield f"GRANT {', '.join(RIGHTS[sink.mode])} ON {target} TO {role};"
    if sink.delivery == EXACTLY_ONCE:
        ledger = ledger_table(PostgresConnection(sink.dsn, Limits()), schema)  # the connection is never opened
        yield f"{ledger.statement};"
        yield f"{ledger.grant(role)};"
