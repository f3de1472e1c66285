"""The seam between an engine and keyed state: a backend makes the tables of operators' subtasks.

Invariants: a table belongs to the loop of one worker; a snapshot is the state at its barrier, whatever records do
meanwhile; any backend restores the blocks of any other, at any parallelism. `testing/state_contract/` tests any
backend.

A backend may keep most state outside of memory. `StoredState.read` gives it a key group when the first record wants it,
and `fetch` when none does; a snapshot encodes in slices, so that images may be iterated from a store's own snapshot.

`CheckpointedState` comes from the blocks of any number of old subtasks, for some key groups or all. It reads only the
indexes; a backend reads the blocks that it wants. All others stay in the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.errors import require
from exactlyonce.state.blocks import EncodedBlock
from exactlyonce.state.chain import Chain, IndexHead, decode_index, index_digest
from exactlyonce.state.errors import BEGIN_EMPTY, DamagedState, StateIncompatible
from exactlyonce.state.key_groups import mask_of
from exactlyonce.state.slots import TableTimes
from exactlyonce.state.state_type import StateType
from exactlyonce.state.stored import Fetch, StoredState

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


class KeyedState(Protocol):
    """The states of one operator for the keys of some key groups; keys are canonical bytes (`pipeline.keys`).

    A record of another key group is a defect, and refused. A batch goes through in one call, in order.
    """

    @property
    def operator(self) -> str: ...

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


class Table(KeyedState, Protocol, Generic[S]):
    """States by key."""

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

    def get(self, key: bytes) -> S | None:
        """The newest state of *key*."""

    def items(self) -> Iterator[tuple[bytes, S]]:
        """The newest state of every key, while no record is applied."""


class TimedTable(KeyedState, Protocol, Generic[S]):
    """States by slot and key; a slot is an int64 in ms, most often the last ms of a window.

    Slots end: `drop` forgets all of key groups up to one, without a word about each key in a checkpoint. The index has
    the last slot that was dropped, so that no older block brings a state back. A state in such a slot is a defect.
    Slots fire in the order (slot, key group, key), whatever the parallelism.
    """

    def update(
        self, fn: Callable[[S | None, R], S], slots: Sequence[int], keys: Sequence[bytes], records: Sequence[R]
    ) -> None:
        """Replace the state of each record's slot and key by ``fn(state or None, record)``, in order.

        Raises `ApplyFailed` if *fn* raises. *fn* may change the state in place, and may return the record.
        """

    def get(self, slot: int, key: bytes) -> S | None:
        """The newest state; not to be changed in place."""

    def get_all(self, slot: int, keys: Sequence[bytes]) -> list[S | None]:
        """The newest state of each of *keys* in *slot*; see `get`."""

    def put(self, slot: int, key: bytes, state: S | None) -> None:
        """Replace a state; None removes it. A clone of a mutable one is kept."""

    def put_all(self, slot: int, states: Mapping[bytes, S | None]) -> None:
        """Replace states in *slot*, by key; None removes one. They are kept themselves: nothing may change one, or a
        part of it, in place from now on."""

    def size(self, state: S) -> int:
        """The bytes that *state* takes in a checkpoint. Raises `StateUnstorable`."""

    def slots_of(self, key: bytes) -> Sequence[int]:
        """The slots with a state of *key*, ascending, until the next change; only in a table made with
        ``by_key=True``."""

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        """The *keys* that have slots; see `slots_of`."""

    def slots(self, limit: int) -> list[int]:
        """The slots up to *limit* with any state, ascending. The states of one may all have been removed."""

    def groups(self, slot: int) -> list[int]:
        """The key groups with a state in *slot*, ascending, or whose states there were all removed."""

    def read(self, slot: int, group: int) -> tuple[list[bytes], list[S]]:
        """The keys of *slot* and *group*, sorted, with their states; these are not to be changed until dropped."""

    def take(self, slot: int, group: int) -> tuple[list[bytes], list[S]]:
        """`read`, then `drop` of *group*: an open snapshot may still have the states, so they are not to be changed."""

    def drop(self, slot: int, groups: Collection[int]) -> None:
        """Forget all states of *groups* whose slot is *slot* or earlier."""

    def watermark(self, group: int) -> int:
        """The last watermark of *group*, restored at any parallelism; at first `NO_WATERMARK`. It is never below a slot
        that was dropped."""

    def advance(self, watermark: int, groups: Iterable[int] | None = None) -> None:
        """Note a watermark of *groups*, None: of all. It never falls."""

    def begin(self, group: int, slot: int, key: bytes) -> None:
        """Note that the keys of *group* up to *key* have had the result of *slot*, though their states are kept."""

    def begun(self, group: int) -> tuple[int, bytes] | None:
        """The slot and key of the last `begin`, restored at any parallelism; None: the watermark is past the slot."""

    def items(self) -> Iterator[tuple[int, bytes, S]]:
        """The slot, the key and the newest state of every key in a slot, while no record is applied."""


class StateBackend(Protocol):
    """Makes tables."""

    def table(self, stored: StoredState[S]) -> Table[S]:
        """The table of *stored*. Raises like `StoredState.read`."""

    def timed_table(self, stored: StoredState[S], *, by_key: bool = False) -> TimedTable[S]:
        """The timed table of *stored*, which has times; *by_key*: with `TimedTable.slots_of`. Raises likewise."""

    def close(self) -> None:
        """At a clean end: let go of the tables, and of their files."""


@dataclass(frozen=True, kw_only=True)
class CheckpointedState:
    """The state of *operator* for some key groups at a checkpoint; a table of it is made by any backend."""

    operator: str
    type: Any
    """The type of a state."""
    groups: range
    max_parallelism: int
    checkpoint: int = 0
    indexes: Sequence[bytes] = ()
    """All parts of the indexes of the old subtasks that had any of `groups`."""
    fetch: Fetch = lambda refs: ()
    """Given the references of needed blocks, yields each with its body, in any order."""

    def table(self, backend: StateBackend, touched: Collection[int] | None = None) -> Table[Any]:
        """The table of `groups`.

        With *touched*, only these of them are read, unless all must be written anew. The table refuses records of the
        others, and its snapshots carry their blocks over. Raises `StateIncompatible` or `DamagedState`.
        """
        known = touched is None or set(touched) <= set(self.groups)
        require(known, f"of the key groups {self.groups} only those are touched that are among them")
        return backend.table(self._stored(touched))

    def entries(self) -> Iterator[tuple[bytes, Any]]:
        """Each key of `groups` with its state, without a table. Raises likewise."""
        stored = self._stored()
        return chain.from_iterable(read.states.items() for read in stored.read(stored.groups).values())

    def timed_table(self, backend: StateBackend, *, meaning: str = "", by_key: bool = False) -> TimedTable[Any]:
        """The timed table of `groups`. Slots end in every one, whether records touch it or not, so all are read.

        *meaning*: of its slots. Raises `StateIncompatible`, also for slots of another one, or `DamagedState`.
        """
        return backend.timed_table(self._stored(meaning=meaning), by_key=by_key)

    def _stored(self, touched: Collection[int] | None = None, *, meaning: str | None = None) -> StoredState[Any]:
        """*meaning* None: it is not timed."""
        groups, state_type = self.groups, StateType[Any](self.operator, self.type)
        indexes = [decode_index(body) for body in self.indexes]
        for index in indexes:
            self._check(index.head, state_type, meaning)
        times = [index.head.times for index in indexes if index.head.times is not None]
        anew = not all(state_type.may_share_chain(index.head.schema, index.head.version) for index in indexes)
        restored = groups if touched is None or anew else sorted(touched)
        return StoredState(
            operator=self.operator,
            type=self.type,
            groups=restored,
            max_parallelism=self.max_parallelism,
            checkpoint=self.checkpoint,
            chain=Chain.of((block for index in indexes for block in index.blocks), mask_of(groups)),
            schema=indexes[0].head.schema if indexes else None,
            version=max((index.head.version for index in indexes), default=1),
            credit=max((index.head.credit for index in indexes), default=0.0),
            share=max(1, len(restored)) / max(1, len(groups)),
            digest=index_digest(self.indexes) if self.indexes else b"",
            anew=anew,
            times=None if meaning is None else TableTimes.of(times, groups, meaning),
            fetch=self.fetch,
        )

    def _check(self, head: IndexHead, state_type: StateType[Any], meaning: str | None) -> None:
        if (head.operator, head.checkpoint) != (self.operator, self.checkpoint):
            raise DamagedState(
                f"The index of operator {self.operator!r} at checkpoint {self.checkpoint} turned out to be that of"
                f" operator {head.operator!r} at checkpoint {head.checkpoint}."
            )
        if head.max_parallelism != self.max_parallelism:
            raise StateIncompatible(
                f"The checkpoint's state of operator {head.operator!r} is laid out for max_parallelism"
                f" {head.max_parallelism}, the pipeline asks for {self.max_parallelism}. It never changes for a"
                f" pipeline: set it to {head.max_parallelism}."
            )
        require_meaning(self.operator, None if head.times is None else head.times.meaning, meaning)
        state_type.require_keys(head.keys)
        state_type.require_readable(head.schema, head.version)


def require_meaning(operator: str, was: str | None, now: str | None) -> None:
    """Raise `StateIncompatible` unless slots of meaning *was* can be read as *now*; None: states by key alone."""
    if was == now or (was is not None and now is not None and now.startswith(f"{was} of=")):  # first without aggregates
        return
    before_ms, now_ms = map(_ttl_ms, (was, now))
    if before_ms is not None and now_ms is not None:
        if now_ms <= before_ms:
            return
        raise StateIncompatible(
            f"The checkpoint's state of operator {operator!r} is kept for ttl={before_ms} ms, and the pipeline now has "
            f"ttl={now_ms} ms: which of it is left for that long depends on the run. Keep ttl={before_ms}ms, or a "
            f"shorter one. {BEGIN_EMPTY}."
        )
    if was is None or now is None:
        kept, keeps = ("by key alone" if meaning is None else "by time" for meaning in (was, now))
        raise StateIncompatible(
            f"The checkpoint's state of operator {operator!r} is kept {kept}, and the pipeline now keeps it {keeps}. "
            f"{BEGIN_EMPTY}."
        )
    raise StateIncompatible(
        f"The checkpoint's state of operator {operator!r} is of {was}, and the pipeline now has {now}: records of the "
        f"one cannot be told apart for the other. {BEGIN_EMPTY}."
    )


def _ttl_ms(meaning: str | None) -> int | None:
    """The time to live in *meaning*; None: it is none of states that expire."""
    name, _, ttl = (meaning or "").partition("=")
    return int(ttl) if name == "ttl" else None
