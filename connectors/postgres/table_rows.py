"""The rows of a table of PostgreSQL: the leader keeps one exported snapshot, in which all workers read ranges of keys.

Invariants: a session reads in one transaction, REPEATABLE READ; rows come as JSON of the server, with types as it
writes them. The leader's session ends once every split has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
from psycopg import sql

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.postgres.connection import Limits, PostgresConnection
from exactlyonce.connectors.postgres.table_source import PostgresTableSource
from exactlyonce.connectors.tables import (
    NUMBERS,
    PAGE_ROWS,
    TEXTS,
    Key,
    KeyedRows,
    Row,
    TableSplit,
    columns_of,
    field_problems,
    key_problems,
)
from exactlyonce.pipeline.errors import ConfigError, Halt, StoreError, StoreUnavailable, Unavailable
from exactlyonce.pipeline.shape import Form

ANSWER_S = 300
"""The limit of one query: the first may have to wait for the disk."""
KEY_TYPES = ("int2", "int4", "int8", "numeric", "text", "varchar", "bpchar", "uuid", "date", "timestamp", "timestamptz",
             "bytea")  # fmt: skip
"""Types of a key: every value is the same one again once it was text."""
SAMPLE_ROWS, SPLIT_SAMPLE_ROWS = 20_000, 500
"""Rows that a table is divided by, and the rows that a split has at least."""
_ROWS_OF_A_PAGE = 50
_NEVER = 0


class TableInServer(msgspec.Struct, frozen=True, kw_only=True):
    """The table that is read."""

    oid: int
    name: sql.Identifier
    types: dict[str, str]
    """By column: its type, and its collation where that is not the type's, as SQL."""
    bases: dict[str, str]
    """By column: the name of its type in the catalogue."""
    key: tuple[str, ...]


def open_rows(source: PostgresTableSource[Any], position: SourceOffset) -> PostgresTableRows:
    """See `TableSource.open_rows`."""
    split = TableSplit.parse(position.topic_id)
    connection = _connection(source)
    try:
        if not _began_in(connection, source, position.source, split.snapshot):
            if source.one_snapshot:
                source.snapshot_gone(position)
            _begin(connection, source, position.source, "")
        return PostgresTableRows(connection, source, found_table(connection, source, position.source, split))
    except BaseException:
        connection.close()
        raise


def _connection(source: PostgresTableSource[Any]) -> PostgresConnection:
    return PostgresConnection(source.dsn, Limits(answer=ANSWER_S))


def _began_in(connection: PostgresConnection, source: PostgresTableSource[Any], id: str, exported: str) -> bool:
    """Whether the transaction reads in the *exported* snapshot: False if it is gone. Its name comes again after a
    restart of the server, so it has the time of that as well."""
    name, _, server = exported.partition(_SERVER_MARK)
    if connection.rows(_SERVER) != [(server,)]:
        return False
    try:
        _begin(connection, source, id, name)
    except (StoreError, StoreUnavailable) as error:
        if not any(code in str(error) for code in _SNAPSHOT_GONE):
            raise
        return False
    return True


def _begin(connection: PostgresConnection, source: PostgresTableSource[Any], id: str, snapshot: str) -> None:
    schema, name, _, kind, _ = _looked_up(connection, source.table, id)
    locked = sql.Identifier(schema, name) if kind in _TABLES else None
    connection.begin("exactlyonce", _NEVER, snapshot=snapshot, reads=locked)
    connection.rows(_SETTINGS)


def _looked_up(connection: PostgresConnection, table: str, id: str) -> tuple[str, str, int, str, bool]:
    """The schema, the name, the oid and the kind of the *table* of source *id*, and whether others inherit from it."""
    schema, _, name = table.rpartition(".")
    rows = connection.rows(_FIND, (schema or None, name))
    if not rows:
        raise ConfigError(
            f"Source {id!r}: there is no table {table} that the role of dsn= may see. Create it, or correct "
            f'the name; one in another schema is "schema.table".'
        )
    return rows[0]


def found_table(
    connection: PostgresConnection, source: KeyedRows[Any], id: str, split: TableSplit | None = None
) -> TableInServer:
    """The table, looked at: ConfigError if it cannot be read by this key; Halt if it is not the table of *split*."""
    there, wrong = table_now(connection, source, id)
    if split is not None and split.table != str(there.oid):
        raise Halt(
            f"Source {id!r} has read a part of the table {source.table}, which was dropped and created again since "
            f"then.\n  Choices: `exactlyonce reset` and read it anew; or restore the database as it was."
        )
    if wrong:
        raise ConfigError(f"Source {id!r} cannot read the table {source.table}: {'; '.join(wrong)}.")
    return there


def table_now(connection: PostgresConnection, source: KeyedRows[Any], id: str) -> tuple[TableInServer, list[str]]:
    """The table as it is, and the reasons why its rows cannot be read by this key. ConfigError if there is none."""
    schema, name, oid, kind, is_parent = _looked_up(connection, source.table, id)
    described = connection.rows(_COLUMNS, (oid,))
    bases = {column: base for column, _, base, _ in described}
    nullable = {column: not not_null for column, _, _, not_null in described}
    key = source.key_columns
    wrong = [
        *([] if kind in _TABLES else ["it is a view or a foreign table, which has no unique key: name a table"]),
        *(
            ["other tables inherit from it, and may have its keys again: name one from which none does"]
            if is_parent
            else []
        ),
        *key_problems(key, bases, nullable, dict.fromkeys(KEY_TYPES, "")),
        *field_problems(columns_of(source.value), bases, TAKEN),
    ]
    if not wrong and list(key) not in [columns for (columns,) in connection.rows(_UNIQUE, (oid,))]:
        names = sql.SQL(", ").join(map(sql.Identifier, key))
        create = sql.SQL("CREATE UNIQUE INDEX ON {} ({})").format(sql.Identifier(schema, name), names).as_string(None)
        wrong.append(f"it has no unique index on ({', '.join(key)}), of all rows and in this order: {create}")
    types = {column: type_ for column, type_, _, _ in described}
    return TableInServer(oid=oid, name=sql.Identifier(schema, name), types=types, bases=bases, key=key), wrong


class PostgresTableFinder:
    """The `SplitFinder` of a table. Its session keeps the snapshot until all splits have ended."""

    def __init__(self, source_id: str, source: PostgresTableSource[Any]) -> None:
        self._id, self._source = source_id, source
        self._connection = _connection(source)
        self._keeps = False
        """Whether its session keeps a snapshot."""

    def find(self, known: Sequence[SourceOffset]) -> list[SourceOffset]:
        if known:
            unended = [split for split in known if not split.ended]
            if not unended:
                self.close()
            elif self._keeps:
                self._require_kept(unended[0])
            return []
        try:
            return self._begun()
        except BaseException:
            self.close()
            raise

    def _begun(self) -> list[SourceOffset]:
        """The splits, of a snapshot that the session keeps."""
        connection = self._connection
        _begin(connection, self._source, self._id, "")
        table = found_table(connection, self._source, self._id)
        ((name,),), ((server,),) = connection.rows("SELECT pg_export_snapshot()"), connection.rows(_SERVER)
        snapshot = f"{name}{_SERVER_MARK}{server}"
        bounds: list[Key | None] = [None, *_bounds(connection, table, self._source.splits), None]
        splits = [TableSplit(str(table.oid), snapshot, after, through) for after, through in pairwise(bounds)]
        self._keeps, place = True, self._source.place
        return [SourceOffset(self._id, place, str(split), number, 0) for number, split in enumerate(splits)]

    def _require_kept(self, split: SourceOffset) -> None:
        """Raise Halt, or begin the run anew with a word, if the session has ended: somebody has ended it."""
        try:
            self._connection.rows("SELECT")
        except (StoreError, StoreUnavailable) as error:
            self._keeps = False
            if self._source.one_snapshot:
                self._source.snapshot_gone(split)
            raise Unavailable(
                f"Source {self._id!r}: the session that kept a snapshot of {self._source.table} has ended. Rows not "
                f"yet read are read as of a later moment: {error}"
            ) from error

    def close(self) -> None:
        self._keeps = False
        self._connection.close()


def _bounds(connection: PostgresConnection, table: TableInServer, splits: int) -> list[Key]:
    """Keys that divide the table's rows into *splits* parts of about one size, or fewer if there are few rows."""
    pages = connection.rows(_PAGES, (table.oid,))[0][0]
    share = min(100.0, 100 * SAMPLE_ROWS / max(1, pages * _ROWS_OF_A_PAGE))
    key = sql.SQL(", ").join(map(sql.Identifier, table.key))
    texts = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(column)) for column in table.key)
    query = sql.SQL(  # names with a blank before them are no column's
        "WITH sampled AS MATERIALIZED (SELECT {key} FROM {table} TABLESAMPLE SYSTEM ({share}) REPEATABLE (1)),"
        ' numbered AS (SELECT {key}, row_number() OVER (ORDER BY {key}) - 1 AS " place" FROM sampled),'
        ' parts AS (SELECT greatest(1, least({splits}, count(*) / {rows})) AS " parts", count(*) AS " rows"'
        " FROM sampled)"
        ' SELECT {texts} FROM numbered, parts WHERE " place" > 0 AND " place" % (" rows" / " parts") = 0'
        ' AND " place" / (" rows" / " parts") < " parts" ORDER BY " place"'
    ).format(
        key=key, table=table.name, texts=texts, share=sql.Literal(share), splits=sql.Literal(splits),
        rows=sql.Literal(SPLIT_SAMPLE_ROWS),
    )  # fmt: skip
    return connection.rows(query)


class PostgresTableRows:
    """See `TableRows`."""

    def __init__(self, connection: PostgresConnection, source: PostgresTableSource[Any], table: TableInServer) -> None:
        self._connection, self._table = connection, table
        self._columns = [name for name in columns_of(source.value) if name in table.types]
        ((self.time_ms,),) = connection.rows("SELECT (extract(epoch FROM now()) * 1000)::bigint")

    def page(self, after: Key | None, through: Key | None) -> list[Row]:
        key = [sql.SQL("t.{}").format(sql.Identifier(column)) for column in self._table.key]
        keys = sql.SQL(", ").join(key)
        conditions, values = list[sql.Composable]([sql.SQL("true")]), list[str]()
        for bound, than in ((after, ">"), (through, "<=")):
            if bound is not None:
                conditions.append(
                    sql.SQL("ROW({}) {} ROW({})").format(keys, sql.SQL(than), self._values(len(values) + 1))
                )
                values += bound
        query = sql.SQL(
            'SELECT {texts}, row_to_json(" row")::text FROM {table} t, LATERAL (SELECT {columns}) " row"'
            " WHERE {conditions} ORDER BY {keys} LIMIT {rows}"
        ).format(
            texts=sql.SQL(", ").join(sql.SQL("{}::text").format(column) for column in key), table=self._table.name,
            columns=sql.SQL(", ").join(map(self._column, self._columns)), keys=keys,
            conditions=sql.SQL(" AND ").join(conditions), rows=sql.Literal(PAGE_ROWS),
        )  # fmt: skip
        return [Row(row[:-1], row[-1]) for row in self._connection.rows(query, tuple(values))]

    def _values(self, first: int) -> sql.Composed:
        """Placeholders for a key, of the types of its columns."""
        return sql.SQL(", ").join(
            sql.SQL(f"${number}::text::{self._table.types[column]}")
            for number, column in enumerate(self._table.key, first)
        )

    def _column(self, name: str) -> sql.Composed:
        """A column as JSON has it for its decoder: bytes are in base64."""
        in_base64 = sql.SQL("translate(encode(t.{0}, 'base64'), E'\\n', '') AS {0}")
        form = in_base64 if self._table.bases[name] == "bytea" else sql.SQL("t.{0}")
        return form.format(sql.Identifier(name))

    def close(self) -> None:
        self._connection.close()


TAKEN: dict[str, frozenset[Form]] = {
    **dict.fromkeys(("int2", "int4", "int8", "float4", "float8", "numeric"), NUMBERS),
    "bool": frozenset({Form.BOOL}),
    **dict.fromkeys(("text", "varchar", "bpchar", "char", "name"), TEXTS),
    **dict.fromkeys(("date", "timestamp", "timestamptz"), frozenset({Form.STR, Form.DATETIME, Form.DATE})),
    **dict.fromkeys(("time", "timetz"), frozenset({Form.STR, Form.TIME})),
    "interval": frozenset({Form.STR, Form.TIMEDELTA}),
    "uuid": frozenset({Form.STR, Form.UUID}),
    "bytea": frozenset({Form.STR, Form.BYTES}),
}
"""By type of a column: the fields that take its values in JSON."""
_TABLES = ("r", "p")
_SERVER_MARK = "@"
_SERVER = "SELECT extract(epoch FROM pg_postmaster_start_time())::text"
_SNAPSHOT_GONE = ("[22023]", "[42704]", "[55000]")
"""SQLSTATEs of an exported snapshot that is no more: before PostgreSQL 17, since then, and while its session ends."""
VALUE_TEXTS = {
    "datestyle": "ISO",
    "timezone": "UTC",
    "intervalstyle": "iso_8601",
    "bytea_output": "hex",
    "extra_float_digits": "1",
}
"""Settings by which the texts of values are the same for every role and database."""
BY_INDEX = {"enable_sort": "off", "enable_bitmapscan": "off"}
"""Pages come by the key's index: without statistics of the table, the server would sort all that is left for each."""
_SETTINGS = sql.SQL("SELECT {}").format(
    sql.SQL(", ").join(
        sql.SQL("set_config({}, {}, true)").format(sql.Literal(name), sql.Literal(value))
        for name, value in (VALUE_TEXTS | BY_INDEX).items()
    )
)
NAMED = "to_regclass(CASE WHEN $1::text IS NULL THEN '' ELSE quote_ident($1::text) || '.' END || quote_ident($2::text))"
"""The table of schema $1, or of the search path, and name $2; NULL: there is none."""
_FIND = sql.SQL("""
SELECT n.nspname, c.relname, c.oid, c.relkind::text,
    c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = {}
""").format(sql.SQL(NAMED))
_COLUMNS = """
SELECT a.attname,
    format_type(a.atttypid, a.atttypmod)
        || coalesce(' COLLATE ' || quote_ident(n.nspname) || '.' || quote_ident(c.collname), ''),
    t.typname, a.attnotnull
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    LEFT JOIN pg_collation c ON c.oid = a.attcollation AND c.oid <> t.typcollation
    LEFT JOIN pg_namespace n ON n.oid = c.collnamespace
WHERE a.attrelid = $1::oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
_UNIQUE = """
SELECT array_agg(a.attname::text ORDER BY n)
FROM pg_index i CROSS JOIN LATERAL generate_series(0, i.indnkeyatts - 1) n
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[n]
WHERE i.indrelid = $1::oid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
GROUP BY i.indexrelid
HAVING bool_and(i.indcollation[n] = a.attcollation)
"""
_PAGES = """
SELECT coalesce(sum(pg_relation_size(oid)), 0)::bigint / 8192 FROM pg_class
WHERE oid = $1::oid OR oid IN (SELECT relid FROM pg_partition_tree($1::oid::regclass))
"""
