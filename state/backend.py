"""The seam between an engine and keyed state: a backend makes the tables of operators' subtasks.

Invariants: a table belongs to the loop of one worker; a snapshot is the state at its barrier, whatever records do
meanwhile; any backend restores the blocks of any other, at any parallelism. `testing/state_contract/` tests any
backend.

A backend may keep most state outside of memory. `StoredState.read` gives it a key group when the first record wants it,
and `fetch` when none does; a snapshot encodes in slices, so that images may be iterated from a store's own snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.state.blocks import EncodedBlock
from exactlyonce.state.chain import Chain
from exactlyonce.state.stored import StoredState

S = TypeVar("S")
R = TypeVar("R")
O = TypeVar("O")  # noqa: E741 - the output


class TableSnapshot(Protocol):
    """The state of one table at one barrier, on its way into blocks and an index."""

    @property
    def operator(self) -> str: ...

    @property
    def checkpoint(self) -> int: ...

    @property
    def chain(self) -> Chain:
        """All blocks of the state, once it is sealed."""

    def encode(self) -> Iterator[EncodedBlock | None]:
        """Blocks to write; None after a slice of work without a finished block. Called once, and advanced between
        batches: a slice takes a few milliseconds.

        Raises `StateUnstorable` for a state that is not of the type, and `SnapshotDeclined` if the snapshot cannot be
        written now; a later one then has all of its changes.
        """

    def seal(self, refs: Sequence[BlockRef]) -> tuple[bytes, ...]:
        """The parts of the index to write, given the references to the blocks of `encode`; none for empty state.

        The checkpoint may be a base from now on.
        """


class Table(Protocol, Generic[S]):
    """The states of one operator for the keys of some key groups; keys are canonical bytes (`pipeline.keys`).

    A record of another key group is a defect, and refused. A batch goes through in one call, in order.
    """

    @property
    def operator(self) -> str: ...

    def apply(
        self, fn: Callable[[S | None, R], tuple[S | None, O]], keys: Sequence[bytes], records: Sequence[R]
    ) -> list[O]:
        """The outputs of ``fn(state or None, record) -> (state, output)``; the state None deletes the key.

        Raises `ApplyFailed` if *fn* raises. An output that is the state itself keeps its value.
        """

    def reduce(self, fn: Callable[[S, S], S], keys: Sequence[bytes], records: Sequence[S]) -> list[S]:
        """The accumulators after each record: the first record of a key, then ``fn(accumulator, record)``.

        Raises `ApplyFailed` if *fn* raises. *fn* may change its accumulator in place.
        """

    @property
    def full(self) -> str:
        """Why no record may be applied now, for people: the table lacks room. Empty: records may be applied."""

    def fetch(self) -> bool:
        """Between two batches: read a part of the stored state that no record has wanted yet; False if none is left."""

    def freeze(self, checkpoint: int, base: int, *, whole: bool = False) -> TableSnapshot:
        """The synchronous part of a snapshot, in constant time; *whole*: its chain has no older block.

        *base* is 0, or a completed checkpoint that this table sealed or was restored from; bases and checkpoints only
        grow. A snapshot that is never sealed was aborted; a sealed one holds all changes since its base.
        """

    def get(self, key: bytes) -> S | None:
        """The newest state of *key*."""

    def items(self) -> Iterator[tuple[bytes, S]]:
        """The newest state of every key, while no record is applied."""


class StateBackend(Protocol):
    """Makes tables."""

    def table(self, stored: StoredState[S]) -> Table[S]:
        """The table of *stored*. Raises like `StoredState.read`."""

    def close(self) -> None:
        """At a clean end: let go of the tables, and of their files."""
