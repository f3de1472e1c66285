"""The state of one table at one barrier, on its way into blocks and an index.

`encode` is advanced between batches; every block that it yields is written, and the references go to `seal` in the same
order. Every chain is the base's with all blocks since, so blocks of a checkpoint that never completed are in none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.errors import require
from exactlyonce.state.blocks import BlockHeader, EncodedBlock
from exactlyonce.state.chain import IndexHead, encode_index
from exactlyonce.state.state_type import StateType
from exactlyonce.state.stored import StoredState


class BlockSequence(Protocol):
    """Blocks by number, like a list of them; not all need be in memory."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> EncodedBlock: ...


class Encoding(Protocol):
    """The changes of an interval, on their way into blocks: `Interval` is one."""

    checkpoint: int
    encoded: bool
    credit: float

    @property
    def blocks(self) -> BlockSequence:
        """The finished ones."""

    def advance(self) -> None:
        """Encode one slice more."""


E = TypeVar("E", bound=Encoding)


class SnapshotHistory(Generic[E]):
    """The chains of the checkpoints that may be a base, and the intervals since the oldest of them."""

    def __init__(self, stored: StoredState[Any]) -> None:
        self.intervals: list[E] = []
        """Oldest first."""
        self.chains = {stored.checkpoint: stored.chain}
        self.times = stored.times
        """The newest ones of a timed table."""
        self._operator = stored.operator
        self._latest = stored.checkpoint
        self._anew = stored.anew

    def begin(self, checkpoint: int, base: int, *, whole: bool) -> bool:
        """Check a new snapshot's numbers, and forget everything before *base*; returns whether to write all state."""
        require(checkpoint > self._latest, f"checkpoint {checkpoint} is later than {self._latest}")
        require(base in self.chains, f"checkpoint {base} is a base of {self._operator!r}")
        for older in [completed for completed in self.chains if completed < base]:
            del self.chains[older]
        self.intervals = [interval for interval in self.intervals if interval.checkpoint > base]
        whole, self._latest, self._anew = whole or self._anew, checkpoint, False
        return whole


class Snapshot:
    """See `Table.freeze` and `TableSnapshot`."""

    def __init__(
        self,
        history: SnapshotHistory[Any],
        base: int,
        state_type: StateType[Any],
        max_parallelism: int,
        *,
        whole: bool,
        sealed: Callable[[int, tuple[bytes, ...]], None] = lambda checkpoint, parts: None,
    ) -> None:
        """*whole*: the newest interval has images of all key groups, so that nothing else is needed.

        *sealed* is called with the checkpoint and the parts of its index.
        """
        self._intervals: tuple[Encoding, ...] = tuple(history.intervals)
        self.checkpoint = self._intervals[-1].checkpoint
        self.operator = state_type.operator
        self._whole, self._sealed = whole, sealed
        self._chains = history.chains
        self._schema, self._version, self._keys = state_type.schema, state_type.version, state_type.keys
        self._max_parallelism = max_parallelism
        self._times = None if history.times is None else history.times.written()
        self._headers: list[BlockHeader] = []
        self._encoded = False
        self.chain = self._chains[base]
        """All blocks of the state, once it is sealed."""

    def encode(self) -> Iterator[EncodedBlock | None]:
        """See `TableSnapshot.encode`."""
        for interval in self._intervals:
            sent = 0
            while sent < len(interval.blocks) or not interval.encoded:
                if sent == len(interval.blocks):
                    interval.advance()
                    yield None
                    continue
                sent += 1
                if self._whole and interval is not self._intervals[-1]:
                    continue
                block = interval.blocks[sent - 1]
                self._headers.append(block.header)
                yield block
        self._encoded = True

    def seal(self, refs: Sequence[BlockRef]) -> tuple[bytes, ...]:
        """See `TableSnapshot.seal`."""
        require(self._encoded, f"checkpoint {self.checkpoint} is sealed after its last block")
        self.chain = self.chain.extended(zip(refs, self._headers, strict=True))
        self._chains[self.checkpoint] = self.chain
        credit = self._intervals[-1].credit
        written = self._schema, credit, self._version, self._keys, self._times
        head = IndexHead(self.operator, self.checkpoint, self._max_parallelism, *written)
        parts = encode_index(self.chain, head)
        self._sealed(self.checkpoint, parts)
        return parts
