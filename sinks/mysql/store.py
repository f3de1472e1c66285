"""The store: rows of a sink, and the ledger, in one transaction of MySQL or MariaDB."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from exactlyonce.pipeline.errors import StoreError, require
from exactlyonce.sinks.mysql import ledger
from exactlyonce.sinks.mysql.address import MySQLAddress
from exactlyonce.sinks.mysql.literals import (
    ROW_END,
    ColumnLiterals,
    MySQLRowEncoder,
    found_template,
    mark_of,
    values_template,
)
from exactlyonce.sinks.mysql.session import TIMEOUT_S, MySQLSession, quoted
from exactlyonce.sinks.mysql.table import (
    ENGINE,
    MySQLColumn,
    MySQLTable,
    check_ledger,
    column_types,
    create_statement,
    read_table,
    table_problems,
)
from exactlyonce.sinks.sql.fields import RowField
from exactlyonce.sinks.write_ahead.ledger import SinkLedger
from exactlyonce.sinks.write_ahead.store import LedgerEntry

STATEMENT_BYTES_MAX = 1 << 20
"""More is several statements: each has to be answered within the time limit."""
DELETED_AT_ONCE = 500
"""Keys of one DELETE. Servers look up so many by the index; of long lists some make a scan of the whole table."""
_JSON_DEPTH_MAX = {True: 31, False: 100}
"""By whether it is MariaDB."""
_END = ROW_END.encode()
_OR = b"OR"
"""Between conditions in brackets. It is no longer than what ends a row."""


class MySQLStore:
    """See `Store`."""

    def __init__(
        self,
        table: str,
        fields: Sequence[RowField],
        *,
        address: Callable[[], MySQLAddress],
        mode: str,
        key: Sequence[str],
        create: bool,
        with_ledger: bool,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._name = table
        self._fields = fields
        self._mode = mode
        self._key = key
        self._create = create
        self._with_ledger = with_ledger
        self._session = MySQLSession(address, timeout_s)
        self._columns: Mapping[str, MySQLColumn] = {}
        """Of the table, as they were looked at last."""
        self._looked_at: int | None = None
        """The connection by which the engines of both tables have been looked at."""

    def check(self) -> None:
        """See `Store`. Tables are made outside of transactions, for making one ends a transaction.

        Where a ledger is there already, a table that is missing is left to `fence`: it knows whether it had rows.
        """
        session = self._session
        had_ledger = self._with_ledger and read_table(session, ledger.LEDGER) is not None
        if not (had_ledger and self._to_be_made()):
            self._check_table()
        if self._with_ledger:
            if not had_ledger:
                self._make(ledger.CREATE)
            check_ledger(session)
            ledger.try_rights(session)

    def inspect(self) -> None:
        """See `InspectableStore`."""
        if not self._to_be_made():
            self._check_table()
        if self._with_ledger and read_table(self._session, ledger.LEDGER) is not None:
            check_ledger(self._session)
            ledger.try_rights(self._session)

    def ledger_of(self, pipeline: str, sink: str) -> SinkLedger:
        """See `InspectableStore`."""
        if read_table(self._session, ledger.LEDGER) is None:
            return SinkLedger()
        return ledger.of_sink(self._session, pipeline, sink)

    def _to_be_made(self) -> bool:
        """Whether the table is missing, and is made then."""
        return self._create and read_table(self._session, self._name) is None

    def _check_table(self) -> None:
        """Raise `StoreError` unless the table takes the rows; it is made if need be."""
        if self._to_be_made():
            self._make(create_statement(self._session, self._name, self._fields, self._key))
        problems = list(table_problems(self._table(), self._fields, self._mode, self._key))
        if problems:
            raise StoreError(f"Rows cannot go into the table {self._shown}: {'; '.join(problems)}.")
        self._try_rights()

    def encoder(self) -> MySQLRowEncoder:
        """See `Store`."""
        columns = self._table().columns
        depth_max = _JSON_DEPTH_MAX[self._session.is_mariadb]
        mark = self._mark(columns)
        literals = [
            ColumnLiterals(field, self._name, columns[field.name], field.name in self._key, depth_max)
            for field in self._fields
        ]
        return MySQLRowEncoder(literals, mark, self._template, self._rows_bytes_max)

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Store`."""
        if self._to_be_made():
            if lost := ledger.newest(self._session, pipeline, sink, origin):
                raise StoreError(
                    f"There is no table {self._shown}, but the ledger {ledger.LEDGER} has checkpoint {lost} of sink "
                    f"{sink!r}, pipeline {pipeline!r}: the table was dropped or renamed, with all rows so far. It is "
                    f"not made anew. Restore it, with the ledger, from one backup; or create it, empty, if the rows "
                    f"that come from now on are all that is wanted."
                )
            self._check_table()
        with self._session.transaction():
            self._require_transactional()
            return ledger.fence(self._session, pipeline, sink, incarnation, origin)

    def apply(self, chunks: Iterable[bytes], entry: LedgerEntry) -> bool:
        """See `Store`."""
        with self._session.transaction():
            self._require_transactional()
            if not ledger.advance(self._session, entry):
                return False
            self._write(chunks)
        return True

    def write(self, chunks: Iterable[bytes]) -> None:
        """See `Store`."""
        with self._session.transaction():
            self._write(chunks)

    def close(self) -> None:
        """See `Store`."""
        self._session.close()

    @property
    def _shown(self) -> str:
        return f"{self._name} at {self._session.address.place}"

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
        if missing := [field.name for field in self._fields if field.name not in columns]:
            raise StoreError(
                f"The table {self._shown} has no column {', '.join(missing)}. Add it, or leave the field out."
            )
        return mark_of(self._mode, self._key, self._fields, columns)

    def _written_to(self) -> bytes:
        """The mark of rows for the columns as they are now."""
        if column_types(self._session, self._name) != {name: each.type for name, each in self._columns.items()}:
            self._columns = self._table().columns
        return self._mark(self._columns).encode()

    def _encoded_otherwise(self) -> StoreError:
        return StoreError(
            f"Rows for the table {self._shown} wait that were encoded for other types of its columns, other fields, or "
            f"another key or mode. Make them what they were, and run the pipeline until it has ended cleanly; then "
            f"change it."
        )

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

    def _table(self) -> MySQLTable:
        table = read_table(self._session, self._name)
        if table is None or not table.columns:
            raise StoreError(
                f"There is no table {self._shown}, or the user may not see it and its columns. Create it, give "
                f"the sink create=True, or {self._grant}"
            )
        return table

    @property
    def _grant(self) -> str:
        """The SQL that gives the rights on the target table."""
        rights = {"append": "INSERT", "upsert": "INSERT, UPDATE", "delete": "SELECT, DELETE"}[self._mode]
        address = self._session.address
        return f"GRANT {rights} ON {quoted(address.database)}.{quoted(self._name)} TO {quoted(address.user)}@'%'"

    def _make(self, sql: str) -> None:
        try:
            self._session.ask(sql)
        except StoreError as error:
            raise StoreError(f"{error} Or let an administrator run, in the dsn's database: {sql};") from None

    def _try_rights(self) -> None:
        """Explain the statements that will be run: that takes the same rights, and changes nothing."""
        before, behind = self._around
        row = self._template % (("NULL",) * len(self._fields))
        try:
            self._session.ask(f"EXPLAIN {before.decode()}{row}{behind.decode()}")
        except StoreError as error:
            raise StoreError(f"{error} For the table {self._name}: {self._grant}") from None

    def _require_transactional(self) -> None:
        """Look once for each connection whether both tables have transactions still, whatever was altered since."""
        if self._looked_at == self._session.connections:
            return
        engines: dict[str, str] = dict(
            self._session.ask(
                "SELECT table_name, engine FROM information_schema.tables "
                "WHERE table_schema = DATABASE() AND table_name IN (%s, %s)", self._name, ledger.LEDGER,
            )
        )  # fmt: skip
        for name in (self._name, ledger.LEDGER):
            if engines.get(name) != ENGINE:
                what = f"has the engine {engines[name]}" if name in engines else "is gone"
                raise StoreError(
                    f"The table {name} at {self._session.address.place} {what}; it is to be one of {ENGINE}. "
                    f"Restore it, or ALTER TABLE {quoted(name)} ENGINE={ENGINE}, and run again: the start checks it."
                )
        self._looked_at = self._session.connections
