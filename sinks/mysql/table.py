"""The target table as the server has it, and the SQL that makes one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.mysql.session import MySQLSession, quoted
from exactlyonce.sinks.sql.fields import FieldKind, RowField
from exactlyonce.sinks.sql.table import TableColumn, column_problems

ENGINE = "InnoDB"
"""The one engine whose transactions are what the ledger stands on."""
CHARSETS = ("utf8mb4", "utf8mb3", "utf8", "latin1", "ascii")
"""Those of which it is known what fits in."""
_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
_TEXTS = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext")
_BYTES = ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob")
_DOCUMENTS = ("json", *_TEXTS[1:])
TAKES: Mapping[FieldKind, tuple[str, ...]] = {
    FieldKind.BOOL: _INTEGERS,
    FieldKind.INT: (*_INTEGERS, "decimal"),
    FieldKind.FLOAT: ("double",),
    FieldKind.STR: _TEXTS,
    FieldKind.BYTES: _BYTES,
    FieldKind.DECIMAL: ("decimal",),
    FieldKind.DATETIME: ("datetime", "timestamp"),
    FieldKind.DATE: ("date",),
    FieldKind.TIME: ("time",),
    FieldKind.TIMEDELTA: ("time",),
    FieldKind.UUID: ("uuid", "char", "varchar", "binary"),
    FieldKind.JSON: _DOCUMENTS,
    FieldKind.LIST: _DOCUMENTS,
}
"""By kind of field: the types of columns that give every value back as it was, or refuse it."""
CREATED: Mapping[FieldKind, str] = {
    FieldKind.BOOL: "BOOLEAN",
    FieldKind.INT: "BIGINT",
    FieldKind.FLOAT: "DOUBLE",
    FieldKind.STR: "LONGTEXT CHARACTER SET utf8mb4 COLLATE {text}",
    FieldKind.BYTES: "LONGBLOB",
    FieldKind.DECIMAL: "DECIMAL(65,30)",
    FieldKind.DATETIME: "DATETIME(6)",
    FieldKind.DATE: "DATE",
    FieldKind.TIME: "TIME(6)",
    FieldKind.TIMEDELTA: "TIME(6)",
    FieldKind.UUID: "CHAR(36) CHARACTER SET ascii COLLATE ascii_bin",
    FieldKind.JSON: "JSON",
    FieldKind.LIST: "JSON",
}
_CREATED_IN_KEY = {
    FieldKind.STR: "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE {text}",
    FieldKind.BYTES: "VARBINARY(255)",
}
_EXACT_COLLATIONS = ("utf8mb4_nopad_bin", "utf8mb4_0900_bin", "utf8mb4_bin")
"""Of MariaDB, of MySQL, of old ones, where blanks at the end do not count: keys are one only if they are equal."""


class MySQLColumn(TableColumn, frozen=True, kw_only=True):
    """A column, with what tells whether a value fits in."""

    data_type: str
    characters_max: int | None = None
    bytes_max: int | None = None
    charset: str | None = None
    digits: int | None = None
    scale: int | None = None
    """Digits behind the point."""
    fraction: int | None = None
    """Digits of a second's fraction."""

    @property
    def unsigned(self) -> bool:
        """Whether it takes no negative number."""
        return "unsigned" in self.type

    @property
    def meaning(self) -> tuple[str, int | None]:
        """What decides which value it makes of a literal that it takes at all: two columns of one meaning make the same
        of it, however wide they are, but for blanks at the end, which a narrower VARCHAR drops. It rounds to a number
        of digits, or fills up to a number of bytes."""
        kind = self.data_type
        family = "integer" if kind in _INTEGERS else "text" if kind in _TEXTS[1:] else kind
        size = self.scale if kind in ("decimal", "double") else self.bytes_max if kind == "binary" else self.fraction
        return family, size


class MySQLTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table, or a view, as the server has it now."""

    name: str
    kind: str
    engine: str | None
    columns: dict[str, MySQLColumn]
    unique: dict[str, tuple[str | None, ...]]
    """The columns of each unique index; None for what is only a part of a column, or computed."""
    numbered: str | None
    """The column whose numbers the server gives out."""


def read_table(session: MySQLSession, name: str) -> MySQLTable | None:
    """The table of this name in the connection's database; None if there is none, or none that the user may see."""
    of_table = "WHERE table_schema = DATABASE() AND table_name = %s"
    found = session.ask(f"SELECT table_type, engine FROM information_schema.tables {of_table}", name)
    if not found:
        return None
    rows = session.ask(
        "SELECT column_name, column_type, is_nullable, column_default, extra, data_type, character_maximum_length, "
        "character_octet_length, character_set_name, numeric_precision, numeric_scale, datetime_precision, "
        f"generation_expression FROM information_schema.columns {of_table} ORDER BY ordinal_position", name,
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
    unique: dict[str, tuple[str | None, ...]] = {}
    for index, column, part in session.ask(
        "SELECT index_name, column_name, sub_part FROM information_schema.statistics "
        f"{of_table} AND non_unique = 0 ORDER BY index_name, seq_in_index", name,
    ):  # fmt: skip
        unique[index] = (*unique.get(index, ()), column if part is None else None)
    numbered = next((row[0] for row in rows if "auto_increment" in row[4]), None)
    return MySQLTable(
        name=name, kind=found[0][0], engine=found[0][1], columns=columns, unique=unique, numbered=numbered
    )


def column_types(session: MySQLSession, name: str) -> dict[str, str]:
    """What `MySQLColumn.type` is of each of a table's columns, told sooner than all about them; of none: empty."""
    rows = session.ask(
        "SELECT column_name, column_type FROM information_schema.columns "
        "WHERE table_schema = DATABASE() AND table_name = %s", name,
    )  # fmt: skip
    return {column: _text(type_) for column, type_ in rows}


def table_problems(table: MySQLTable, fields: Sequence[RowField], mode: str, key: Sequence[str]) -> Iterator[str]:
    """What is in the way of rows, each with what to do about it."""
    name = quoted(table.name)
    if table.kind == "VIEW":
        yield "it is a view: name the table"
        return
    if table.engine != ENGINE:
        yield (
            f"its engine is {table.engine}, which has no transactions that the ledger could be part of: "
            f"ALTER TABLE {name} ENGINE={ENGINE}"
        )
    yield from column_problems(fields, table.columns, inserts=mode != "delete")
    for field in fields:
        if field.name in table.columns:
            yield from _type_problems(name, field, table.columns[field.name])
    if mode == "upsert":
        yield from _key_problems(table, {field.name for field in fields}, set(key))


def _type_problems(table: str, field: RowField, column: MySQLColumn) -> Iterator[str]:
    alter = f"ALTER TABLE {table} MODIFY {quoted(column.name)}"
    if column.data_type not in TAKES[field.kind] or (field.kind is FieldKind.UUID and not _holds_uuid(column)):
        takes = ", ".join(each.upper() for each in TAKES[field.kind])
        made = CREATED[field.kind].format(text=_EXACT_COLLATIONS[-1])
        yield (
            f"its column {column.name!r} is {column.type}, and a field of {field.kind.value} needs one of {takes}: "
            f"{alter} {made}"
        )
    elif column.data_type == "double" and column.scale is not None:
        double = "DOUBLE UNSIGNED" if column.unsigned else "DOUBLE"
        yield f"its column {column.name!r} is {column.type}, which rounds: {alter} {double}"
    elif column.charset is not None and column.charset not in CHARSETS:
        yield (
            f"its column {column.name!r} has the character set {column.charset}: "
            f"{alter} {column.type} CHARACTER SET utf8mb4"
        )


def _holds_uuid(column: MySQLColumn) -> bool:
    if column.data_type == "uuid":
        return True
    return column.bytes_max == 16 if column.data_type == "binary" else (column.characters_max or 0) >= 36


def _key_problems(table: MySQLTable, written: set[str], key: set[str]) -> Iterator[str]:
    """An upsert changes the row that *any* unique index finds: only one by the key may find one."""
    name = quoted(table.name)
    if not any(set(columns) == key for columns in table.unique.values()):
        columns = ", ".join(map(quoted, sorted(key)))
        yield f"mode='upsert' needs a unique key on {columns}: ALTER TABLE {name} ADD UNIQUE KEY ({columns})"
    for index, indexed in table.unique.items():
        given_out = table.numbered in indexed and table.numbered not in written
        if not key <= set(indexed) and not given_out:
            yield (
                f"its unique index {quoted(index)} is not on the key, and MySQL would change the row that it finds, "
                f"which is another key's: ALTER TABLE {name} DROP INDEX {quoted(index)}"
            )


def create_statement(session: MySQLSession, name: str, fields: Sequence[RowField], key: Sequence[str]) -> str:
    """The SQL that makes the table for these fields, with *key* as its primary key."""
    known = {row[0] for row in session.ask("SELECT collation_name FROM information_schema.collations")}
    text = next(each for each in _EXACT_COLLATIONS if each in known)
    lines = []
    for field in fields:
        types = {**CREATED, **_CREATED_IN_KEY} if field.name in key else CREATED
        null = "NULL" if field.nullable else "NOT NULL"
        lines.append(f"  {quoted(field.name)} {types[field.kind].format(text=text)} {null}")
    if key:
        lines.append(f"  PRIMARY KEY ({', '.join(map(quoted, key))})")
    return f"CREATE TABLE IF NOT EXISTS {quoted(name)} (\n" + ",\n".join(lines) + f"\n) ENGINE={ENGINE}"


def check_own_table(session: MySQLSession, name: str, columns: Sequence[str], key: Sequence[str]) -> None:
    """Raise `StoreError` unless a table of exactlyonce has transactions, and the columns that it should have."""
    table = read_table(session, name)
    if table is None or tuple(table.columns) != tuple(columns) or set(table.unique.get("PRIMARY", ())) != set(key):
        raise StoreError(
            f"The table {name} at {session.address.place} is not that of exactlyonce: its columns must be "
            f"{', '.join(columns)}, its primary key {', '.join(key)}. Rename it; it is then made anew."
        )
    if table.engine != ENGINE:
        raise StoreError(
            f"The table {name} at {session.address.place} has the engine {table.engine}, which has no transactions: "
            f"ALTER TABLE {name} ENGINE={ENGINE}"
        )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
