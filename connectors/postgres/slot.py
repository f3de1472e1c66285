"""A logical slot of PostgreSQL: what it needs to be whole, how it is made and removed, and the positions in it.

Invariant: a position names whatever would be silent about changes if it were another: the cluster, the slot, and each
table with its entry in the publication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from psycopg import sql

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.changes import CapturedTable, Pages, TableProgress
from exactlyonce.connectors.postgres.change_stream import Begin, System, read_lsn, shown_lsn, system_of
from exactlyonce.connectors.postgres.change_values import columns_in, relation_problems
from exactlyonce.connectors.postgres.changes import PostgresChanges, PostgresSlot
from exactlyonce.connectors.postgres.connection import Limits, PostgresConnection
from exactlyonce.connectors.postgres.table_rows import ANSWER_S, TableInServer, found_table, table_now
from exactlyonce.connectors.tables import Key, columns_of
from exactlyonce.pipeline.errors import ConfigError, Halt, StoreUnavailable, Unavailable
from exactlyonce.pipeline.secrets import shown_reference


class SlotPages(Pages, omit_defaults=True):
    """How far the table was read, and what decides about the changes of its keys."""

    after: Key | None = None
    """The rows with keys above it, and up to *through*, are of the newest page."""
    last: bool = False
    """Whether there is no other page: all keys above *after* belong to the newest one."""
    snapshot: str = ""
    """Of the newest page; empty: there is none."""
    until: int = 0
    """The position by which the stream has passed all that was visible in it."""
    dropped: list[int] = msgspec.field(default_factory=list)
    """The numbers, of 64 bits, of transactions with a dropped change that may not be visible yet."""
    since: int = 0
    """A page is read once all transactions with lower numbers have ended: what they have changed before the table was
    in the publication does not come."""


class TableCursor(TableProgress, omit_defaults=True, kw_only=True):
    """How far one table of a slot was read."""

    name: str
    key: tuple[str, ...]
    published: str
    """The table's entry in the publication, and the version of that, which any ALTER PUBLICATION changes but those that
    add or drop tables."""
    pages: SlotPages | None = None


class Cursor(msgspec.Struct, omit_defaults=True):
    """The `SourceOffset.cursor` of a slot."""

    lsn: int
    """The end of the last transaction that was wholly returned."""
    timeline: int
    done: dict[str, int] = {}
    """The changes of the next one that were returned, or left to a page: for each table, by its oid, and each prefix of
    messages. So a source that comes or goes meanwhile changes nothing for the others."""
    tables: dict[int, TableCursor] = {}
    """By oid; a table that is made anew has another."""


class Identity(msgspec.Struct, frozen=True):
    """The `SourceOffset.identity` of a slot."""

    system: str
    """The database cluster's identifier."""
    slot: str

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


@dataclass
class SlotTable(CapturedTable[PostgresChanges[Any]]):
    """A table of a slot."""

    cursor: TableCursor
    there: TableInServer
    noted: Begin | None = None
    """The last transaction with a dropped change."""
    unfit_since: int | None = None
    """The end of the log when its columns were first seen to fit no page; the changes before it are read."""


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
    gone: str
    """The reason why it is lost, as the server tells it since version 17."""


class SlotFinder:
    """The `SplitFinder` of a slot, which is one split."""

    def __init__(self, slot: PostgresSlot) -> None:
        self._slot = slot
        self._session = PostgresConnection(slot.dsn, Limits())
        self._system: System | None = None
        self._is_checked = False
        """Whether the tables were looked at, of which some may be new to the position."""

    def find(self, known: Sequence[SourceOffset]) -> list[SourceOffset]:
        """See `SplitFinder`. Raises Halt where the slot, a table or its publication is not the one of before."""
        session, slot, id = self._session, self._slot, self._slot.id
        if known:
            try:
                self._system = self._system or system_of(slot.dsn)
                if self._is_checked:
                    require_same(session, slot, self._system, known[0])
                else:
                    followed(session, slot, self._system, known[0])
                    self._is_checked = True
                require_slot(session, slot, id, was_read=True)
            except StoreUnavailable as error:
                raise Unavailable(f"Source {id!r}: {error}") from error  # a new incarnation waits for it
            return []
        found = require_slot(session, slot, id, was_read=False)
        system = system_of(slot.dsn)
        start = SourceOffset(id, slot.place, str(Identity(system.id, slot.name)), 0, 0)
        cursor = Cursor(read_lsn(found.confirmed), system.timeline)
        start = msgspec.structs.replace(start, cursor=msgspec.json.encode(cursor).decode())
        cursor.tables = {table.there.oid: table.cursor for table in followed(session, slot, system, start)}
        return [msgspec.structs.replace(start, cursor=msgspec.json.encode(cursor).decode())]

    def close(self) -> None:
        self._session.close()


def followed(
    session: PostgresConnection, slot: PostgresSlot, system: System, position: SourceOffset
) -> list[SlotTable]:
    """The tables of *slot* at *position*; one that is not in it begins with its pages. The columns of the others may be
    newer than the changes that come next, so these tell whether they fit.

    Raises Halt if changes since then may not have come, `ConfigError` if a table cannot be captured.
    """
    cursor = require_same(session, slot, system, position)
    tables: dict[int, SlotTable] = {}
    if not slot.tables:
        _require_capturable(session, slot, {}, None)
    for members, entry in zip(slot.tables, _entries(session, slot), strict=True):
        id, source = next(iter(members.items()))
        there, wrong = table_now(session, source, id)
        known = cursor.tables.get(there.oid)
        if known is not None and known.pages is not None and not set(source.key_columns) <= there.types.keys():
            raise source.columns_changed(id, wrong)
        if known is not None and known.key != source.key_columns:
            raise ConfigError(
                f"Source {id!r}: the table {source.table} was read by key= {', '.join(known.key)}, which positions are "
                f"made of. Give it that key; or `exactlyonce reset` begins with the rows that are there."
            )
        if there.oid in tables:
            raise ConfigError(f"Sources {tables[there.oid].id!r} and {id!r} name one table: write it alike in both.")
        if known is None:
            there = found_table(session, source, id)
            _require_capturable(session, slot, members, there)
            pages = SlotPages(since=_next_transaction(session)) if source.snapshot == "pages" else None
            known = TableCursor(name=source.table, key=source.key_columns, published=entry.published, pages=pages)
        tables[there.oid] = SlotTable(id, members, known, there)
        known.name = source.table
    return list(tables.values())


def require_same(session: PostgresConnection, slot: PostgresSlot, system: System, position: SourceOffset) -> Cursor:
    """The cursor of *position*. Raises Halt if changes since then may not have come."""
    cursor = msgspec.json.decode(position.cursor, type=Cursor)
    then = msgspec.json.decode(position.identity, type=Identity)
    if then.system != system.id:
        raise _other(position.source, "the server of dsn= is another database cluster")
    if then.slot != slot.name:
        raise _other(position.source, f"slot= is {slot.name!r}, and was {then.slot!r}")
    read = {table.name: oid for oid, table in cursor.tables.items()}
    for members, entry in zip(slot.tables, _entries(session, slot), strict=True):
        id, source = next(iter(members.items()))
        known = cursor.tables.get(entry.oid)
        if known is None and source.table in read:
            for (now,) in session.rows("SELECT $1::oid::regclass::text FROM pg_class WHERE oid = $1::oid",
                                       (read[source.table],)):  # fmt: skip
                raise Halt(
                    f"Source {id!r} cannot go on: the table {source.table} was renamed, and is {now} now. Nothing is "
                    f"missing: name it so in the source, or rename it back, and run again.",
                    operator=id,
                )
            raise _other(id, f"the table {source.table} was dropped or made anew since then")
        if known is not None and known.published != entry.published:
            raise _other(
                id, f"publication {slot.name} was altered or dropped, or {source.table} taken out of it, since then"
            )
    return cursor


def _other(id: str, what: str) -> Halt:
    return lost(id, f"cannot go on: {what}, so changes may be missing")


def _next_transaction(session: PostgresConnection) -> int:
    ((number,),) = session.rows("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    return int(number)


def _require_capturable(
    session: PostgresConnection, slot: PostgresSlot, members: Mapping[str, PostgresChanges[Any]],
    table: TableInServer | None,
) -> None:  # fmt: skip
    """Raise `ConfigError` unless the changes of *table* come from now on; None: of a slot of messages alone."""
    wrong = [*server_problems(session), *publication_problems(session, slot)]
    if table is not None:
        for source in members.values():
            wrong += [*table_problems(session, source, table), *relation_problems(source, columns_in(table))]
    if wrong:
        what = next((source.table for source in members.values()), slot.contents)
        reasons = "; ".join(dict.fromkeys(wrong))
        raise ConfigError(f"Source {next(iter(members), slot.id)!r} cannot capture the changes of {what}: {reasons}.")


def require_slot(session: PostgresConnection, source: PostgresSlot, id: str, *, was_read: bool) -> Slot:
    """The slot in the server. Raises Halt if the server gave it up, or if it is not there and a checkpoint *was_read*
    of it; ConfigError if it was not made yet, or is another's."""
    name, where = source.name, shown_reference(source.dsn)
    rows = session.rows(_SLOT, (name,))
    if not rows and was_read:
        raise _other(
            id, f"there is no replication slot {name!r} any more at {where}: it was dropped, or a failover led to a "
            f"server without it"
        )  # fmt: skip
    if not rows:
        raise ConfigError(
            f"Source {id!r}: there is no replication slot {name!r} at {where}. `exactlyonce changes setup` makes it, "
            f"or PostgresSlot.setup()."
        )
    slot = Slot(*rows[0])
    if slot.plugin != "pgoutput" or not slot.here:
        raise ConfigError(
            f"Source {id!r}: slot {name!r} is of another database or plugin: set slot= to a name of its own."
        )
    if slot.status == "lost":
        reason = _GONE.get(slot.gone, slot.gone)
        raise lost(id, f"cannot go on: the server has given up slot {name!r}, since {reason}: changes are lost")
    return slot


def require_kept(slot: Slot, cursor: Cursor, id: str) -> None:
    """Raise Halt unless *slot*, which was just looked at, still has all after *cursor*."""
    if read_lsn(slot.confirmed) > cursor.lsn:
        raise lost(
            id,
            f"goes on at {shown_lsn(cursor.lsn)}, and its slot has forgotten all before {slot.confirmed}: somebody has "
            f"moved it, as a second pipeline does with this slot=, or this checkpoint is older than the last one of "
            f"the pipeline",
        )


def server_problems(session: PostgresConnection) -> Iterator[str]:
    ((level, standby),) = session.rows("SELECT current_setting('wal_level'), pg_is_in_recovery()")
    if session.version < 140000:
        yield f"PostgreSQL {session.version // 10000} is too old, it takes 14 or newer"
    if level != "logical":
        yield f"wal_level is {level}: ALTER SYSTEM SET wal_level = 'logical', and restart the server"
    if standby:
        yield "the server is a standby: name the primary in dsn="


def table_problems(session: PostgresConnection, source: PostgresChanges[Any], table: TableInServer) -> Iterator[str]:
    """The reasons why the changes of *table* would not come whole, beside its publication."""
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


def publication_problems(session: PostgresConnection, slot: PostgresSlot) -> Iterator[str]:
    """The reasons why the publication does not give all that is captured."""
    name = slot.name
    rows = session.rows(_PUBLICATION, (name,))
    if not rows:
        yield f"there is no publication {name!r}: `exactlyonce changes setup` makes it"
        return
    if not all(rows[0]):
        yield (
            f"publication {name} leaves out operations: "
            f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')"
        )
    for members, entry in zip(slot.tables, _entries(session, slot), strict=True):
        table = next(iter(members.values())).table
        if not entry.published:
            yield f"publication {name} does not have the table {table}: `exactlyonce changes setup` adds it"
        elif entry.hides:
            yield f"publication {name} has a row filter or a column list for {table}, which hide changes: remove them"


def _key_index(session: PostgresConnection, source: PostgresChanges[Any], table: TableInServer) -> str | None:
    """An index by which at no time two rows have one key; None if there is none."""
    rows = session.rows(_INDEX, (table.oid, list(source.key_columns)))
    return str(rows[0][0]) if rows else None


def _says_key(source: PostgresChanges[Any], identity: str, columns: Sequence[str] | None) -> bool:
    """Whether changes say the key of a row as it was: by a replica identity that has these *columns*, or is full."""
    return identity == "f" or set(source.key_columns) <= set(columns or ())


def lost(id: str, what: str) -> Halt:
    """The error of a source whose changes since its checkpoint are not there any more."""
    return Halt(
        f"Source {id!r} {what}.\n"
        f"  Choices: restore the database as it was, and run again; or `exactlyonce changes drop`, "
        f"`exactlyonce changes setup` and `exactlyonce reset`: the next run begins with the rows that are there.",
        operator=id,
    )


def set_up(slot: PostgresSlot, *, dry_run: bool) -> list[str]:
    """See `PostgresSlot.setup`."""
    name = slot.name
    with closing(PostgresConnection(slot.dsn, Limits(answer=ANSWER_S))) as session:
        if wrong := list(server_problems(session)):
            raise ConfigError(f"The changes of {slot.contents} cannot be captured: {'; '.join(wrong)}.")
        statements, unpublished = list[sql.Composed](), list[sql.Identifier]()
        for members, entry in zip(slot.tables, _entries(session, slot), strict=True):
            source = next(iter(members.values()))
            table = found_table(session, source, source.table)
            if (identity := _identity_statement(session, source, table)) is not None:
                statements.append(identity)
            if not entry.published:
                unpublished.append(table.name)
        tables, publication = sql.SQL(", ").join(unpublished), sql.Identifier(name)
        if not session.rows(_PUBLICATION, (name,)):
            of = sql.SQL(" FOR TABLE {}").format(tables) if unpublished else sql.SQL("")
            statements.append(sql.SQL("CREATE PUBLICATION {}{}").format(publication, of))
        elif unpublished:
            statements.append(sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(publication, tables))
        if not session.rows(_SLOT, (name,)):
            create = sql.SQL("SELECT pg_create_logical_replication_slot({}, 'pgoutput'{})")
            kept = ", failover => true" if session.version >= 170000 else ""  # a standby may keep it, too
            statements.append(create.format(sql.Literal(name), sql.SQL(kept)))
        if not dry_run:
            for statement in statements:
                session.rows(statement)
            require_slot(session, slot, slot.id, was_read=False)
            _require_capturable(session, slot, {}, None)
            for members in slot.tables:
                source = next(iter(members.values()))
                _require_capturable(session, slot, members, found_table(session, source, source.table))
        return [statement.as_string(None) for statement in statements]


def _identity_statement(
    session: PostgresConnection, source: PostgresChanges[Any], table: TableInServer
) -> sql.Composed | None:
    """The statement that lets changes of *table* say its key, if they do not."""
    ((_, identity, _, columns, _),) = session.rows(_TABLE, (table.oid,))
    index = _key_index(session, source, table)
    if index is None:
        raise ConfigError(f"The changes of {source.table} cannot be captured: {_DEFERRABLE}.")
    if _says_key(source, identity, columns):
        return None
    use = sql.SQL("ALTER TABLE {} REPLICA IDENTITY USING INDEX {}")
    return use.format(table.name, sql.Identifier(index))


def drop(slot: PostgresSlot, *, dry_run: bool) -> list[str]:
    """See `PostgresSlot.drop`."""
    name = slot.name
    with closing(PostgresConnection(slot.dsn, Limits(answer=ANSWER_S))) as session:
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
    coalesce(s.wal_status, ''), coalesce(to_jsonb(s) ->> 'invalidation_reason', '')
FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid WHERE s.slot_name = $1
"""
_KEPT_TOO_MUCH = "it kept more log than max_slot_wal_keep_size"
_GONE = {
    "": _KEPT_TOO_MUCH,
    "wal_removed": _KEPT_TOO_MUCH,
    "idle_timeout": "nobody has read it for idle_replication_slot_timeout",
    "wal_level_insufficient": "wal_level was not logical",
}
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
_PUBLICATION = "SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname = $1"
_ENTRIES = """
SELECT coalesce(named.oid, 0), coalesce(entry.published, ''), coalesce(entry.hides, false)
FROM (
    SELECT place, to_regclass(coalesce(quote_ident(nullif(schema, '')) || '.', '') || quote_ident(name))::oid AS oid
    FROM unnest($2::text[], $3::text[]) WITH ORDINALITY AS n (schema, name, place)
) named LEFT JOIN LATERAL (
    SELECT r.oid::text || '/' || p.xmin::text AS published, {hides} AS hides
    FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
    WHERE p.pubname = $1 AND r.prrelid = named.oid
    UNION ALL SELECT oid::text || '/' || xmin::text, false FROM pg_publication WHERE pubname = $1 AND puballtables
) entry ON named.oid IS NOT NULL
ORDER BY place
"""


class _Entry(NamedTuple):
    """A table, and its entry in the publication."""

    oid: int
    """0: it is gone."""
    published: str
    """See `TableCursor.published`; empty: it has none."""
    hides: bool


def _entries(session: PostgresConnection, slot: PostgresSlot) -> list[_Entry]:
    """Those of the slot's tables, in their order."""
    if not slot.tables:
        return []
    hides = "r.prqual IS NOT NULL OR r.prattrs IS NOT NULL" if session.version >= 150000 else "false"  # came with 15
    names = [next(iter(members.values())).table.rpartition(".") for members in slot.tables]
    values = slot.name, [schema for schema, _, _ in names], [name for _, _, name in names]
    return [_Entry(*row) for row in session.rows(sql.SQL(_ENTRIES).format(hides=sql.SQL(hides)), values)]
