"""The stream of a logical slot: messages of pgoutput, version 1, as changes of tables and ends of transactions.

Invariants: a transaction comes whole, after its commit, and transactions in the order of their commits. Whoever starts
at the end of a commit gets the next transaction from its first change on. The slot is told how far it may forget by
`finalized` alone.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from typing import NamedTuple

import msgspec
import psycopg
from psycopg import pq, sql
from psycopg.errors import Diagnostic
from psycopg.pq.abc import PGresult

from exactlyonce.connectors.postgres.connection import Limits, PostgresConnection
from exactlyonce.connectors.postgres.table_rows import VALUE_TEXTS
from exactlyonce.pipeline.changes import Op
from exactlyonce.pipeline.errors import StoreUnavailable

TEXTS = {"client_encoding": "UTF8", "options": " ".join(f"-c {name}={value}" for name, value in VALUE_TEXTS.items())}
"""Settings of a session by which the texts of values are the same for every role and database."""
APPLICATION = "exactlyonce changes"
"""The name of the sessions that read a slot."""
STATUS_S = 10
"""The interval of status messages."""
TIMEOUT_MS = 60_000
"""The silence after which the server ends a stream, at least: a shorter one of the server's own does not hold."""
_EPOCH_MS = 946_684_800_000
"""2000-01-01, where the server's times begin, in ms since 1970."""
_HEADER = 25
"""The bytes before a message of pgoutput: kind, two positions, a time."""
_ROW = _HEADER + 6
"""The bytes before the first row of a change: its kind, the table's oid, the kind of the row."""


class Column(NamedTuple):
    """A column of the streamed table, as the server tells it."""

    name: str
    oid: int
    """Of its type."""
    is_key: bool = True
    """Whether it is of the replica identity: old rows have it."""


class StreamedTable(NamedTuple):
    """A table whose changes are read."""

    name: sql.Identifier
    """Its name by now."""
    mark: str


class Relation(NamedTuple):
    """The columns of a table from its next change on."""

    oid: int
    columns: tuple[Column, ...]
    is_full: bool = False
    """Whether an old row has all its values: REPLICA IDENTITY FULL."""


class Begin(NamedTuple):
    """A transaction begins."""

    lsn: int
    """The position of its commit."""
    timestamp_ms: int
    transaction: int | None
    """Its number, of 32 bits."""


class RowChange(msgspec.Struct, frozen=True, gc=False):
    """A change of a row. Rows are as the server has sent them, since most are looked into once: see `row_texts`."""

    mark: str
    """That of the table's members: see `Part`."""
    op: Op
    relation: Relation
    """Its columns, in the order of the rows."""
    begin: Begin
    new: bytes | None = None
    old: bytes | None = None
    """It may have only the values of the replica identity."""


class Truncate(NamedTuple):
    """All rows of these tables are gone, by one statement."""

    changes: list[RowChange]


class LogicalMessage(NamedTuple):
    """A message that a transaction has written into the log."""

    prefix: str
    content: bytes
    begin: Begin


class End(NamedTuple):
    """All transactions up to this position have come."""

    lsn: int
    is_commit: bool
    """Whether one ends here; else the server is that far, and the transaction that was at hand when the stream before
    this one ended may still come."""


Message = RowChange | Truncate | LogicalMessage | Relation | End


class LogMissing(StoreUnavailable):
    """The server does not give all from the slot's position on, though its slot does not say so. The text says why."""


class System(NamedTuple):
    """The identity of a server's log."""

    id: str
    timeline: int


_LASTING = sql.SQL(
    "SELECT set_config('wal_sender_timeout', {least}::text, false) FROM pg_settings"
    " WHERE name = 'wal_sender_timeout' AND setting::int BETWEEN 1 AND {least}"
)
"""Raises the time limit of the session's stream to the *least* ms, if it is shorter; 0 is none."""


_DECODING = ("SnapBuildFindSnapshot", "SnapBuildRestore")
"""The server's functions that log the position from which on it decodes."""
_LSN = re.compile("[0-9A-F]+/[0-9A-F]+")
_SETTINGS = {**TEXTS, "options": f"{TEXTS['options']} -c client_min_messages=log"}


class ChangeStream:
    """A walsender and its stream from a position on, the end of a transaction."""

    def __init__(self, dsn: str) -> None:
        self._connection = PostgresConnection(
            dsn, Limits(), {"replication": "database", "application_name": APPLICATION, **_SETTINGS}
        )
        self._relations: dict[int, Relation | None] = {}
        """By oid of each table that is read; None: its columns are not known yet."""
        self._tables: Mapping[int, StreamedTable] = {}
        self._plain: dict[bytes, tuple[str, Op, Relation]] = {}
        """By the bytes before its row: the mark, the operation and the relation of a change that has a new row alone,
        as most have."""
        self._prefixes: frozenset[str] = frozenset()
        self.begin = Begin(0, 0, None)
        """The newest transaction that has begun to come."""
        self.inside = False
        """Whether a transaction has begun."""
        self._acknowledged = 0
        self._began = self._decoded = 0
        """The positions where the stream began, and from which on the server decodes its log."""
        self._status_s = 0.0

    def system(self) -> System:
        """The identity of the server's log now."""
        ((id, timeline, *_),) = self._connection.rows(sql.Composed([sql.SQL("IDENTIFY_SYSTEM")]))
        return System(id, int(timeline))

    def left_at(self, timeline: int, now: int) -> int | None:
        """The position at which *timeline* was left on the way to the timeline *now*; None if it was not."""
        ((_, content),) = self._connection.rows(sql.SQL("TIMELINE_HISTORY {}").format(sql.SQL(str(now))))
        text = content.decode() if isinstance(content, bytes) else content
        fields = (line.split() for line in text.splitlines())
        return next((read_lsn(line[1]) for line in fields if len(line) > 1 and line[0] == str(timeline)), None)

    def start(
        self,
        slot: str,
        lsn: int,
        acknowledged: int,
        tables: Mapping[int, StreamedTable],
        prefixes: Collection[str] = (),
    ) -> None:
        """Begin to stream at *lsn*: the changes of *tables*, by oid, which may have had other names, and the messages
        with these *prefixes*. *slot* is also the publication's name; it was told *acknowledged* before."""
        self._relations, self._tables = dict.fromkeys(tables), tables
        self._prefixes, self._acknowledged = frozenset(prefixes), acknowledged
        self._connection.rows(_LASTING.format(least=sql.Literal(TIMEOUT_MS)))
        self._status_s = time.monotonic()
        command = sql.SQL("START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {}{})").format(
            sql.Identifier(slot), sql.SQL(shown_lsn(lsn)), sql.Literal(f'"{slot}"'),
            sql.SQL(", messages 'true'" if prefixes else ""),
        )  # fmt: skip
        self._began, self._decoded = lsn, 0
        self._copy = self._connection.replicate(command, self._noticed)

    def _noticed(self, notice: Diagnostic) -> None:
        """A slot without a snapshot of transactions is decoded only once those that were open then have ended. What is
        committed before is left out, which nothing but the server's log tells, in any language."""
        found = _LSN.search(notice.message_primary or "")
        if notice.source_function in _DECODING and found is not None:
            self._decoded = max(read_lsn(found[0]), self._decoded)

    @property
    def committed_ms(self) -> int:
        """The time of the newest commit that has begun to come; 0: none has."""
        return self.begin.timestamp_ms

    def messages(self) -> Iterator[Message]:
        """What has come by now. Raises StoreUnavailable once the stream is lost."""
        copy, plain, is_fresh = self._copy, self._plain, False
        self.keep()
        try:
            while True:
                length, data = copy.get_copy_data(1)
                if self._decoded > self._began:
                    raise LogMissing(
                        f"the server leaves out what was committed from {shown_lsn(self._began)} to "
                        f"{shown_lsn(self._decoded)}, from where on it can decode its log, as after a failover to a "
                        f"server to which the slot was copied without its snapshot"
                    )
                if length > 0:
                    is_fresh, received = False, bytes(data)
                    if (kind := plain.get(received[_HEADER:_ROW])) is not None:
                        yield RowChange(*kind, self.begin, received[_ROW:])
                    elif (message := self._message(received)) is not None:
                        yield message
                elif length < 0:
                    result = copy.get_result()
                    if result is not None and _is_log_removed(result):
                        raise LogMissing(
                            f"the server does not have the log that this slot needs, as after a failover to a server "
                            f"that was copied later. It says: {result.error_message.decode(errors='replace').strip()}"
                        )
                    raise psycopg.OperationalError(
                        "the server has ended the stream" if result is None else result.error_message.decode()
                    )
                elif is_fresh:
                    return
                else:
                    copy.consume_input()  # a few kB
                    is_fresh = True
        except psycopg.Error as error:
            raise self._connection.lost(error) from None

    def _message(self, data: bytes) -> Message | None:
        """None: it is of no table that is read, or only says something of what comes."""
        if data[0] == 0x6B:  # k: a keepalive
            return self._keepalive(data)
        kind = data[_HEADER : _HEADER + 1]
        if (op := _OPS.get(kind)) is not None:
            relation = self._relations.get(_LENGTH(data, _HEADER + 1)[0])
            return None if relation is None else self._row_change(op, data, relation)
        if kind == b"B":
            lsn, at_us, transaction = struct.unpack_from("!QqI", data, _HEADER + 1)
            self.inside = True
            self.begin = Begin(lsn, _EPOCH_MS + at_us // 1000, transaction)
        elif kind == b"C":
            (end,) = struct.unpack_from("!Q", data, _HEADER + 10)
            self.inside = False
            return End(end, True)
        elif kind == b"R":
            return self._relation_of(data)
        elif kind == b"T":
            count, _ = struct.unpack_from("!IB", data, _HEADER + 1)
            truncated = map(self._relations.get, struct.unpack_from(f"!{count}I", data, _HEADER + 6))
            return Truncate(
                [
                    RowChange(self._tables[relation.oid].mark, "truncate", relation, self.begin)
                    for relation in truncated if relation
                ]
            )  # fmt: skip
        elif kind == b"M":
            return self._logical_message(data)
        return None

    def _row_change(self, op: Op, data: bytes, relation: Relation) -> RowChange:
        """A change with its old row, or the key of that, which comes before the new row."""
        end = _end_of_row(data, _ROW)
        new = None if op == "delete" else data[end + 1 :]
        return RowChange(self._tables[relation.oid].mark, op, relation, self.begin, new, data[_ROW:end])

    def _keepalive(self, data: bytes) -> End | None:
        _, end, _, asks = struct.unpack_from("!cQQB", data)
        if asks:
            self._tell(False)
        return None if self.inside else End(end, False)

    def _logical_message(self, data: bytes) -> LogicalMessage | None:
        (is_transactional,) = struct.unpack_from("!B", data, _HEADER + 1)
        prefix, _, rest = data[_HEADER + 10 :].partition(b"\0")
        is_read = is_transactional and prefix.decode() in self._prefixes
        return LogicalMessage(prefix.decode(), rest[4:], self.begin) if is_read else None

    def _relation_of(self, data: bytes) -> Relation | None:
        (oid,) = struct.unpack_from("!I", data, _HEADER + 1)
        schema, name, rest = data[_HEADER + 5 :].split(b"\0", 2)
        shown = sql.Identifier(schema.decode() or "pg_catalog", name.decode())
        if oid not in self._relations and all(table.name != shown for table in self._tables.values()):
            return None
        is_full = rest[:1] == b"f"
        (count,), at = struct.unpack_from("!H", rest, 1), 3
        columns = []
        for _ in range(count):
            end = rest.index(b"\0", at + 1)
            (type_oid,) = struct.unpack_from("!I", rest, end + 1)
            columns.append(Column(rest[at + 1 : end].decode(), type_oid, bool(rest[at] & 1)))
            at = end + 9
        self._relations[oid] = relation = Relation(oid, tuple(columns), is_full)
        if oid in self._tables:
            for kind, op in _OPS.items():
                self._plain[kind + data[_HEADER + 1 : _HEADER + 5] + b"N"] = self._tables[oid].mark, op, relation
        return relation

    def finalized(self, lsn: int) -> None:
        """The server may forget what lies before *lsn*. Says so at once; if that fails, `messages` notices."""
        if lsn > self._acknowledged:
            self._acknowledged = lsn
            self._tell_if_there()

    def keep(self) -> None:
        """Keep the stream, also while nothing is read: call it more often than every `TIMEOUT_MS`. If that fails,
        `messages` notices."""
        if time.monotonic() - self._status_s > STATUS_S:
            self._tell_if_there()

    def _tell_if_there(self) -> None:
        try:
            self._tell(False)
        except psycopg.Error:
            self._connection.close()

    def ask(self) -> None:
        """Ask the server how far it is: an `End` comes."""
        try:
            self._tell(True)
        except psycopg.Error as error:
            raise self._connection.lost(error) from None

    def _tell(self, asks: bool) -> None:
        done, no_time = self._acknowledged, 0
        self._copy.put_copy_data(struct.pack("!cQQQqB", b"r", done, done, done, no_time, asks))
        self._copy.flush()
        self._status_s = time.monotonic()

    def close(self) -> None:
        self._connection.close()


_OPS: dict[bytes, Op] = {b"I": "insert", b"U": "update", b"D": "delete"}


_COUNT, _LENGTH = struct.Struct("!H").unpack_from, struct.Struct("!I").unpack_from


def _end_of_row(data: bytes, at: int) -> int:
    """Where the row ends that begins in *data* at *at*."""
    (count,) = _COUNT(data, at)
    at += 2
    for _ in range(count):
        at += 5 + _LENGTH(data, at + 1)[0] if data[at] == 0x74 else 1  # t: a text; else there is no value
    return at


def system_of(dsn: str) -> System:
    """The identity of the server's log now."""
    with closing(ChangeStream(dsn)) as stream:
        return stream.system()


def _is_log_removed(result: PGresult) -> bool:
    """Whether the server's error is that a file of its log is not there; its text is in the server's language."""
    state, function = map(result.error_field, (pq.DiagnosticField.SQLSTATE, pq.DiagnosticField.SOURCE_FUNCTION))
    return (state, function) == (b"58P01", b"WalSndSegmentOpen")


def read_lsn(text: str) -> int:
    """
    >>> read_lsn("1/10") == (1 << 32) + 16
    True
    """
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) | int(low, 16)


def shown_lsn(lsn: int) -> str:
    """
    >>> shown_lsn((1 << 32) + 16)
    '1/10'
    """
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
