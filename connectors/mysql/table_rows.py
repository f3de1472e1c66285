"""The rows of a table of MySQL or MariaDB, read by one session in one consistent snapshot.

Invariant: the session has one transaction, REPEATABLE READ, and ends with it; nothing is read after that was lost.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.mysql.session import OF_TABLE, MySQLSession, quoted, unique_indexes
from exactlyonce.connectors.mysql.table_source import MySQLTableSource
from exactlyonce.connectors.tables import (
    DOCUMENTS,
    NUMBERS,
    PAGE_ROWS,
    Key,
    KeyedRows,
    Row,
    TableSplit,
    columns_of,
    field_problems,
    forms_of,
    key_problems,
)
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.shape import Field, Form

ANSWER_S = 300
"""The limit of one query: the first may have to wait for the disk."""
IDLE_S = 24 * 3600
"""The time that a session is kept while nothing is read from it."""
_ENGINE = "InnoDB"
_AS_TEXT, _AS_HEX = "CAST({} AS CHAR)", "HEX({})"
_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
KEY_TYPES = {
    **dict.fromkeys(_INTEGERS, "CAST(%s AS {})"),
    "decimal": "CAST(%s AS {})",
    **dict.fromkeys(("char", "varchar", "uuid"), "%s"),
    "date": "CAST(%s AS DATE)",
    **dict.fromkeys(("datetime", "timestamp"), "CAST(%s AS DATETIME(6))"),
    **dict.fromkeys(("binary", "varbinary"), "UNHEX(%s)"),
}
"""By type of a key's column: the value that a text stands for, {} its type for CAST."""


class KeyColumn(msgspec.Struct, frozen=True):
    """A column of the key, as SQL."""

    name: str
    text: str
    value: str
    """The placeholder of a text."""
    compared: str
    """The placeholder of a text where no column is beside it, by whose collation it would be compared."""


class ColumnInServer(NamedTuple):
    """A column as the server has it."""

    type: str
    """Without its length."""
    full_type: str
    charset: str
    """Empty: its values are no text."""


class TableInServer(msgspec.Struct, frozen=True, kw_only=True):
    """A table as the server has it."""

    schema: str
    """Its database, as the server writes it, and the next its name."""
    name: str
    kind: str
    """"BASE TABLE", "SYSTEM VERSIONED" and so on."""
    options: str
    columns: dict[str, ColumnInServer]
    key: tuple[KeyColumn, ...]

    @property
    def types(self) -> dict[str, str]:
        """The types of all columns, without their lengths."""
        return {name: column.type for name, column in self.columns.items()}


def open_rows(source: MySQLTableSource[Any], position: SourceOffset) -> MySQLTableRows:
    """See `TableSource.open_rows`; a position above the first row was reached in a snapshot that is no more."""
    if source.one_snapshot and position.cursor:
        source.snapshot_gone(position)
    session = MySQLSession(source.address, ANSWER_S)
    try:
        table = found_table(session, source, position.source)
        session.ask("SET SESSION wait_timeout = %s, net_write_timeout = %s", IDLE_S, IDLE_S)
        session.ask("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        # The first page takes the snapshot, once it has the table's lock: an earlier one would be of before a reload
        session.ask("START TRANSACTION READ ONLY")
        return MySQLTableRows(session, source, table)
    except BaseException:
        session.close()
        raise


def found_table(session: MySQLSession, source: KeyedRows[Any], id: str) -> TableInServer:
    """The table, looked at: ConfigError if it cannot be read by this key."""
    table, wrong = table_now(session, source, id)
    if wrong:
        raise ConfigError(f"Source {id!r} cannot read the table {source.table}: {'; '.join(wrong)}.")
    return table


def table_now(session: MySQLSession, source: KeyedRows[Any], id: str) -> tuple[TableInServer, list[str]]:
    """The table, and why it cannot be read by its key: then it has none. ConfigError if it is not there."""
    found = session.ask(
        f"SELECT table_schema, table_name, table_type, engine, create_options "
        f"FROM information_schema.tables {OF_TABLE}", source.table,
    )  # fmt: skip
    if not found:
        raise ConfigError(
            f"Source {id!r}: there is no table {source.table} in the database of dsn= that its user may see. Create "
            f"it, or correct the name."
        )
    ((schema, table_name, kind, engine, options),) = found
    rows = session.ask(
        f"SELECT column_name, data_type, column_type, is_nullable, numeric_precision, numeric_scale, "
        f"character_set_name, collation_name "
        f"FROM information_schema.columns {OF_TABLE} ORDER BY ordinal_position", source.table,
    )  # fmt: skip
    columns = {
        name: ColumnInServer(_text(data_type).lower(), _text(column), charset or "")
        for name, data_type, column, _, _, _, charset, _ in rows
    }
    types = {name: column.type for name, column in columns.items()}
    nullable = {name: nullable == "YES" for name, _, _, nullable, *_ in rows}
    key = source.key_columns
    wrong = [
        *key_problems(key, types, nullable, KEY_TYPES),
        *field_problems(columns_of(source.value), types, TAKEN),
    ]
    if engine != _ENGINE:
        wrong.append(f"it is no table of {_ENGINE}, which alone has snapshots")
    if not wrong and key not in unique_indexes(session, source.table).values():
        names = ", ".join(map(quoted, key))
        wrong.append(
            f"it has no unique index on ({', '.join(key)}), of whole columns and in this order: "
            f"ALTER TABLE {quoted(source.table)} ADD UNIQUE ({names})"
        )
    casts = {
        name: f"DECIMAL({digits},{scale})" if types[name] == "decimal"
        else "UNSIGNED" if "unsigned" in columns[name].full_type else "SIGNED"
        for name, *_, digits, scale, _, _ in rows
    }  # fmt: skip
    collations = {name: (charset, collation) for name, *_, charset, collation in rows if collation}
    compared = [] if wrong else [_key_column(name, types[name], casts[name], *collations.get(name, ())) for name in key]
    table = TableInServer(
        schema=schema, name=table_name, kind=kind, options=options or "", columns=columns, key=tuple(compared)
    )
    return table, wrong


def _key_column(name: str, type_: str, cast: str, charset: str = "", collation: str = "") -> KeyColumn:
    text = _AS_HEX if "binary" in type_ else _AS_TEXT
    value = KEY_TYPES[type_].format(cast)
    compared = f"CONVERT({value} USING {charset}) COLLATE {collation}" if collation else value
    return KeyColumn(_column(name), text.format(_column(name)), value, compared)


def _column(name: str) -> str:
    """A column in a statement with values, where a % stands for one."""
    return quoted(name).replace("%", "%%")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class MySQLTableFinder:
    """The `SplitFinder` of a table, which is one split."""

    def __init__(self, source_id: str, source: MySQLTableSource[Any]) -> None:
        self._id, self._source = source_id, source

    def find(self, known: Sequence[SourceOffset]) -> list[SourceOffset]:
        if known:
            return []
        session = MySQLSession(self._source.address, ANSWER_S)
        try:
            found_table(session, self._source, self._id)
        finally:
            session.close()
        return [SourceOffset(self._id, self._source.place, str(TableSplit(self._source.table)), 0, 0)]

    def close(self) -> None:
        """Nothing is connected."""


class MySQLTableRows:
    """See `TableRows`."""

    def __init__(self, session: MySQLSession, source: KeyedRows[Any], table: TableInServer) -> None:
        types = table.types
        self._session, self._key, self._table = session, table.key, quoted(source.table).replace("%", "%%")
        fields = {name: field for name, field in columns_of(source.value).items() if name in types}
        self.names = list(fields)
        self._columns = [
            f"CAST({_column(name)} AS DOUBLE)" if types[name] == "float" else _column(name) for name in fields
        ]  # the server would show a FLOAT with six digits
        self._conversions = [conversion_of(field, types[name]) for name, field in fields.items()]
        ((time_ms,),) = session.ask("SELECT ROUND(UNIX_TIMESTAMP(NOW(3)) * 1000)")
        self.time_ms = int(time_ms)

    def page(self, after: Key | None, through: Key | None) -> list[Row]:
        return [Row(key, self._row(cells)) for key, cells in self.cells(after, through, PAGE_ROWS)]

    def cells(self, after: Key | None, through: Key | None, rows_max: int) -> list[tuple[Key, tuple[Any, ...]]]:
        """The keys and the values of the columns `names` of the next rows, as PyMySQL gives them."""
        self._session.require_transaction()
        conditions, values = ["TRUE"], list[str]()
        for bound, form in ((after, "{0} >= {1} AND ({2})"), (through, "{0} <= {1} AND NOT ({2})")):
            if bound is not None:
                above, more = self._above(bound)
                conditions.append(form.format(self._key[0].name, self._key[0].value, above))
                values += [bound[0], *more]
        columns = ", ".join([*(column.text for column in self._key), *self._columns])
        order = ", ".join(column.name for column in self._key)
        query = f"SELECT {columns} FROM {self._table} WHERE {' AND '.join(conditions)} ORDER BY {order} LIMIT %s"
        width = len(self._key)
        rows = self._session.ask(query, *values, rows_max)
        return [(tuple(map(str, row[:width])), row[width:]) for row in rows]

    def _above(self, bound: Key) -> tuple[str, list[str]]:
        """The condition of keys above *bound*, with its values. Servers find no index by the comparison of rows."""
        alternatives, values = list[str](), list[str]()
        for place, column in enumerate(self._key):
            equal = [f"{before.name} = {before.value}" for before in self._key[:place]]
            alternatives.append(" AND ".join([*equal, f"{column.name} > {column.value}"]))
            values += bound[: place + 1]
        return f"({') OR ('.join(alternatives)})", values

    def _row(self, cells: Sequence[Any]) -> dict[str, Any]:
        return {
            name: cell if conversion is None or cell is None else conversion(cell)
            for name, cell, conversion in zip(self.names, cells, self._conversions, strict=True)
        }

    def close(self) -> None:
        self._session.close()


def conversion_of(field: Field, type_: str) -> Callable[[Any], Any] | None:
    """The conversion of a column's values for a field, where the driver's do not fit."""
    forms = forms_of(field)
    if type_ == "float":
        return _short_float
    if Form.TIME in forms and type_ == "time":
        return _time
    if Form.UUID in forms and type_ == "binary":
        return _uuid
    in_text = type_ in ("json", "text", "mediumtext", "longtext") and Form.STR not in forms
    if in_text and forms & (DOCUMENTS | {Form.ANY}):
        return _document
    return None


def _short_float(number: float) -> float:
    """The shortest number that is the same one in 32 bits, as FLOAT has.

    >>> _short_float(0.10000000149011612)
    0.1
    """
    for digits in range(6, 9):
        short = float(f"{number:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", number):
            return short
    return number


_SPANS = frozenset({Form.DATETIME, Form.TIMEDELTA})
TAKEN: dict[str, frozenset[Form]] = {
    **dict.fromkeys(_INTEGERS, NUMBERS | _SPANS | {Form.BOOL}),
    **dict.fromkeys(("float", "double"), NUMBERS | _SPANS),
    "decimal": NUMBERS,
    **dict.fromkeys(("datetime", "timestamp"), frozenset({Form.DATETIME})),
    "date": frozenset({Form.DATE}),
    "time": frozenset({Form.TIME, Form.TIMEDELTA}),
    "binary": frozenset({Form.BYTES, Form.UUID}),
    **dict.fromkeys(("varbinary", "tinyblob", "blob", "mediumblob", "longblob"), frozenset({Form.BYTES})),
}
"""By type of a column: the fields that take the driver's values. Texts may stand for anything."""


def _time(cell: Any) -> Any:
    return (datetime.min + cell).time() if isinstance(cell, timedelta) and timedelta() <= cell < _DAY else cell


_DAY = timedelta(days=1)


def _uuid(cell: bytes) -> Any:
    return UUID(bytes=cell) if len(cell) == 16 else cell


def _document(cell: str) -> Any:
    try:
        return msgspec.json.decode(cell)
    except msgspec.DecodeError:
        return cell
