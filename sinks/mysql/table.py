"""Tables in the server: read, created, and compared with a sink."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from exactlyonce.connectors.mysql.session import OF_TABLE, MySQLSession, quoted, unique_indexes
from exactlyonce.pipeline.columns import RowField, kind_name
from exactlyonce.pipeline.errors import StoreError
from exactlyonce.pipeline.shape import Form
from exactlyonce.sinks.sql.table import CHANGES, Table, TableColumn

ENGINE = "InnoDB"
"""The one engine with the transactions that the ledger needs."""
CHARSETS = ("utf8mb4", "utf8mb3", "utf8", "latin1", "ascii")
"""The character sets with a known repertoire."""
_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
_TEXTS = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext")
_BYTES = ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob")
_DOCUMENTS = ("json", *_TEXTS[1:])
TAKES: Mapping[Form, tuple[str, ...]] = {
    Form.BOOL: _INTEGERS,
    Form.INT: (*_INTEGERS, "decimal"),
    Form.FLOAT: ("double",),
    Form.STR: _TEXTS,
    Form.BYTES: _BYTES,
    Form.DECIMAL: ("decimal",),
    Form.DATETIME: ("datetime", "timestamp"),
    Form.DATE: ("date",),
    Form.TIME: ("time",),
    Form.TIMEDELTA: ("time",),
    Form.UUID: ("uuid", "char", "varchar", "binary"),
    Form.ANY: _DOCUMENTS,
    Form.LIST: _DOCUMENTS,
}
"""By kind of field: the types of columns that keep every value as it is, or refuse it."""
CREATED: Mapping[Form, str] = {
    Form.BOOL: "BOOLEAN",
    Form.INT: "BIGINT",
    Form.FLOAT: "DOUBLE",
    Form.STR: "LONGTEXT CHARACTER SET utf8mb4 COLLATE {text}",
    Form.BYTES: "LONGBLOB",
    Form.DECIMAL: "DECIMAL(65,30)",
    Form.DATETIME: "DATETIME(6)",
    Form.DATE: "DATE",
    Form.TIME: "TIME(6)",
    Form.TIMEDELTA: "TIME(6)",
    Form.UUID: "CHAR(36) CHARACTER SET ascii COLLATE ascii_bin",
    Form.ANY: "JSON",
    Form.LIST: "JSON",
}
_CREATED_IN_KEY = {
    Form.STR: "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE {text}",
    Form.BYTES: "VARBINARY(255)",
}
_EXACT_COLLATIONS = ("utf8mb4_nopad_bin", "utf8mb4_0900_bin", "utf8mb4_bin")
"""Collations of MariaDB, of MySQL, and of old servers, which ignore blanks at the end: only equal keys are one."""


class MySQLColumn(TableColumn, frozen=True, kw_only=True):
    """A column, with its type in detail."""

    data_type: str
    characters_max: int | None = None
    bytes_max: int | None = None
    charset: str | None = None
    digits: int | None = None
    scale: int | None = None
    """Digits after the point."""
    fraction: int | None = None
    """Digits of a second's fraction."""

    @property
    def unsigned(self) -> bool:
        """Whether it takes no negative number."""
        return "unsigned" in self.type

    @property
    def meaning(self) -> tuple[str, int | None]:
        """The part of its type that decides the value of an accepted literal: the family, and the digits to which it
        rounds or the bytes to which it fills up. Two columns of one meaning give the same value, however wide they are,
        except that a narrower VARCHAR drops blanks at the end."""
        kind = self.data_type
        family = "integer" if kind in _INTEGERS else "text" if kind in _TEXTS[1:] else kind
        size = self.scale if kind in ("decimal", "double") else self.bytes_max if kind == "binary" else self.fraction
        return family, size


class MySQLTable(Table[MySQLColumn], frozen=True, kw_only=True):
    """A table, or a view."""

    name: str
    kind: str
    engine: str | None
    unique: dict[str, tuple[str | None, ...]]
    """The columns of each unique index; None for a part of a column, or an expression."""
    numbered: str | None
    """The column with AUTO_INCREMENT."""


def read_table(session: MySQLSession, name: str) -> MySQLTable | None:
    """The table of this name in the connection's database; None if there is none, or the user may not see it."""
    tables = session.ask(f"SELECT table_type, engine FROM information_schema.tables {OF_TABLE}", name)
    if not tables:
        return None
    rows = session.ask(
        "SELECT column_name, column_type, is_nullable, column_default, extra, data_type, character_maximum_length, "
        "character_octet_length, character_set_name, numeric_precision, numeric_scale, datetime_precision, "
        f"generation_expression FROM information_schema.columns {OF_TABLE} ORDER BY ordinal_position", name,
    )  # fmt: skip
    columns = {}
    for column, type_, nullable, default, extra, data_type, *sizes, generated in rows:
        characters, octets, charset, digits, scale, fraction = sizes
        columns[column] = MySQLColumn(
            name=column,
            type=_text(type_),
            nullable=nullable == "YES",
            has_default=default is not None or "auto_increment" in extra or "DEFAULT_GENERATED" in extra,
            generated=bool(generated),
            data_type=_text(data_type).lower(),
            characters_max=characters,
            bytes_max=octets,
            charset=charset,
            digits=digits,
            scale=scale,
            fraction=fraction,
        )
    numbered = next((row[0] for row in rows if "auto_increment" in row[4]), None)
    ((kind, engine),) = tables
    return MySQLTable(
        name=name, kind=kind, engine=engine, columns=columns, unique=unique_indexes(session, name), numbered=numbered
    )


def column_types(session: MySQLSession, name: str) -> dict[str, str]:
    """The `MySQLColumn.type` of each column of a table, by a quick query; empty if there is no table."""
    rows = session.ask(f"SELECT column_name, column_type FROM information_schema.columns {OF_TABLE}", name)
    return {column: _text(type_) for column, type_ in rows}


def table_problems(
    table: MySQLTable, mode: str, fields: Sequence[RowField], key: Sequence[str], of_columns: Iterable[str]
) -> Iterator[str]:
    """The reasons why the table cannot take rows, each with its remedy; *of_columns*: the reasons of its columns."""
    if table.kind == "VIEW":
        yield "it is a view: name the table"
        return
    if table.engine != ENGINE:
        yield (
            f"its engine is {table.engine}, which has no transactions that the ledger could be part of: "
            f"ALTER TABLE {quoted(table.name)} ENGINE={ENGINE}"
        )
    yield from of_columns
    if mode in ("upsert", CHANGES):
        yield from _key_problems(table, {field.name for field in fields}, set(key))


def type_problem(table: str, field: RowField, column: MySQLColumn) -> str | None:
    """The reason why a column of *table* cannot take a field, with its remedy."""
    alter = f"ALTER TABLE {quoted(table)} MODIFY {quoted(column.name)}"
    if column.data_type not in TAKES[field.kind] or (field.kind is Form.UUID and not _holds_uuid(column)):
        takes = ", ".join(type_.upper() for type_ in TAKES[field.kind])
        created = CREATED[field.kind].format(text=_EXACT_COLLATIONS[-1])
        return (
            f"its column {column.name!r} is {column.type}, and a field of {kind_name(field.kind)} needs one of "
            f"{takes}: {alter} {created}"
        )
    if column.data_type == "double" and column.scale is not None:
        double = "DOUBLE UNSIGNED" if column.unsigned else "DOUBLE"
        return f"its column {column.name!r} is {column.type}, which rounds: {alter} {double}"
    if column.charset is not None and column.charset not in CHARSETS:
        return (
            f"its column {column.name!r} has the character set {column.charset}: "
            f"{alter} {column.type} CHARACTER SET utf8mb4"
        )
    return None


def _holds_uuid(column: MySQLColumn) -> bool:
    if column.data_type == "uuid":
        return True
    return column.bytes_max == 16 if column.data_type == "binary" else (column.characters_max or 0) >= 36


def _key_problems(table: MySQLTable, written: set[str], key: set[str]) -> Iterator[str]:
    """An upsert changes the row that *any* unique index finds: only one on the key may find it."""
    name = quoted(table.name)
    if not any(set(columns) == key for columns in table.unique.values()):
        columns = ", ".join(map(quoted, sorted(key)))
        yield f"mode='upsert' needs a unique key on {columns}: ALTER TABLE {name} ADD UNIQUE KEY ({columns})"
    for index, indexed in table.unique.items():
        is_numbered = table.numbered in indexed and table.numbered not in written
        if not key <= set(indexed) and not is_numbered:
            yield (
                f"its unique index {quoted(index)} is not on the key, and MySQL would change the row that it finds, of "
                f"another key: ALTER TABLE {name} DROP INDEX {quoted(index)}"
            )


def create_statement(session: MySQLSession, name: str, fields: Sequence[RowField], key: Sequence[str]) -> str:
    """The SQL that creates the table for these fields, with *key* as its primary key."""
    known = {row[0] for row in session.ask("SELECT collation_name FROM information_schema.collations")}
    text = next(collation for collation in _EXACT_COLLATIONS if collation in known)
    lines = []
    for field in fields:
        types = {**CREATED, **_CREATED_IN_KEY} if field.name in key else CREATED
        null = "NULL" if field.nullable else "NOT NULL"
        lines.append(f"  {quoted(field.name)} {types[field.kind].format(text=text)} {null}")
    if key:
        lines.append(f"  PRIMARY KEY ({', '.join(map(quoted, key))})")
    return f"CREATE TABLE IF NOT EXISTS {quoted(name)} (\n" + ",\n".join(lines) + f"\n) ENGINE={ENGINE}"


def create(session: MySQLSession, statement: str) -> None:
    """Create a table; `StoreError` says what an administrator can run instead."""
    try:
        session.ask(statement)
    except StoreError as error:
        raise StoreError(f"{error} Or let an administrator run, in the dsn's database: {statement};") from None


def require_rights(session: MySQLSession, rights: str, table: str, *statements: str) -> None:
    """Raise `StoreError` with the SQL to run unless the user has *rights* on *table*. Explaining *statements* takes the
    same rights as running them, and changes nothing."""
    try:
        for statement in statements:
            session.ask(f"EXPLAIN {statement}")
    except StoreError as error:
        raise StoreError(f"{error} For the table {table}: {grant(session, rights, table)}") from None


def grant(session: MySQLSession, rights: str, table: str) -> str:
    """The SQL that grants *rights* on *table* to the user."""
    address = session.address
    return f"GRANT {rights} ON {quoted(address.database)}.{quoted(table)} TO {quoted(address.user)}@'%'"


class MySQLOwnTable(msgspec.Struct, frozen=True, kw_only=True):
    """See `OwnTable`."""

    session: MySQLSession
    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    statement: str
    """Creates it."""
    rights: str
    uses: tuple[str, ...]
    """Statements that need the rights."""

    @property
    def shown(self) -> str:
        return f"{self.name} at {self.session.address.place}"

    @property
    def exists(self) -> bool:
        return read_table(self.session, self.name) is not None

    def create(self) -> None:
        if not self.exists:
            create(self.session, self.statement)

    def check(self) -> None:
        table = read_table(self.session, self.name)
        key = None if table is None else set(table.unique.get("PRIMARY", ()))
        if table is None or tuple(table.columns) != self.columns or key != set(self.key):
            raise StoreError(
                f"The table {self.shown} is not that of exactlyonce: its columns must be {', '.join(self.columns)}, "
                f"its primary key {', '.join(self.key)}. Rename it; it is then made anew."
            )
        if table.engine != ENGINE:
            raise StoreError(
                f"The table {self.shown} has the engine {table.engine}, which has no transactions: "
                f"ALTER TABLE {self.name} ENGINE={ENGINE}"
            )
        require_rights(self.session, self.rights, self.name, *self.uses)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
