"""The rights that a user needs in MySQL or MariaDB, as statements for its client, in the dsn's database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exactlyonce.connectors.mysql.session import quoted
from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.sinks.mysql.sink import MySQLSink
from exactlyonce.sinks.mysql.store import CREATE_LEDGER, LEDGER_RIGHTS, RIGHTS
from exactlyonce.sinks.sql.ledger import TABLE as LEDGER


def statements(sink: MySQLSink[Any], user: str, *, creates: bool) -> Iterator[str]:
    """They make the tables of exactlyonce, if these are missing; with *creates* the user may make its own table."""
    grantee = f"{quoted(user)}@'%'"
    rights = f"{RIGHTS[sink.mode]}, CREATE" if creates else RIGHTS[sink.mode]
    yield f"GRANT {rights} ON {quoted(sink.table)} TO {grantee};"
    if sink.delivery == EXACTLY_ONCE:
        yield f"{CREATE_LEDGER};"
        yield f"GRANT {LEDGER_RIGHTS} ON {LEDGER} TO {grantee};"
