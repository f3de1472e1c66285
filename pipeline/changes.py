"""A change of a table: the record of sources that capture changes, whatever the database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_origin

import msgspec

from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.shape import Form, Shape

T = TypeVar("T")
Unchanged: TypeAlias = msgspec.UnsetType
"""The type of `UNCHANGED`, for a field of a row: ``text: str | Unchanged = UNCHANGED``."""
UNCHANGED = msgspec.UNSET
"""In place of a large value that an update has left as it was, and that the database has not sent. JSON lacks such a
field; a sink with columns does not take its type."""
Op: TypeAlias = Literal["read", "insert", "update", "delete", "truncate"]


class Change(msgspec.Struct, Generic[T], frozen=True):
    """A change of one row, in the order of its database's commits; an update that changes the key is two of them."""

    op: Op
    """"read": the row was there before its changes were captured. "truncate": all rows are gone."""
    key: Any
    """The value of the key's column: an int if its field is one, else text as the database writes it; of several
    columns, the JSON array of such values as text: see `KeyForm`. None of a truncate."""
    after: T | None
    """The row as it is now; None of a delete and of a truncate."""
    before: T | None
    """The row as it was; None where the database does not say it."""
    table: str
    timestamp_ms: int
    """The time of the commit, or of the page that a "read" is from, by the server's clock, in ms since 1970."""
    lsn: int
    """The place of the commit in the database's log; that of a "read" lies before those of later changes. In MariaDB it
    is the number of the GTID, and each GTID domain has its own order: of several, a "read" has the highest number."""
    transaction: int | None = None
    """Its number in the database; None of a "read"."""

    @property
    def value(self) -> T | None:
        """The row as a record's value, None once it is deleted. Raises ValueError of a truncate."""
        if self.op == "truncate":
            raise ValueError(
                f"TRUNCATE has deleted all rows of {self.table}, and a record has one key, so that copies keep their "
                f"rows: leave it out by on_error=, and empty the copies; or delete rows by DELETE"
            )
        return self.after

    def record(self) -> Record[T | None]:
        """The row by its key, None once it is deleted. Raises ValueError of a truncate."""
        return Record(self.value, self.key, self.timestamp_ms)


class KeyForm:
    """The form of `Change.key`, by the shapes of the key's fields; None: no field has the column."""

    def __init__(self, shapes: Sequence[Shape | None]) -> None:
        self._columns = len(shapes)
        self.is_number = [None if shape is None else shape.without_none.form for shape in shapes] == [Form.INT]

    @property
    def type(self) -> type[int] | type[str]:
        return int if self.is_number else str

    @property
    def maker(self) -> Callable[[Sequence[str]], Any]:
        """Makes the key of the texts of its columns."""
        if self._columns > 1:
            return lambda texts: _encode(texts).decode()
        return (lambda texts: int(texts[0])) if self.is_number else itemgetter(0)

    def values(self, key: Any) -> list[Any]:
        """The texts that *key* was made of; of one column, the key; of a tuple, its parts. ValueError if it has another
        number of columns."""
        if self._columns == 1 and not isinstance(key, tuple):
            return [key]
        try:
            texts = [*key] if isinstance(key, tuple) else _decode_texts(key)
        except (msgspec.DecodeError, TypeError):
            texts = []
        if len(texts) != self._columns:
            raise ValueError(f"key= has {self._columns} columns, and the change is of the key {key!r:.60}")
        return texts


_encode = msgspec.json.Encoder().encode
_decode_texts = msgspec.json.Decoder(list[str]).decode


def holds_changes(type_: Any) -> bool:
    """Whether *type_* is `Change`, of any row."""
    return type_ is Change or get_origin(type_) is Change


class Transaction(msgspec.Struct, frozen=True):
    """A transaction whose changes are all there."""

    transaction: int
    """Its number in the database: `Change.transaction`."""
    lsn: int
    timestamp_ms: int
    """The time of its commit."""
    changes: dict[str, int]
    """The number of its changes by table, and of its messages by prefix, as the pipeline reads them."""
