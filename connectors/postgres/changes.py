"""The changes of tables of PostgreSQL as sources, which share a slot: the description. It opens nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.changes import ChangeDecoding, ChangeLog, LoggedSource, TableChanges
from exactlyonce.connectors.postgres.dsn import PostgresDatabase, PostgresTable, quoted
from exactlyonce.connectors.registry import check_reading, opened
from exactlyonce.connectors.registry import problems as registry_problems
from exactlyonce.connectors.source import SplitFinder
from exactlyonce.connectors.splits import OpenSplit, SourceFinding, SplitDecoder
from exactlyonce.pipeline.changes import Change, Transaction
from exactlyonce.pipeline.codec import Codec, codec_for
from exactlyonce.pipeline.dead_letters import OnError
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.shape import type_name
from exactlyonce.pipeline.source import TimeOf

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
V = TypeVar("V")
_SLOT = re.compile("[a-z0-9_]{1,63}")
_SLOT_LENGTH_MAX = 63


@dataclass(frozen=True, eq=False, kw_only=True)
class SlotSource(PostgresDatabase, LoggedSource[T_co]):
    """The description of a source that is read from a slot, with others."""

    slot: str = ""

    def whole(self, pipeline: str) -> PostgresSlot:
        return PostgresSlot(dsn=self.dsn, name=self.slot or default_slot(pipeline), on_error=self.on_error)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.slot and not _SLOT.fullmatch(self.slot):
            yield f"slot={self.slot!r} must have 1 to {_SLOT_LENGTH_MAX} of a-z, 0-9 and _"


@dataclass(frozen=True, eq=False)
class PostgresChanges(PostgresTable, TableChanges[T], SlotSource[Change[T]]):
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

    kind: ClassVar[str] = "postgres-changes"

    def change_decoder(self) -> ChangeDecoding[T]:
        from exactlyonce.connectors.postgres.change_values import ChangeDecoder

        return ChangeDecoder(self)


@dataclass(frozen=True, eq=False)
class PostgresMessages(SlotSource[T]):
    """Reads messages that transactions write into the log, an outbox without a table: ``PostgresMessages("orders",
    dsn="env:SHOP_DSN", value=OrderPlaced)`` gives `OrderPlaced` of each ``SELECT pg_logical_emit_message(true,
    'orders', '{"id": 1}')`` once its transaction is committed.

    `PostgresMessages.records` gives each as `Record`, at its commit's time. It reads the slot of `PostgresChanges`.

    - *prefix*: the second argument of pg_logical_emit_message; "exactlyonce" is taken.
    - *value*: a type (`bytes` as they are, `str` in UTF-8, all else JSON) or a codec, as of `KafkaSource`.
    - *dsn*, *slot*, *on_error*, *time*: as those of `PostgresChanges`; *time* names a field of *value*.
    """

    prefix: str
    _: KW_ONLY
    value: TypeForm[T] | Codec[T]
    metadata: bool = field(default=False, init=False, repr=False)

    @classmethod
    def records(
        cls, prefix: str, *, dsn: str, value: TypeForm[V] | Codec[V], slot: str = "", on_error: OnError = "fail",
        time: TimeOf[Record[V]] | None = None,
    ) -> PostgresMessages[Record[V]]:  # fmt: skip
        """Likewise as `Record`, which a function for *time* takes; its key is None."""
        source: Any = cls(prefix, dsn=dsn, value=value, slot=slot, on_error=on_error, time=time)  # type: ignore[arg-type]  # another T
        object.__setattr__(source, "metadata", True)
        return source  # type: ignore[no-any-return]  # as above

    @property
    def timed_type(self) -> Any:
        return self.value.type if isinstance(self.value, Codec) else self.value

    @property
    def type(self) -> Any:
        return Record[self.timed_type] if self.metadata else self.timed_type  # type: ignore[name-defined]  # at run time

    @property
    def stamp(self) -> Callable[[Any], Any] | None:
        return attrgetter("timestamp_ms") if self.metadata else None

    @property
    def mark(self) -> str:
        return f"messages {self.prefix}"

    @property
    def place(self) -> str:
        return f"postgres-messages:{self.prefix}"

    def decoder(self) -> SplitDecoder:
        with self.needing_driver():
            from exactlyonce.connectors.postgres.change_stream import shown_lsn
        codec, name = codec_for(self.value), type_name(self.timed_type)
        decode = opened(codec, self.prefix, "value").decode

        def decode_record(part: Any) -> Any:
            return Record(decode(part.change.content), None, part.change.begin.timestamp_ms)

        def refused(part: Any, error: BaseException) -> str:
            begin = part.change.begin
            where = f"{self.prefix!r} at {shown_lsn(begin.lsn)}, of transaction {begin.transaction}"
            return f"the message {where}, is not {name} in {codec.name}: {error}"

        return SplitDecoder(
            decode_record if self.metadata else lambda part: decode(part.change.content),
            lambda part: bytes(part.change.content),
            refused,
        )

    def check_services(self) -> None:
        check_reading(codec_for(self.value))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not isinstance(self.prefix, str) or self.prefix in ("", "exactlyonce"):
            yield f"prefix={self.prefix!r} must be a text, as 'orders' of pg_logical_emit_message(true, 'orders', '')"
        yield from registry_problems(codec_for(self.value))

    def describe(self) -> dict[str, Any]:
        codec = codec_for(self.value).describe()
        return {"source": "postgres-messages", "place": self.place, "value": codec, **self.describe_time()}


@dataclass(frozen=True, eq=False, kw_only=True)
class PostgresTransactions(SlotSource[Transaction]):
    """Gives a `Transaction` after the last change of each: ``PostgresTransactions(dsn="env:SHOP_DSN")``. Its counts say
    when all changes of the slot's tables are there. There is none until the rows of all tables are read, for some of
    these have changes in them."""

    mark: ClassVar[str] = "transactions"
    type: ClassVar[Any] = Transaction

    @property
    def place(self) -> str:
        return "postgres-transactions"

    @property
    def stamp(self) -> Callable[[Any], Any] | None:
        return attrgetter("timestamp_ms")

    def decoder(self) -> SplitDecoder:
        return SplitDecoder(
            attrgetter("change"), lambda part: msgspec.json.encode(part.change), lambda _, error: str(error)
        )

    def describe(self) -> dict[str, Any]:
        return {"source": "postgres-transactions", "place": self.place, **self.describe_time()}


@dataclass(frozen=True, eq=False, kw_only=True)
class PostgresSlot(PostgresDatabase, ChangeLog):
    """A logical replication slot, and the publication of the same name: one split, for all sources of a pipeline that
    read it."""

    kind: ClassVar[str] = "postgres-changes"

    @property
    def id(self) -> str:
        return f"slot-{self.name}"

    @property
    def shown(self) -> str:
        return f"slot and publication {self.name}"

    @property
    def prefixes(self) -> dict[str, str]:
        """The marks of messages that are read, by their prefix."""
        messages = (member for member in self.members.values() if isinstance(member, PostgresMessages))
        return {member.prefix: member.mark for member in messages}

    def finder(self, source: str, topics: Any = None) -> SplitFinder:
        with self.needing_driver():
            from exactlyonce.connectors.postgres.slot import SlotFinder
        return SlotFinder(self)

    def open_split(self, position: SourceOffset) -> OpenSplit:
        with self.needing_driver():
            from exactlyonce.connectors.postgres.change_split import OpenSlot
        return OpenSlot(self, position)

    def setup(self, *, dry_run: bool = False) -> list[str]:
        """Make the publication and the slot, if they are not there, and publish what is not yet; from then on the
        server keeps its log for them.

        A table gets a replica identity with its key, if it has none. Returns the statements, which *dry_run* does not
        run. Raises `ConfigError` where a table cannot be captured, `StoreError` where the role may not,
        `StoreUnavailable` where nobody answers.
        """
        with self.needing_driver():
            from exactlyonce.connectors.postgres.slot import set_up
        return set_up(self, dry_run=dry_run)

    def drop(self, *, dry_run: bool = False) -> list[str]:
        """Remove the slot, which nobody reads, and the publication. Returns and raises as `setup`."""
        with self.needing_driver():
            from exactlyonce.connectors.postgres.slot import drop
        return drop(self, dry_run=dry_run)

    def examine(self, positions: Sequence[SourceOffset]) -> tuple[str, Sequence[SourceFinding]]:
        with self.needing_driver():
            from exactlyonce.connectors.postgres.slot_status import examine
        return examine(self, positions)

    def replicating(self, user: str) -> str:
        """See `ChangeLog`; the owner of the tables, with CREATE on the database, runs `setup`."""
        return f"ALTER ROLE {quoted(user)} REPLICATION;"


def default_slot(pipeline: str) -> str:
    """The name of a pipeline's slot.

    >>> default_slot("Shop-eu")
    'exactlyonce_shop_eu'
    """
    name = "exactlyonce_" + re.sub("[^a-z0-9_]", "_", pipeline.lower())
    if len(name) <= _SLOT_LENGTH_MAX:
        return name
    return f"{name[:54]}_{hashlib.sha256(pipeline.encode()).hexdigest()[:8]}"
