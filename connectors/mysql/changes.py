"""The changes of tables of MariaDB as sources, which share a reader of the binlog: the description. Opens nothing."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.mysql.address import MySQLAddress, MySQLTable
from exactlyonce.connectors.source import RangeContext, SplitFinder
from exactlyonce.connectors.splits import OpenSplit, SharedDecoder, SplitDecoder, SplitRange, SplitSource
from exactlyonce.connectors.tables import KeyedRows, columns_of, forms_of
from exactlyonce.pipeline import hints
from exactlyonce.pipeline.changes import Change
from exactlyonce.pipeline.dead_letters import OnError
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.grants import Grants
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.secrets import look_up, shown_reference
from exactlyonce.pipeline.shape import Form, describe, type_name
from exactlyonce.pipeline.source import PartSource, SharedSource, TimeOf

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
_READER = re.compile(r"[A-Za-z0-9_.-]{1,63}")


@dataclass(frozen=True, eq=False)
class MySQLChanges(MySQLTable, KeyedRows[Change[T]], PartSource[Change[T]]):
    """Captures the changes of a table: ``MySQLChanges("customers", dsn="env:SHOP_MYSQL", key="id", value=Customer)``
    gives `Change[Customer]`, first the rows that are there, then each change after its commit.

    It reads the binlog of MariaDB 10.5 or newer, in the format ROW, as a replica does. All tables of a pipeline in one
    database are read together, in the order of the commits. The server removes binlogs by age alone: a pipeline that
    stood still for longer halts.

    - *table*: in the database of the dsn; its engine must be InnoDB.
    - *dsn*: the place of a URL ``mysql://user:password@host:3306/database``: ``env:NAME``, ``file:/path``. One without
      a password may be written out. The user has REPLICATION SLAVE, and may read the table.
    - *key*: the column of the primary key, or a tuple of them: fields of *value*.
    - *value*: the type of a row, whose fields are columns: a Struct, a dataclass, a TypedDict.
    - *snapshot*: "pages" reads the rows that are there, page by page, beside the changes; "never" only changes.
    - *reader*: the name of another reader; by default "exactlyonce_" and the pipeline's name. Its server id comes from
      the name. A server has one reader of an id at a time: two with one name end each other.
    - *on_error*, *time*: as those of `KafkaSource`; *time* "timestamp_ms" is that of the commit.

    In `Pipeline.table` its records are `Record`: the row by its key, None once it is deleted, at the commit's time. A
    function for *time* takes that then.
    """

    table: str
    _: KW_ONLY
    dsn: str = field(repr=False)
    key: str | tuple[str, ...]
    value: TypeForm[T]
    snapshot: Literal["pages", "never"] = "pages"
    reader: str = ""
    on_error: OnError = "fail"
    time: TimeOf[Any] | None = None
    is_changelog: bool = field(default=False, init=False, repr=False)
    stamp: ClassVar[Callable[[Any], Any]] = attrgetter("timestamp_ms")

    @property
    def type(self) -> Any:
        if self.is_changelog:
            return Record[hints.union([*hints.members(self.value), type(None)])]  # type: ignore[misc]  # at run time
        return Change[self.value]  # type: ignore[name-defined]  # likewise

    @property
    def key_type(self) -> Any:
        return int if self._is_number else str

    def changelog(self) -> MySQLChanges[T]:
        """See `Source`; a truncate has no such record."""
        changed = copy.copy(self)
        object.__setattr__(changed, "is_changelog", True)
        return changed

    @property
    def mark(self) -> str:
        return f"table {self.table}"

    @property
    def place(self) -> str:
        return f"mysql-changes:{self.table}"

    def whole(self, pipeline: str) -> MySQLBinlog:
        return MySQLBinlog(dsn=self.dsn, name=self.reader or f"exactlyonce_{pipeline}", on_error=self.on_error)

    def decoder(self) -> SplitDecoder:
        with self.needing_driver():
            from exactlyonce.connectors.mysql.change_values import ChangeDecoder
        decoder, name = ChangeDecoder(self), type_name(self.type)
        decode: Callable[[Any], Any] = decoder.decode
        if self.is_changelog:
            decode = lambda part: decoder.decode(part).record()  # noqa: E731 - it has one use
        return SplitDecoder(decode, decoder.as_json, lambda part, error: f"the change is not {name}: {error}")

    @property
    def key_reader(self) -> Callable[[Sequence[str]], Any]:
        """Makes `Change.key` of the texts of the key's columns."""
        if len(self.key_columns) > 1:
            return lambda texts: msgspec.json.encode(texts).decode()
        if self._is_number:
            return lambda texts: int(texts[0])
        return itemgetter(0)

    @property
    def _is_number(self) -> bool:
        """Whether the key is one column, and its field an int."""
        fields = [columns_of(self.value).get(column) for column in self.key_columns]
        return len(fields) == 1 and fields[0] is not None and forms_of(fields[0]) == {Form.INT}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        columns = columns_of(self.value)
        if missing := [column for column in self.key_columns if columns and column not in columns]:
            yield f"key={self.key!r}: {type_name(self.value)} has no field {missing[0]!r}"
        if self.snapshot not in ("pages", "never"):
            yield f'snapshot={self.snapshot!r} must be "pages" or "never"'
        if self.reader and not _READER.fullmatch(self.reader):
            yield f"reader={self.reader!r} must have 1 to 63 letters, digits, and . _ -"

    def describe(self) -> dict[str, Any]:
        """The table without its database."""
        key, value = list(self.key_columns), describe(self.value)
        return {"source": "mysql-changes", "place": self.place, "key": key, "value": value, **self.describe_time()}


@dataclass(frozen=True, eq=False, kw_only=True)
class MySQLBinlog(SharedSource, SplitSource[Any]):
    """The binlog of a server: one split, for all sources of a pipeline that read it."""

    dsn: str = field(repr=False)
    name: str
    members: Mapping[str, PartSource[Any]] = field(default_factory=dict)
    grows: bool = field(default=True, init=False, repr=False)

    @property
    def id(self) -> str:  # type: ignore[override]
        return f"binlog-{self.name}"

    @property
    def place(self) -> str:
        return f"mysql-changes:{self.name}"

    @property
    def server_id(self) -> int:
        """That of its reader: of its own, and above those that people give their servers."""
        return 0x80000000 | int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big")

    def address(self) -> MySQLAddress:
        """The server's address, looked up now."""
        return MySQLAddress.parse(look_up("dsn", self.dsn))

    @property
    def repeats(self) -> bool:
        return False

    def is_one_with(self, other: SharedSource) -> bool:
        return isinstance(other, MySQLBinlog) and (other.dsn, other.name) == (self.dsn, self.name)

    def with_member(self, id: str, member: PartSource[Any]) -> MySQLBinlog:
        return replace(self, members={**self.members, id: member})

    @property
    def tables(self) -> list[dict[str, MySQLChanges[Any]]]:
        """The members of each table, by id."""
        tables: dict[str, dict[str, MySQLChanges[Any]]] = {}
        for id, member in self.members.items():
            if isinstance(member, MySQLChanges):
                tables.setdefault(member.mark, {})[id] = member
        return list(tables.values())

    @property
    def shown(self) -> str:
        """Its contents, for errors."""
        return " and ".join(dict.fromkeys(member.mark for member in self.members.values()))

    def finder(self, source: str, topics: Any = None) -> SplitFinder:
        with self._needing_driver():
            from exactlyonce.connectors.mysql.change_split import BinlogFinder
        return BinlogFinder(source, self)

    def open_split(self, position: SourceOffset) -> OpenSplit:
        with self._needing_driver():
            from exactlyonce.connectors.mysql.change_split import OpenBinlog
        return OpenBinlog(self, position)

    def _needing_driver(self) -> Any:
        return needing(MySQLTable.extra, MySQLTable.driver, f"MySQLChanges of {self.shown}")

    def decoder(self) -> SplitDecoder:
        decoders = {id: member.decoder() for id, member in self.members.items() if isinstance(member, MySQLChanges)}
        return SharedDecoder(self.routes, decoders) if len(decoders) > 1 else next(iter(decoders.values()))

    def left(self, position: SourceOffset) -> NoReturn:
        raise ConfigError(
            f"Source {position.source!r} captures the changes of {self.shown}, which have no end: bounded work cannot "
            f"read them. Use `exactlyonce run`, with --until latest; or write the changes to a topic, and read that."
        )

    def open_range(self, context: RangeContext) -> SplitRange:
        raise Halt(
            f"Source {context.start.source!r} captures the changes of {self.shown}, which the database forgets once "
            f"they are in a finalized checkpoint, so what it has read cannot be computed again. Write the changes to a "
            f"topic, and read that.",
            operator=context.start.source,
        )

    def grants(self, user: str) -> Grants:
        """See `Source`."""
        account = f"`{user}`@'%'"
        reading = [f"GRANT SELECT ON `{next(iter(members.values())).table}` TO {account};" for members in self.tables]
        replicating = f"GRANT REPLICATION SLAVE, BINLOG MONITOR ON *.* TO {account};"
        return Grants(f"the database of {shown_reference(self.dsn)}", MySQLTable.client, (*reading, replicating))

    def problems(self) -> Iterator[str]:
        yield from SharedSource.problems(self)
        for members in self.tables:
            for setting in ("key", "snapshot"):
                if len({getattr(member, setting) for member in members.values()}) > 1:
                    yield f"{' and '.join(members)} are one table with another {setting}=: give both the same"

    def describe(self) -> dict[str, Any]:
        return {"source": "mysql-binlog", "place": self.place}
