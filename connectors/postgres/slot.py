"""A logical slot of PostgreSQL: what it needs to be whole, how it is made and removed, and the positions in it.

Invariant: a position names whatever would be silent about changes if it were another: the cluster, the slot, the table
and its entry in the publication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import msgspec
from psycopg import sql

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.postgres.change_stream import System, read_lsn, system_of
from exactlyonce.connectors.postgres.changes import PostgresChanges
from exactlyonce.connectors.postgres.connection import Limits, PostgresConnection
from exactlyonce.connectors.postgres.table_rows import ANSWER_S, NAMED, TableInServer, found_table
from exactlyonce.connectors.tables import Key, columns_of
from exactlyonce.pipeline.errors import ConfigError, Halt, StoreUnavailable, Unavailable
from exactlyonce.pipeline.secrets import shown_reference


class Pages(msgspec.Struct, omit_defaults=True):
    """How far the table was read, and what decides about the changes of its keys."""

    after: Key | None = None
    """The rows with keys above it, and up to *through*, are of the newest page."""
    through: Key | None = None
    """None: no row was read."""
    last: bool = False
    """Whether there is no other page: all keys above *after* belong to the newest one."""
    snapshot: str = ""
    """Of the newest page; empty: there is none."""
    until: int = 0
    """The position by which the stream has passed all that was visible in it."""
    rows: int = 0
    """The rows that were returned."""
    dropped: list[int] = []
    """The numbers, of 64 bits, of transactions with a dropped change that may not be visible yet."""


class Cursor(msgspec.Struct, omit_defaults=True):
    """The `SourceOffset.cursor` of a slot."""

    lsn: int
    """The end of the last transaction that was wholly returned."""
    timeline: int
    index: int = 0
    """The changes of the next one that were returned, or left to a page."""
    pages: Pages | None = None
    """None: the whole table was read, or none of it is to be."""


class Identity(msgspec.Struct, frozen=True):
    """The `SourceOffset.identity` of a slot: whatever would be silent about changes if it were another."""

    system: str
    """The database cluster's identifier."""
    slot: str
    table: int
    """The table's oid: one that is made anew has another."""
    published: str
    """The table's entry in the publication, and the version of that, which any ALTER PUBLICATION changes but those that
    add or drop tables."""

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


class Slot(NamedTuple):
    """A slot, as the server tells it."""

    plugin: str
    here: bool
    """Whether it is of this database."""
    confirmed: str
    holder: int | None
    """The process that reads it now."""
    holder_name: str | None
    status: str


class SlotFinder:
    """The `SplitFinder` of a slot, which is one split."""

    def __init__(self, source_id: str, source: PostgresChanges[Any]) -> None:
        self._id, self._source = source_id, source
        self._session = PostgresConnection(source.dsn, Limits())
        self._system: System | None = None

    def find(self, known: Sequence[SourceOffset]) -> list[SourceOffset]:
        """See `SplitFinder`. Raises Halt where the slot, the table or its publication is not the one of before."""
        session, source, id = self._session, self._source, self._id
        if known:
            try:
                self._require_same(known[0])
            except StoreUnavailable as error:
                raise Unavailable(f"Source {id!r}: {error}") from error  # a new incarnation waits for it
            return []
        slot = require_slot(session, source, id)
        system = system_of(source.dsn)
        table = found_table(session, source, id)
        if wrong := [*server_problems(session), *table_problems(session, source, table)]:
            raise ConfigError(f"Source {id!r} cannot capture the changes of {source.table}: {'; '.join(wrong)}.")
        pages = Pages() if source.snapshot == "pages" else None
        cursor = msgspec.json.encode(Cursor(read_lsn(slot.confirmed), system.timeline, 0, pages)).decode()
        identity = identity_of(session, source, system)
        return [SourceOffset(id, source.place, str(identity), 0, 0, cursor=cursor)]

    def _require_same(self, position: SourceOffset) -> None:
        require_slot(self._session, self._source, self._id)
        self._system = self._system or system_of(self._source.dsn)
        require_same(identity_of(self._session, self._source, self._system), position.identity, self._id)

    def close(self) -> None:
        self._session.close()


def require_slot(session: PostgresConnection, source: PostgresChanges[Any], id: str) -> Slot:
    """The source's slot. Raises ConfigError if it is not there or another's, Halt if the server has given it up."""
    name = source.slot_name
    rows = session.rows(_SLOT, (name,))
    if not rows:
        raise ConfigError(
            f"Source {id!r}: there is no replication slot {name!r} at {shown_reference(source.dsn)}. `exactlyonce "
            f"changes setup` makes it, or PostgresChanges.setup(). If this pipeline has read it before, what was "
            f"committed since then may be missing: `exactlyonce reset` begins with the rows that are there."
        )
    slot = Slot(*rows[0])
    if slot.plugin != "pgoutput" or not slot.here:
        raise ConfigError(
            f"Source {id!r}: slot {name!r} is of another database or plugin: set slot= to a name of its own."
        )
    if slot.status == "lost":
        raise Halt(
            f"Source {id!r}: the server has removed log that slot {name!r} needs, since max_slot_wal_keep_size was "
            f"exceeded: changes are lost.\n  Choices: drop the slot, make it anew, and let `exactlyonce reset` begin "
            f"with the rows that are there.",
            operator=id,
        )
    return slot


def server_problems(session: PostgresConnection) -> Iterator[str]:
    ((level, standby),) = session.rows("SELECT current_setting('wal_level'), pg_is_in_recovery()")
    if session.version < 140000:
        yield f"PostgreSQL {session.version // 10000} is too old, it takes 14 or newer"
    if level != "logical":
        yield f"wal_level is {level}: ALTER SYSTEM SET wal_level = 'logical', and restart the server"
    if standby:
        yield "the server is a standby: name the primary in dsn="


def table_problems(session: PostgresConnection, source: PostgresChanges[Any], table: TableInServer) -> Iterator[str]:
    """The reasons why the changes of *table* would not come, or not whole."""
    name, shown = source.slot_name, table.name.as_string(None)
    ((kind, identity, persistence, identity_columns, generated),) = session.rows(_TABLE, (table.oid,))
    if kind != "r":
        yield "it is partitioned, and only plain tables are captured: name its partitions"
    if persistence != "p":
        yield "it is unlogged or temporary, so the server's log does not have its changes"
    if _key_index(session, source, table) is None:
        yield _DEFERRABLE
    elif not _says_key(source, identity, identity_columns):
        has = ", ".join(identity_columns or ()) or "nothing"
        yield (
            f"its replica identity is {has}, and key= {', '.join(source.key_columns)}: `exactlyonce changes setup` "
            f"gives it the unique index on the key"
        )
    if hidden := sorted(columns_of(source.value).keys() & set(generated or ())):
        yield f"its column {hidden[0]!r} is generated, and such columns are not published: leave the field out"
    rows = session.rows(_PUBLICATION, (name,))
    if not rows:
        yield f"there is no publication {name!r}: `exactlyonce changes setup` makes it"
        return
    if not all(rows[0]):
        yield (
            f"publication {name} leaves out operations: "
            f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')"
        )
    published = session.rows(_published(session), (name, table.oid))
    if not published:
        yield f"publication {name} does not have the table: ALTER PUBLICATION {name} ADD TABLE {shown}"
    elif published[0][1]:
        yield f"publication {name} has a row filter or a column list for the table, which hide changes: remove them"


def _key_index(session: PostgresConnection, source: PostgresChanges[Any], table: TableInServer) -> str | None:
    """An index by which at no time two rows have one key; None if there is none."""
    rows = session.rows(_INDEX, (table.oid, list(source.key_columns)))
    return str(rows[0][0]) if rows else None


def _says_key(source: PostgresChanges[Any], identity: str, columns: Sequence[str] | None) -> bool:
    """Whether changes say the key of a row as it was: by a replica identity that has these *columns*, or is full."""
    return identity == "f" or set(source.key_columns) <= set(columns or ())


def identity_of(session: PostgresConnection, source: PostgresChanges[Any], system: System) -> Identity:
    """What the split is now; a table or an entry of it in the publication that is gone is 0, or empty."""
    schema, name = source.table.rpartition(".")[::2]
    ((table,),) = session.rows(_OID, (schema or None, name))
    published = session.rows(_published(session), (source.slot_name, table)) if table else []
    return Identity(system.id, source.slot_name, table or 0, published[0][0] if published else "")


def require_same(now: Identity, before: str, id: str) -> None:
    """Raise Halt if changes since then may not have come."""
    then = msgspec.json.decode(before, type=Identity)
    whats = {
        "system": "the server of dsn= is another database cluster",
        "slot": f"slot= is {now.slot!r}, and was {then.slot!r}",
        "table": "the table was dropped or made anew since then",
        "published": "the publication was altered, or the table taken out of it, since then",
    }
    for name, what in whats.items():
        if getattr(now, name) != getattr(then, name):
            raise lost(id, f"cannot go on: {what}, so changes may be missing")


def lost(id: str, what: str) -> Halt:
    """The error of a source whose changes since its checkpoint are not there any more."""
    return Halt(
        f"Source {id!r} {what}.\n"
        f"  Choices: restore the database as it was, and run again; or `exactlyonce changes drop` and `setup`, and let "
        f"`exactlyonce reset` begin with the rows that are there.",
        operator=id,
    )


def set_up(source: PostgresChanges[Any], *, dry_run: bool) -> list[str]:
    """See `PostgresChanges.setup`."""
    name = source.slot_name
    with closing(PostgresConnection(source.dsn, Limits(answer=ANSWER_S))) as session:
        if wrong := list(server_problems(session)):
            raise ConfigError(f"The changes of {source.table} cannot be captured: {'; '.join(wrong)}.")
        table = found_table(session, source, source.table)
        statements = list[sql.Composed]()
        ((_, identity, _, columns, _),) = session.rows(_TABLE, (table.oid,))
        index = _key_index(session, source, table)
        if index is None:
            raise ConfigError(f"The changes of {source.table} cannot be captured: {_DEFERRABLE}.")
        if not _says_key(source, identity, columns):
            use = sql.SQL("ALTER TABLE {} REPLICA IDENTITY USING INDEX {}")
            statements.append(use.format(table.name, sql.Identifier(index)))
        if not session.rows(_PUBLICATION, (name,)):
            create = sql.SQL("CREATE PUBLICATION {} FOR TABLE {}")
            statements.append(create.format(sql.Identifier(name), table.name))
        if not session.rows(_SLOT, (name,)):
            create = sql.SQL("SELECT pg_create_logical_replication_slot({}, 'pgoutput'{})")
            kept = ", failover => true" if session.version >= 170000 else ""  # a standby may keep it, too
            statements.append(create.format(sql.Literal(name), sql.SQL(kept)))
        if not dry_run:
            for statement in statements:
                session.rows(statement)
            require_slot(session, source, source.table)
            if wrong := list(table_problems(session, source, table)):
                raise ConfigError(f"The changes of {source.table} cannot be captured yet: {'; '.join(wrong)}.")
        return [statement.as_string(None) for statement in statements]


def drop(source: PostgresChanges[Any], *, dry_run: bool) -> list[str]:
    """See `PostgresChanges.drop`."""
    name = source.slot_name
    with closing(PostgresConnection(source.dsn, Limits(answer=ANSWER_S))) as session:
        statements = list[sql.Composed]()
        if rows := session.rows(_SLOT, (name,)):
            if (holder := Slot(*rows[0]).holder) is not None:
                raise ConfigError(f"Slot {name!r} is read by process {holder} of the server: stop the pipeline first.")
            statements.append(sql.SQL("SELECT pg_drop_replication_slot({})").format(sql.Literal(name)))
        if session.rows(_PUBLICATION, (name,)):
            statements.append(sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(name)))
        for statement in () if dry_run else statements:
            session.rows(statement)
        return [statement.as_string(None) for statement in statements]


_DEFERRABLE = (
    "its unique index on the key is DEFERRABLE, so a transaction may have two rows of one key: make it NOT DEFERRABLE"
)
_SLOT = """
SELECT s.plugin, s.database = current_database(), s.confirmed_flush_lsn::text, s.active_pid, a.application_name,
    coalesce(s.wal_status, '')
FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid WHERE s.slot_name = $1
"""
_TABLE = """
SELECT c.relkind::text, c.relreplident::text, c.relpersistence::text,
    (SELECT array_agg(a.attname::text)
        FROM pg_index i JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY(i.indkey)
        WHERE i.indrelid = c.oid
            AND CASE c.relreplident
                WHEN 'd' THEN i.indisprimary AND i.indimmediate WHEN 'i' THEN i.indisreplident ELSE false END),
    (SELECT array_agg(a.attname::text) FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated <> '')
FROM pg_class c WHERE c.oid = $1::oid
"""
_INDEX = """
SELECT c.relname::text FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = $1::oid AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
    AND i.indnkeyatts = cardinality($2::text[])
    AND i.indnkeyatts = (SELECT count(*) FROM pg_attribute a WHERE a.attrelid = i.indrelid
        AND a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1]) AND a.attname::text = ANY($2::text[]))
LIMIT 1
"""
"""A unique index on exactly the columns $2, which may be a replica identity."""
_OID = sql.SQL("SELECT {}::oid").format(sql.SQL(NAMED))
_PUBLICATION = "SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname = $1"
_PUBLISHED = """
SELECT r.oid::text || '/' || p.xmin::text, {hides} FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
WHERE p.pubname = $1 AND r.prrelid = $2::oid
UNION ALL SELECT oid::text || '/' || xmin::text, false FROM pg_publication WHERE pubname = $1 AND puballtables
"""


def _published(session: PostgresConnection) -> sql.Composed:
    """Asks for the table's entry in the publication, and whether it hides anything, which came with 15."""
    hides = "r.prqual IS NOT NULL OR r.prattrs IS NOT NULL" if session.version >= 150000 else "false"
    return sql.SQL(_PUBLISHED).format(hides=sql.SQL(hides))
