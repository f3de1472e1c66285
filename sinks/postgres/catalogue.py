"""Tables in PostgreSQL's catalogue: found, created, and compared with a sink; the types of columns that take a field's
values unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec
from psycopg import sql

from exactlyonce.connectors.postgres.connection import PostgresConnection
from exactlyonce.pipeline.columns import RowField, fields_of, kind_name
from exactlyonce.pipeline.errors import StoreError, require
from exactlyonce.pipeline.shape import Form
from exactlyonce.sinks.postgres import copy_text
from exactlyonce.sinks.postgres.copy_text import Texts
from exactlyonce.sinks.postgres.sink import PostgresSink
from exactlyonce.sinks.sql.fields import ColumnTexts
from exactlyonce.sinks.sql.table import CHANGES, Table, TableColumn, row_type

_VERSION_MIN = 120_000
RIGHTS = {
    "append": ("INSERT",),
    "upsert": ("SELECT", "INSERT", "UPDATE"),
    "delete": ("SELECT", "DELETE"),
    CHANGES: ("SELECT", "INSERT", "UPDATE", "DELETE"),
}
"""On the table, by mode."""
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
    Form.LIST: "an array, jsonb or json; of floats also pgvector's vector or halfvec",
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

Shape = list[tuple[Any, ...]]
"""The identity of a table, and names and types of its columns: a quick query."""


class PostgresColumn(TableColumn, frozen=True, kw_only=True):
    """A column in the catalogue, with its type in detail."""

    base: str
    """The name of its type; for a domain the underlying type, for an array the items' type."""
    modifier: int
    """The type's length, precision or dimensions, as the catalogue keeps it; -1 for none."""
    array: bool
    labels: tuple[str, ...]
    """The values of an enum."""


class Target(Table[PostgresColumn], frozen=True, kw_only=True):
    """The table that is written to."""

    schema: str
    table: str
    oid: int
    shape: Shape
    """The shape when its columns were read."""

    @property
    def name(self) -> sql.Identifier:
        """The name for statements."""
        return sql.Identifier(self.schema, self.table)

    @property
    def shown(self) -> str:
        """The name as text, for people and for SQL that they run."""
        return self.name.as_string(None)


def find(connection: PostgresConnection, schema: str | None, table: str) -> Target | None:
    """The table, None if there is none; without a *schema*, along the search_path."""
    rows = connection.rows(_FIND, (schema, table))
    if not rows:
        return None
    schema, table, oid = rows[0]
    shape = connection.rows(_SHAPE, (sql.Identifier(schema, table).as_string(None),))
    rows = connection.rows(_COLUMNS, (oid,))
    columns = {
        name: PostgresColumn(
            name=name, type=shown, nullable=not not_null, has_default=default, generated=generated, base=base,
            modifier=modifier, array=array, labels=tuple(labels or ()),
        )
        for name, shown, not_null, default, generated, base, modifier, array, labels in rows
    }  # fmt: skip
    return Target(schema=schema, table=table, oid=oid, columns=columns, shape=shape)


def is_unchanged(connection: PostgresConnection, target: Target) -> bool:
    """Whether the table has still the same shape."""
    return connection.rows(_SHAPE, (target.shown,)) == target.shape


def schema_of(connection: PostgresConnection, sink: PostgresSink[Any]) -> str:
    """The schema in which a table of the sink is created; `StoreError` if the search_path names no existing one."""
    schema, table = sink.place
    if schema is None:
        schema = connection.rows("SELECT current_schema()")[0][0]
    if schema is None:
        raise StoreError(
            f"The role may use no schema of its search_path: GRANT USAGE ON SCHEMA public TO the role, or name the "
            f'table\'s schema, as in "schema.{table}".'
        )
    return schema


def create(connection: PostgresConnection, sink: PostgresSink[Any], type_: Any) -> Target:
    """Create the table, with the fields of *type_* as columns, unless another session does it at the same time."""
    schema, table = sink.place
    statement = sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(
        sql.Identifier(table) if schema is None else sql.Identifier(schema, table),
        sql.SQL(", ").join(_definitions(fields_of(row_type(type_, sink.mode)), sink.key_columns)),
    )
    try:
        connection.rows(statement)
    except StoreError as error:  # if two sessions create it at once, one may fail
        if (target := find(connection, schema, table)) is not None:
            return target
        if "[42501]" in str(error):
            raise StoreError(f"{error} Or let an administrator run: {statement.as_string(None)};") from error
        raise
    target = find(connection, schema, table)
    require(target is not None, "A table that was created is found")
    assert target is not None
    return target


def _definitions(fields: Sequence[RowField], key: Sequence[str]) -> Iterator[sql.Composable]:
    for field in fields:
        ending = "" if field.nullable else " NOT NULL"
        yield sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(created_type(field) + ending))
    if key:
        yield sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, key)))


class PostgresOwnTable(msgspec.Struct, frozen=True, kw_only=True):
    """See `OwnTable`."""

    connection: PostgresConnection
    schema: str
    table: str
    columns: dict[str, str]
    """Their types by name."""
    key: tuple[str, ...]
    rights: tuple[str, ...]

    @property
    def name(self) -> str:
        return sql.Identifier(self.schema, self.table).as_string(None)

    @property
    def shown(self) -> str:
        return self.name

    @property
    def exists(self) -> bool:
        return bool(self._read())

    @property
    def statement(self) -> str:
        """Creates it."""
        columns = ", ".join(f"{name} {type_} NOT NULL" for name, type_ in self.columns.items())
        return f"CREATE TABLE IF NOT EXISTS {self.name} ({columns}, PRIMARY KEY ({', '.join(self.key)}))"

    def grant(self, role: str) -> str:
        """Gives *role*, as SQL has it, the rights that a run needs on it."""
        return f"GRANT {', '.join(self.rights)} ON {self.name} TO {role}"

    def create(self) -> None:
        if self.exists:
            return
        role, may_create = self.connection.rows(
            "SELECT quote_ident(current_user), has_schema_privilege($1::text, 'CREATE')", (self.schema,)
        )[0]
        if not may_create:
            raise StoreError(
                f"The table {self.name} is missing, and the role {role} may not create it. Let an administrator run: "
                f"{self.statement}; {self.grant(role)};"
            )
        try:
            self.connection.ask(self.statement)
        except StoreError:  # if two sessions create it at once, one may fail
            if not self.exists:
                raise

    def check(self) -> None:
        rows = self._read()
        require(bool(rows), "A table that was created is found")
        persistence, role, missing, columns = rows[0]
        if columns != self.columns:
            raise StoreError(
                f"The table {self.name} is not that of exactlyonce: its columns are {', '.join(columns)}, and not "
                f"{', '.join(self.columns)}. Rename it, or write to a table in another schema."
            )
        if persistence != "p":
            raise StoreError(
                f"The table {self.name} is UNLOGGED: a crash would empty it, and rows would come twice. Run: "
                f"ALTER TABLE {self.name} SET LOGGED"
            )
        if missing:
            raise StoreError(
                f"The role lacks rights on {self.name}. Run: GRANT {', '.join(missing)} ON {self.name} TO {role}"
            )

    def _read(self) -> list[tuple[Any, ...]]:
        """One row of persistence, role, the rights that it lacks, and the columns; empty if there is no such table."""
        return self.connection.rows(_OWN, (self.schema, self.table, list(self.rights)))


def check_server(connection: PostgresConnection) -> None:
    """Raise `StoreError` unless the server and its database can be written to."""
    version, shown, encoding = connection.rows(
        "SELECT current_setting('server_version_num')::int, current_setting('server_version'),"
        " current_setting('server_encoding')"
    )[0]
    if version < _VERSION_MIN:
        raise StoreError(f"PostgreSQL {shown} is too old: version 12 or later is needed. Upgrade the server.")
    if encoding != "UTF8":
        raise StoreError(
            f"The database is encoded in {encoding}, and text is checked and written as UTF8. Use a database that was "
            f"created WITH ENCODING 'UTF8'."
        )


def target_problems(
    connection: PostgresConnection,
    key: Sequence[str],
    mode: str,
    fields: Sequence[RowField],
    target: Target,
    of_columns: Iterable[str],
) -> list[str]:
    """The reasons why the table cannot take rows in this mode, of a store; *of_columns*: the reasons of its columns."""
    wrong = [*_kind_problems(connection, target), *of_columns, *_rule_problems(connection, mode, target)]
    if not wrong and mode in ("upsert", CHANGES):
        wrong += _index_problems(connection, target, key)
    if not wrong and mode == CHANGES:
        wrong += _domain_problems(connection, target, [field.name for field in fields if field.name not in key])
    return wrong or list(_right_problems(connection, key, mode, fields, target))


def _kind_problems(connection: PostgresConnection, target: Target) -> Iterator[str]:
    """The reasons why the table is not kept together with the ledger."""
    parts = connection.rows(_PARTS, (target.oid,))
    if others := sorted({kind for kind, _ in parts} - {"r", "p"}):
        names = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence"}
        shown = ", ".join(names.get(kind, kind) for kind in others)
        yield f"it is, or has as a partition, {shown}: name a table of this database"
    if any(persistence != "p" for _, persistence in parts):
        yield f"it is temporary or UNLOGGED, and loses rows in a crash: ALTER TABLE {target.shown} SET LOGGED"
    if connection.rows("SELECT row_security_active($1::oid)", (target.oid,))[0][0]:
        yield "row-level security applies to the role, and may hide rows: ALTER ROLE ... BYPASSRLS, or use another role"


def _rule_problems(connection: PostgresConnection, mode: str, target: Target) -> Iterator[str]:
    """COPY ignores rules, an upsert is refused with any, and a delete follows them."""
    events = {"append": "3", "upsert": "23", "delete": "4", CHANGES: "234"}[mode]
    for rule, event in connection.rows(_RULES, (target.oid, list(events))):
        drop = sql.SQL("DROP RULE {} ON {}").format(sql.Identifier(rule), target.name).as_string(None)
        yield f"it has the rule {rule} on {event}, which would change or drop rows: use a trigger: {drop}"


def _index_problems(connection: PostgresConnection, target: Target, key: Sequence[str]) -> Iterator[str]:
    rows = connection.rows(_UNIQUE, (target.oid,))
    indexes = {shown: as_columns for shown, as_columns, columns in rows if set(columns) == set(key)}
    if not any(indexes.values()):
        columns = sql.SQL(", ").join(map(sql.Identifier, key))
        create = sql.SQL("CREATE UNIQUE INDEX ON {} ({})").format(target.name, columns).as_string(None)
        yield f"it has no unique index on exactly ({', '.join(key)}), all rows, not deferrable: {create}"
    for shown, as_columns in indexes.items():
        if not as_columns:
            yield (
                f"its unique index {shown} has another collation than its column, by which it takes other texts for "
                f"one key, and an upsert would change another key's row: DROP INDEX {shown}"
            )


def _domain_problems(connection: PostgresConnection, target: Target, columns: Sequence[str]) -> Iterator[str]:
    """A key that is gone comes through a table of the same types, with NULL for the other columns."""
    for name in columns:
        try:
            connection.rows(f"SELECT NULL::{target.columns[name].type}")
        except StoreError:
            yield (
                f"its column {name!r} is of the domain {target.columns[name].type}, which refuses NULL, and a delete "
                f"has only the key: give the column, and not the domain, the condition"
            )


def _right_problems(
    connection: PostgresConnection, key: Sequence[str], mode: str, fields: Sequence[RowField], target: Target
) -> Iterator[str]:
    names = [field.name for field in fields]
    columns_by_right = {"SELECT": names, "INSERT": names, "UPDATE": [name for name in names if name not in key]}
    missing = [
        right
        for right, columns in columns_by_right.items()
        if right in RIGHTS[mode] and columns
        and not connection.rows(_HAS_RIGHT, (target.oid, right, columns))[0][0]
    ]  # fmt: skip
    deletes = "DELETE" in RIGHTS[mode]
    if deletes and not connection.rows("SELECT has_table_privilege($1::oid, 'DELETE')", (target.oid,))[0][0]:
        missing.append("DELETE")
    role, database, temporary = connection.rows(
        "SELECT current_user, current_database(), has_database_privilege(current_database(), 'TEMPORARY')"
    )[0]
    grantee = sql.Identifier(role).as_string(None)
    if missing:
        yield f"the role lacks rights on it: GRANT {', '.join(missing)} ON {target.shown} TO {grantee}"
    if mode != "append" and not temporary:
        grant = f"GRANT TEMPORARY ON DATABASE {sql.Identifier(database).as_string(None)} TO {grantee}"
        yield f"the role may create no temporary table, which this mode needs: {grant}"


_FIND = """
SELECT n.nspname, c.relname, c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass(
        CASE WHEN $1::text IS NULL THEN '' ELSE quote_ident($1::text) || '.' END || quote_ident($2::text))
    AND c.relname = $2::text
"""
_COLUMNS = """
WITH RECURSIVE types AS (
    SELECT a.attnum, a.atttypid AS type, a.atttypmod AS modifier, a.attnotnull AS not_null, false AS has_default
    FROM pg_attribute a WHERE a.attrelid = $1::oid AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL
    SELECT d.attnum, t.typbasetype, t.typtypmod, d.not_null OR t.typnotnull, d.has_default OR t.typdefault IS NOT NULL
    FROM types d JOIN pg_type t ON t.oid = d.type WHERE t.typtype = 'd'
)
SELECT a.attname, format_type(a.atttypid, a.atttypmod), d.not_null,
    a.atthasdef OR a.attidentity <> '' OR d.has_default, a.attgenerated <> '' OR a.attidentity = 'a',
    CASE WHEN coalesce(item.typnamespace, t.typnamespace) = 'pg_catalog'::regnamespace OR t.typname = 'citext'
            OR (t.typname IN ('vector', 'halfvec') AND t.typtype = 'b')
        THEN coalesce(item.typname, t.typname) ELSE '' END, d.modifier, item.oid IS NOT NULL,
    (SELECT array_agg(e.enumlabel::text ORDER BY e.enumsortorder) FROM pg_enum e
     WHERE e.enumtypid = coalesce(item.oid, t.oid))
FROM types d JOIN pg_type t ON t.oid = d.type AND t.typtype <> 'd'
    JOIN pg_class c ON true JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = d.attnum
    LEFT JOIN pg_type item ON t.typcategory = 'A' AND item.oid = t.typelem
WHERE c.oid = $1::oid ORDER BY a.attnum
"""
_SHAPE = """
SELECT attrelid, attname, atttypid, atttypmod FROM pg_attribute
WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
_PARTS = """
SELECT relkind::text, relpersistence::text FROM pg_class
WHERE oid = $1::oid OR oid IN (SELECT relid FROM pg_partition_tree($1::oid::regclass))
"""
_RULES = """
SELECT rulename::text, CASE ev_type WHEN '2' THEN 'UPDATE' WHEN '3' THEN 'INSERT' ELSE 'DELETE' END
FROM pg_rewrite WHERE ev_class = $1::oid AND ev_type::text = ANY ($2::text[]) AND (ev_enabled <> 'D' OR ev_type = '2')
ORDER BY 1
"""
"""An upsert is refused even for a disabled rule on UPDATE."""
_OWN = """
SELECT c.relpersistence::text, quote_ident(current_user),
    (SELECT array_agg(action) FROM unnest($3::text[]) action
     WHERE NOT has_table_privilege(c.oid, action)),
    (SELECT json_object_agg(a.attname, format_type(a.atttypid, a.atttypmod) ORDER BY a.attnum) FROM pg_attribute a
     WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2
"""
_HAS_RIGHT = """
SELECT has_table_privilege(it, action)
    OR (SELECT bool_and(has_column_privilege(it, name, action)) FROM unnest(names) name)
FROM (SELECT $1::oid AS it, $2::text AS action, $3::text[] AS names) asked
"""
_UNIQUE = """
SELECT i.indexrelid::regclass::text,
    coalesce((SELECT bool_and(i.indcollation[n] = a.attcollation OR NOT EXISTS (
            SELECT FROM pg_collation c WHERE c.oid IN (i.indcollation[n], a.attcollation) AND NOT c.collisdeterministic
        )) FROM generate_series(0, i.indnkeyatts - 1) n
            JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[n]), true),
    (SELECT array_agg(a.attname::text) FROM pg_attribute a
        WHERE a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
FROM pg_index i
WHERE i.indrelid = $1::oid AND i.indisunique AND i.indisvalid AND i.indisready AND i.indimmediate
    AND i.indpred IS NULL AND i.indexprs IS NULL
"""
"""Each index, whether it finds the same texts equal as its columns do, and the columns. Deterministic collations find
only identical texts equal."""


# --- types ------------------------------------------------------------------------------------------------------------


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


_VECTORS = ("vector", "halfvec")
_PLAIN = {
    "bool", *_INTEGERS, "float4", "float8", "numeric", "timestamp", "timestamptz", "date", "time", "interval", "uuid",
    *_VECTORS,
}  # fmt: skip
"""Types whose texts have no backslash, tab or end of a line."""


def _texts(field: RowField, column: PostgresColumn) -> Texts | None:
    if column.array:
        items = None if field.item is None else _scalar(field.item, column)
        return None if items is None else copy_text.arrays(items)
    if column.base in _VECTORS:
        is_list = field.item is Form.FLOAT and field.shape.without_none.form is Form.LIST
        dimensions = column.modifier if column.modifier > 0 else None
        return copy_text.vectors(dimensions, half=column.base == "halfvec") if is_list else None
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
