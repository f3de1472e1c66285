"""Operators whose states expire: `ttl=`.

Invariants: whether a record finds its key's state depends on its time and floor, and on those of the records before it,
alone, unless an input was idle: it counts at the later of both, which no watermark passes. A state is dropped once no
record can find it, with its slot, and no older block of it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.operators import StateCalls
from exactlyonce.engines.runtime.timed import Due, TimedOperator, TimedParts
from exactlyonce.pipeline.expiry import Expiry
from exactlyonce.pipeline.graph import Kind
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.state.backend import TimedTable
from exactlyonce.state.batches import BatchTable
from exactlyonce.state.state_type import StateType

Entry = tuple[int, Any]
"""The time of a key's last record in ms, and its state."""


class Latest(BatchTable[Entry]):
    """The entries of a timed table by key alone: each key has one slot."""

    def __init__(self, table: TimedTable[Entry], state_type: StateType[Entry], expiry: Expiry) -> None:
        self.state_type = state_type
        self._table, self._expiry = table, expiry
        self._states: dict[bytes, Entry | None] = {}
        self._changes: dict[bytes, Entry | None] = {}
        self._slots: dict[bytes, int] = {}
        """Those of the keys of the batch, before it."""

    def _touch(self, keys: Sequence[bytes]) -> dict[bytes, Entry | None]:
        clone = self.state_type.clone if self.state_type.mutable else None
        self._states, self._changes, self._slots = {}, {}, {}
        for key in dict.fromkeys(keys):
            for slot in self._table.slots_of(key):
                entry = self._table.get(slot, key)
                self._slots[key] = slot
                self._states[key] = entry if clone is None or entry is None else clone(entry)
        return self._changes

    def _touched(self, added: int) -> None:
        slots: list[int] = []
        keys: list[bytes] = []
        entries: list[Entry] = []
        for key, entry in self._changes.items():
            before, slot = self._slots.get(key), None if entry is None else self._expiry.slot(entry[0])
            if before is not None and before != slot:
                self._table.put(before, key, None)
            if entry is not None and slot is not None:
                slots.append(slot)
                keys.append(key)
                entries.append(entry)
        self._table.update(_replaced, slots, keys, entries)


def _replaced(before: Entry | None, entry: Entry) -> Entry:
    return entry


@dataclass(slots=True)
class ExpiringStateful(StateCalls, TimedOperator[None]):
    """`stateful_map`, `stateful_flat_map` and `reduce` with ``ttl=``."""

    fn: Callable[..., Any]
    expiry: Expiry
    latest: Latest
    flat: bool = False
    reduces: bool = False
    clone: Callable[[Any], Any] | None = None
    copy: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    """Copies a state that is the record itself; None: it never changes."""

    @classmethod
    def made(cls, parts: TimedParts) -> ExpiringStateful:
        node, expiry = parts.node, parts.node.timed
        assert isinstance(expiry, Expiry)
        state = StateType[Any](node.id, VersionedState(expiry.state_of(node.state_type)))
        copy = state.clone if state.mutable else None
        return cls(
            node.id,
            parts.table,
            parts.groups,
            parts.max_parallelism,
            parts.function,
            expiry,
            Latest(parts.table, StateType[Entry](node.id, VersionedState(node.state_type)), expiry),
            node.kind is Kind.STATEFUL_FLAT_MAP,
            node.kind is Kind.REDUCE,
            copy if node.dead_letters is not None else None,
            copy=copy,
        )

    def _runner(
        self, fn: Callable[..., Any], batch: Batch, dead: Sequence[tuple[int, BaseException]]
    ) -> Callable[[slice], list[Any]]:
        assert batch.keys is not None
        assert batch.times is not None
        keys, records = batch.keys, batch.records
        moments, ttl_ms, copy = map(max, batch.times, self.floors(batch)), self.expiry.ttl_ms, self.copy

        def run(entry: Entry | None, record: Any) -> tuple[Entry | None, Any]:
            now, failed = next(moments), len(dead)
            expired = entry is None or now >= entry[0] + ttl_ms
            state, output = fn(None if expired or entry is None else entry[1], record)
            last = now if expired or entry is None else max(now, entry[0])
            if len(dead) > failed:  # a dead letter changes nothing
                return entry if expired or entry is None else (entry[0], state), output
            if copy is not None and state is record and state is not None:
                state = copy(state)
            return None if state is None else (last, state), output

        return lambda chunk: self.latest.apply(run, keys[chunk], records[chunk])

    def _due(self) -> Iterator[Due[None]]:
        """The slots that end, which give nothing. A drain ends none: the next run goes on with the states."""
        for slot in [] if self.drains else self.table.slots(self.watermark):
            self.table.drop(slot, self.table.groups(slot))
            yield Due(slot, 0, None)


OPERATORS: dict[type[Timed], type[ExpiringStateful]] = {Expiry: ExpiringStateful}
