"""The changes of tables of PostgreSQL as sources, which share a slot: the description. It opens nothing."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.postgres.dsn import PostgresTable, quoted
from exactlyonce.connectors.source import RangeContext, SplitFinder
from exactlyonce.connectors.splits import (
    OpenSplit,
    SharedDecoder,
    SourceFinding,
    SplitDecoder,
    SplitRange,
    SplitSource,
)
from exactlyonce.connectors.tables import KeyedRows, columns_of, forms_of
from exactlyonce.pipeline import hints
from exactlyonce.pipeline.changes import Change
from exactlyonce.pipeline.dead_letters import OnError
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.grants import Grants
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.secrets import shown_reference
from exactlyonce.pipeline.shape import Form, describe, type_name
from exactlyonce.pipeline.source import AHEAD, EventTime, PartSource, SharedSource, TimeOf

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_SLOT = re.compile("[a-z0-9_]{1,63}")
_SLOT_LENGTH_MAX = 63


@dataclass(frozen=True, eq=False, kw_only=True)
class SlotSource(PartSource[T_co]):
    """The description of a source that is read from a slot, with others."""

    dsn: str = field(repr=False)
    slot: str = ""
    on_error: OnError = "fail"
    time: TimeOf[Any] | None = None

    def whole(self, pipeline: str) -> PostgresSlot:
        return PostgresSlot(dsn=self.dsn, name=self.slot or default_slot(pipeline), on_error=self.on_error)

    def decoder(self) -> SplitDecoder:
        """The decoder of its own parts."""
        raise NotImplementedError

    def statements(self, user: str) -> Sequence[str]:
        """Those that let *user* read it, beside the slot."""
        return ()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if isinstance(self.time, EventTime) and self.time.ahead not in (None, AHEAD):
            yield "ahead= is about the timestamps of messages of Kafka: leave it out"
        if self.slot and not _SLOT.fullmatch(self.slot):
            yield f"slot={self.slot!r} must have 1 to {_SLOT_LENGTH_MAX} of a-z, 0-9 and _"


@dataclass(frozen=True, eq=False)
class PostgresChanges(PostgresTable, KeyedRows[Change[T]], SlotSource[Change[T]]):
    """Captures the changes of a table: ``PostgresChanges("customers", dsn="env:SHOP_DSN", key="id", value=Customer)``
    gives `Change[Customer]`, first the rows that are there, then each change after its commit.

    It reads a logical replication slot, by pgoutput, which `PostgresSlot.setup` makes. All tables of a pipeline in one
    database share it. The server keeps its log from the last finalized checkpoint on. PostgreSQL 14 or newer, its
    primary server.

    - *table*: its name, or "schema.table".
    - *dsn*: the place of a connection string of libpq: ``env:NAME`` or ``file:/path``. One without a password may be
      written out. The role has REPLICATION, and may read the table.
    - *key*: the column of the primary key, or a tuple of them: fields of *value*.
    - *value*: the type of a row, whose fields are columns: a Struct, a dataclass, a TypedDict.
    - *snapshot*: "pages" reads the rows that are there, page by page, beside the changes; "never" only changes.
    - *slot*: the name of another slot, and of its publication; by default "exactlyonce_" and the pipeline's name.
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
    slot: str = ""
    on_error: OnError = "fail"
    time: TimeOf[Any] | None = None
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
        return int if self._is_number else str

    def changelog(self) -> PostgresChanges[T]:
        """See `Source`; a truncate has no such record."""
        changed = copy.copy(self)
        object.__setattr__(changed, "is_changelog", True)
        return changed

    @property
    def mark(self) -> str:
        return f"table {self.table}"

    @property
    def place(self) -> str:
        return f"postgres-changes:{self.table}"

    @property
    def shown(self) -> str:
        return f"{'rows and changes' if self.snapshot == 'pages' else 'changes'} of {self.table}"

    def statements(self, user: str) -> Sequence[str]:
        return self.reading_grants(user)

    def decoder(self) -> SplitDecoder:
        with self.needing_driver():
            from exactlyonce.connectors.postgres.change_values import ChangeDecoder
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

    def describe(self) -> dict[str, Any]:
        """The table without its database."""
        key, value = list(self.key_columns), describe(self.value)
        return {"source": "postgres-changes", "place": self.place, "key": key, "value": value, **self.describe_time()}


@dataclass(frozen=True, eq=False, kw_only=True)
class PostgresSlot(SharedSource, SplitSource[Any]):
    """A logical replication slot, and the publication of the same name: one split, for all sources of a pipeline that
    read it. `slots_of` gives those of a graph."""

    dsn: str = field(repr=False)
    name: str
    members: Mapping[str, PartSource[Any]] = field(default_factory=dict)
    grows: bool = field(default=True, init=False, repr=False)

    @property
    def id(self) -> str:  # type: ignore[override]  # a part of its name
        return f"slot-{self.name}"

    @property
    def place(self) -> str:
        return f"postgres-changes:{self.name}"

    @property
    def repeats(self) -> bool:
        return False

    def is_one_with(self, other: SharedSource) -> bool:
        return isinstance(other, PostgresSlot) and (other.dsn, other.name) == (self.dsn, self.name)

    def with_member(self, id: str, member: PartSource[Any]) -> PostgresSlot:
        return replace(self, members={**self.members, id: member})

    @property
    def tables(self) -> list[dict[str, PostgresChanges[Any]]]:
        """The members of each table, by id."""
        tables: dict[str, dict[str, PostgresChanges[Any]]] = {}
        for id, member in self.members.items():
            if isinstance(member, PostgresChanges):
                tables.setdefault(member.mark, {})[id] = member
        return list(tables.values())

    @property
    def shown(self) -> str:
        return f"slot and publication {self.name}"

    @property
    def contents(self) -> str:
        """What is read of it, for errors."""
        return " and ".join(dict.fromkeys(member.mark for member in self.members.values()))

    def finder(self, source: str, topics: Any = None) -> SplitFinder:
        with _needing_driver():
            from exactlyonce.connectors.postgres.slot import SlotFinder
        return SlotFinder(source, self)

    def open_split(self, position: SourceOffset) -> OpenSplit:
        with _needing_driver():
            from exactlyonce.connectors.postgres.change_split import OpenSlot
        return OpenSlot(self, position)

    def decoder(self) -> SplitDecoder:
        decoders = {id: member.decoder() for id, member in self.members.items() if isinstance(member, SlotSource)}
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

    def setup(self, *, dry_run: bool = False) -> list[str]:
        """Make the publication and the slot, if they are not there, and publish what is not yet; from then on the
        server keeps its log for them.

        A table gets a replica identity with its key, if it has none. Returns the statements, which *dry_run* does not
        run. Raises `ConfigError` where a table cannot be captured, `StoreError` where the role may not,
        `StoreUnavailable` where nobody answers.
        """
        with _needing_driver():
            from exactlyonce.connectors.postgres.slot import set_up
        return set_up(self, dry_run=dry_run)

    def drop(self, *, dry_run: bool = False) -> list[str]:
        """Remove the slot, which nobody reads, and the publication. Returns and raises as `setup`."""
        with _needing_driver():
            from exactlyonce.connectors.postgres.slot import drop
        return drop(self, dry_run=dry_run)

    def examine(self, id: str, positions: Sequence[SourceOffset]) -> tuple[str, Sequence[SourceFinding]]:
        with _needing_driver():
            from exactlyonce.connectors.postgres.slot_status import examine
        return examine(self, positions)

    def grants(self, user: str) -> Grants:
        """See `Source`; those of `setup` are its own: the tables' owner, with CREATE on the database."""
        members = [member for member in self.members.values() if isinstance(member, SlotSource)]
        reading = [statement for member in members for statement in member.statements(user)]
        replicating = f"ALTER ROLE {quoted(user)} REPLICATION;"
        statements = tuple(dict.fromkeys([*reading, replicating]))
        return Grants(f"the database of {shown_reference(self.dsn)}", PostgresTable.client, statements)

    def problems(self) -> Iterator[str]:
        yield from SharedSource.problems(self)
        for members in self.tables:
            for setting in ("key", "snapshot"):
                if len({getattr(member, setting) for member in members.values()}) > 1:
                    yield f"{' and '.join(members)} read one table with another {setting}=: give both the same"

    def describe(self) -> dict[str, Any]:
        """The slot without its database; its members describe themselves."""
        return {"source": "postgres-changes", "place": self.place, **self.describe_time()}


def slots_of(graph: LogicalGraph) -> list[PostgresSlot]:
    """The slots that a pipeline reads: ``for slot in slots_of(pipeline.build()): slot.setup()``."""
    return [node.source for node in graph.sources if isinstance(node.source, PostgresSlot)]


def default_slot(pipeline: str) -> str:
    """The name of a pipeline's slot.

    >>> default_slot("Shop-eu")
    'exactlyonce_shop_eu'
    """
    name = "exactlyonce_" + re.sub("[^a-z0-9_]", "_", pipeline.lower())
    if len(name) <= _SLOT_LENGTH_MAX:
        return name
    return f"{name[:54]}_{hashlib.sha256(pipeline.encode()).hexdigest()[:8]}"


def _needing_driver() -> Any:
    return needing(PostgresTable.extra, PostgresTable.driver, "A slot of PostgreSQL")
