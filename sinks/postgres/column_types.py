"""The types of PostgreSQL's columns that take a field's values unchanged. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from exactlyonce.pipeline.shape import Form
from exactlyonce.sinks.postgres import copy_text
from exactlyonce.sinks.postgres.copy_text import Texts
from exactlyonce.sinks.sql.fields import ColumnTexts, RowField, kind_name
from exactlyonce.sinks.sql.table import TableColumn

WANTED: Mapping[Form, str] = {
    Form.BOOL: "boolean",
    Form.INT: "bigint, integer, smallint or numeric",
    Form.FLOAT: "double precision or real",
    Form.STR: "text, varchar, char, citext or an enum",
    Form.BYTES: "bytea",
    Form.DECIMAL: "numeric",
    Form.DATETIME: "timestamp with time zone, or without",
    Form.DATE: "date",
    Form.TIME: "time without time zone",
    Form.TIMEDELTA: "interval, without restricted fields",
    Form.UUID: "uuid",
    Form.ANY: "jsonb or json",
    Form.LIST: "an array, jsonb or json",
}
"""By kind: the types that take it, for errors."""
CREATED: Mapping[Form, str] = {
    Form.BOOL: "boolean",
    Form.INT: "bigint",
    Form.FLOAT: "double precision",
    Form.STR: "text",
    Form.BYTES: "bytea",
    Form.DECIMAL: "numeric",
    Form.DATETIME: "timestamp with time zone",
    Form.DATE: "date",
    Form.TIME: "time",
    Form.TIMEDELTA: "interval",
    Form.UUID: "uuid",
    Form.ANY: "jsonb",
}
"""By kind: the type of a column that is created. A list is an array of its items' type."""

_INTEGERS = {"int2": 15, "int4": 31, "int8": 63}
_DIGITS_MAX = 4000
"""In an int for numeric: the limit of Python's conversion to text."""


class PostgresColumn(TableColumn, frozen=True, kw_only=True):
    """A column in the catalogue, with its type in detail."""

    base: str
    """The name of its type; for a domain the underlying type, for an array the items' type."""
    modifier: int
    """The type's length or precision, as the catalogue keeps it; -1 for none."""
    array: bool
    labels: tuple[str, ...]
    """The values of an enum."""


def created_type(field: RowField) -> str:
    """The type of the column that is created for a field."""
    return f"{CREATED[field.item]}[]" if field.item is not None else CREATED[field.kind]


def type_problem(field: RowField, column: PostgresColumn) -> str | None:
    """The reason why a column cannot take a field, or None."""
    if _texts(field, column) is not None:
        return None
    wanted = WANTED[field.kind]
    return f"its column {column.name!r} is {column.type}, and the field is {kind_name(field.kind)}: make it {wanted}"


def meaning(column: PostgresColumn) -> tuple[str, bool, int]:
    """The part of a column's type that decides the value of an accepted text. Two columns of one meaning give the same
    value, however wide they are, except that a narrower varchar drops blanks at the end."""
    family, modifier = _FAMILIES.get(column.base, column.base), column.modifier
    if column.base == "numeric" and modifier >= 4:
        modifier = (modifier - 4) & 0x7FF  # its scale
    return family, column.array, modifier if column.base in _ROUNDED else -1


_FAMILIES = dict.fromkeys(("int2", "int4", "int8"), "integer") | dict.fromkeys(("text", "varchar", "citext"), "text")
_ROUNDED = {"numeric", "timestamp", "timestamptz", "time", "interval"}
"""Types that round to a number of digits, or cut."""


def column_text(field: RowField, table: str, column: PostgresColumn) -> ColumnTexts:
    """The conversion of a field to text for a column of *table* without a `type_problem`."""
    texts = _texts(field, column)
    assert texts is not None
    plain = column.base in _PLAIN and not column.array
    return ColumnTexts(
        field=field, table=table, type=column.type, nullable=column.nullable, null=r"\N",
        texts=texts if plain else lambda values: copy_text.escape(texts(values)),
    )  # fmt: skip


_PLAIN = {
    "bool", *_INTEGERS, "float4", "float8", "numeric", "timestamp", "timestamptz", "date", "time", "interval", "uuid"
}  # fmt: skip
"""Types whose texts have no backslash, tab or end of a line."""


def _texts(field: RowField, column: PostgresColumn) -> Texts | None:
    if column.array:
        items = None if field.item is None else _scalar(field.item, column)
        return None if items is None else copy_text.arrays(items)
    if field.kind in (Form.ANY, Form.LIST):
        return copy_text.json_text(column.base == "jsonb") if column.base in ("json", "jsonb") else None
    return _scalar(field.kind, column)


def _scalar(kind: Form, column: PostgresColumn) -> Texts | None:
    """The texts of one scalar kind for a column's type; None if the column does not take it."""
    base, modifier = column.base, column.modifier
    if kind is Form.INT and base in _INTEGERS:
        return copy_text.integers(-(1 << _INTEGERS[base]), (1 << _INTEGERS[base]) - 1)
    if kind in (Form.INT, Form.DECIMAL) and base == "numeric":
        return _numeric(kind, modifier)
    if kind is Form.STR and column.labels:
        return copy_text.labels(column.labels)
    if kind is Form.STR and base in ("text", "varchar", "bpchar", "citext"):
        return copy_text.strings(modifier - 4 if modifier >= 4 else None, padded=base == "bpchar")
    if kind is Form.DATETIME and base in ("timestamp", "timestamptz"):
        return copy_text.timestamps(base == "timestamptz", modifier if modifier >= 0 else 6)
    if kind is Form.TIME and base == "time":
        return copy_text.times(modifier if modifier >= 0 else 6)
    if kind is Form.TIMEDELTA and base == "interval" and modifier < 0:
        return copy_text.intervals
    return _UNRESTRICTED.get((kind, base))


_UNRESTRICTED: Mapping[tuple[Form, str], Texts] = {
    (Form.BOOL, "bool"): copy_text.booleans,
    (Form.FLOAT, "float8"): copy_text.doubles,
    (Form.FLOAT, "float4"): copy_text.reals,
    (Form.BYTES, "bytea"): copy_text.binary,
    (Form.DATE, "date"): copy_text.dates,
    (Form.UUID, "uuid"): copy_text.uuids,
}


def _numeric(kind: Form, modifier: int) -> Texts:
    """The texts for numeric(precision, scale), which the catalogue keeps as one number."""
    if modifier < 4:
        bound = 10**_DIGITS_MAX - 1
        return copy_text.integers(-bound, bound) if kind is Form.INT else copy_text.decimals(None, 0)
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, ((modifier - 4) & 0x7FF ^ 1024) - 1024
    texts = copy_text.decimals(precision, scale)
    return texts if kind is Form.DECIMAL else lambda values: texts(list(map(Decimal, values)))
