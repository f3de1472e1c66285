"""What sources of captured changes share, whatever the database: members, which read a log together, and that log.

Invariant: a log is one split, in the order of the commits. The descriptions open nothing.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NoReturn, Protocol, TypeVar

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import RangeContext, TableRead
from exactlyonce.connectors.splits import SharedDecoder, SourceFinding, SplitDecoder, SplitRange, SplitSource
from exactlyonce.connectors.tables import Database, DatabaseSource, Key, KeyedRows, columns_of
from exactlyonce.pipeline import hints
from exactlyonce.pipeline.changes import Change, KeyForm
from exactlyonce.pipeline.dead_letters import OnError
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.pipeline.grants import Grants
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.shape import describe, type_name
from exactlyonce.pipeline.source import AHEAD, EventTime, PartSource, SharedSource, TimeOf

if TYPE_CHECKING:
    from typing_extensions import Self, TypeForm

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Part(msgspec.Struct, frozen=True, gc=False):
    """What was read of a log, for the members with this *mark*."""

    mark: str
    key: Key
    """() of a truncate and of a message."""
    change: Any
    """As its log has it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LoggedSource(DatabaseSource[T_co], PartSource[T_co]):
    """The description of a source that is read from a log, with others."""

    on_error: OnError = "fail"
    time: TimeOf[Any] | None = None

    def decoder(self) -> SplitDecoder:
        """The decoder of its own parts."""
        raise NotImplementedError

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if isinstance(self.time, EventTime) and self.time.ahead not in (None, AHEAD):
            yield "ahead= is about the timestamps of messages of Kafka: leave it out"


class ChangeDecoding(Protocol[T]):
    """Makes changes of the parts of a table."""

    def decode(self, part: Any, /) -> Change[T]:
        """The record. Raises ValueError if a value does not fit its field."""

    def as_json(self, part: Any, /) -> bytes:
        """The row's values, by column, for a dead letter."""

    def key_of(self, part: Any, /) -> Key:
        """The texts of the key's columns; () of a truncate."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TableChanges(KeyedRows[Change[T]], LoggedSource[Change[T]]):
    """The description of the changes of a table."""

    kind: ClassVar[str]
    """The name of its kind in places."""
    value: TypeForm[T]
    snapshot: Literal["pages", "never"] = "pages"
    is_changelog: bool = field(default=False, init=False, repr=False)

    @property
    def stamp(self) -> Callable[[Any], Any]:
        return attrgetter("timestamp_ms")

    @property
    def type(self) -> Any:
        if self.is_changelog:
            return Record[hints.union([*hints.members(self.value), type(None)])]  # type: ignore[misc]  # at run time
        return Change[self.value]  # type: ignore[name-defined]  # likewise

    @property
    def key_type(self) -> Any:
        return self._key_form.type

    def changelog(self) -> Self:
        """See `Source`; a truncate has no such record."""
        changed = copy.copy(self)
        object.__setattr__(changed, "is_changelog", True)
        return changed

    @property
    def mark(self) -> str:
        return f"table {self.table}"

    @property
    def place(self) -> str:
        return f"{self.kind}:{self.table}"

    @property
    def shown(self) -> str:
        return f"{'rows and changes' if self.snapshot == 'pages' else 'changes'} of {self.table}"

    @abstractmethod
    def change_decoder(self) -> ChangeDecoding[T]:
        """The decoder of its parts. It needs the driver."""

    def decoder(self) -> SplitDecoder:
        with self.needing_driver():
            changes = self.change_decoder()
        name, key, decode_change = type_name(self.type), self.key_reader, changes.decode

        def refused(part: Any, error: BaseException) -> str:
            texts = changes.key_of(part)
            row = f" with key {key(texts)!r}" if texts else ""
            return f"the change of {self.table}{row} is not {name}: {error}"

        def decode_record(part: Any) -> Any:
            return decode_change(part).record()

        decode = decode_record if self.is_changelog else decode_change
        return SplitDecoder(decode, changes.as_json, refused)

    @property
    def key_reader(self) -> Callable[[Sequence[str]], Any]:
        """Makes `Change.key` of the texts of the key's columns."""
        return self._key_form.maker

    @property
    def _key_form(self) -> KeyForm:
        fields = columns_of(self.value)
        return KeyForm([fields[column].shape if column in fields else None for column in self.key_columns])

    def columns_changed(self, id: str, reasons: Sequence[str]) -> Halt:
        """The error of source *id* whose next changes are no records of its type any more."""
        return Halt(
            f"Source {id!r} cannot read the next changes of {self.table}, whose columns were changed: "
            f"{'; '.join(reasons)}. A column that is renamed, dropped or new to the record's type is not guessed: run "
            f"the program that fits these changes until all of them are read, then the next one.",
            operator=id,
        )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        columns = columns_of(self.value)
        if missing := [column for column in self.key_columns if columns and column not in columns]:
            yield f"key={self.key!r}: {type_name(self.value)} has no field {missing[0]!r}"
        if self.snapshot not in ("pages", "never"):
            yield f'snapshot={self.snapshot!r} must be "pages" or "never"'

    def describe(self) -> dict[str, Any]:
        """The table without its database."""
        key, value = list(self.key_columns), describe(self.value)
        return {"source": self.kind, "place": self.place, "key": key, "value": value, **self.describe_time()}


@dataclass(frozen=True, eq=False, kw_only=True)
class ChangeLog(Database, SharedSource, SplitSource[Any]):
    """The log of a database as one split, for all sources of a pipeline that read it. `logs_of` gives those of a graph.

    A subclass has its `Database`, `kind`, `id`, `shown`, `finder`, `open_split`, `setup`, `drop`, `replicating` and
    `examine`."""

    name: str
    members: Mapping[str, LoggedSource[Any]] = field(default_factory=dict)
    grows: bool = field(default=True, init=False, repr=False)
    kind: ClassVar[str]

    nothing: ClassVar[str] = "there is nothing to do"
    """The answer of `setup` and `drop` without a statement, for people."""

    @property
    def place(self) -> str:
        return f"{self.kind}:{self.name}"

    @property
    def named(self) -> str:
        return self.shown

    @property
    def repeats(self) -> bool:
        return False

    @property
    def tables(self) -> list[dict[str, Any]]:
        """The `TableChanges` of each table, by id."""
        tables: dict[str, dict[str, Any]] = {}
        for id, member in self.members.items():
            if isinstance(member, TableChanges):
                tables.setdefault(member.mark, {})[id] = member
        return list(tables.values())

    @property
    def contents(self) -> str:
        """What is read of it, for errors."""
        return " and ".join(dict.fromkeys(member.mark for member in self.members.values()))

    def decoder(self) -> SplitDecoder:
        decoders = {id: member.decoder() for id, member in self.members.items()}
        return SharedDecoder(self.routes, decoders) if len(decoders) > 1 else next(iter(decoders.values()))

    def left(self, position: SourceOffset) -> NoReturn:
        raise ConfigError(
            f"Source {position.source!r} captures the changes of {self.contents}, which have no end: bounded work "
            f"cannot read them. Use `exactlyonce run`, with --until latest; or write the changes to a topic, and read "
            f"that."
        )

    def open_range(self, context: RangeContext) -> SplitRange:
        raise Halt(
            f"Source {context.start.source!r} captures the changes of {self.contents}, which the database forgets once "
            f"they are in a finalized checkpoint, so what it has read cannot be computed again. Write the changes to a "
            f"topic, and read that.",
            operator=context.start.source,
        )

    @abstractmethod
    def setup(self, *, dry_run: bool = False) -> list[str]:
        """Make what the log needs in the database, and is not there. Returns the statements, which *dry_run* does not
        run. Raises `ConfigError` where a table cannot be captured, `StoreError` where the role may not,
        `StoreUnavailable` where nobody answers."""

    @abstractmethod
    def drop(self, *, dry_run: bool = False) -> list[str]:
        """Remove what `setup` has made, which nobody reads. Returns and raises as that."""

    @abstractmethod
    def replicating(self, user: str) -> str:
        """The statement that lets *user* read the log."""

    def grants(self, user: str) -> Grants:
        """See `Source`; those of `setup` are its own."""
        tables = [next(iter(members.values())) for members in self.tables]
        reading = [statement for table in tables for statement in table.reading_grants(user)]
        return self.granted_by(dict.fromkeys([*reading, self.replicating(user)]))

    def problems(self) -> Iterator[str]:
        yield from SharedSource.problems(self)
        for members in self.tables:
            for setting in ("key", "snapshot"):
                if len({getattr(member, setting) for member in members.values()}) > 1:
                    yield f"{' and '.join(members)} read one table with another {setting}=: give both the same"

    def describe(self) -> dict[str, Any]:
        """The log without its database; its members describe themselves."""
        return {"source": self.kind, "place": self.place, **self.describe_time()}


def logs_of(graph: LogicalGraph) -> list[ChangeLog]:
    """The logs that a pipeline reads: ``for log in logs_of(pipeline.build()): log.setup()``."""
    return [node.source for node in graph.sources if isinstance(node.source, ChangeLog)]


class Pages(msgspec.Struct, omit_defaults=True):
    """How far the rows of a table were read."""

    through: Key | None = None
    """The key of the last row that was read; None: no row was."""
    rows: int = 0
    """The rows that were read."""


class TableProgress(msgspec.Struct, omit_defaults=True):
    """How far a table was read."""

    pages: Pages | None = None
    """None: the whole table was read, or none of it is to be."""


SourceT = TypeVar("SourceT", bound=TableChanges[Any])


@dataclass
class CapturedTable(Generic[SourceT]):
    """A table of a log, as it is in the server."""

    id: str
    """Of its first member, for errors."""
    members: Mapping[str, SourceT]
    cursor: TableProgress
    places: tuple[int, ...] = field(default=(), kw_only=True)
    """Of the key's columns in a row of the stream."""

    def __post_init__(self) -> None:
        self.source = self.members[self.id]
        """Any member: they have one table and one key."""
        self.mark = self.source.mark


TableT = TypeVar("TableT", bound=CapturedTable[Any])


def first_unread(tables: Iterable[TableT]) -> TableT | None:
    """The table that the next page is of."""
    return next((table for table in tables if table.cursor.pages is not None), None)


def tables_read(tables: Iterable[TableT], page_rows: int, rows_about: Callable[[TableT], int]) -> Iterator[TableRead]:
    """The *tables* that are read in pages of so many rows; *rows_about* estimates all rows of one."""
    unread = [(table, pages) for table in tables if (pages := table.cursor.pages) is not None]
    for place, (table, pages) in enumerate(unread):
        page = max(int(place == 0), -(-pages.rows // page_rows))
        yield TableRead(table.source.table, page, max(1, page, -(-rows_about(table) // page_rows)))


def not_captured(name: str, problem: str) -> SourceFinding:
    """The *problem* for which the changes of *name* do not come, as what the doctor says."""
    what, _, do = problem.partition(": ")
    return SourceFinding(f"The changes of {name} cannot be captured: {what}", do or "as it says")


def finding_of(error: ConfigError | Halt) -> SourceFinding:
    """The *error* with which a run would end, as what the doctor says."""
    what, _, choices = str(error).partition("\n")
    return SourceFinding(what.rstrip("."), choices.strip().removeprefix("Choices: ") or "as it says")


def places_of(key: tuple[str, ...], names: Sequence[str]) -> tuple[int, ...]:
    """The places of the key's columns in a row with columns *names*."""
    return tuple(map(list(names).index, key))
