"""A database and its tables, whatever the database: their common description, and tables as sources.

A source reads each row once, by ranges of a unique key, in its order.

Invariants: a position has the key of the last row that was read, as text, and reading goes on with the next larger key;
only the database compares keys. All splits are read in one snapshot of the database, as long as that is there. Once it
is gone, each split goes on in a later one. So a key is read once; its row is as of the moment of one of these.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeVar

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import RangeContext
from exactlyonce.connectors.splits import OpenSplit, SplitDecoder, SplitRange, SplitSource
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.grants import Grants
from exactlyonce.pipeline.secrets import PASSWORD_WRITTEN, is_reference, reference_problem, shown_reference
from exactlyonce.pipeline.shape import SCALARS, Field, Form, describe, record_fields, shape_of, type_name
from exactlyonce.pipeline.source import Source

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T_co = TypeVar("T_co", covariant=True)
Key = tuple[str, ...]
"""The values of the key's columns, as text."""
PAGE_ROWS = 2_000
"""The rows of one query."""
NUMBERS = frozenset({Form.INT, Form.FLOAT, Form.DECIMAL})
TEXTS = SCALARS - {Form.BOOL, Form.INT, Form.FLOAT}
"""The forms that a text may stand for."""
DOCUMENTS = frozenset({Form.RECORD, Form.DICT, Form.LIST, Form.TUPLE, Form.SET})


class Database:
    """The part that sources, logs and sinks share, which name the place of a connection string."""

    extra: ClassVar[str]
    """The extra of its driver, which is also its name in places."""
    driver: ClassVar[str]
    """The package of the extra; descriptions do without."""
    client: ClassVar[str]
    """The database's own client, as a command that reads statements from its stdin."""
    schemes: ClassVar[tuple[str, ...]]
    """The beginnings of its connection strings, if these are URLs."""
    dsn: str

    @staticmethod
    def has_password(dsn: str) -> bool:
        """Whether a password is written out in *dsn*. `ConfigError` for one that is of the wrong form."""
        raise NotImplementedError

    @staticmethod
    def query(dsn: str, statement: str) -> Iterator[Any]:
        """The rows of *statement*, as objects by column or as their JSON, in the database of *dsn*, a reference."""
        raise NotImplementedError

    @property
    def named(self) -> str:
        """Its name in errors."""
        return type(self).__name__

    def dsn_problems(self) -> Iterator[str]:
        """The mistakes of the dsn, each with its remedy."""
        if not isinstance(self.dsn, str) or not self.dsn:
            yield 'dsn= is not set: say where the connection string is: dsn="env:ORDERS_DSN", or file:/path'
        elif problem := reference_problem(self.dsn):
            yield f"dsn={self.dsn!r}: {problem}"
        elif not is_reference(self.dsn):
            try:
                if self.has_password(self.dsn):
                    yield PASSWORD_WRITTEN
            except ConfigError as error:
                yield str(error)

    def needing_driver(self) -> AbstractContextManager[None]:
        """Around imports of what needs the driver."""
        return needing(self.extra, self.driver, self.named)

    def granted_by(self, statements: Iterable[str]) -> Grants:
        """The rights that *statements* give, for an administrator."""
        return Grants(f"the database of {shown_reference(self.dsn)}", self.client, tuple(statements))


class DatabaseTable(Database):
    """A database, and a table in it."""

    table: str

    @property
    def named(self) -> str:
        return f"{type(self).__name__}({self.table!r})"

    def reading_grants(self, user: str) -> tuple[str, ...]:
        """The statements that let *user* read the table."""
        raise NotImplementedError


class TableSplit(msgspec.Struct, frozen=True, omit_defaults=True):
    """The identity of a split: the rows of one table with keys above *after*, up to *through*."""

    table: str
    """The identity of the table in its database."""
    snapshot: str = ""
    """The name of the exported snapshot; empty: each reader has its own."""
    after: Key | None = None
    """None: from the first row on."""
    through: Key | None = None
    """None: to the last row."""

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, identity: str) -> TableSplit:
        """The split of an identity.

        >>> TableSplit.parse(str(TableSplit("16385", after=("7", "ann")))).after
        ('7', 'ann')
        """
        return msgspec.json.decode(identity, type=cls)


class Row(NamedTuple):
    """A row as read."""

    key: Key
    part: Any
    """The argument of the source's decoder."""


class TableRows(Protocol):
    """Reads the rows of a table in one snapshot, over one connection."""

    @property
    def time_ms(self) -> int:
        """The time of the snapshot, by the server's clock, in ms since 1970."""

    def page(self, after: Key | None, through: Key | None) -> Sequence[Row]:
        """The next `PAGE_ROWS` rows in the order of their keys, above *after* and up to *through*; fewer: these are the
        last."""

    def close(self) -> None:
        """Close the connection."""


class OpenTable(OpenSplit):
    """A range of keys."""

    cursor: str = ""

    def __init__(self, position: SourceOffset, name: str, rows: TableRows) -> None:
        self.name, self.time_ms = name, rows.time_ms
        self.cursor = position.cursor
        self._rows, self._through = rows, TableSplit.parse(position.topic_id).through
        self._page: Sequence[Row] = ()
        self._at = 0
        self._fill(last_read(position))

    def _fill(self, after: Key | None) -> None:
        self._page, self._at = self._rows.page(after, self._through), 0

    def read(self, records_max: int) -> list[Any]:
        rows = self._page[self._at : self._at + records_max]
        self._at += len(rows)
        if rows:
            key = rows[-1].key
            self.cursor = msgspec.json.encode(key).decode()
            if self._at == PAGE_ROWS:
                self._fill(key)
        return [row.part for row in rows]

    @property
    def ended(self) -> bool:
        return self._at == len(self._page)

    def buffered(self) -> int:
        return len(self._page) - self._at

    def close(self) -> None:
        self._rows.close()


def last_read(position: SourceOffset) -> Key | None:
    """The key above which the split at *position* goes on."""
    if position.cursor:
        return msgspec.json.decode(position.cursor, type=Key)
    return TableSplit.parse(position.topic_id).after


def columns_of(type_: Any) -> dict[str, Field]:
    """The columns that the fields of *type_* are read from; empty if it is no type of a row."""
    fields = record_fields(type_)
    return {} if fields and shape_of(type_).is_array else {field.name: field for field in fields}


def key_problems(
    key: Sequence[str], types: Mapping[str, str], nullable: Mapping[str, bool], taken: Mapping[str, str]
) -> Iterator[str]:
    """The reasons why the columns *key* are no key to read by; *types*: of the table's columns, the kinds of their
    values, of which *taken* has those whose texts can be compared."""
    for column in key:
        if column not in types:
            yield f"it has no column {column!r}, which key= names"
        elif nullable[column]:
            yield f"its column {column!r} of the key takes NULL, which no order has: make it NOT NULL, or name another"
        elif types[column] not in taken:
            yield f"its column {column!r} of the key is {types[column]}, and may be one of {', '.join(sorted(taken))}"


def forms_of(field: Field) -> frozenset[Form]:
    """The forms of a field, without None."""
    return frozenset(member.form for member in field.shape.members) - {Form.NULL}


def field_problems(
    columns: Mapping[str, Field], types: Mapping[str, str], taken: Mapping[str, frozenset[Form]]
) -> Iterator[str]:
    """The fields of the record's type that the table lacks, or whose values its columns never have.

    *types*: of the table's columns, of which *taken* has the forms of fields that take their values, if it is known. An
    Enum, say, may take whatever a column has.
    """
    for name, declared in columns.items():
        if name not in types:
            if declared.required:
                yield f"it has no column {name!r}, which the record's type has, without a default"
            continue
        forms = forms_of(declared)
        if forms and forms <= SCALARS | DOCUMENTS and not forms & taken.get(types[name], forms):
            shown = " | ".join(sorted(form.value for form in forms))
            fitting = " or ".join(sorted(form.value for form in taken[types[name]]))
            wrong = f"its column {name!r} is {types[name]}, which the record's field, {shown}, does not take"
            yield f"{wrong}: {fitting} does"


@dataclass(frozen=True, eq=False)
class DatabaseSource(Database, Source[T_co]):
    """The description of a source that is read from a database."""

    dsn: str = field(repr=False, kw_only=True)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.dsn_problems()


@dataclass(frozen=True, eq=False)
class KeyedRows(DatabaseTable, DatabaseSource[T_co]):
    """The description of a source of rows, which have a key."""

    table: str
    _: KW_ONLY
    key: str | tuple[str, ...]
    value: TypeForm[Any]

    @property
    def key_columns(self) -> tuple[str, ...]:
        return (self.key,) if isinstance(self.key, str) else tuple(self.key)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not isinstance(self.table, str) or not self.table:
            yield f"table={self.table!r} must be the name of a table"
        if not self.key_columns or not all(isinstance(column, str) and column for column in self.key_columns):
            yield f'key={self.key!r} must name the columns of a unique key, as "id" or ("shop", "number")'
        if not columns_of(self.value):
            yield f"value={type_name(self.value)} has no fields for the columns: give a Struct, or a dataclass"


@dataclass(frozen=True, eq=False, kw_only=True)
class TableSource(KeyedRows[T_co], SplitSource[T_co]):
    """The description of a table as a source."""

    value: TypeForm[T_co]
    one_snapshot: bool = False
    name: str = ""

    @property
    def repeats(self) -> bool:
        return False

    @property
    def type(self) -> Any:
        return self.value

    @property
    def place(self) -> str:
        return f"{self.extra}:{self.table}#{self.name}" if self.name else f"{self.extra}:{self.table}"

    @abstractmethod
    def open_rows(self, position: SourceOffset) -> TableRows:
        """Rows of the snapshot of *position*, or of a later one, unless `one_snapshot`."""

    def open_split(self, position: SourceOffset) -> OpenTable:
        return OpenTable(position, self.place, self.open_rows(position))

    def open_range(self, context: RangeContext) -> SplitRange:
        """Raise Halt unless it is read for the first time: rows may have changed."""
        if context.to_end:
            return super().open_range(context)
        raise Halt(
            f"Source {context.start.source!r} reads the table {self.table}, whose rows may have changed since then, so "
            f"what it has read cannot be computed again.",
            operator=context.start.source,
        )

    def snapshot_gone(self, position: SourceOffset) -> NoReturn:
        """Raise Halt: `one_snapshot` is demanded."""
        raise Halt(
            f"Source {position.source!r} cannot go on reading {self.table} as of one moment: the session that kept its "
            f"snapshot has ended, and one_snapshot=True.\n"
            f"  Choices: `exactlyonce reset` and read the table anew; or one_snapshot=False, and the rest of the rows "
            f"are of a later moment.",
            operator=position.source,
        )

    def grants(self, user: str) -> Grants:
        """See `Source`."""
        return self.granted_by(self.reading_grants(user))

    def decoder(self) -> SplitDecoder:
        name = type_name(self.value)
        return SplitDecoder(self._decode(), self._as_json, lambda part, error: f"the row is not {name}: {error}")

    @abstractmethod
    def _decode(self) -> Any:
        """The function that turns a row's part into a record."""

    @abstractmethod
    def _as_json(self, part: Any) -> bytes:
        """A row's part, for dead letters."""

    def describe(self) -> dict[str, Any]:
        """The table without its database; how many splits there are is noted in checkpoints."""
        value = describe(self.value)
        key = list(self.key_columns)
        return {"source": self.extra, "place": self.place, "key": key, "value": value, **self.describe_time()}
