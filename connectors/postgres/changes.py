"""The changes of a table of PostgreSQL as a source: the description. It opens nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.postgres.dsn import PostgresTable, quoted
from exactlyonce.connectors.source import RangeContext, SplitFinder
from exactlyonce.connectors.splits import OpenSplit, SourceFinding, SplitDecoder, SplitRange
from exactlyonce.connectors.tables import KeyedRows, columns_of, forms_of
from exactlyonce.pipeline import hints
from exactlyonce.pipeline.changes import Change
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.pipeline.grants import Grants
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.shape import Form, describe, type_name

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
_SLOT = re.compile("[a-z0-9_]{1,63}")


@dataclass(frozen=True, eq=False)
class PostgresChanges(PostgresTable, KeyedRows[Change[T]]):
    """Captures the changes of a table: ``PostgresChanges("customers", dsn="env:SHOP_DSN", key="id", value=Customer)``
    gives `Change[Customer]`, first the rows that are there, then each change after its commit.

    It reads a logical replication slot, by pgoutput, which `setup` makes; the server keeps its log from the last
    finalized checkpoint on. PostgreSQL 14 or newer, its primary server.

    - *table*: its name, or "schema.table".
    - *dsn*: the place of a connection string of libpq: ``env:NAME`` or ``file:/path``. One without a password may be
      written out. The role has REPLICATION, and may read the table.
    - *key*: the column of the primary key, or a tuple of them: fields of *value*.
    - *value*: the type of a row, whose fields are columns: a Struct, a dataclass, a TypedDict.
    - *snapshot*: "pages" reads the rows that are there, page by page, beside the changes; "never" only changes.
    - *slot*: the name of its slot and of its publication; by default "exactlyonce_" and the table's name.
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
    grows: bool = field(default=True, init=False, repr=False)
    is_changelog: bool = field(default=False, init=False, repr=False)

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
    def place(self) -> str:
        return f"postgres-changes:{self.table}"

    @property
    def shown(self) -> str:
        rows = "rows and changes" if self.snapshot == "pages" else "changes"
        return f"{rows} of {self.table}, by slot and publication {self.slot_name}"

    @property
    def slot_name(self) -> str:
        return self.slot or "exactlyonce_" + re.sub("[^a-z0-9_]", "_", self.table.lower())

    def finder(self, source: str, topics: Any = None) -> SplitFinder:
        with self.needing_driver():
            from exactlyonce.connectors.postgres.slot import SlotFinder
        return SlotFinder(source, self)

    def open_split(self, position: SourceOffset) -> OpenSplit:
        with self.needing_driver():
            from exactlyonce.connectors.postgres.change_split import OpenSlot
        return OpenSlot(self, position)

    def left(self, position: SourceOffset) -> NoReturn:
        raise ConfigError(
            f"Source {position.source!r} captures the changes of {self.table}, which have no end: bounded work cannot "
            f"read them. Use `exactlyonce run`, with --until latest; or write the changes to a topic, and read that."
        )

    def open_range(self, context: RangeContext) -> SplitRange:
        raise Halt(
            f"Source {context.start.source!r} captures the changes of {self.table}, which the database forgets once "
            f"they are in a finalized checkpoint, so what it has read cannot be computed again. Write the changes to a "
            f"topic, and read that.",
            operator=context.start.source,
        )

    def setup(self, *, dry_run: bool = False) -> list[str]:
        """Make the publication and the slot, if they are not there; from then on the server keeps its log for them.

        The table gets a replica identity with the key, if it has none. Returns the statements, which *dry_run* does not
        run. Raises `ConfigError` where the table cannot be captured, `StoreError` where the role may not,
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

    def examine(self, id: str, positions: Sequence[SourceOffset]) -> tuple[str, Sequence[SourceFinding]]:
        with self.needing_driver():
            from exactlyonce.connectors.postgres.slot_status import examine
        return examine(self, id, positions)

    def grants(self, user: str) -> Grants:
        """See `Source`; those of `setup` are its own: the table's owner, with CREATE on the database."""
        return self.granted_by((*self.reading_grants(user), f"ALTER ROLE {quoted(user)} REPLICATION;"))

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
        if not _SLOT.fullmatch(self.slot_name):
            yield f"slot={self.slot_name!r} must have 1 to 63 of a-z, 0-9 and _"

    def describe(self) -> dict[str, Any]:
        """The table without its database."""
        key, value = list(self.key_columns), describe(self.value)
        return {"source": "postgres-changes", "place": self.place, "key": key, "value": value, **self.describe_time()}
