"""The MySQL store: rows and their ledger row, in one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from exactlyonce.connectors.mysql.session import TIMEOUT_S, MySQLSession, quoted
from exactlyonce.pipeline.columns import RowField
from exactlyonce.pipeline.errors import StoreError, require
from exactlyonce.pipeline.sink import EXACTLY_ONCE
from exactlyonce.sinks.mysql.literals import (
    ROW_END,
    MySQLRowEncoder,
    column_literals,
    key_template,
    mark_of,
    newest_of,
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
from exactlyonce.sinks.sql.fields import ChangedRows, ChangeEncoder, ColumnTexts
from exactlyonce.sinks.sql.store import SqlStore
from exactlyonce.sinks.sql.table import CHANGES, mode_of
from exactlyonce.sinks.write_ahead.store import RowEncoder

STATEMENT_BYTES_MAX = 1 << 20
"""The size of a statement, each of which has to be answered within the time limit."""
DELETED_AT_ONCE = 500
"""Keys of one DELETE. Servers look up so many by the index; for longer lists some scan the whole table."""
_JSON_DEPTH_MAX = {True: 31, False: 100}
"""By whether it is MariaDB."""
_END = ROW_END.encode()
_OR = b"OR"
"""Between conditions in brackets. It is no longer than the end of a row."""
RIGHTS = {
    "append": "INSERT", "upsert": "SELECT, INSERT, UPDATE", "delete": "SELECT, DELETE",
    CHANGES: "SELECT, INSERT, UPDATE, DELETE",
}  # fmt: skip
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


def grant_statements(sink: MySQLSink[Any], type_: Any, user: str, *, creates: bool) -> Iterator[str]:
    """The rights that a user needs, as statements for the server's client, in the dsn's database. They make the
    tables of exactlyonce, if these are missing; with *creates* the user may make its own table."""
    grantee = f"{quoted(user)}@'%'"
    rights = RIGHTS[mode_of(sink.mode, type_)] + (", CREATE" if creates else "")
    yield f"GRANT {rights} ON {quoted(sink.table)} TO {grantee};"
    if sink.delivery == EXACTLY_ONCE:
        yield f"{CREATE_LEDGER};"
        yield f"GRANT {LEDGER_RIGHTS} ON {ledger.TABLE} TO {grantee};"


class _Statement(NamedTuple):
    """A statement that writes rows, which come between its parts."""

    before: str
    template: str
    """Of a row."""
    columns: int
    """The values in a row."""
    after: str


class MySQLStore(SqlStore[MySQLSink[Any], MySQLTable]):
    """See `SqlStore`. Tables are created outside of transactions, since that ends one."""

    unless_there = "ON DUPLICATE KEY UPDATE subtask = subtask"
    shared = "LOCK IN SHARE MODE"
    _session: MySQLSession

    def __init__(self, sink: MySQLSink[Any], type_: Any, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(sink, type_, MySQLSession(sink.address, timeout_s))
        self._name, self._key = sink.table, sink.key_columns
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
        uses = [one.before + one.template % (("NULL",) * one.columns) + one.after for one in self._statements]
        require_rights(self._session, RIGHTS[self._mode], self._name, *uses)

    def _type_problem(self, field: RowField, column: MySQLColumn) -> str | None:
        return type_problem(self._name, field, column)

    def _encoder(self, table: MySQLTable) -> RowEncoder:
        depth_max = _JSON_DEPTH_MAX[self._session.is_mariadb]

        def literals(fields: Iterable[RowField]) -> list[ColumnTexts]:
            return [
                column_literals(
                    field, self._name, table.columns[field.name], in_key=field.name in self._key, depth_max=depth_max
                )
                for field in fields
            ]

        mark, own = self._mark(table), literals(self._fields)
        if self._mode != CHANGES:
            return MySQLRowEncoder(own, mark, self._statements[0].template, self._rows_bytes_max)
        changed, (key, row) = ChangedRows(self._fields, self._key), [one.template for one in self._statements]
        in_key = [literal for literal in own if literal.field.name in self._key]
        gone = literals(changed.gone(literal.field) for literal in in_key)
        rows = MySQLRowEncoder([*in_key, *own], mark, f"{key}\f{row}", self._rows_bytes_max)
        return ChangeEncoder(changed, rows, MySQLRowEncoder(gone, mark, f"{key}\f", self._rows_bytes_max))

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
    def _statements(self) -> list[_Statement]:
        """The statements that write rows, in their order. A delete comes first: an insert changes the row that any
        index finds."""
        name, columns = quoted(self._name), [quoted(field.name) for field in self._fields]
        in_key = [field.name for field in self._fields if field.name in self._key]
        before, after = (f"{quoted(in_key[0])} IN (", ")") if len(in_key) == 1 else ("", "")
        statements = []
        if self._mode in ("delete", CHANGES):
            template = key_template(in_key)
            statements.append(_Statement(f"DELETE FROM {name} WHERE {before}", template, len(in_key), after))
        if self._mode != "delete":
            before, after = f"INSERT INTO {name} ({','.join(columns)}) VALUES ", ""
            if self._mode != "append":
                others = [
                    column for field, column in zip(self._fields, columns, strict=True) if field.name not in in_key
                ]
                sets = [f"{column}=VALUES({column})" for column in others] or [f"{columns[0]}={columns[0]}"]
                after = f" ON DUPLICATE KEY UPDATE {','.join(sets)}"
            template = values_template([field.name for field in self._fields])
            statements.append(_Statement(before, template, len(columns), after))
        return statements

    @property
    def _of_no_row(self) -> str:
        """A statement that takes the same rights, and locks the table against ALTER in a transaction."""
        if self._mode == "delete":
            return f"DELETE FROM {quoted(self._name)} WHERE FALSE"
        columns = ",".join(quoted(field.name) for field in self._fields)
        nulls = ",".join(["NULL"] * len(self._fields))
        return f"INSERT INTO {quoted(self._name)} ({columns}) SELECT {nulls} FROM DUAL WHERE FALSE"

    @property
    def _rows_bytes_max(self) -> int:
        """The server's limit for the rows of a statement; one byte of a packet is its kind."""
        around = max(len((one.before + one.after).encode()) for one in self._statements)
        return self._session.max_allowed_packet - around - 1

    def _write(self, chunks: Iterable[bytes]) -> None:
        """Read the columns only once the table is locked: MariaDB shows none while it is being altered."""
        self._session.ask(self._of_no_row)
        mark = self._mark(self._current_table()).encode()
        for chunk in chunks:
            if chunk.count(_END + mark) + chunk.startswith(mark) != chunk.count(_END):
                raise self._encoded_otherwise()
            for statement in self._filled(chunk):
                self._session.require_transaction()
                self._session.send(statement)

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

    def _filled(self, chunk: bytes) -> Iterator[bytes]:
        """The statements with the rows of a chunk."""
        require(not chunk or chunk.endswith(_END), "Chunks consist of whole rows")
        parts = newest_of(chunk) if self._mode == CHANGES else (chunk,)
        for one, part in zip(self._statements, parts, strict=True):
            for rows in self._parts(part):
                for some in self._keys(rows) if one.before.startswith("DELETE") else (rows,):
                    yield one.before.encode() + some + one.after.encode()

    def _parts(self, chunk: bytes) -> Iterator[bytes]:
        """The rows of a chunk, as many at a time as a statement takes, without the end of the last one."""
        size = min(self._rows_bytes_max, STATEMENT_BYTES_MAX)
        start = 0
        while start < len(chunk):
            end = len(chunk) - len(_END)
            if end - start > size:
                end = chunk.rfind(_END, start, start + size + len(_END))
                end = chunk.find(_END, start) if end < 0 else end
            self._require_that_it_fits(end - start)
            yield chunk[start:end]
            start = end + len(_END)

    def _keys(self, rows: bytes) -> Iterator[bytes]:
        keys = rows.split(_END)
        between = _END if len(self._key) == 1 else _OR
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
