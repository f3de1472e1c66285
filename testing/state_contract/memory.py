"""Subtasks of one operator over blocks in memory, for the tests of the contract."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.state.backend import CheckpointedState, KeyedState, StateBackend, Table, TableSnapshot, TimedTable
from exactlyonce.state.blocks import EncodedBlock
from exactlyonce.state.key_groups import group_range, subtask_of

OPERATOR = "totals"
MAX_PARALLELISM = 8
T = TypeVar("T", bound=KeyedState)


class StateBlocks:
    """The blocks that snapshots have written, by reference."""

    def __init__(self) -> None:
        self._bodies: dict[BlockRef, bytes] = {}
        self._count = 0
        self.read: list[BlockRef] = []
        """Every block that was fetched."""

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return sum(map(len, self._bodies.values()))

    def put(self, block: EncodedBlock) -> BlockRef:
        """Keep one block."""
        self._count += 1
        number = self._count
        key = f"block/1/{block.header.checkpoint}/{OPERATOR}/{block.group}/{number}/0-contract"
        ref = BlockRef(1, number, key, len(block.body), hashlib.sha256(block.body).digest())
        self._bodies[ref] = block.body
        return ref

    def keep(self, refs: Iterable[BlockRef]) -> None:
        """Delete all other blocks, as those that no checkpoint needs."""
        self._bodies = {ref: self._bodies[ref] for ref in refs}

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, bytes]]:
        """The blocks, newest first: no order is promised."""
        for ref in sorted(refs, key=lambda ref: ref.offset, reverse=True):
            self.read.append(ref)
            yield ref, self._bodies[ref]

    def write(self, snapshot: TableSnapshot) -> tuple[bytes, ...]:
        """Encode a snapshot and seal it; returns the parts of its index."""
        return snapshot.seal([self.put(block) for block in snapshot.encode() if block is not None])


def key_of(number: int) -> bytes:
    """The key of *number* as in records."""
    return canonical_key(f"key-{number}")


class AnySubtasks(Generic[T]):
    """All subtasks of the operator, each with a table."""

    def __init__(self, blocks: StateBlocks, tables: Sequence[T]) -> None:
        self.blocks, self.tables, self.parallelism = blocks, tables, len(tables)

    def table_of(self, key: bytes) -> T:
        """The table of *key*."""
        return self.tables[subtask_of(key_group(key, MAX_PARALLELISM), self.parallelism, MAX_PARALLELISM)]

    def freeze(self, checkpoint: int, base: int, *, whole: bool = False) -> list[TableSnapshot]:
        """Let the barrier of *checkpoint* reach all subtasks."""
        return [table.freeze(checkpoint, base, whole=whole) for table in self.tables]

    def write(self, snapshots: Iterable[TableSnapshot]) -> list[bytes]:
        """Write the snapshots; returns all parts of their indexes."""
        return [part for snapshot in snapshots for part in self.blocks.write(snapshot)]


class Subtasks(AnySubtasks[Table[Any]]):
    """Each has a table of *backend* restored from a checkpoint."""

    def __init__(
        self, backend: StateBackend, blocks: StateBlocks, type_: Any = int, *, parallelism: int = 1,
        checkpoint: int = 0, indexes: Sequence[bytes] = (), touched: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        self.backend, self.type = backend, type_

        def table(stored: CheckpointedState) -> Table[Any]:
            return stored.table(backend, None if touched is None else set(touched) & set(stored.groups))

        super().__init__(blocks, list(map(table, _stored(blocks, type_, parallelism, checkpoint, indexes))))

    def put(self, states: Mapping[int, Any]) -> None:
        """Set states by one record per key; None deletes."""
        for number, state in states.items():
            self.table_of(key_of(number)).apply(lambda _, record: (record, None), [key_of(number)], [state])

    def items(self) -> dict[bytes, Any]:
        """The current states of all subtasks."""
        return {key: state for table in self.tables for key, state in table.items()}


class TimedSubtasks(AnySubtasks[TimedTable[Any]]):
    """Each has a timed table of *backend* restored from a checkpoint."""

    def __init__(
        self, backend: StateBackend, blocks: StateBlocks, type_: Any = int, *, parallelism: int = 1,
        checkpoint: int = 0, indexes: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        self.type = type_

        stored = _stored(blocks, type_, parallelism, checkpoint, indexes)
        super().__init__(blocks, [of_subtask.timed_table(backend, by_key=True) for of_subtask in stored])

    def put(self, states: Mapping[tuple[int, int], Any]) -> None:
        """Set the state of each (slot, number of a key); None removes it."""
        for (slot, number), state in states.items():
            self.table_of(key_of(number)).put(slot, key_of(number), state)

    def fire(self, limit: int) -> list[tuple[int, int, bytes, Any]]:
        """Read and drop all slots up to *limit*: (slot, key group, key, state), in the order of each table. Every other
        key group goes by `TimedTable.take`."""
        fired = []
        for table in self.tables:
            for slot in table.slots(limit):
                for group in table.groups(slot):
                    keys, states = table.take(slot, group) if group % 2 else table.read(slot, group)
                    fired += [(slot, group, key, state) for key, state in zip(keys, states, strict=True)]
                    if not group % 2:
                        table.drop(slot, [group])
        return fired

    def items(self) -> dict[tuple[int, bytes], Any]:
        """The current states of all subtasks."""
        return {(slot, key): state for table in self.tables for slot, key, state in table.items()}


def _stored(
    blocks: StateBlocks, type_: Any, parallelism: int, checkpoint: int, indexes: Sequence[bytes]
) -> list[CheckpointedState]:
    """The stored state of each subtask."""
    return [
        CheckpointedState(
            operator=OPERATOR, type=type_, groups=group_range(subtask, parallelism, MAX_PARALLELISM),
            max_parallelism=MAX_PARALLELISM, checkpoint=checkpoint, indexes=indexes, fetch=blocks.fetch,
        )
        for subtask in range(parallelism)
    ]  # fmt: skip
