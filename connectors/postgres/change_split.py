"""A slot's changes and the pages of its tables as one split: each row that was there once, then its changes, in order.

The tables are read one after the other, in pages. A page is a range of keys in a snapshot of its own, read between two
transactions of the stream. A change of a key that no page has yet is dropped: its page will have it. One of a key in
the newest page is dropped if its transaction was visible there; all later ones are given. Invariants: the next page is
read only once the stream has passed all that was visible in the newest; and only where every transaction with a dropped
change is visible, which may be later than the server streams it. Only the server compares keys. What decides is part of
the position.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from psycopg import sql

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.changes import Part, first_unread, places_of, tables_read
from exactlyonce.connectors.postgres.change_stream import (
    APPLICATION,
    TEXTS,
    Begin,
    ChangeStream,
    End,
    LogicalMessage,
    LogMissing,
    Relation,
    RowChange,
    StreamedTable,
    Truncate,
    read_lsn,
    shown_lsn,
)
from exactlyonce.connectors.postgres.change_values import (
    columns_in,
    key_texts,
    relation_problems,
    rows_of_page,
)
from exactlyonce.connectors.postgres.changes import PostgresSlot, PostgresTransactions
from exactlyonce.connectors.postgres.connection import Limits, PostgresConnection
from exactlyonce.connectors.postgres.slot import (
    Cursor,
    Slot,
    SlotPages,
    SlotTable,
    followed,
    lost,
    require_kept,
    require_same,
    require_slot,
)
from exactlyonce.connectors.postgres.slot_status import SlotLog
from exactlyonce.connectors.postgres.table_rows import ANSWER_S, BY_INDEX, TableInServer, table_now
from exactlyonce.connectors.source import LogRead
from exactlyonce.connectors.splits import OpenSplit
from exactlyonce.connectors.tables import Key
from exactlyonce.pipeline.changes import Op, Transaction
from exactlyonce.pipeline.errors import ConfigError, Halt, StoreError, StoreUnavailable

PAGE_ROWS = 10_000
ASK_S = 0.2
"""The interval of questions to a server that has nothing to give."""
DROPPED_MAX = 1_000
"""The transactions with dropped changes of which the server is asked which are visible by now."""
JUDGED_MAX = 1_000
"""The changes that are fetched at once while there are pages, for most of which there may be no use."""
SKIPPED_MAX = 10_000
"""The changes that are skipped at once: the worker has other work as well."""
TAKE_OVER_MS = 10_000
_PAGE_SETTINGS = {
    **TEXTS,
    "options": " ".join(
        [TEXTS["options"], *(f"-c {name}={value}" for name, value in BY_INDEX.items()), "-c row_security=off"]
    ),
}
"""Of the session that reads pages. A policy that would hide rows is an error."""


class Left(NamedTuple):
    """A change that is left to a page."""

    mark: str


class Page(NamedTuple):
    """The rows of a page."""

    reads: list[RowChange]
    """Those that were not returned yet, the next one last."""
    places: tuple[int, ...]
    """Of the key's columns."""
    is_last: bool
    """Whether there is no page of its table after it."""


Taken = RowChange | Part | Left
"""A message of the stream as a part, or what is left of it."""


class OpenSlot(OpenSplit):
    """See the module. It holds a stream, and a session for questions and pages."""

    def __init__(self, slot: PostgresSlot, position: SourceOffset) -> None:
        self._slot, self._id, self._position = slot, position.source, position
        self.name = f"the changes of {slot.contents}"
        self._cursor = msgspec.json.decode(position.cursor, type=Cursor)
        self._session = PostgresConnection(slot.dsn, Limits(answer=ANSWER_S), _PAGE_SETTINGS)
        self._log = SlotLog(self._session, slot.name)
        self._tables: dict[int, SlotTable] = {}
        """By oid."""
        self._marks = slot.prefixes
        """Of messages, by prefix."""
        ends = any(isinstance(member, PostgresTransactions) for member in slot.members.values())
        self._counts: Counter[str] | None = Counter() if ends else None
        """The changes of the transaction at hand, by mark, if its end is a record."""
        shown = {source.mark: source.table for members in slot.tables for source in members.values()}
        self._shown = {**shown, **{mark: prefix for prefix, mark in self._marks.items()}}
        """By mark: the table or the prefix."""
        self._stream: ChangeStream | None = None
        self._page = Page([], (), is_last=False)
        """The newest page."""
        self._ready: list[Taken] = []
        """What was fetched of the stream."""
        self._ends = deque[tuple[int, End]]()
        """The ends among that, each with the number of items before it since the stream began."""
        self._taken_count = 0
        """The number of items of the stream that were taken."""
        self._skip: dict[str, int] = {}
        """The changes, by their mark, of the transaction at hand that were done with before the stream began."""
        self._names: dict[str, str] = {}
        """By mark: the name of its changes in `Cursor.done`."""
        self._end: int | None = None
        """A position of the server's log, asked since the stream last gave anything."""
        self._ask_s = self._page_s = 0.0
        """The times of the next question, and of the next try to read a page that was not whole."""
        self._began_again: tuple[int, dict[str, int]] | None = None
        """The place where the stream was last begun again after a fault."""
        self._near = 0
        """The number of the next transaction when the server was last asked, for tables without a snapshot."""
        self._unfit: dict[tuple[int, Op], Halt] = {}
        """The errors of the next changes, by the table's oid and the operation, that are no records any more."""
        self._halt: Halt | None = None
        """The error of the next change; all before it were fetched."""
        self._final = position.cursor
        """The newest cursor that is of a finalized checkpoint."""
        try:
            self._start(take_over=True)
        except BaseException:
            self.close()
            raise

    # --- the stream ---------------------------------------------------------------------------------------------------

    def _start(self, *, take_over: bool) -> None:
        """Begin to stream at the position. Raises Halt where the slot does not have it any more."""
        slot, cursor = self._slot, self._cursor
        self._stream = stream = ChangeStream(slot.dsn)
        system = stream.system()
        position = msgspec.structs.replace(self._position, cursor=self.cursor)
        if self._tables:
            require_same(self._session, slot, system, position)
        else:
            self._tables = {table.there.oid: table for table in followed(self._session, slot, system, position)}
            cursor.tables = {oid: table.cursor for oid, table in self._tables.items()}
        if system.timeline != cursor.timeline:
            left = stream.left_at(cursor.timeline, system.timeline)
            if left is None or left < cursor.lsn:
                raise lost(
                    self._id,
                    f"goes on at {shown_lsn(cursor.lsn)} of timeline {cursor.timeline}, and the server, on timeline "
                    f"{system.timeline} since a failover, left that one before: it lacks changes that were read",
                )
            cursor.timeline = system.timeline
        there = require_slot(self._session, slot, self._id, was_read=True)
        require_kept(there, cursor, self._id)
        if there.holder is not None:
            self._free(there, take_over=take_over)
        streamed = {oid: StreamedTable(table.there.name, table.mark) for oid, table in self._tables.items()}
        stream.start(slot.name, cursor.lsn, read_lsn(there.confirmed), streamed, self._marks)
        tables = {table.mark: str(oid) for oid, table in self._tables.items()}
        self._names = {**tables, **{mark: mark for mark in self._marks.values()}}
        if self._counts is not None:
            self._counts.clear()
        cursor.done = {name: count for name, count in cursor.done.items() if name in self._names.values()}
        self._skip = {mark: cursor.done.get(name, 0) for mark, name in self._names.items()} if cursor.done else {}
        self._end = None
        self._ready.clear()
        self._ends.clear()
        self._taken_count = 0
        self._unfit.clear()

    def _free(self, slot: Slot, *, take_over: bool) -> None:
        """End the session that reads the slot, if it is one of ours that is left over."""
        what = f"Slot {self._slot.name!r} of source {self._id!r} is read by process {slot.holder} of the server"
        is_ours = slot.holder_name == APPLICATION
        if not take_over:
            who = "another incarnation of this pipeline, which goes on" if is_ours else f"{slot.holder_name!r}"
            raise StoreUnavailable(f"{what}: {who}")
        if not is_ours:
            raise ConfigError(
                f"{what}, of {slot.holder_name!r}. A slot has one reader: end that one, or give this source its own "
                f"slot=."
            )
        ((ended,),) = self._session.rows("SELECT pg_terminate_backend($1, $2)", (slot.holder, TAKE_OVER_MS))
        if not ended:
            raise StoreUnavailable(f"{what}, and does not end")

    def read(self, records_max: int) -> list[Any]:
        rows = self._page_rows(records_max)
        if len(rows) == records_max:
            return rows
        began = self._cursor.lsn, dict(self._cursor.done)
        try:
            return rows + self._read(records_max - len(rows))
        except LogMissing as error:
            raise lost(self._id, f"cannot go on with slot {self._slot.name!r}: {error}") from error
        except StoreUnavailable:
            if self._began_again == began:
                raise
            self._began_again = began
            self._drop_stream()
            self._start(take_over=False)
            return rows

    def _read(self, records_max: int) -> list[Any]:
        """What comes after the rows of the newest page that were returned."""
        if (rows := self._next_page(records_max)) is not None:
            return rows
        if not self._ready:
            if self._halt is None:
                self._fetch(records_max)
            elif self._final == self.cursor:
                raise self._halt  # a later start goes on at the change itself
        return self._take(records_max) or self._next_page(records_max) or []

    def _next_page(self, records_max: int) -> list[Any] | None:
        """The first rows of the next page, where it is read; None: the stream goes on."""
        while self._halt is None and (table := self._unread) is not None and self._is_due(table):
            pages = table.cursor.pages
            assert pages is not None
            if not pages.last:
                if self._read_page(table, pages):
                    return self._page_rows(records_max)
                return [] if pages.dropped and not pages.since and table.unfit_since is None else None
            table.cursor.pages = None
        return None

    @property
    def _unread(self) -> SlotTable | None:
        """The first table that was not wholly read."""
        return first_unread(self._tables.values())

    def _is_due(self, table: SlotTable) -> bool:
        """Whether the stream is where the next page of *table* is read, or its last one is over."""
        pages = table.cursor.pages
        at_end = self._stream is not None and not (self._stream.inside or self._ready or self._ends)
        return pages is not None and at_end and (not pages.snapshot or self._cursor.lsn >= pages.until)

    def _fetch(self, records_max: int) -> None:
        """Fetch the next changes of the stream; those that pages have, or will have, are not to be given."""
        assert self._stream is not None
        unread = self._unread
        pages = None if unread is None else unread.cursor.pages
        is_held = pages is not None and pages.since > 0 and time.monotonic() < self._page_s
        items: list[RowChange | Part] = []
        first = self._taken_count + len(self._ready)
        count, count_max = 0, records_max if pages is None else max(records_max, JUDGED_MAX)
        came, skipped = False, 0
        for message in self._stream.messages():
            came = True
            parts: Sequence[RowChange | Part] = ()
            match message:
                case RowChange():
                    parts = (message,) if message.old is None else self._parts(message)
                case Relation():
                    self._look_at(message)
                    if self._halt is not None:
                        break
                    continue
                case End(lsn, is_commit):
                    if is_commit:
                        items += self._ended()  # no position lies between it and the commit
                        self._skip = {}
                    self._ends.append((first + len(items), message))
                    if pages is not None and lsn >= pages.until and not is_held:
                        break  # a page is due
                case Truncate(changes):
                    parts = changes
                case LogicalMessage(prefix):
                    parts = [Part(self._marks[prefix], (), message)]
            if self._counts is not None:
                self._counts.update(part.mark for part in parts)
            if self._skip:
                skipped += len(parts)
                parts = [part for part in parts if not self._is_done(part)]
            if self._unfit and parts and isinstance(message, RowChange):
                self._halt = self._unfit.get((message.relation.oid, message.op))
                if self._halt is not None:
                    break
            count += len(parts)
            items += parts
            if count >= count_max or skipped >= SKIPPED_MAX or (pages is not None and isinstance(message, Truncate)):
                break  # a truncate begins pages anew
        if came:
            self._end = None
            self._ready += items if unread is None else self._judged(items)

    def _ended(self) -> list[Part]:
        """The end of the transaction at hand, if it is a record and has changes. Until all tables are read it is none:
        pages may have its rows."""
        if not self._counts or self._stream is None:
            return []
        begin, counts = self._stream.begin, {self._shown[mark]: count for mark, count in self._counts.items()}
        self._counts.clear()
        if self._unread is not None:
            return []
        return [
            Part(
                PostgresTransactions.mark,
                (),
                Transaction(begin.transaction or 0, begin.lsn, begin.timestamp_ms, counts),
            )
        ]

    def _is_done(self, part: RowChange | Part) -> bool:
        """Whether *part* was done with before the stream began."""
        left = self._skip[part.mark]
        self._skip[part.mark] = left - 1
        return left > 0

    def _take(self, records_max: int) -> list[Any]:
        """What is fetched, up to *records_max* changes that are to be given."""
        given = self._take_items(records_max)
        while self._ready and len(given) < records_max:  # some are left to pages
            given += self._take_items(records_max - len(given))
        return given

    def _take_items(self, items_max: int) -> list[Any]:
        """Those of the next items, *items_max* at most, that are to be given."""
        cursor, ends = self._cursor, self._ends
        items, begun = self._ready[:items_max], self._taken_count
        del self._ready[:items_max]
        self._taken_count += len(items)
        open_from = 0  # the first item of the transaction that is not over
        while ends and ends[0][0] <= self._taken_count:
            place, end = ends.popleft()
            if end.is_commit or not (place - begun > open_from or cursor.done):
                cursor.lsn = max(end.lsn, cursor.lsn)
                open_from = place - begun
                cursor.done.clear()
        for mark, count in Counter([item.mark for item in items[open_from:]]).items():
            name = self._names[mark]
            cursor.done[name] = cursor.done.get(name, 0) + count
        if self._unread is None:
            return items
        for item in items:
            if isinstance(item, RowChange) and item.op == "truncate":
                self._begin_anew(self._table_of(item), item.begin)
        return [item for item in items if not isinstance(item, Left)]

    def _table_of(self, change: RowChange) -> SlotTable:
        return self._tables[change.relation.oid]

    def _parts(self, change: RowChange) -> list[RowChange]:
        """The change, which has an old row; two if it changes the key."""
        assert change.old is not None
        if change.new is None or self._key_of(change) == key_texts(change.old, self._table_of(change).places):
            return [change]
        return [replace(change, op="delete", new=None), replace(change, op="insert")]

    def _key_of(self, change: RowChange) -> Key:
        """The key of the row that it is about."""
        places = self._table_of(change).places
        if change.new is not None:
            return key_texts(change.new, places, change.old)
        assert change.old is not None
        return key_texts(change.old, places)

    def _look_at(self, relation: Relation) -> None:
        """Take note of the columns of a table's next changes, and whether these are records of the sources' types."""
        oid, table = relation.oid, self._tables.get(relation.oid)
        if table is None:
            self._halt = lost(self._id, f"cannot go on: of {self._slot.contents}, one was dropped and made anew")
            return
        key, names = table.source.key_columns, [column.name for column in relation.columns]
        self._unfit = {(other, op): halt for (other, op), halt in self._unfit.items() if other != oid}
        if hidden := [column.name for column in relation.columns if column.name in key and not column.is_key]:
            halt = lost(
                table.id,
                f"cannot go on: the replica identity of {table.source.table} was changed, and lacks {hidden[0]!r} of "
                f"key=, so a change does not say which row it was",
            )
            self._unfit |= {(oid, op): halt for op in _OF_OLD_ROWS}
        for id, source in table.members.items():
            if wrong := list(relation_problems(source, relation)):
                halt = source.columns_changed(id, wrong)
                self._unfit |= {(oid, op): halt for op in ("insert", *_OF_OLD_ROWS)}
        table.places = places_of(key, names) if set(key) <= set(names) else ()
        if table.cursor.pages is not None:
            table.there, _ = self._now(table)  # the type of its key may be wider by now

    # --- the pages ----------------------------------------------------------------------------------------------------

    def _judged(self, items: Sequence[RowChange | Part]) -> list[Taken]:
        """*items*, without the changes that a page has, or will have."""
        judged: list[Taken] = [*items]
        for table in self._tables.values():
            if (pages := table.cursor.pages) is None:
                continue
            mark = table.mark
            changes = {
                place: item for place, item in enumerate(items)
                if isinstance(item, RowChange) and item.mark == mark and item.op != "truncate"
            }  # fmt: skip
            zones = self._zones(table, pages, list(map(self._key_of, changes.values())))
            for (place, change), zone in zip(changes.items(), zones, strict=True):
                if zone is _UNREAD or (zone is _NEWEST and self._visible(pages, change.begin)):
                    judged[place] = Left(mark)
                if zone is _UNREAD:
                    self._note_dropped(table, pages, change.begin)
        return judged

    def _zones(self, table: SlotTable, pages: SlotPages, keys: Sequence[Key]) -> list[str]:
        """Where each of *keys* lies: in a page before the newest, in the newest, or in none."""
        if pages.through is None and not pages.last:
            return [_UNREAD] * len(keys)
        read, newest = self._at_most(table, pages.after, keys), self._at_most(table, pages.through, keys)
        return [
            _READ if is_read else _NEWEST if is_newest or pages.last else _UNREAD
            for is_read, is_newest in zip(read, newest, strict=True)
        ]

    def _at_most(self, table: SlotTable, bound: Key | None, keys: Sequence[Key]) -> list[bool]:
        """Whether each of *keys* is at most *bound*; None: there is no bound below any key."""
        if bound is None or not keys:
            return [False] * len(keys)
        columns = [[key[place] for key in keys] for place in range(len(bound))]
        names = sql.SQL(", ").join(sql.Identifier(f"k{place}") for place in range(len(bound)))
        arrays = sql.SQL(", ").join(sql.SQL(f"${place}::text[]") for place in range(1, len(bound) + 1))
        typed = sql.SQL(", ").join(
            sql.SQL("{}::{}").format(sql.Identifier(f"k{place}"), sql.SQL(table.there.types[column]))
            for place, column in enumerate(table.there.key)
        )
        query = sql.SQL(
            "SELECT ROW({typed}) <= ROW({bound}) FROM unnest({arrays}) WITH ORDINALITY AS k({names}, place)"
            " ORDER BY place"
        ).format(typed=typed, bound=_literals(table.there, bound), arrays=arrays, names=names)
        return [bool(row[0]) for row in self._session.rows(query, tuple(columns))]

    def _visible(self, pages: SlotPages, begin: Begin) -> bool:
        return bool(pages.snapshot) and snapshot_of(pages.snapshot).sees(self._number(pages, begin))

    def _number(self, pages: SlotPages, begin: Begin) -> int:
        """The transaction's number of 64 bits: the one nearest to the newest that is known."""
        assert begin.transaction is not None
        near = snapshot_of(pages.snapshot).xmax if pages.snapshot else self._near or self._snapshot_now().xmax
        number = (near & ~0xFFFFFFFF) | begin.transaction
        return number + (((near - number) + 0x80000000) >> 32 << 32)

    def _snapshot_now(self) -> Snapshot:
        ((text,),) = self._session.rows("SELECT pg_current_snapshot()::text")
        self._near = snapshot_of(text).xmax
        return snapshot_of(text)

    def _note_dropped(self, table: SlotTable, pages: SlotPages, begin: Begin) -> None:
        if begin is table.noted:
            return
        table.noted = begin
        pages.dropped.append(self._number(pages, begin))
        if len(pages.dropped) % DROPPED_MAX == 0:
            now = self._snapshot_now()
            pages.dropped = [number for number in dict.fromkeys(pages.dropped) if not now.sees(number)]

    def _begin_anew(self, table: SlotTable, begin: Begin) -> None:
        """All rows are gone: read those that come since then, if the table is not wholly read."""
        if (pages := table.cursor.pages) is not None:
            self._note_dropped(table, pages, begin)
            pages.after = pages.through = None
            pages.last, pages.snapshot, pages.until, pages.rows = False, "", 0, 0

    def _now(self, table: SlotTable) -> tuple[TableInServer, list[str]]:
        """The table as it is in the server now, and why it cannot be read. Raises Halt if it was made anew."""
        there, wrong = table_now(self._session, table.source, table.id)
        if there.oid != table.there.oid:
            raise lost(table.id, f"cannot go on: the table {table.source.table} was dropped and made anew")
        if not set(there.key) <= there.types.keys():
            raise table.source.columns_changed(table.id, wrong)
        return there, wrong

    def _stop_at_columns(self, table: SlotTable, reasons: Sequence[str]) -> None:
        """A page of *table* would be no records any more: read the changes before that, then halt."""
        assert self._stream is not None
        if table.unfit_since is None:
            table.unfit_since = self._flushed()
        if self._cursor.lsn >= table.unfit_since:
            self._halt = table.source.columns_changed(table.id, reasons)
        else:
            self._stream.ask()

    def _read_page(self, table: SlotTable, pages: SlotPages) -> bool:
        """Read the next page; False where a transaction that it has to see is not visible yet, and where the table's
        columns were changed."""
        session, now_s = self._session, time.monotonic()
        if (pages.dropped or pages.since or table.unfit_since is not None) and now_s < self._page_s:
            return False
        self._page_s = now_s + ASK_S
        after = pages.through
        session.begin("exactlyonce", 0, snapshot="", reads=table.there.name)
        try:
            there, wrong = self._now(table)  # its columns may be others by now
            if wrong:
                self._stop_at_columns(table, wrong)
                return False
            table.there, table.unfit_since = there, None
            ((text, time_ms),) = session.rows(
                "SELECT pg_current_snapshot()::text, (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
                " FROM set_config('intervalstyle', 'iso_8601', true)"
            )
            snapshot = snapshot_of(text)
            if snapshot.xmin < pages.since:
                return False
            pages.since = 0
            if not all(map(snapshot.sees, pages.dropped)):
                return False
            lines = session.copied(_page_query(there, after))
        finally:
            session.end()
        with session.transaction("exactlyonce"):
            session.rows("SET LOCAL synchronous_commit = local")
            ((until,),) = session.rows("SELECT pg_logical_emit_message(true, 'exactlyonce', '')::text")
        pages.dropped, pages.after, pages.snapshot = [], after, text
        pages.until = read_lsn(until)
        relation, begin = columns_in(there), Begin(self._cursor.lsn, time_ms, None)
        reads = [RowChange(table.mark, "read", relation, begin, row) for row in rows_of_page(lines)]
        places = places_of(there.key, [column.name for column in relation.columns])
        self._page = Page(reads[::-1], places, is_last=len(reads) < PAGE_ROWS)
        pages.last = not reads
        return True

    def _page_rows(self, records_max: int) -> list[Any]:
        """The next rows of the newest page."""
        reads, places, is_last = self._page
        rows = reads[-records_max:][::-1]
        if rows:
            del reads[-records_max:]
            table = self._unread
            assert table is not None
            pages = table.cursor.pages
            assert pages is not None
            assert rows[-1].new is not None
            pages.through = key_texts(rows[-1].new, places)
            pages.rows += len(rows)
            pages.last = is_last and not reads
        return rows

    # --- the rest -----------------------------------------------------------------------------------------------------

    @property
    def cursor(self) -> str:
        return msgspec.json.encode(self._cursor).decode()

    def caught_up(self) -> bool:
        """Whether all that was committed at the last question was read. Asks the server how far it is, now and then."""
        if (
            self._page.reads or self._ready or self._halt is not None or self._stream is None or self._stream.inside
        ):  # fmt: skip
            return False
        if (now_s := time.monotonic()) >= self._ask_s:
            self._ask_s = now_s + ASK_S
            self._end = self._flushed()
            if self._cursor.lsn < self._end:
                self._stream.ask()
        return self._end is not None and self._cursor.lsn >= self._end and self._unread is None

    def _flushed(self) -> int:
        """The end of the server's log."""
        return read_lsn(self._session.rows("SELECT pg_current_wal_flush_lsn()::text")[0][0])

    def log(self) -> LogRead:
        """Keeps the stream while a sink lets nothing be read."""
        if self._stream is not None:
            self._stream.keep()
        committed_ms = 0 if self._stream is None else self._stream.committed_ms
        read = tables_read(self._tables.values(), PAGE_ROWS, self._rows_about)
        return self._log.look(self._cursor.lsn, committed_ms, list(read))

    def _rows_about(self, table: SlotTable) -> int:
        """The server's estimate of the table's rows; 0: it does not answer."""
        try:
            ((text,),) = self._session.rows(sql.SQL("EXPLAIN (FORMAT JSON) SELECT FROM {}").format(table.there.name))
        except (StoreError, StoreUnavailable):
            return 0
        return int(text[0]["Plan"]["Plan Rows"])

    def finalized(self, position: SourceOffset) -> None:
        self._final = position.cursor
        if self._stream is not None:
            self._stream.finalized(msgspec.json.decode(position.cursor, type=Cursor).lsn)

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        self._drop_stream()
        self._session.close()


_READ, _NEWEST, _UNREAD = "read", "newest", "unread"
_OF_OLD_ROWS: tuple[Op, ...] = ("update", "delete")


def _page_query(table: TableInServer, after: Key | None) -> sql.Composed:
    key = sql.SQL(", ").join(map(sql.Identifier, table.key))
    above = sql.SQL("") if after is None else sql.SQL("WHERE ROW({}) > ROW({})").format(key, _literals(table, after))
    return sql.SQL("COPY (SELECT {} FROM {} {} ORDER BY {} LIMIT {}) TO STDOUT").format(
        sql.SQL(", ").join(map(sql.Identifier, table.types)), table.name, above, key, sql.Literal(PAGE_ROWS)
    )


def _literals(table: TableInServer, key: Key) -> sql.Composed:
    return sql.SQL(", ").join(
        sql.SQL("{}::{}").format(sql.Literal(text), sql.SQL(table.types[column]))
        for column, text in zip(table.key, key, strict=True)
    )


class Snapshot(NamedTuple):
    """The transactions that a statement sees."""

    xmin: int
    xmax: int
    running: frozenset[int]

    def sees(self, number: int) -> bool:
        """Whether it sees what a committed transaction of this number has written."""
        return number < self.xmin or (number < self.xmax and number not in self.running)


@lru_cache(maxsize=8)
def snapshot_of(text: str) -> Snapshot:
    """
    >>> snapshot_of("10:14:10,12").sees(11), snapshot_of("10:14:10,12").sees(12)
    (True, False)
    """
    xmin, xmax, running = text.split(":")
    return Snapshot(int(xmin), int(xmax), frozenset(map(int, filter(None, running.split(",")))))
