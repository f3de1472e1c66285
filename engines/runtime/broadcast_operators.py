"""The operators of `with_broadcast`: one keeps the rows of a table by key, the other has all of them in each subtask.

Invariants: `Broadcaster` keeps each row once, in the subtask of its key, and sends every change to all subtasks of
`WithBroadcast`, in its order. No barrier overtakes these changes. So at a barrier each subtask of `WithBroadcast` has
exactly the rows that all subtasks of `Broadcaster` have, and it begins with those of the checkpoint. See
docs/design/broadcast.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.faults import Notes
from exactlyonce.engines.runtime.join_operators import replaced
from exactlyonce.engines.runtime.operators import BatchOperator, Sides
from exactlyonce.engines.runtime.timed_operators import KeyReader
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.state.backend import Table

ROWS_MAX = 100_000
"""A subtask that has more rows says so: all of them are in its memory."""


@dataclass(slots=True)
class Broadcaster(BatchOperator):
    """Keeps the newest row of each key, and gives each change with its key; None deletes a row."""

    table: Table[Any]

    def __call__(self, batch: Batch) -> None:
        assert batch.keys is not None
        entered_s = self.activity.enter(self.id)
        rows = [record.value for record in batch.records]
        self.table.apply(replaced, batch.keys, rows)
        self.activity.leave(self.id, entered_s, len(rows))
        self.push(batch.of(rows))


@dataclass(slots=True)
class WithBroadcast(Sides, BatchOperator):
    """Calls the user's function with each record and a read-only mapping of all rows."""

    fn: Callable[[Any, Mapping[Any, Any]], Any]
    read_keys: KeyReader
    notes: Notes
    tells: bool
    """Whether it is this subtask that says that there are too many rows."""
    rows: Mapping[Any, Any] = field(init=False)
    """As the user sees them: in the order of their canonical keys, which a replay has, too."""
    _rows: dict[Any, Any] = field(default_factory=dict, init=False)
    _keys: dict[Any, bytes] = field(default_factory=dict, init=False)
    """The canonical key of each row."""
    _sorted: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.rows = MappingProxyType(self._rows)

    def restore(self, rows: Iterable[tuple[bytes, Any]]) -> None:
        """Begin with *rows*, by canonical key."""
        known = [*rows]
        self._change([key for key, _ in known], [row for _, row in known])

    def left(self, batch: Batch) -> None:
        """Take records."""
        self._sort()
        fn, rows = self.fn, self.rows
        batch, done = self.apply(lambda record: fn(record, rows), batch)
        self.push(batch.of(done))

    def right(self, batch: Batch) -> None:
        """Take changes of rows."""
        assert batch.keys is not None
        self._change(batch.keys, batch.records)

    def _no_key(self, key: Any, why: str) -> GraphError:
        return GraphError(
            f"Operator {self.id!r} gives its function a mapping, and the key {key!r:.100} of a row cannot be one of "
            f"that: {why}. Nothing is lost: give the table's source a key= of one type, as text, numbers or bytes."
        )

    def _sort(self) -> None:
        if not self._sorted:
            in_order = sorted(self._keys.items(), key=itemgetter(1))
            rows = [(key, self._rows[key]) for key, _ in in_order]
            self._rows.clear()
            self._rows.update(rows)
            self._sorted = True

    def _change(self, keys: Sequence[bytes], rows: Sequence[Any]) -> None:
        for canonical, key, row in zip(keys, self.read_keys(keys), rows, strict=True):
            try:
                same = self._keys.get(key, canonical) == canonical
            except TypeError as error:
                raise self._no_key(key, str(error)) from error
            if not same:  # as 1 and True
                raise self._no_key(key, "it equals that of another row")
            if row is None:
                self._rows.pop(key, None)
                self._keys.pop(key, None)
            else:
                self._sorted = self._sorted and key in self._keys
                self._rows[key], self._keys[key] = row, canonical
        if self.tells and len(self._rows) > ROWS_MAX:
            self.tells = False
            self.notes.add(
                f"operator {self.id!r} has more than {ROWS_MAX:,} rows, all of them in the memory of each subtask: "
                f"with_broadcast is for small tables, and lookup(id, table) of a keyed stream for large ones"
            )
