"""Operators whose states expire: `ttl=`.

Invariants: whether a record finds its key's state depends on its time and floor, and on the records before it,
alone, unless an input was idle: it counts at the later of both, which no watermark passes. A state is dropped once no
record can find it, with its slot, and no older block of it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.join_operators import Lookups, replaced
from exactlyonce.engines.runtime.operators import StateCalls
from exactlyonce.engines.runtime.timed_operators import Due, KeyReader, TimedOperator, TimedParts, nothing_at
from exactlyonce.pipeline.errors import users_errors
from exactlyonce.pipeline.event_time import NO_WATERMARK
from exactlyonce.pipeline.graph import Kind
from exactlyonce.pipeline.joins import Lookup
from exactlyonce.pipeline.timed import Expiry, Timed
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.state.backend import TimedTable
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.state_type import StateType

S = TypeVar("S")

ENTRIES_MAX = 20_000
"""The most entries that are in memory alone, but for a chunk's."""


class Latest(Generic[S]):
    """The last entry of each key: the time of its last record in ms, and its state.

    The entries of the keys of recent records are in memory alone: most are written over before the next barrier. The
    table has them once there is one, or there are too many.
    """

    def __init__(
        self, table: TimedTable[tuple[int, S]], groups: Sequence[int], state_type: StateType[S], expiry: Expiry
    ) -> None:
        self._table, self._groups, self._state_type, self._expiry = table, groups, state_type, expiry
        self._entries: dict[bytes, tuple[int, S] | None] = {}

    def apply(
        self,
        fn: Callable[[S | None, Any], tuple[S | None, Any]],
        keys: Sequence[bytes],
        records: Sequence[Any],
        moments: Sequence[int],
        dead: Sequence[Any] = (),
    ) -> list[Any]:
        """The outputs of *fn*, as of `Table.apply`, for *records*, which count at *moments*.

        A record that *fn* adds to *dead* changes nothing.
        """
        self._read(keys)
        entries, state_type, ttl_ms = self._entries, self._state_type, self._expiry.ttl_ms
        mutable, shares, known = state_type.mutable, state_type.shares, state_type.sharing.get
        outputs: list[Any] = []
        append, failed = outputs.append, len(dead)
        try:
            for key, record, now in zip(keys, records, moments, strict=True):
                entry = entries[key]
                if entry is None or now >= entry[0] + ttl_ms:
                    last, (state, output) = now, fn(None, record)
                else:
                    last = entry[0] if entry[0] > now else now
                    state, output = fn(entry[1], record)
                append(output)
                if len(dead) > failed:
                    failed += 1
                    entries[key] = entry if entry is None or state is None else (entry[0], state)
                    continue
                if mutable and state is not None:
                    shared = known(type(output))
                    if state is record or (shares(output) if shared is None else shared):
                        state = state_type.clone(state)
                entries[key] = None if state is None else (last, state)
        except users_errors() as error:
            raise ApplyFailed(len(outputs)) from error
        if len(entries) > ENTRIES_MAX:
            self.settle()
        return outputs

    def states(self, keys: Sequence[bytes], moments: Sequence[int]) -> list[S | None]:
        """The state that a record of each of *keys* finds at each of *moments*."""
        self._read(keys)
        ttl_ms, entries = self._expiry.ttl_ms, map(self._entries.__getitem__, keys)
        found = [
            None if entry is None or now >= entry[0] + ttl_ms else entry[1]
            for entry, now in zip(entries, moments, strict=True)
        ]
        if len(self._entries) > ENTRIES_MAX:
            self.settle()
        return found

    def _read(self, keys: Sequence[bytes]) -> None:
        """Bring the entries of *keys* into memory."""
        entries, table, clone = self._entries, self._table, self._state_type.clone
        new = set(keys).difference(entries)
        entries.update(dict.fromkeys(new))
        for key in table.present(new):
            for slot in table.slots_of(key):
                entry = table.get(slot, key)
            mutable = self._state_type.mutable and entry is not None
            entries[key] = (entry[0], clone(entry[1])) if entry is not None and mutable else entry

    def settle(self) -> None:
        """Write all entries into the table, but for those whose slots have gone."""
        table, slot_of, slots, keys, entries = self._table, self._expiry.slot, list[int](), list[bytes](), list[Any]()
        gone = min(map(table.watermark, self._groups), default=NO_WATERMARK)
        left: list[tuple[int, bytes]] = []
        for key, entry in self._entries.items():
            slot = gone if entry is None else slot_of(entry[0])
            left += [(before, key) for before in table.slots_of(key) if before != slot]
            if slot > gone:
                slots.append(slot)
                keys.append(key)
                entries.append(entry)
        for before, key in left:
            table.put(before, key, None)
        table.update(_replaced, slots, keys, entries)
        self._entries.clear()


def _replaced(before: Any, entry: Any) -> Any:
    """The new entry; not *entry* itself, of which the table would keep a clone, though nothing else has it."""
    last, state = entry
    return last, state


@dataclass(slots=True)
class ExpiringOperator(TimedOperator[None]):
    """An operator with a state by key, which expires."""

    latest: Latest[Any]

    @classmethod
    def made(cls, parts: TimedParts) -> ExpiringOperator:
        node, expiry = parts.node, parts.node.timed
        assert isinstance(expiry, Expiry)
        state_type = StateType[Any](node.id, VersionedState(expiry.state_of(node.state_type)))
        latest = Latest(parts.table, parts.groups, state_type, expiry)
        if node.lookup is not None:
            return ExpiringLookup(*parts.shared, latest, node.lookup, parts.read_keys)
        return ExpiringStateful(
            *parts.shared,
            latest,
            parts.function,
            node.kind is Kind.STATEFUL_FLAT_MAP,
            node.kind is Kind.REDUCE,
            state_type.clone if state_type.mutable and node.dead_letters is not None else None,
        )

    def settle(self) -> None:
        self.latest.settle()

    def _moments(self, batch: Batch) -> Sequence[int]:
        """The time at which each record counts."""
        assert batch.times is not None
        if not batch.times or self.are_in_time(batch, min(batch.times)):
            return batch.times
        return list(map(max, batch.times, self.floors(batch)))

    def _due(self) -> Iterator[Due[None]]:
        """The slots that end, which give nothing. A drain ends none: the next run goes on with the states."""
        for slot in [] if self.drains else self.table.slots(self.watermark):
            self.table.drop(slot, self.table.groups(slot))
            self.table.advance(slot)
            yield nothing_at(slot)


@dataclass(slots=True)
class ExpiringStateful(StateCalls, ExpiringOperator):
    """`stateful_map`, `stateful_flat_map` and `reduce` with ``ttl=``."""

    fn: Callable[..., Any]
    flat: bool = False
    reduces: bool = False
    clone: Callable[[Any], Any] | None = None

    def _runner(
        self, fn: Callable[..., Any], batch: Batch, dead: Sequence[tuple[int, BaseException]]
    ) -> Callable[[slice], list[Any]]:
        assert batch.keys is not None
        keys, records, moments, run = batch.keys, batch.records, self._moments(batch), self.latest.apply
        return lambda chunk: run(fn, keys[chunk], records[chunk], moments[chunk], dead)


@dataclass(slots=True)
class ExpiringLookup(Lookups, ExpiringOperator):
    """`lookup` with ``ttl=``."""

    join: Lookup
    read_keys: KeyReader

    def _found(self, batch: Batch) -> Sequence[Any]:
        assert batch.keys is not None
        return self.latest.states(batch.keys, self._moments(batch))

    def _keep(self, batch: Batch, values: Sequence[Any]) -> None:
        assert batch.keys is not None
        self.latest.apply(replaced, batch.keys, values, self._moments(batch))


OPERATORS: dict[type[Timed], type[ExpiringOperator]] = {Expiry: ExpiringOperator}
