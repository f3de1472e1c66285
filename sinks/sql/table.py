"""A table of a database, as a sink describes it and as the database has it: modes, and mismatches. Opens nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from exactlyonce.connectors.tables import DatabaseTable
from exactlyonce.pipeline import hints, shape
from exactlyonce.pipeline.columns import RowField, fields_of, kind_name
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.shape import Form
from exactlyonce.pipeline.sink import StoredRow, StoredRows
from exactlyonce.sinks.sql.fields import ChangedRows, KeyColumns
from exactlyonce.sinks.sql.ledger import TABLE as LEDGER
from exactlyonce.sinks.write_ahead.sink import WriteAheadSink
from exactlyonce.sinks.writer import holds_keys, value_type

MODES = ("append", "upsert", "delete")
CHANGES = "changes"
"""The mode of a store whose sink upserts a stream of `Change`, or of `Record`: rows and deletes, in one order."""
WRITE_AHEAD = "write_ahead"
T = TypeVar("T")


class TableColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column as the database has it."""

    name: str
    type: str
    """As the database writes it, with its length or precision: for people."""
    nullable: bool
    has_default: bool
    """Whether a row may leave it out, even if it is not nullable: a default, an identity, an automatic number."""
    generated: bool = False
    """Whether no row may give it a value."""


ColumnT = TypeVar("ColumnT", bound=TableColumn)


class Table(msgspec.Struct, Generic[ColumnT], frozen=True, kw_only=True):
    """The part of a table that all dialects read."""

    columns: dict[str, ColumnT]


def mode_of(mode: str, type_: Any) -> str:
    """The mode of a store: of the sink's *mode* for records of the type."""
    return CHANGES if mode == "upsert" and holds_keys(type_) else mode


def row_type(type_: Any, mode: str) -> Any:
    """The type of the rows of a sink: T for an upsert of `Change[T]` or `Record[T]`, else that of its records."""
    return hints.without_none(value_type(type_)) if mode_of(mode, type_) == CHANGES else type_


def row_fields(type_: Any, mode: str, key: Sequence[str]) -> tuple[RowField, ...]:
    """The written fields: all, or with mode "delete" the key's. Raises `UnsupportedType`."""
    fields = fields_of(row_type(type_, mode))
    return fields if mode != "delete" else tuple(field for field in fields if field.name in key)


def contents(fields: Sequence[RowField], rows: Sequence[Any]) -> list[dict[str, Any]]:
    """The columns of each row, in the classes of *fields*; `TypeError` for a value of another class."""
    names = [field.name for field in fields]
    columns = [field.values(rows) for field in fields]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def rows_of_table(type_: Any, mode: str, key: Sequence[str], place: str) -> StoredRows[Any]:
    """The rows of the table *place* that a sink writes in this mode, with this key. Raises `UnsupportedType`."""
    fields = row_fields(type_, mode, key)
    columns = KeyColumns(fields, key)

    def appended(records: Sequence[Any]) -> list[StoredRow]:
        return [StoredRow(None, content) for content in contents(fields, records)]

    def upserted(records: Sequence[Any]) -> list[StoredRow]:
        return list(map(StoredRow, columns.of_rows(records), contents(fields, records)))

    def deleted(records: Sequence[Any]) -> list[StoredRow]:
        return [StoredRow(values, None) for values in columns.of_rows(records)]

    def changed(changes: Sequence[Any]) -> list[StoredRow]:
        keys, rows = ChangedRows(fields, key).keys(changes), [change.value for change in changes]
        there = iter(contents(fields, [row for row in rows if row is not None]))
        return [StoredRow(key, None if row is None else next(there)) for key, row in zip(keys, rows, strict=True)]

    by_mode = {"append": appended, "upsert": upserted, "delete": deleted, CHANGES: changed}
    return StoredRows(place, ", ".join(key), by_mode[mode_of(mode, type_)])


def columns_of_key(key: str | tuple[str, ...]) -> tuple[str, ...]:
    """The columns of *key*, as a sink was given it: one name, or several."""
    return (key,) if isinstance(key, str) else key


def description_problems(mode: Any, key: Any, create: Any) -> Iterator[str]:
    """The problems of the arguments of all SQL sinks, each as a sentence that says how to fix it."""
    if mode not in MODES:
        yield f"mode={mode!r} must be one of {', '.join(map(repr, MODES))}"
    if not isinstance(create, bool):
        yield f"create={create!r} must be True or False"
    key = columns_of_key(key)
    if not isinstance(key, tuple) or not all(isinstance(name, str) and name for name in key):
        yield f'key={key!r} must be a column, or several: key="customer", key=("shop", "customer")'
    elif len(set(key)) < len(key):
        yield f"key={key!r} names a column twice: name each once"
    elif mode in ("upsert", "delete") and not key:
        yield f'mode={mode!r} needs the columns by which it finds a row: key="customer"'
    elif mode == "append" and key:
        yield (
            f"mode='append' inserts every record, and looks for no row by key={key!r}: set mode='upsert', which "
            f"updates the row that has the key, or leave key= out"
        )


def row_problems(type_: Any, mode: str, key: Sequence[str]) -> Iterator[str]:
    """The reasons why a record's type cannot be rows of a table in this mode, with this key."""
    if mode == "delete" and holds_keys(type_):
        yield (
            f"mode='delete' deletes a row for each record, and a {shape.type_name(type_)} may be a row: mode='upsert' "
            f"knows its deletes"
        )
        return
    type_ = row_type(type_, mode)
    try:
        fields = {field.name: field for field in fields_of(type_)}
    except shape.UnsupportedType as error:
        yield str(error)
        return
    for name in key:
        if name not in fields:
            yield f"key= names {name!r}, and {shape.type_name(type_)} has {', '.join(fields)}: name fields of it"
        elif fields[name].shape.form is Form.ANY:
            yield (
                f"{name} is in key=, and may be anything: give it a type. That of a window's key comes from the "
                f"annotation of key_by's function, which a lambda does not have"
            )
        elif fields[name].nullable:
            yield f"{name} is in key=, and its type admits None, which equals nothing: give it a type without None"
        elif fields[name].kind in (Form.ANY, Form.LIST):
            yield f"{name} is in key=, and is {kind_name(fields[name].kind)}: a key is made of scalars"


def column_problems(
    fields: Sequence[RowField], columns: Mapping[str, TableColumn], inserts: bool = True
) -> Iterator[str]:
    """The columns of a table that do not match the fields: missing, generated, or obligatory without a field.

    *inserts*: whether rows are written, or only searched. Types are the dialect's matter.
    """
    for field in fields:
        if field.name not in columns:
            yield f"it has no column {field.name!r}, but {', '.join(columns)}: add the column, or leave the field out"
        elif inserts and columns[field.name].generated:
            yield f"its column {field.name!r} is generated, and takes no value: leave the field out"
    names = {field.name for field in fields}
    for column in columns.values() if inserts else ():
        if column.name not in names and not (column.nullable or column.has_default or column.generated):
            yield f"its column {column.name!r} is NOT NULL without a default, and no field has that name: add one"


class KeyedTable:
    """The part of a description that says which rows of a table a sink writes, and by which columns it finds them."""

    mode: str
    key: str | tuple[str, ...]

    @property
    @abstractmethod
    def full_name(self) -> str:
        """The table's name or place, for people."""

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The columns of the key."""
        return columns_of_key(self.key)

    @property
    def shown(self) -> str:
        """Table, mode and key: ``shop.totals upsert by customer``."""
        by = f" by {', '.join(self.key_columns)}" if self.key_columns else ""
        return f"{self.full_name} {self.mode}{by}"

    def changed(self, type_: Any) -> ChangedRows | None:
        """Tells rows and deletes apart, if the records are changes and the sink knows deletes."""
        if mode_of(self.mode, type_) != CHANGES:
            return None
        return ChangedRows(row_fields(type_, self.mode, self.key_columns), self.key_columns)

    def stored_rows(self, type_: Any) -> StoredRows[Any]:
        """See `Sink`: the columns of the table. Raises `UnsupportedType`."""
        return rows_of_table(type_, self.mode, self.key_columns, self.full_name)


class TableSink(KeyedTable, DatabaseTable, WriteAheadSink[T]):
    """The description of a table as a write-ahead sink, whatever the dialect."""

    place_kind: ClassVar[str]
    """Schema or database of the table, where the ledger lies, too."""
    create: bool
    commit: str

    @abstractmethod
    def name_problems(self) -> Iterator[str]:
        """The problems of the table's name."""

    @property
    def full_name(self) -> str:
        """The table, with its schema if that is given apart."""
        return self.table

    def ledger_of(self, pipeline: str, sink: str) -> str:
        """Its rows in the table beside the target, as SQL."""
        rows = f"WHERE pipeline = '{pipeline}' AND sink = '{sink}'"
        return f"table {LEDGER} in the {self.place_kind} of {self.table}, {rows}"

    # --- problems ---------------------------------------------------------------------------------------------------

    def problems(self, type_: Any) -> Iterator[str]:
        """The problems of the arguments, and of the type as rows of a table."""
        yield from self.name_problems()
        yield from self.dsn_problems()
        wrong = list(description_problems(self.mode, self.key, self.create))
        yield from wrong
        if self.commit != WRITE_AHEAD:
            yield (
                f"commit={self.commit!r} must be {WRITE_AHEAD!r}, as it is by itself: rows wait in the checkpoint "
                f"topic until their checkpoint is decided, in any mode, without locks or settings of the server"
            )
        if not wrong and type_ is not UNKNOWN:
            yield from row_problems(type_, self.mode, self.key_columns)
