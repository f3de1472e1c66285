"""The store: rows of a sink, and the ledger, in one transaction of MySQL or MariaDB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from exactlyonce.pipeline.errors import StoreError, require
from exactlyonce.sinks.mysql.literals import (
    ROW_END,
    MySQLRowEncoder,
    column_literals,
    found_template,
    mark_of,
    values_template,
)
from exactlyonce.sinks.mysql.session import TIMEOUT_S, MySQLSession, quoted
from exactlyonce.sinks.mysql.sink import MySQLSink
from exactlyonce.sinks.mysql.table import (
    ENGINE,
    MySQLColumn,
    MySQLTable,
    check_own_table,
    column_types,
    create_statement,
    read_table,
    table_problems,
)
from exactlyonce.sinks.sql import ledger
from exactlyonce.sinks.sql.ledger import Ledger
from exactlyonce.sinks.sql.store import SqlStore
from exactlyonce.sinks.sql.table import column_problems

STATEMENT_BYTES_MAX = 1 << 20
"""More is several statements: each has to be answered within the time limit."""
DELETED_AT_ONCE = 500
"""Keys of one DELETE. Servers look up so many by the index; of long lists some make a scan of the whole table."""
_JSON_DEPTH_MAX = {True: 31, False: 100}
"""By whether it is MariaDB."""
_END = ROW_END.encode()
_OR = b"OR"
"""Between conditions in brackets. It is no longer than what ends a row."""
_RIGHTS = {"append": "INSERT", "upsert": "INSERT, UPDATE", "delete": "SELECT, DELETE"}
"""On the table, by mode."""
TEXT = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
_CREATE_LEDGER = f"""CREATE TABLE IF NOT EXISTS {ledger.TABLE} (
  pipeline VARCHAR(255) {TEXT},
  sink VARCHAR(255) {TEXT},
  subtask INT NOT NULL,
  checkpoint BIGINT NOT NULL,
  incarnation BIGINT NOT NULL,
  origin VARCHAR(255) {TEXT},
  PRIMARY KEY (pipeline, sink, subtask)
) ENGINE={ENGINE} ROW_FORMAT=DYNAMIC"""


class MySQLStore(SqlStore[MySQLSink[Any], MySQLTable]):
    """See `SqlStore`. Tables are made outside of transactions, for making one ends a transaction."""

    def __init__(self, sink: MySQLSink[Any], type_: Any, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(sink, type_)
        self._name, self._mode, self._key = sink.table, sink.mode, sink.key
        self._session = MySQLSession(sink.address, timeout_s)
        self._looked_at: int | None = None
        """The connection by which the engines of both tables have been looked at."""

    def close(self) -> None:
        """See `Store`."""
        self._session.close()

    @property
    def _shown(self) -> str:
        return f"{self._name} at {self._session.address.place}"

    @property
    def _how_to_see(self) -> str:
        return f"or {self._grant(_RIGHTS[self._mode], self._name)}"

    def _find(self) -> MySQLTable | None:
        table = read_table(self._session, self._name)
        return table if table is not None and table.columns else None

    def _create(self) -> MySQLTable:
        self._make(create_statement(self._session, self._name, self._fields, self._key))
        if (table := self._find()) is None:
            raise self._missing()
        return table

    def _check_table(self, table: MySQLTable) -> None:
        self._require_none(table_problems(table, self._fields, self._mode, self._key))
        before, behind = self._around
        row = self._template % (("NULL",) * len(self._fields))
        self._explain(self._name, _RIGHTS[self._mode], f"{before.decode()}{row}{behind.decode()}")

    def _encoder(self, table: MySQLTable) -> MySQLRowEncoder:
        columns = table.columns
        mark = self._mark(columns)
        depth_max = _JSON_DEPTH_MAX[self._session.is_mariadb]
        literals = [
            column_literals(field, self._name, columns[field.name], in_key=field.name in self._key, depth_max=depth_max)
            for field in self._fields
        ]
        return MySQLRowEncoder(literals, mark, self._template, self._rows_bytes_max)

    # --- the ledger -------------------------------------------------------------------------------------------------

    def _ledger(self) -> Ledger:
        shown = f"{ledger.TABLE} at {self._session.address.place}"
        return Ledger(
            session=self._session, name=ledger.TABLE, shown=shown, shared="LOCK IN SHARE MODE",
            unless_there="ON DUPLICATE KEY UPDATE subtask = subtask",
        )  # fmt: skip

    def _has_ledger(self) -> bool:
        return read_table(self._session, ledger.TABLE) is not None

    def _create_ledger(self) -> None:
        self._make(_CREATE_LEDGER)

    def _check_ledger(self) -> None:
        check_own_table(self._session, ledger.TABLE, ledger.COLUMNS, ledger.KEY)
        self._explain(
            ledger.TABLE,
            "SELECT, INSERT, UPDATE",
            f"UPDATE {ledger.TABLE} SET origin = '' WHERE pipeline = '' AND sink = '' AND subtask = -1",
            f"INSERT INTO {ledger.TABLE} VALUES ('', '', -1, 0, 0, '')",
        )

    @contextmanager
    def _transaction(self, session: str = "") -> Iterator[None]:
        with self._session.transaction(session):
            yield

    @contextmanager
    def _transaction_with_ledger(self, pipeline: str, sink: str) -> Iterator[None]:
        with super()._transaction_with_ledger(pipeline, sink):
            self._require_transactional()
            yield

    def _make(self, sql: str) -> None:
        try:
            self._session.ask(sql)
        except StoreError as error:
            raise StoreError(f"{error} Or let an administrator run, in the dsn's database: {sql};") from None

    def _explain(self, table: str, rights: str, *statements: str) -> None:
        """Raise `StoreError` with the SQL to run unless the user has *rights* on *table*. Explaining the statements
        that will be run takes the same rights, and changes nothing."""
        try:
            for statement in statements:
                self._session.ask(f"EXPLAIN {statement}")
        except StoreError as error:
            raise StoreError(f"{error} For the table {table}: {self._grant(rights, table)}") from None

    def _grant(self, rights: str, table: str) -> str:
        address = self._session.address
        return f"GRANT {rights} ON {quoted(address.database)}.{quoted(table)} TO {quoted(address.user)}@'%'"

    # --- rows -------------------------------------------------------------------------------------------------------

    @property
    def _around(self) -> tuple[bytes, bytes]:
        """What stands before and behind the rows of a statement."""
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
        """A statement that takes the same rights, and the lock by which the table stays as it is in a transaction."""
        if self._mode == "delete":
            return f"DELETE FROM {quoted(self._name)} WHERE FALSE"
        columns = ",".join(quoted(field.name) for field in self._fields)
        nulls = ",".join(["NULL"] * len(self._fields))
        return f"INSERT INTO {quoted(self._name)} ({columns}) SELECT {nulls} FROM DUAL WHERE FALSE"

    @property
    def _template(self) -> str:
        """Of a row."""
        names = [field.name for field in self._fields]
        return found_template(names) if self._mode == "delete" else values_template(names)

    @property
    def _rows_bytes_max(self) -> int:
        """How long the rows of a statement may be for the server: a byte of a packet says that it is one."""
        return self._session.max_allowed_packet - sum(map(len, self._around)) - 1

    def _write(self, chunks: Iterable[bytes]) -> None:
        """Part of a transaction: the rows. What they go into is looked at when it is locked: before, MariaDB shows no
        columns of a table that is just being altered."""
        before, behind = self._around
        self._session.ask(self._of_no_row)
        mark = self._written_to()
        for chunk in chunks:
            if chunk.count(_END + mark) + chunk.startswith(mark) != chunk.count(_END):
                raise self._encoded_otherwise()
            for rows in self._parts(chunk):
                self._session.require_transaction()
                self._session.send(before + rows + behind)

    def _mark(self, columns: Mapping[str, MySQLColumn]) -> str:
        """Of rows that are encoded for these columns of the table; `StoreError` where one is missing."""
        self._require_none(column_problems(self._fields, columns, inserts=self._mode != "delete"))
        return mark_of(self._mode, self._key, self._fields, columns)

    def _written_to(self) -> bytes:
        """The mark of rows for the columns as they are now."""
        table, types = self._table, column_types(self._session, self._name)
        if table is None or types != {name: column.type for name, column in table.columns.items()}:
            table = self._table = self._find()
        if table is None:
            raise self._missing()
        return self._mark(table.columns).encode()

    def _parts(self, chunk: bytes) -> Iterator[bytes]:
        """The rows of a chunk, as many at a time as a statement takes, without what ends the last one."""
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
        """The server would cut the connection, which looks as if it were away."""
        if size > self._rows_bytes_max:
            raise StoreError(
                f"A row of {size} bytes of SQL for the table {self._shown} is longer than the server now takes: its "
                f"max_allowed_packet is {self._session.max_allowed_packet}, and was more when it was encoded. "
                f"Raise it: SET GLOBAL max_allowed_packet = {size * 2}"
            )

    def _require_transactional(self) -> None:
        """Look once for each connection whether both tables have transactions still, whatever was altered since."""
        if self._looked_at == self._session.connections:
            return
        engines: dict[str, str] = dict(
            self._session.ask(
                "SELECT table_name, engine FROM information_schema.tables "
                "WHERE table_schema = DATABASE() AND table_name IN (%s, %s)", self._name, ledger.TABLE,
            )
        )  # fmt: skip
        for name in (self._name, ledger.TABLE):
            if engines.get(name) != ENGINE:
                what = f"has the engine {engines[name]}" if name in engines else "is gone"
                raise StoreError(
                    f"The table {name} at {self._session.address.place} {what}; it is to be one of {ENGINE}. "
                    f"Restore it, or ALTER TABLE {quoted(name)} ENGINE={ENGINE}, and run again: the start checks it."
                )
        self._looked_at = self._session.connections
