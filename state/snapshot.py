"""The state of one table at one barrier, on its way into blocks and an index.

`encode` is advanced between batches; every block that it yields is written, and the references go to `seal` in the same
order. Every chain is the base's with all blocks since, so blocks of a checkpoint that never completed are in none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.errors import require
from exactlyonce.state.blocks import BlockHeader, EncodedBlock
from exactlyonce.state.chain import Chain
from exactlyonce.state.index import IndexHead, encode_index
from exactlyonce.state.state_type import StateType


class BlockSequence(Protocol):
    """Blocks, by number; a list of them is one. Whoever has many need not have all of them in memory."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> EncodedBlock: ...


class Encoding(Protocol):
    """The changes of an interval, on their way into blocks: `Interval` is one."""

    checkpoint: int
    encoded: bool
    credit: float

    @property
    def blocks(self) -> BlockSequence:
        """Those that are finished."""

    def advance(self) -> None:
        """Encode one slice more."""


class Snapshot:
    """Made by `KeyedTable.freeze`."""

    def __init__(
        self,
        intervals: Sequence[Encoding],
        base: Chain,
        chains: dict[int, Chain],
        state_type: StateType[Any],
        max_parallelism: int,
        *,
        whole: bool = False,
    ) -> None:
        """*whole*: the last of *intervals* has images of all key groups, so that nothing else is needed."""
        self.checkpoint = intervals[-1].checkpoint
        self.operator = state_type.operator
        self._intervals, self._whole = intervals, whole
        self._chains = chains
        self._schema, self._version, self._keys = state_type.schema, state_type.version, state_type.keys
        self._max_parallelism = max_parallelism
        self._headers: list[BlockHeader] = []
        self._encoded = False
        self.chain = base
        """All blocks of the state, once it is sealed."""

    def encode(self) -> Iterator[EncodedBlock | None]:
        """Blocks to write; None where a slice of work is done and no block finished. Call it once."""
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
        """The parts of the index to write, given where the blocks of `encode` were written; none for empty state."""
        require(self._encoded, f"checkpoint {self.checkpoint} is sealed after its last block")
        self.chain = self.chain.extended(zip(refs, self._headers, strict=True))
        self._chains[self.checkpoint] = self.chain
        credit = self._intervals[-1].credit
        written = self._schema, credit, self._version, self._keys
        return encode_index(self.chain, IndexHead(self.operator, self.checkpoint, self._max_parallelism, *written))
