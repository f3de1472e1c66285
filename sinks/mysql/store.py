"""The MySQL store: rows and their ledger row, in one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from exactlyonce.connectors.mysql.session import TIMEOUT_S, MySQLSession, quoted
from exactlyonce.pipeline.errors import StoreError, require
from exactlyonce.pipeline.sink import EXACTLY_ONCE
from exactlyonce.sinks.mysql.literals import (
    ROW_END,
    MySQLRowEncoder,
    column_literals,
    key_template,
    mark_of,
    values_template,
)
from exactlyonce.sinks.mysql.sink import MySQLSink
from exactlyonce.sinks.mysql.table import (
    ENGINE,
    MySQLColumn,
    MySQLOwnTable,
    MySQLTable,
    column_types,
    create,
    create_statement,
    grant,
    read_table,
    require_rights,
    table_problems,
    type_problem,
)
from exactlyonce.sinks.sql import ledger
from exactlyonce.sinks.sql.fields import RowField
from exactlyonce.sinks.sql.store import SqlStore

STATEMENT_BYTES_MAX = 1 << 20
"""The size of a statement, each of which has to be answered within the time limit."""
DELETED_AT_ONCE = 500
"""Keys of one DELETE. Servers look up so many by the index; for longer lists some scan the whole table."""
_JSON_DEPTH_MAX = {True: 31, False: 100}
"""By whether it is MariaDB."""
_END = ROW_END.encode()
_OR = b"OR"
"""Between conditions in brackets. It is no longer than the end of a row."""
RIGHTS = {"append": "INSERT", "upsert": "SELECT, INSERT, UPDATE", "delete": "SELECT, DELETE"}
"""On the table, by mode."""
TEXT = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
LEDGER_RIGHTS = "SELECT, INSERT, UPDATE"
CREATE_LEDGER = f"""CREATE TABLE IF NOT EXISTS {ledger.TABLE} (
  pipeline VARCHAR(255) {TEXT},
  sink VARCHAR(255) {TEXT},
  subtask INT NOT NULL,
  checkpoint BIGINT NOT NULL,
  incarnation BIGINT NOT NULL,
  origin VARCHAR(255) {TEXT},
  PRIMARY KEY (pipeline, sink, subtask)
) ENGINE={ENGINE} ROW_FORMAT=DYNAMIC"""


def grant_statements(sink: MySQLSink[Any], user: str, *, creates: bool) -> Iterator[str]:
    """The rights that a user needs, as statements for the server's client, in the dsn's database. They make the
    tables of exactlyonce, if these are missing; with *creates* the user may make its own table."""
    grantee = f"{quoted(user)}@'%'"
    rights = f"{RIGHTS[sink.mode]}, CREATE" if creates else RIGHTS[sink.mode]
    yield f"GRANT {rights} ON {quoted(sink.table)} TO {grantee};"
    if sink.delivery == EXACTLY_ONCE:
        yield f"{CREATE_LEDGER};"
        yield f"GRANT {LEDGER_RIGHTS} ON {ledger.TABLE} TO {grantee};"


class MySQLStore(SqlStore[MySQLSink[Any], MySQLTable]):
    """See `SqlStore`. Tables are created outside of transactions, since that ends one."""

    unless_there = "ON DUPLICATE KEY UPDATE subtask = subtask"
    shared = "LOCK IN SHARE MODE"
    _session: MySQLSession

    def __init__(self, sink: MySQLSink[Any], type_: Any, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(sink, type_, MySQLSession(sink.address, timeout_s))
        self._name, self._mode, self._key = sink.table, sink.mode, sink.key
        self._engines_checked: int | None = None
        """The number of the connection on which the engines of both tables were checked."""

    @property
    def _shown(self) -> str:
        return f"{self._name} at {self._session.address.place}"

    @property
    def _how_to_see(self) -> str:
        return f"or {grant(self._session, RIGHTS[self._mode], self._name)}"

    def _find(self) -> MySQLTable | None:
        table = read_table(self._session, self._name)
        return table if table is not None and table.columns else None

    def _create(self) -> MySQLTable:
        create(self._session, create_statement(self._session, self._name, self._fields, self._key))
        if (table := self._find()) is None:
            raise self._missing()
        return table

    def _check_table(self, table: MySQLTable) -> None:
        self._require_none(table_problems(table, self._mode, self._fields, self._key, self._column_problems(table)))
        before, after = self._around
        row = self._template % (("NULL",) * len(self._fields))
        require_rights(self._session, RIGHTS[self._mode], self._name, f"{before.decode()}{row}{after.decode()}")

    def _type_problem(self, field: RowField, column: MySQLColumn) -> str | None:
        return type_problem(self._name, field, column)

    def _encoder(self, table: MySQLTable) -> MySQLRowEncoder:
        depth_max = _JSON_DEPTH_MAX[self._session.is_mariadb]
        literals = [
            column_literals(
                field, self._name, table.columns[field.name], in_key=field.name in self._key, depth_max=depth_max
            )
            for field in self._fields
        ]
        return MySQLRowEncoder(literals, self._mark(table), self._template, self._rows_bytes_max)

    # --- the ledger -------------------------------------------------------------------------------------------------

    def _ledger_table(self) -> MySQLOwnTable:
        return MySQLOwnTable(
            session=self._session, name=ledger.TABLE, columns=ledger.COLUMNS, key=ledger.KEY, statement=CREATE_LEDGER,
            rights=LEDGER_RIGHTS,
            uses=(
                f"UPDATE {ledger.TABLE} SET origin = '' WHERE pipeline = '' AND sink = '' AND subtask = -1",
                f"INSERT INTO {ledger.TABLE} VALUES ('', '', -1, 0, 0, '')",
            ),
        )  # fmt: skip

    @contextmanager
    def _transaction_with_ledger(self, pipeline: str, sink: str) -> Iterator[None]:
        with super()._transaction_with_ledger(pipeline, sink):
            self._require_transactional()
            yield

    # --- rows -------------------------------------------------------------------------------------------------------

    @property
    def _around(self) -> tuple[bytes, bytes]:
        """The parts of a statement before and after its rows."""
        columns = ",".join(quoted(field.name) for field in self._fields)
        if self._mode == "delete":
            deletes = f"DELETE FROM {quoted(self._name)} WHERE ".encode()
            return (deletes + f"{columns} IN (".encode(), b")") if len(self._fields) == 1 else (deletes, b"")
        before = f"INSERT INTO {quoted(self._name)} ({columns}) VALUES ".encode()
        if self._mode == "append":
            return before, b""
        others = [quoted(field.name) for field in self._fields if field.name not in self._key]
        sets = [f"{name}=VALUES({name})" for name in others] or [f"{quoted(self._key[0])}={quoted(self._key[0])}"]
        return before, f" ON DUPLICATE KEY UPDATE {','.join(sets)}".encode()

    @property
    def _of_no_row(self) -> str:
        """A statement that takes the same rights, and locks the table against ALTER in a transaction."""
        if self._mode == "delete":
            return f"DELETE FROM {quoted(self._name)} WHERE FALSE"
        columns = ",".join(quoted(field.name) for field in self._fields)
        nulls = ",".join(["NULL"] * len(self._fields))
        return f"INSERT INTO {quoted(self._name)} ({columns}) SELECT {nulls} FROM DUAL WHERE FALSE"

    @property
    def _template(self) -> str:
        """The template of a row."""
        names = [field.name for field in self._fields]
        return key_template(names) if self._mode == "delete" else values_template(names)

    @property
    def _rows_bytes_max(self) -> int:
        """The server's limit for the rows of a statement; one byte of a packet is its kind."""
        return self._session.max_allowed_packet - sum(map(len, self._around)) - 1

    def _write(self, chunks: Iterable[bytes]) -> None:
        """Read the columns only once the table is locked: MariaDB shows none while it is being altered."""
        before, after = self._around
        self._session.ask(self._of_no_row)
        mark = self._mark(self._current_table()).encode()
        for chunk in chunks:
            if chunk.count(_END + mark) + chunk.startswith(mark) != chunk.count(_END):
                raise self._encoded_otherwise()
            for rows in self._parts(chunk):
                self._session.require_transaction()
                self._session.send(before + rows + after)

    def _mark(self, table: MySQLTable) -> str:
        """The mark of rows that are encoded for the table."""
        return mark_of(self._mode, self._key, self._fields, table.columns)

    def _current_table(self) -> MySQLTable:
        """The table as it is now."""
        table, types = self._table, column_types(self._session, self._name)
        if table is None or types != {name: column.type for name, column in table.columns.items()}:
            table = self._table = self._find()
        if table is None:
            raise self._missing()
        self._require_columns(table)
        return table

    def _parts(self, chunk: bytes) -> Iterator[bytes]:
        """The rows of a chunk, as many at a time as a statement takes, without the end of the last one."""
        require(not chunk or chunk.endswith(_END), "Chunks consist of whole rows")
        size = min(self._rows_bytes_max, STATEMENT_BYTES_MAX)
        start = 0
        while start < len(chunk):
            end = len(chunk) - len(_END)
            if end - start > size:
                end = chunk.rfind(_END, start, start + size + len(_END))
                end = chunk.find(_END, start) if end < 0 else end
            self._require_that_it_fits(end - start)
            yield from self._keys(chunk[start:end]) if self._mode == "delete" else (chunk[start:end],)
            start = end + len(_END)

    def _keys(self, rows: bytes) -> Iterator[bytes]:
        keys = rows.split(_END)
        between = _END if len(self._fields) == 1 else _OR
        for start in range(0, len(keys), DELETED_AT_ONCE):
            yield between.join(keys[start : start + DELETED_AT_ONCE])

    def _require_that_it_fits(self, size: int) -> None:
        """Raise `StoreError` for a row that is too long: the server would cut the connection."""
        if size > self._rows_bytes_max:
            raise StoreError(
                f"A row of {size} bytes of SQL for the table {self._shown} is longer than the server now takes: its "
                f"max_allowed_packet is {self._session.max_allowed_packet}, and was more when it was encoded. "
                f"Raise it: SET GLOBAL max_allowed_packet = {size * 2}"
            )

    def _require_transactional(self) -> None:
        """Check once for each connection that both tables still have transactions."""
        if self._engines_checked == self._session.connections:
            return
        engines: dict[str, str] = dict(
            self._session.ask(
                "SELECT table_name, engine FROM information_schema.tables "
                "WHERE table_schema = DATABASE() AND table_name IN (%s, %s)", self._name, ledger.TABLE,
            )
        )  # fmt: skip
        for name in (self._name, ledger.TABLE):
            if engines.get(name) != ENGINE:
                problem = f"has the engine {engines[name]}" if name in engines else "is gone"
                raise StoreError(
                    f"The table {name} at {self._session.address.place} {problem}; it must have {ENGINE}. "
                    f"Restore it, or ALTER TABLE {quoted(name)} ENGINE={ENGINE}, and run again: the start checks it."
                )
        self._engines_checked = self._session.connections
