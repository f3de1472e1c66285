"""The seam between engines and what keeps their blocks: put, get many, list since, drop.

Invariants: a block is put once, under a key that no other block has, and that it is there means nothing: only a
manifest makes it part of a checkpoint. A reference names the bytes by their SHA-256: whoever gets a block gets exactly
these, or `DamagedBlock`. A block that may not be durable never gives a reference. Decisions are not kept here: their
log is Kafka's. `testing/storage_contract/` asks all of it of any storage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

from exactlyonce.checkpoint.records.encoding import Block, DamagedRecord
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.requests import Scanned, Write
from exactlyonce.pipeline.errors import BrokerUnavailable


class DamagedBlock(DamagedRecord):
    """A block that a manifest refers to is missing, or is not what was written."""

    def __init__(self, message: str, ref: BlockRef) -> None:
        super().__init__(message, ref)
        self.ref = ref

    def __str__(self) -> str:
        return str(self.args[0])


class Ticket:
    """A block on its way to the storage, which tells it once what became of it."""

    __slots__ = ("_failure", "_ref", "_sha256", "_size", "key")

    def __init__(self, key: str, value: bytes) -> None:
        self.key = key
        self._size, self._sha256 = len(value), hashlib.sha256(value).digest()
        self._ref: BlockRef | None = None
        self._failure = ""

    @property
    def ref(self) -> BlockRef | None:
        """Where the block lies; None until that is known. `BrokerUnavailable` if it may not have been written."""
        if self._failure:
            raise BrokerUnavailable(
                f"Block {self.key} may not have been written: {self._failure}. Its checkpoint cannot complete."
            )
        return self._ref

    @property
    def resolved(self) -> bool:
        """Whether `ref` will not change any more."""
        return self._ref is not None or bool(self._failure)

    def written(self, partition: int, offset: int) -> None:
        """It is durable, at this place."""
        self._ref = BlockRef(partition, offset, self.key, self._size, self._sha256)

    def failed(self, reason: str) -> None:
        """It may be durable, or not."""
        self._failure = reason


class AttemptBlocks(Protocol):
    """Puts the blocks of one attempt of one process. It waits in `wait` alone."""

    @property
    def pending(self) -> int:
        """How many blocks are on their way."""

    def write(self, block: Block, key_group: int, part: int = 0) -> Ticket:
        """Put *block*, once for every (operator, checkpoint, key group, part), and return at once.

        `BrokerUnavailable` where there is no room for more, `InvariantViolation` for one that is put twice, or larger
        than `BLOCK_SIZE_MAX`.
        """

    def poll(self, timeout_s: float = 0.0) -> int:
        """Let tickets learn their fate; how many are still pending. To be called now and then while any is."""

    def wait(self, timeout_s: float) -> None:
        """Poll until nothing is pending, at most *timeout_s*; then `BrokerUnavailable`."""


class Blocks(Protocol):
    """Where blocks are read by reference."""

    def fetch(self, refs: Iterable[BlockRef]) -> Iterable[tuple[BlockRef, Block]]:
        """Every one of *refs* once, with its block; `DamagedBlock`, which names the first that is not what was written,
        or is gone. Those of one key group that are given in the order in which they were put come in that order."""


class BlockStorage(Blocks, Protocol):
    """Where the blocks of one pipeline are kept."""

    def begin(self, incarnation: int, attempt: int) -> AttemptBlocks:
        """Puts this process's blocks of *attempt*; the storage has answered. No two processes share a key."""

    def since(self, ends: Iterable[int]) -> Scanned:
        """The blocks that were put behind *ends*, which an earlier `Scanned` or a manifest has noted, and were not
        dropped, whoever has put them and whether or not a checkpoint ever completed."""

    def drop(self, refs: Iterable[BlockRef]) -> tuple[Write, ...]:
        """Let go of blocks that no manifest needs: -> what the decision log writes for it.

        It is asked where the manifest without them is durable, and a transaction of the log is about to finalize it or
        to clean up. For what lies in the checkpoint topic these are tombstones, which become durable in that very
        transaction: the log and the blocks never disagree. A storage outside of the topic would write nothing there. It
        may drop only once that transaction is durable, since it may still fail; what a crash leaves then is dropped by
        whoever finds it in `since`.
        """

    def close(self) -> None:
        """Let go of the connection, if there is one; a call that comes later connects again."""
