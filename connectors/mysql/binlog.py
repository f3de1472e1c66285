"""The binlog of MariaDB as a stream: changes of rows of some tables, statements about them, and ends of transactions.

Invariants: a transaction comes whole, after it was written to the binlog, which may be before others see it; and
transactions come in the order of their commits. A stream that starts at a GTID position begins right after it, or
fails. An event that may change rows and is not understood is an error, never left out.
"""

from __future__ import annotations

import re
import select
import ssl
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple

import pymysql

from exactlyonce.connectors.mysql.address import MySQLAddress
from exactlyonce.connectors.mysql.binlog_rows import Relation, Values, counted, relation_of, row_reader
from exactlyonce.connectors.mysql.session import MySQLSession
from exactlyonce.pipeline.changes import Op
from exactlyonce.pipeline.errors import Halt, StoreUnavailable

HEARTBEAT_S, SILENCE_S = 5, 30
"""The interval of the server's heartbeats, and the silence after which it counts as away."""
WRITE_S = 24 * 3600
"""The time that the server waits for a reader that does not read, as one whose outputs are full."""
RECEIVED_BYTES = 1 << 18
_DUMP, _FROM_START = 0x12, 4
_PACKET_BYTES_MAX = 0xFFFFFF
_HEADER = struct.Struct("<IBIIIH")
"""Of an event: seconds, kind, server id, length, end in its file, flags."""
_GTID = struct.Struct("<QIB")


class Event(IntEnum):
    """A kind of events, by MySQL's name."""

    QUERY = 2
    STOP = 3
    ROTATE = 4
    INTVAR = 5
    RAND = 13
    USER_VAR = 14
    FORMAT_DESCRIPTION = 15
    XID = 16
    BEGIN_LOAD_QUERY = 17
    EXECUTE_LOAD_QUERY = 18
    TABLE_MAP = 19
    WRITE_ROWS_V1 = 23
    UPDATE_ROWS_V1 = 24
    DELETE_ROWS_V1 = 25
    INCIDENT = 26
    HEARTBEAT = 27
    IGNORABLE = 28
    ROWS_QUERY = 29
    XA_PREPARE = 38
    ANNOTATE_ROWS = 160
    """From here on they are MariaDB's own."""
    BINLOG_CHECKPOINT = 161
    GTID = 162
    GTID_LIST = 163
    START_ENCRYPTION = 164
    QUERY_COMPRESSED = 165
    WRITE_ROWS_COMPRESSED_V1 = 166
    UPDATE_ROWS_COMPRESSED_V1 = 167
    DELETE_ROWS_COMPRESSED_V1 = 168


_ROWS: Mapping[int, tuple[Op, bool]] = {
    Event.WRITE_ROWS_V1: ("insert", False), Event.WRITE_ROWS_COMPRESSED_V1: ("insert", True),
    Event.UPDATE_ROWS_V1: ("update", False), Event.UPDATE_ROWS_COMPRESSED_V1: ("update", True),
    Event.DELETE_ROWS_V1: ("delete", False), Event.DELETE_ROWS_COMPRESSED_V1: ("delete", True),
}  # fmt: skip
"""The operation, and whether its rows are compressed."""
_WITHOUT_ROWS: frozenset[int] = frozenset((
    Event.STOP, Event.INTVAR, Event.RAND, Event.USER_VAR, Event.BEGIN_LOAD_QUERY, Event.HEARTBEAT, Event.IGNORABLE,
    Event.ROWS_QUERY, Event.ANNOTATE_ROWS, Event.BINLOG_CHECKPOINT, Event.GTID_LIST, Event.START_ENCRYPTION,
))  # fmt: skip
"""Ends of files, values for the statement that follows, heartbeats, notes."""
_STANDALONE, _PREPARES_XA, _COMPLETES_XA = 1, 64, 128
"""Flags of a GTID event."""
_PURGED, _KICKED_OUT = 1236, 4052
Table = tuple[str, str]
"""Its database and its name."""


class Gtid(NamedTuple):
    """The last transaction of a replication domain."""

    server: int
    number: int


Gtids = dict[int, Gtid]
"""A GTID position: by domain."""


def read_gtids(text: str) -> Gtids:
    """
    >>> read_gtids("0-1-100,5-2-7")[5]
    Gtid(server=2, number=7)
    """
    parts = (map(int, gtid.split("-")) for gtid in text.split(",") if gtid)
    return {domain: Gtid(server, number) for domain, server, number in parts}


def shown_gtids(gtids: Gtids) -> str:
    return ",".join(f"{domain}-{server}-{number}" for domain, (server, number) in sorted(gtids.items()))


def covers(gtids: Gtids, others: Gtids) -> bool:
    """Whether a log up to *gtids* has all transactions of *others*.

    >>> covers(read_gtids("0-1-5"), read_gtids("0-2-5")), covers(read_gtids("0-1-5"), read_gtids("0-1-5,1-1-1"))
    (True, False)
    """
    return all(domain in gtids and gtids[domain].number >= last.number for domain, last in others.items())


class Place(NamedTuple):
    """A place in the binlog of one server; files have ascending numbers."""

    file: int
    end: int


def number_of_file(name: str) -> int:
    return int(name.rpartition(".")[2])


class Begin(NamedTuple):
    """A transaction begins."""

    gtid: str
    number: int
    timestamp_ms: int
    prepares_xa: bool = False


class RowChange(NamedTuple):
    """A change of a row, with all columns in the order of the relation."""

    op: Op
    old: Values | None
    new: Values | None
    relation: Relation
    begin: Begin


class Statement(NamedTuple):
    """A statement that is in the log as text, as DDL is; of no table if it may change any of *database*."""

    text: str
    database: str
    begin: Begin


class End(NamedTuple):
    """A transaction ends."""

    domain: int
    gtid: Gtid
    place: Place
    committed_ms: int
    rolled_back: bool


class Torn(NamedTuple):
    """The transaction at hand did not happen: the server died while it wrote it to the binlog, and undid it. Its
    number is another one's then."""

    begin: Begin


Message = RowChange | Relation | Statement | End | Torn


class BinlogStream:
    """The stream of one server's binlog from the GTID position *gtids* on. The server ends an older one of the same
    *server_id*."""

    def __init__(
        self, id: str, address: Callable[[], MySQLAddress], server_id: int, gtids: Gtids, tables: Iterable[Table]
    ) -> None:
        """*id*: of the source, for errors."""
        self._id, self._tables = id, frozenset(tables)
        self._session = session = MySQLSession(address)
        self.gtids = dict(gtids)
        self.inside = False
        """Whether a transaction has begun."""
        self.is_replaced = False
        """Whether another reader has ended this one."""
        self.place: Place | None = None
        """The end of the last transaction; None: none has ended yet."""
        self._standalone = False
        self._domain, self._gtid = 0, Gtid(0, 0)
        self._begin = Begin("", 0, 0)
        self._file = 0
        self._has_checksums = False
        self._mapped: dict[int, Relation | None] = {}
        """By number within a transaction: the tables; None: one that is not read."""
        self._relations: dict[bytes, Relation] = {}
        """By their description in the log, as it was last."""
        self._known: dict[Table, Relation] = {}
        self._buffer, self._at, self._large = bytearray(), 0, b""
        try:
            ((self.server,),) = session.ask("SELECT @@server_uid")
            self._charsets = charsets_of(session)
            for name, value in (
                ("@master_binlog_checksum", "@@global.binlog_checksum"),
                ("@mariadb_slave_capability", "4"),
                ("@slave_connect_state", f"'{shown_gtids(gtids)}'"),
                ("@slave_gtid_strict_mode", "1"),
                ("@slave_gtid_ignore_duplicates", "0"),
                ("@master_heartbeat_period", str(HEARTBEAT_S * 10**9)),
                ("SESSION net_write_timeout", str(WRITE_S)),
            ):
                session.ask(f"SET {name} = {value}")
            self._socket = session.handed_over(_DUMP, struct.pack("<IHI", _FROM_START, 0, server_id))
        except BaseException:
            session.close()
            raise
        self._heard_s = time.monotonic()

    # --- packets ------------------------------------------------------------------------------------------------------

    def messages(self) -> Iterator[list[Message]]:
        """What has come by now, by event: all of what is taken from here has to be used. Raises StoreUnavailable once
        the stream is lost, Halt where the server does not have the position."""
        while True:
            for event in self._events():
                if messages := list(self._read(event)):
                    yield messages
            received = self._received()
            if not received:
                return
            del self._buffer[: self._at]
            self._at = 0
            self._buffer += received

    def require_begun(self) -> None:
        """Wait for the first event. Raises as `messages`, and StoreError where the user may not read the binlog."""
        select.select([self._socket], [], [], SILENCE_S)
        next(self.messages(), None)

    def _received(self) -> bytes:
        try:
            received = bytes(self._socket.recv(RECEIVED_BYTES))
        except (BlockingIOError, ssl.SSLWantReadError):
            if time.monotonic() - self._heard_s > SILENCE_S:
                raise self._lost("it sends nothing, not even a heartbeat") from None
            return b""
        except OSError as error:
            raise self._lost(str(error)) from None
        if not received:
            raise self._lost("it has closed the connection")
        self._heard_s = time.monotonic()
        return received

    def _lost(self, what: str) -> StoreUnavailable:
        return StoreUnavailable(f"The stream of changes from {self._session.address.place} has ended: {what}")

    def _events(self) -> Iterator[bytes]:
        """The events that are whole in the buffer."""
        buffer = self._buffer
        while len(buffer) >= self._at + 4:
            end = self._at + 4 + (length := int.from_bytes(buffer[self._at : self._at + 3], "little"))
            if len(buffer) < end:
                return
            packet = bytes(buffer[self._at + 4 : end])
            self._at = end
            if length == _PACKET_BYTES_MAX or self._large:
                self._large += packet
                if length == _PACKET_BYTES_MAX:
                    continue
                packet, self._large = self._large, b""
            if packet[0] == 0:
                yield packet[1:]
            elif packet[0] == 0xFF:
                number = int.from_bytes(packet[1:3], "little")
                raise self._refused(number, packet[9:].decode(errors="replace"))
            else:
                raise self._lost("the server has ended it")

    def _refused(self, number: int, message: str) -> Exception:
        if number == _KICKED_OUT:
            self.is_replaced = True
            return StoreUnavailable(
                f"The stream of changes of source {self._id!r} was ended by another reader with its server id: another "
                f"incarnation of this pipeline, which goes on; or another program, and each has its own server_id="
            )
        if number == _PURGED:
            return lost(
                self._id,
                f"goes on after GTID {shown_gtids(self.gtids)}, which is not in the binlog of the server any more, or "
                f"never was: changes may be missing ({message})",
            )
        return self._session.as_ours(pymysql.OperationalError(number, message))

    # --- events -------------------------------------------------------------------------------------------------------

    def _read(self, event: bytes) -> Iterator[Message]:
        seconds, kind, server, _, file_end, _ = _HEADER.unpack_from(event)
        if kind == Event.FORMAT_DESCRIPTION:
            self._has_checksums = event[-5] == 1
            if self.inside:
                self.inside = False
                yield Torn(self._begin)
        elif kind == Event.ROTATE:  # may come before it is known whether it has a checksum
            name = re.match(rb"[^\0]*?\.\d{6,}", self._checked(event, guess=True)[_HEADER.size + 8 :])
            assert name is not None
            self._file = number_of_file(name[0].decode())
        elif kind in _WITHOUT_ROWS:
            return
        elif kind == Event.GTID:
            self._begun(server, seconds, self._checked(event))
        elif kind == Event.TABLE_MAP:
            yield from self._map(self._checked(event)[_HEADER.size :])
        elif kind in _ROWS:
            yield from self._rows(kind, self._checked(event)[_HEADER.size :])
        elif kind in (Event.QUERY, Event.QUERY_COMPRESSED):
            yield from self._statement(self._checked(event)[_HEADER.size :], kind == Event.QUERY_COMPRESSED, file_end)
        elif kind in (Event.XID, Event.XA_PREPARE):
            yield self._ended(file_end)
        elif kind == Event.EXECUTE_LOAD_QUERY:
            yield Statement("LOAD DATA", "", self._begin)
        elif kind == Event.INCIDENT:
            raise lost(self._id, "cannot go on: the server has noted an incident, after which changes may be missing")
        else:
            raise lost(self._id, f"cannot go on: the binlog has an event of kind {kind}, which is not known here")

    def _checked(self, event: bytes, *, guess: bool = False) -> bytes:
        """*event* without its checksum."""
        is_right = zlib.crc32(event[:-4]) == int.from_bytes(event[-4:], "little")
        if not self._has_checksums and not (guess and is_right):
            return event
        if not is_right:
            if guess:
                return event
            raise self._lost("an event has the wrong checksum")
        return event[:-4]

    def _begun(self, server: int, seconds: int, event: bytes) -> None:
        number, domain, flags = _GTID.unpack_from(event, _HEADER.size)
        last = self.gtids.get(domain)
        if self.inside or (last is not None and number <= last.number):
            raise lost(
                self._id,
                f"cannot go on: GTID {domain}-{server}-{number} comes after {shown_gtids(self.gtids)}, and the numbers "
                f"of a domain have to grow. Set gtid_strict_mode = ON on the servers",
            )
        self._domain, self._gtid, self.inside = domain, Gtid(server, number), True
        self._standalone = bool(flags & (_STANDALONE | _COMPLETES_XA))
        self._begin = Begin(f"{domain}-{server}-{number}", number, seconds * 1000, bool(flags & _PREPARES_XA))
        self._mapped.clear()

    def _ended(self, file_end: int, *, rolled_back: bool = False) -> End:
        self.inside = False
        self.gtids[self._domain] = self._gtid
        self.place = Place(self._file, file_end)
        return End(self._domain, self._gtid, self.place, self._begin.timestamp_ms, rolled_back)

    def _map(self, body: bytes) -> Iterator[Relation]:
        number = int.from_bytes(body[:6], "little")
        database, name = body[9 : (at := 9 + body[8])], body[at + 2 : at + 2 + body[at + 1]]
        table = database.decode(), name.decode()
        if table not in self._tables:
            self._mapped[number] = None
            return
        described = body[8:]
        relation = self._relations.get(described)
        if relation is None:
            relation = self._relations[described] = relation_of(table, body[at + 2 + len(name) + 1 :], self._charsets)
        self._mapped[number] = relation
        if relation is not self._known.get(table):
            self._known[table] = relation
            yield relation

    def _rows(self, kind: int, body: bytes) -> Iterator[RowChange]:
        relation = self._mapped[int.from_bytes(body[:6], "little")]
        if relation is None:
            return
        op, is_compressed = _ROWS[kind]
        if self._begin.prepares_xa:
            raise lost(
                self._id,
                f"cannot go on: transaction {self._begin.gtid} changes {'.'.join(relation.table)} by XA PREPARE, and "
                f"its changes are in the binlog before it is decided whether they happen: use XA for other tables only",
            )
        width, at = counted(body, 8)
        images = 2 if op == "update" else 1
        present = body[at : (at := at + (width + 7) // 8 * images)]
        if int.from_bytes(present, "little").bit_count() < width * images:
            raise lost(
                self._id,
                f"cannot go on: a change of {'.'.join(relation.table)} does not have all columns, since its session "
                f"has set binlog_row_image",
            )
        rows = _uncompressed(body[at:]) if is_compressed else body[at:]
        read, at, begin, end = row_reader(relation), 0, self._begin, len(rows)
        while at < end:
            old = new = None
            if op != "insert":
                old, at = read(rows, at)
            if op != "delete":
                new, at = read(rows, at)
            yield RowChange(op, old, new, relation, begin)

    def _statement(self, body: bytes, is_compressed: bool, file_end: int) -> Iterator[Message]:
        at = 13 + int.from_bytes(body[11:13], "little")
        database = body[at : (at := at + body[8])].decode(errors="replace")
        text = _uncompressed(body[at + 1 :]) if is_compressed else body[at + 1 :]
        command = text[:20].strip().upper()
        if command == b"BEGIN" or command.startswith(b"SAVEPOINT"):
            return
        if command in (b"COMMIT", b"ROLLBACK"):
            yield self._ended(file_end, rolled_back=command == b"ROLLBACK")
            return
        yield Statement(text.decode(errors="replace"), database, self._begin)
        if self._standalone:
            yield self._ended(file_end)

    def close(self) -> None:
        self._session.close()


def _uncompressed(data: bytes) -> bytes:
    """Of a compressed event: a byte with the algorithm and the width of the length, the length, and the contents."""
    return zlib.decompress(data[1 + (data[0] & 7) :])


def charsets_of(session: MySQLSession) -> Mapping[int, str]:
    """The character set by the number of a collation."""
    rows = session.ask("SELECT id, character_set_name FROM information_schema.collations WHERE id IS NOT NULL")
    return {int(number): str(name) for number, name in rows if name}


def lost(id: str, what: str) -> Halt:
    """The error of a source whose changes since its checkpoint are not there any more, or cannot be told."""
    return Halt(
        f"Source {id!r} {what}.\n"
        f"  Choices: restore the server and its binlog as they were, and run again; or let `exactlyonce reset` begin "
        f"with the rows that are there.",
        operator=id,
    )


_TOKEN = re.compile(
    r"""
    /\*M?!\d* | \*/ | /\*.*?\*/ | (?:--\s|\#)[^\n]* | '(?:[^'\\]|\\.|'')*'
    | `((?:[^`]|``)*)` | "((?:[^"]|"")*)" | ([\w$\x80-\U0010ffff]+) | ([.,;()=])
    """,
    re.DOTALL | re.VERBOSE,
)
"""A comment that is run as SQL is a part of it; other comments and texts are left out."""
_HARMLESS = frozenset((
    "CREATE", "ALTER", "DROP", "RENAME", "GRANT", "REVOKE", "SET", "FLUSH", "ANALYZE", "OPTIMIZE", "REPAIR", "CHECK",
    "XA", "INSTALL", "UNINSTALL",
))  # fmt: skip
_REWRITES = frozenset(("PARTITION", "PARTITIONING", "TABLESPACE", "IGNORE", "CASCADE", "SYSTEM"))
"""Words of ALTER TABLE by which it may change rows, or which let others change them, without a change in the log."""
_NOT_OF_TABLE = frozenset(("COLUMN", "INDEX", "KEY"))


def effect_of(text: str, database: str, table: Table) -> str:
    """What a statement does to the rows of *table*: "truncate"; "" for nothing; else why it cannot be told.

    >>> effect_of("truncate /* all */ `shop`.customers", "", ("shop", "customers"))
    'truncate'
    >>> effect_of("ALTER TABLE customers ADD x int", "shop", ("shop", "customers"))
    ''
    >>> effect_of("RENAME TABLE customers TO old, new TO customers", "shop", ("shop", "customers"))
    'the table was renamed'
    """
    words = [next(group for group in groups if group) for groups in _TOKEN.findall(text) if any(groups)]
    upper = [word.upper() for word in words]
    if upper[:2] == ["SET", "STATEMENT"] and "FOR" in upper:
        begin = upper.index("FOR") + 1
        words, upper = words[begin:], upper[begin:]
    named = {_named(words, place, database) for place in range(len(words)) if words[place - 1 : place] != ["."]}
    ours = table[0].lower(), table[1].lower()
    first = upper[0] if upper else ""
    if first == "TRUNCATE":
        place = 2 if upper[1:2] == ["TABLE"] else 1
        return "truncate" if _named(words, place, database) == ours else ""
    if first not in _HARMLESS:
        in_database = database.lower() == ours[0] or ours[0] in map(str.lower, words) or not database
        return f"a statement changed rows without telling which, by binlog_format: {first}" if in_database else ""
    if first == "DROP" and upper[1:2] in (["DATABASE"], ["SCHEMA"]):
        return "its database was dropped" if ours[0] in map(str.lower, words) else ""
    if "TEMPORARY" in upper[:4] or not {"TABLE", "TABLES"} & set(upper[:4]):
        return ""
    if first in ("DROP", "RENAME"):
        return f"the table was {'dropped' if first == 'DROP' else 'renamed'}" if ours in named else ""
    place = upper.index("TABLE") + 1  # not TABLES, which only DROP and RENAME take
    while upper[place : place + 1] in (["IF"], ["NOT"], ["EXISTS"]):
        place += 1
    if _named(words, place, database) != ours:
        is_moved = "PARTITION" in upper and {"EXCHANGE", "CONVERT"} & set(upper) and ours in named
        return "its rows were exchanged with a partition of another table" if is_moved else ""
    if first == "CREATE":
        return "the table was made anew" if "REPLACE" in upper[:place] else ""
    rest = upper[place:]
    if "IGNORE" in upper[:place] or (risky := _REWRITES & set(rest)):
        return f"ALTER TABLE {'IGNORE' if 'IGNORE' in upper[:place] else min(risky)} may have changed its rows"
    for word, after, then in zip(rest, rest[1:], [*rest[2:], ""], strict=False):
        if word == "RENAME" and after not in _NOT_OF_TABLE:
            return "the table was renamed"
        if word == "ENGINE" and "INNODB" not in (after, then):
            return "the table has another engine"
        if word == "SET" and after in ("NULL", "DEFAULT") and "FOREIGN" in rest:
            return "ALTER TABLE FOREIGN KEY ... SET NULL may have changed its rows"
    return ""


def _named(words: list[str], place: int, database: str) -> Table:
    """The table that is named from *place* on, in lower case."""
    if words[place + 1 : place + 2] == ["."]:
        return words[place].lower(), "".join(words[place + 2 : place + 3]).lower()
    return database.lower(), "".join(words[place : place + 1]).lower()
