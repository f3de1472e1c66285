"""A binlog's changes and the pages of its tables as one split: each row that was there, then its changes, in order.

A page is a range of keys in a consistent snapshot, whose place in the binlog MariaDB tells exactly. Its rows are given
when the stream is at that place. A change of a key that no page has yet is dropped: its page will have it; others are
given. Invariants: a page is read only where the stream is between two transactions; one whose snapshot lies before that
is read again, for the stream may have a commit before others see it. A transaction is given once all of it is in the
stream, or much: a server that died may have left a part of one. Only the server compares keys.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.changes import (
    CapturedTable,
    Pages,
    Part,
    TableProgress,
    finding_of,
    first_unread,
    not_captured,
    places_of,
    tables_read,
)
from exactlyonce.connectors.mysql.binlog import (
    Begin,
    BinlogStream,
    End,
    Gtids,
    Message,
    Place,
    RowChange,
    Statement,
    Table,
    Torn,
    covers,
    effect_of,
    lost,
    number_of_file,
    read_gtids,
    shown_gtids,
)
from exactlyonce.connectors.mysql.binlog_rows import CODECS, Column, Relation
from exactlyonce.connectors.mysql.change_values import key_texts, relation_problems
from exactlyonce.connectors.mysql.changes import MySQLBinlog, MySQLChanges
from exactlyonce.connectors.mysql.session import OF_TABLE, MySQLSession, quoted
from exactlyonce.connectors.mysql.table_rows import (
    ANSWER_S,
    TAKEN,
    MySQLTableRows,
    TableInServer,
    found_table,
    table_now,
)
from exactlyonce.connectors.source import LogRead
from exactlyonce.connectors.splits import OpenSplit, SourceFinding
from exactlyonce.connectors.tables import Key, columns_of
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError, Halt, StoreError, StoreUnavailable
from exactlyonce.pipeline.sizes import shown_bytes

PAGE_ROWS = 10_000
ASK_S = 0.2
"""The interval of questions to a server that has nothing to give."""
JUDGED_MAX = 1_000
"""The changes that are fetched at once while there are pages, for most of which there may be no use."""
HELD_MAX = 50_000
"""The changes of a transaction that are held until its end is there."""
TAKEN_MAX = 10_000
"""The messages that are taken at once, most of which may be skipped: the worker has other work as well."""
SHORT_S = 24 * 3600
"""The age that binlogs should reach before the server removes them."""
COMPARED_MAX = 500
"""The keys that one statement compares."""


class TableCursor(TableProgress, omit_defaults=True):
    """How far one table of a binlog was read."""

    index: int = 0
    """The changes of the transaction at hand that were returned, or left to a page."""


class Cursor(msgspec.Struct, omit_defaults=True):
    """The `SourceOffset.cursor` of a binlog."""

    gtids: str
    """The last transaction, by domain, that was wholly returned."""
    tables: dict[str, TableCursor] = {}
    server: str = ""
    """The server that the place is of."""
    place: tuple[int, int] | None = None
    """The end of the last transaction, as the number of a file and a place in it, if it is known."""


@dataclass
class BinlogTable(CapturedTable[MySQLChanges[Any]]):
    """A table of the binlog."""

    cursor: TableCursor
    name: Table
    there: TableInServer
    skip: int = 0
    """The changes of the transaction at hand that were done with before the stream began."""
    relation: Relation = field(default=Relation(("", ""), ()))


class Page(NamedTuple):
    """A page that was read."""

    table: BinlogTable
    rows: deque[Part]
    place: Place
    gtids: Gtids | None
    """The place as a GTID position, where the stream has not come to this file yet."""
    is_last: bool


class Identity(msgspec.Struct, frozen=True):
    """The `SourceOffset.identity` of a binlog. Its server may be another one with the same transactions."""

    database: str


class BinlogFinder:
    """The `SplitFinder` of a binlog, which is one split."""

    def __init__(self, binlog: MySQLBinlog) -> None:
        self._binlog = binlog

    def find(self, known: Sequence[SourceOffset]) -> list[SourceOffset]:
        """See `SplitFinder`. Raises ConfigError where the changes cannot be captured."""
        binlog = self._binlog
        if known:
            return []
        cursor = require_capturable(binlog)
        identity = msgspec.json.encode(Identity(binlog.address().database)).decode()
        return [SourceOffset(binlog.id, binlog.place, identity, 0, 0, cursor=msgspec.json.encode(cursor).decode())]

    def close(self) -> None:
        """Nothing is connected."""


class OpenBinlog(OpenSplit):
    """See the module. It holds a stream, and a session for questions and pages."""

    def __init__(self, binlog: MySQLBinlog, position: SourceOffset) -> None:
        self._binlog, self._id = binlog, position.source
        self.name = f"the changes of {binlog.contents}"
        cursor = msgspec.json.decode(position.cursor, type=Cursor)
        self._gtids = read_gtids(cursor.gtids)
        """The last transaction, by domain, that was wholly returned."""
        self._server, self._place = cursor.server, cursor.place
        self._session = MySQLSession(binlog.address, ANSWER_S)
        self._stream: BinlogStream | None = None
        self._page: Page | None = None
        self._ready = deque[tuple[Part | End, bool]]()
        """The fetched part of the stream, and whether each is to be given."""
        self._held: list[Part | End] = []
        """The changes of a transaction whose end was not fetched yet."""
        self._failed: Halt | ConfigError | None = None
        """The reason why nothing can be read after what is fetched: raised once all before is finalized."""
        self._final = position.cursor
        self._ask_s = self._page_s = 0.0
        """The times of the next question, and of the next try to read a page that came too early."""
        self._read_ms = 0
        """All commits before it were read, by the server's clock; 0: that is not known."""
        self._end: Gtids | None = None
        """The end of the server's log, asked since the stream last gave anything."""
        self._began_again: str | None = None
        """The position at which the stream was last begun again after a fault."""
        try:
            require_server(self._session, binlog)
            database = self._session.address.database
            if msgspec.json.decode(position.identity, type=Identity).database != database:
                raise lost(self._id, f"goes on in another database: the dsn names {database!r} now")
            self._tables = {table.name: table for table in captured(self._session, binlog, cursor)}
            self._by_mark = {table.mark: table for table in self._tables.values()}
            self._start()
        except BaseException:
            self.close()
            raise

    # --- the stream ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin to stream at the position."""
        binlog = self._binlog
        self._require_same_log()
        self._stream = BinlogStream(self._id, binlog.address, binlog.server_id, self._gtids, self._tables)
        self._ready.clear()
        self._held, self._end, self._failed = [], None, None
        for table in self._tables.values():
            table.skip = table.cursor.index

    def _require_same_log(self) -> None:
        """Raise Halt if the server has begun its log anew: it may have come to the same numbers since then."""
        ((server,),) = self._session.ask("SELECT @@server_uid")
        if self._place is None or server != self._server:
            return
        file, end = self._place
        files = {number_of_file(file): file for file, *_ in self._session.ask("SHOW BINARY LOGS")}
        if file in files:
            ((text,),) = self._session.ask("SELECT BINLOG_GTID_POS(%s, %s)", files[file], end)
            then = None if text is None else read_gtids(text)
            is_same = then is not None and all(self._gtids.get(domain) == last for domain, last in then.items())
        else:
            is_same = file < max(files)  # gone by age
        if not is_same:
            raise lost(
                self._id,
                f"cannot go on after GTID {shown_gtids(self._gtids)}: the server has begun its binlog anew, by RESET "
                f"MASTER or from a backup",
            )

    def read(self, records_max: int) -> list[Part]:
        if self._page is not None and self._is_at(self._page):
            return self._page_rows(self._page, records_max)
        began = self.cursor
        try:
            return self._read(records_max)
        except StoreUnavailable:
            if self._began_again == began or (self._stream is not None and self._stream.is_replaced):
                raise
            self._began_again = began
            self._drop_stream()
            self._start()
            return []

    def _read(self, records_max: int) -> list[Part]:
        if self._page is None and self._is_between() and (table := first_unread(self._tables.values())) is not None:
            self._page = self._read_page(table)
        if self._page is not None and self._is_at(self._page):
            return self._page_rows(self._page, records_max)
        if not self._ready:
            self._fetch(records_max)
        return self._taken(records_max)

    def _is_between(self) -> bool:
        """Whether all that was fetched is taken, up to the end of a transaction."""
        return self._stream is not None and not self._stream.inside and not self._ready and self._failed is None

    def _is_at(self, page: Page) -> bool:
        """Whether the stream is at the place of *page*."""
        return self._is_between() and self._is_past(page)

    def _is_past(self, page: Page) -> bool:
        stream = self._stream
        assert stream is not None
        if page.gtids is not None:
            return covers(stream.gtids, page.gtids)
        return stream.place is not None and stream.place >= page.place

    def _fetch(self, records_max: int) -> None:
        """Fetch the next changes of the stream; those that a page will have are not to be given."""
        stream = self._stream
        assert stream is not None
        if self._failed is not None:
            if self._final == self.cursor:
                raise self._failed  # a later start goes on at the change itself
            return
        unread = first_unread(self._tables.values()) is not None
        count, count_max = 0, max(records_max, JUDGED_MAX) if unread else records_max
        held, taken = self._held, 0
        try:
            for messages in stream.messages():
                taken += len(messages)
                for message in messages:
                    if isinstance(message, Torn):
                        self._undo(message)
                    for part in self._parts(message):
                        held.append(part)
                        count += 1
                is_due = unread and not stream.inside and (self._page is None or self._is_past(self._page))
                is_full = count >= count_max and (not stream.inside or len(held) > HELD_MAX)
                if is_due or is_full or taken >= TAKEN_MAX:
                    break
        except (Halt, ConfigError) as error:
            self._failed = error
        if self._failed is None and stream.inside and len(held) <= HELD_MAX:
            last = max((at for at, item in enumerate(held) if isinstance(item, End)), default=-1)
            items, self._held = held[: last + 1], held[last + 1 :]
        else:
            items, self._held = held, []
        if items:
            self._end = None
            self._ready.extend(zip(items, self._judged(items), strict=True))

    def _undo(self, torn: Torn) -> None:
        """Forget the changes that are held of a transaction that did not happen. Raises Halt if some were given."""
        if any(table.cursor.index for table in self._tables.values()) or any(
            not isinstance(item, End) for item, _ in self._ready
        ):
            raise lost(
                self._id,
                f"cannot go on: the server died while it wrote transaction {torn.begin.gtid}, and undid it, of which "
                f"the first changes were given",
            )
        while self._held and not isinstance(self._held[-1], End):
            self._held.pop()

    def _parts(self, message: Message) -> Iterator[Part | End]:
        """The changes that a message tells, but for those that were done with before the stream began."""
        match message:
            case RowChange():
                table = self._tables[message.relation.table]
                for part in _keyed(table, message):
                    if table.skip:
                        table.skip -= 1
                    else:
                        yield part
            case Relation():
                self._look_at(message)
            case Statement():
                yield from self._effects(message)
            case End():
                for table in self._tables.values():
                    table.skip = 0
                yield message

    def _effects(self, statement: Statement) -> Iterator[Part]:
        for table in self._tables.values():
            effect = effect_of(statement.text, statement.database, table.name)
            if effect == "truncate":
                if table.skip:
                    table.skip -= 1
                else:
                    change = RowChange("truncate", None, None, table.relation, statement.begin)
                    yield Part(table.mark, (), change)
            elif effect:
                raise lost(table.id, f"cannot go on at {statement.begin.gtid}, where {effect}: changes may be missing")

    def _look_at(self, relation: Relation) -> None:
        """Raise Halt if the table's columns are not those of the record's type any more."""
        table = self._tables[relation.table]
        for id, source in table.members.items():
            if wrong := list(relation_problems(source, relation)):
                raise source.columns_changed(id, wrong)
        table.relation = relation
        table.places = places_of(table.source.key_columns, [column.name for column in relation.columns])

    def _taken(self, records_max: int) -> list[Part]:
        """What is fetched, up to *records_max* changes that are to be given."""
        given: list[Part] = []
        ready = self._ready
        assert self._stream is not None
        while ready:
            item, is_given = ready[0]
            if isinstance(item, End):
                self._require_committed(item)
                self._gtids[item.domain], self._place, self._server = item.gtid, item.place, self._stream.server
                self._read_ms = max(self._read_ms, item.committed_ms)
                for table in self._tables.values():
                    table.cursor.index = 0
            elif is_given and len(given) == records_max:
                break
            else:
                cursor = self._by_mark[item.mark].cursor
                cursor.index += 1
                if is_given:
                    given.append(item)
            ready.popleft()
        return given

    def _require_committed(self, end: End) -> None:
        if end.rolled_back and any(table.cursor.index for table in self._tables.values()):
            raise lost(
                self._id,
                f"cannot go on: the transaction after {shown_gtids(self._gtids)} was rolled back once it was in the "
                f"binlog, as one is that also changes tables of another engine than InnoDB",
            )

    # --- the pages ----------------------------------------------------------------------------------------------------

    def _judged(self, items: Sequence[Part | End]) -> list[bool]:
        """Whether each of *items* is to be given: no page will have it."""
        judged = [True] * len(items)
        for table in self._tables.values():
            if (pages := table.cursor.pages) is None:
                continue
            keyed = [
                (place, item)
                for place, item in enumerate(items)
                if isinstance(item, Part) and item.key and item.mark == table.mark
            ]
            read = self._at_most(table, pages.through, [part for _, part in keyed])
            for (place, _), is_read in zip(keyed, read, strict=True):
                judged[place] = is_read
        return judged

    def _at_most(self, table: BinlogTable, bound: Key | None, parts: Sequence[Part]) -> list[bool]:
        """Whether the key of each of *parts* is at most *bound*; None: there is no bound below any key."""
        if bound is None:
            return [False] * len(parts)
        row = f"({', '.join(column.compared for column in table.there.key)})"
        at_most: list[bool] = []
        for at in range(0, len(parts), COMPARED_MAX):
            chunk = parts[at : at + COMPARED_MAX]
            values = [text for part in chunk for text in (*part.key, *bound)]
            (answers,) = self._session.ask(f"SELECT {', '.join([f'{row} <= {row}'] * len(chunk))}", *values)
            at_most += map(bool, answers)
        return at_most

    def _read_page(self, table: BinlogTable) -> Page | None:
        """Read the next page of *table*; None where the stream is ahead of all that others see."""
        session, stream, now_s = self._session, self._stream, time.monotonic()
        assert stream is not None
        if now_s < self._page_s:
            return None
        pages = table.cursor.pages
        assert pages is not None
        session.ask("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        session.ask("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        try:
            status = {str(name).lower(): value for name, value in session.ask("SHOW STATUS LIKE 'binlog_snapshot_%%'")}
            name, end = status["binlog_snapshot_file"], int(status["binlog_snapshot_position"])
            ((server,),) = session.ask("SELECT @@server_uid")
            if server != stream.server:
                raise StoreUnavailable(f"Source {self._id!r}: the server of dsn= was replaced by another one")
            place, gtids = Place(number_of_file(name), end), None
            if stream.place is None or stream.place.file != place.file:
                ((text,),) = session.ask("SELECT BINLOG_GTID_POS(%s, %s)", name, end)
                gtids = None if text is None else read_gtids(text)
                is_seen = gtids is not None and covers(gtids, stream.gtids)
            else:
                is_seen = place >= stream.place
            if not is_seen:
                self._page_s = now_s + ASK_S
                return None
            table.there = there = found_table(session, table.source, table.id)  # its columns may be others by now
            rows, types = MySQLTableRows(session, table.source, there), there.types
            cells = rows.cells(pages.through, None, PAGE_ROWS)
        finally:
            session.ask("ROLLBACK")
        relation = Relation(table.name, tuple(Column(name, types[name], "", 0, 0, False) for name in rows.names))
        begin = Begin("", max((last.number for last in self._gtids.values()), default=0), rows.time_ms)
        places = places_of(table.source.key_columns, rows.names)
        read = deque(
            Part(table.mark, key_texts(values, places), RowChange("read", None, values, relation, begin))
            for _, values in cells
        )
        return Page(table, read, place, gtids, len(cells) < PAGE_ROWS)

    def _page_rows(self, page: Page, records_max: int) -> list[Part]:
        assert self._stream is not None
        self._stream.place = page.place
        pages = page.table.cursor.pages
        assert pages is not None
        rows = [page.rows.popleft() for _ in range(min(records_max, len(page.rows)))]
        if rows:
            pages.through = rows[-1].key
            pages.rows += len(rows)
        if not page.rows:
            self._page = None
            if page.is_last:
                page.table.cursor.pages = None
        return rows

    # --- the rest -----------------------------------------------------------------------------------------------------

    def finalized(self, position: SourceOffset) -> None:
        self._final = position.cursor

    @property
    def cursor(self) -> str:
        tables = {table.source.table: table.cursor for table in self._tables.values()}
        cursor = Cursor(shown_gtids(self._gtids), tables, self._server, self._place)
        return msgspec.json.encode(cursor).decode()

    def caught_up(self) -> bool:
        """Whether all that was committed at the last question was read. Asks the server how far it is, now and then."""
        if not self._is_between() or self._page is not None:
            return False
        if (now_s := time.monotonic()) >= self._ask_s:
            self._ask_s = now_s + ASK_S
            ((end,),) = self._session.ask("SELECT @@gtid_binlog_pos")
            self._end = read_gtids(end)
        return self._end is not None and covers(self._gtids, self._end) and first_unread(self._tables.values()) is None

    def log(self) -> LogRead:
        """The lag is at most the time since all was read, and no more than the age of the last commit."""
        tables = list(tables_read(self._tables.values(), PAGE_ROWS, self._rows_about))
        name = f"binlog of {self._binlog.name}"
        try:
            ((end, now_ms),) = self._session.ask("SELECT @@gtid_binlog_pos, ROUND(UNIX_TIMESTAMP(NOW(3)) * 1000)")
            files = [(number_of_file(file), int(size)) for file, size, *_ in self._session.ask("SHOW BINARY LOGS")]
        except (StoreError, StoreUnavailable):
            return LogRead(name=name, tables=tables)
        if covers(self._gtids, read_gtids(end)):
            self._read_ms = int(now_ms)
        lag_ms = max(0, int(now_ms) - self._read_ms) if self._read_ms else None
        lag_bytes = None
        if self._place is not None:
            at = self._place
            lag_bytes = sum(max(0, size - (at[1] if file == at[0] else 0)) for file, size in files if file >= at[0])
        return LogRead(name=name, lag_ms=lag_ms, lag_bytes=lag_bytes, tables=tables)

    def _rows_about(self, table: BinlogTable) -> int:
        """The server's estimate of the table's rows; 0: it does not answer."""
        try:
            rows = self._session.ask(f"SELECT table_rows FROM information_schema.tables {OF_TABLE}", table.source.table)
        except (StoreError, StoreUnavailable):
            return 0
        return int(rows[0][0] or 0) if rows else 0

    def _drop_stream(self) -> None:
        """The page goes with it: another server may have other places."""
        self._page = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        self._drop_stream()
        self._session.close()


def _keyed(table: BinlogTable, change: RowChange) -> Iterator[Part]:
    """The change; two if it changes the key."""
    mark, places = table.mark, table.places
    old = None if change.old is None else key_texts(change.old, places)
    new = None if change.new is None else key_texts(change.new, places)
    if old is None or new is None or old == new:
        yield Part(mark, new or old or (), change)
        return
    yield Part(mark, old, change._replace(op="delete", new=None))
    yield Part(mark, new, change._replace(op="insert", old=None))


# --- what is required -------------------------------------------------------------------------------------------------


def require_server(session: MySQLSession, binlog: MySQLBinlog) -> None:
    """Raise ConfigError unless the binlog of the server tells all changes."""
    if wrong := list(_server_problems(session)):
        raise ConfigError(f"Source {binlog.id!r} cannot capture the changes of {binlog.contents}: {'; '.join(wrong)}.")


def require_capturable(binlog: MySQLBinlog) -> Cursor:
    """The position at the end of the binlog. Raises ConfigError or StoreError unless its changes can be captured."""
    with closing(MySQLSession(binlog.address, ANSWER_S)) as session:
        require_server(session, binlog)
        ((gtids,),) = session.ask("SELECT @@gtid_binlog_pos")
        cursor = Cursor(gtids)
        cursor.tables = {table.source.table: table.cursor for table in captured(session, binlog, cursor)}
    require_position(binlog, gtids)
    return cursor


def require_position(binlog: MySQLBinlog, gtids: str) -> None:
    """Raise StoreError where the user may not read the binlog, Halt where it does not go on after *gtids*. A reader
    that is at work goes on."""
    another = replace(binlog, name=f"{binlog.name}, looked at")
    with closing(BinlogStream(binlog.id, binlog.address, another.server_id, read_gtids(gtids), ())) as stream:
        stream.require_begun()


def examine(binlog: MySQLBinlog, positions: Sequence[SourceOffset]) -> tuple[str, list[SourceFinding]]:
    """See `SplitSource.examine`."""
    findings, cursor = list[SourceFinding](), Cursor("")
    if positions:
        cursor = msgspec.json.decode(positions[0].cursor, type=Cursor)
    with closing(MySQLSession(binlog.address, ANSWER_S)) as session:
        problems = list(_server_problems(session))
        findings += [not_captured(binlog.contents, problem) for problem in problems]
        if problems:
            return f"binlog for reader {binlog.name}: not readable", findings
        try:
            captured(session, binlog, cursor)
            require_position(binlog, cursor.gtids or session.ask("SELECT @@gtid_binlog_pos")[0][0])
        except (ConfigError, Halt) as error:
            findings.append(finding_of(error))
        sizes = [int(size) for _, size, *_ in session.ask("SHOW BINARY LOGS")]
        ((expire_s,),) = session.ask("SELECT @@binlog_expire_logs_seconds")
    age = f"removed after {shown_duration(int(expire_s * 1000))}" if expire_s else "never removed by age"
    if 0 < expire_s < SHORT_S:
        findings.append(
            SourceFinding(
                f"The server removes its binlogs after {shown_duration(int(expire_s * 1000))}: a pipeline that stands "
                f"still for longer halts",
                "SET GLOBAL binlog_expire_logs_seconds = 604800, and in the configuration",
                is_note=True,
            )
        )
    return f"binlog for reader {binlog.name}: {shown_bytes(sum(sizes))} kept, {age}", findings


def _server_problems(session: MySQLSession) -> Iterator[str]:
    variables: dict[str, str] = dict(
        session.ask("SHOW GLOBAL VARIABLES WHERE Variable_name IN (%s, %s, %s, %s, %s, %s)", *_VARIABLES)
    )
    if not session.is_mariadb:
        yield "the server is MySQL, and it was shown for MariaDB alone, 10.5 or newer: MySQL has other GTIDs"
        return
    if variables.get("log_bin") != "ON":
        yield "the server has no binlog: set log_bin and server_id in its configuration, and restart it"
        return
    for name, value in (("binlog_format", "ROW"), ("binlog_row_image", "FULL"), ("binlog_row_metadata", "FULL")):
        if variables.get(name) != value:
            yield f"{name} is {variables.get(name, 'not known')}: SET GLOBAL {name} = {value}, and in its configuration"
    if variables.get("gtid_slave_pos") and variables.get("log_slave_updates") != "ON":
        yield "the server is a replica without log_slave_updates: set that, or name the primary in dsn="
    for _, _, only, never, *_ in session.ask("SHOW MASTER STATUS"):
        database = session.address.database
        if (only and database not in only.split(",")) or database in never.split(","):
            yield f"its binlog leaves out database {database}, by binlog_do_db or binlog_ignore_db"


_VARIABLES = (
    "log_bin", "binlog_format", "binlog_row_image", "binlog_row_metadata", "gtid_slave_pos", "log_slave_updates"
)  # fmt: skip


def captured(session: MySQLSession, binlog: MySQLBinlog, cursor: Cursor) -> list[BinlogTable]:
    """The tables of *binlog*; one that *cursor* does not have begins with its pages. Raises ConfigError for one that
    cannot be captured."""
    tables = []
    for members in binlog.tables:
        id, source = next(iter(members.items()))
        known = cursor.tables.get(source.table)
        if known is None or known.pages is not None:
            there = found_table(session, source, id)
            problems = [reason for member in members.values() for reason in _column_problems(member, there)]
        else:  # the next changes may be older than these columns, and tell their own
            there, problems = table_now(session, source, id)[0], []
        if problems := [*_table_problems(session, source, there), *dict.fromkeys(problems)]:
            raise ConfigError(f"Source {id!r} cannot capture the changes of {source.table}: {'; '.join(problems)}.")
        known = known or TableCursor(Pages() if source.snapshot == "pages" else None)
        tables.append(BinlogTable(id, members, known, (there.schema, there.name), there))
    return tables


def _table_problems(session: MySQLSession, source: MySQLChanges[Any], table: TableInServer) -> Iterator[str]:
    """The reasons why the binlog does not tell all changes of the table."""
    if table.kind != "BASE TABLE":
        yield f"it is a {table.kind}, and only plain tables are captured"
    if "partitioned" in table.options:
        yield "it is partitioned, and a partition goes without a change in the binlog"
    ((_, statement),) = session.ask(f"SHOW CREATE TABLE {quoted(source.table)}".replace("%", "%%"))
    for name, rest in _FOREIGN_KEY.findall(statement):
        if rules := _CASCADES.findall(rest):
            yield (
                f"its foreign key {name} changes rows {' and '.join(rules)}, which is not in the binlog: make it "
                f"RESTRICT, and let the program change them"
            )


def _column_problems(source: MySQLChanges[Any], table: TableInServer) -> Iterator[str]:
    """The reasons why the binlog does not tell the values of the record's columns."""
    columns = columns_of(source.value)
    for name, (type_, full_type, charset) in table.columns.items():
        if "/*" in full_type:
            yield (
                f"its column {name!r} is {full_type}, which the binlog does not tell: ALTER TABLE ... MODIFY {name} ..."
            )
        elif name in columns and type_ not in _TYPES:
            yield f"its column {name!r} is of type {type_}, for which there is no rule: leave it out, or make it text"
        elif name in columns and charset and charset not in CODECS:
            yield f"its column {name!r} has the character set {charset}: use utf8mb4, or leave it out"


_FOREIGN_KEY = re.compile(r"^ *CONSTRAINT (`(?:[^`]|``)*`) FOREIGN KEY (.*)$", re.MULTILINE)
_CASCADES = re.compile(r"ON (?:DELETE|UPDATE) (?:CASCADE|SET NULL|SET DEFAULT)")
_TYPES = frozenset((
    *TAKEN, "char", "varchar", "tinytext", "text", "mediumtext", "longtext", "json", "enum", "set", "bit", "year",
))  # fmt: skip
