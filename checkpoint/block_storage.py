"""The seam between engines and block storages: put, get many, list since, drop.

Invariants: a block is put once, under a key that no other block has; only a manifest makes it part of a checkpoint. A
reference names the bytes by their SHA-256: a reader gets exactly these, or `DamagedBlock`. A block that may not be
durable never gives a reference. A storage that is away is waited for, without blocking writers. Decisions are not kept
here: their log is Kafka's. `testing/storage_contract.py` tests any storage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from exactlyonce.checkpoint.records.encoding import Block, BlockKey, DamagedRecord, decode
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, require

CHECKPOINTS_KNOWN = 8
"""A writer remembers its keys for so many checkpoints before the newest."""


class DamagedBlock(DamagedRecord):
    """A block that a manifest refers to is missing or damaged."""

    def __init__(self, message: str, ref: BlockRef) -> None:
        super().__init__(message, ref)
        self.ref = ref

    def __str__(self) -> str:
        return str(self.args[0])


class UnreadableBlock(ConfigError):
    """A block that its storage refuses to read: a right is missing, or something else is in its place."""

    def __init__(self, message: str, ref: BlockRef) -> None:
        super().__init__(message, ref)
        self.ref = ref

    def __str__(self) -> str:
        return str(self.args[0])


class Ticket:
    """A block on its way to the storage, which reports its fate once."""

    __slots__ = ("_failure", "_ref", "_sha256", "_size", "key")

    def __init__(self, key: str, value: bytes) -> None:
        self.key = key
        self._size, self._sha256 = len(value), hashlib.sha256(value).digest()
        self._ref: BlockRef | None = None
        self._failure = ""

    @property
    def ref(self) -> BlockRef | None:
        """The reference to the block; None until it is durable. `BrokerUnavailable` if it may not have been written."""
        if self._failure:
            raise BrokerUnavailable(
                f"Block {self.key} may not have been written: {self._failure}. Its checkpoint cannot complete."
            )
        return self._ref

    @property
    def resolved(self) -> bool:
        """Whether `ref` will not change any more."""
        return self._ref is not None or bool(self._failure)

    def at(self, partition: int, offset: int) -> BlockRef:
        """The reference once the block is durable at this place."""
        return BlockRef(partition, offset, self.key, self._size, self._sha256)

    def written(self, partition: int, offset: int) -> None:
        self._ref = self.at(partition, offset)

    def failed(self, reason: str) -> None:
        """The block may be durable, or not."""
        self._failure = reason


class KeysWritten:
    """The keys of one writer, to find one that is written twice; keys of old checkpoints are forgotten."""

    def __init__(self) -> None:
        self._keys: dict[int, set[BlockKey]] = {}

    def add(self, key: BlockKey) -> None:
        """*key* is about to be written; `InvariantViolation` if it was before, or is malformed."""
        require(BlockKey.parse(str(key)) == key, f"{key} is a well-formed key")
        if key.checkpoint not in self._keys:
            for older in [known for known in self._keys if known < key.checkpoint - CHECKPOINTS_KNOWN]:
                del self._keys[older]
        known = self._keys.setdefault(key.checkpoint, set())
        require(key not in known, f"A block is written once, under a key that no other has: {key}")
        known.add(key)

    def forget(self, key: BlockKey) -> None:
        """*key* was not written after all."""
        self._keys[key.checkpoint].discard(key)


def verified_value(ref: BlockRef, value: bytes, named: str) -> Block:
    """The block in *value*; `DamagedBlock`, which calls it *named*, unless it is the one that was written."""
    if len(value) != ref.size or hashlib.sha256(value).digest() != ref.sha256:
        raise DamagedBlock(f"{named} is damaged: its bytes are not those that were written.", ref)
    try:
        return decode(value, Block)
    except DamagedRecord as error:
        raise DamagedBlock(f"{named}: {error}", ref) from error


@dataclass(frozen=True)
class Scanned:
    blocks: tuple[BlockRef, ...]
    end_offsets: tuple[int, ...]
    unreadable: tuple[str, ...] = ()
    """Damaged places, which were skipped."""
    written_at_ms: Mapping[str, int] = field(default_factory=dict)
    """The times at which blocks were put, by key, for people; empty if the storage does not know."""


class AttemptBlocks(Protocol):
    """Puts the blocks of one attempt of one process. It waits in `wait` alone."""

    @property
    def pending(self) -> int:
        """The number of blocks on their way."""

    @property
    def waiting(self) -> str:
        """Where and why blocks cannot be put at the moment, for people; empty if they can, or for a broker, which
        others report."""

    def write(self, block: Block, key_group: int, part: int = 0) -> Ticket:
        """Put *block*, once for every (operator, checkpoint, key group, part), and return at once.

        Raises `BrokerUnavailable` if there is no room for more, `InvariantViolation` for a block that is put twice, or
        is larger than `BLOCK_SIZE_MAX`.
        """

    def poll(self, timeout_s: float = 0.0) -> int:
        """Let tickets learn their fate; returns how many are pending. Called now and then while any is."""

    def wait(self, timeout_s: float, look: Callable[[], None] = lambda: None, *, left: int = 0) -> None:
        """Poll until at most *left* blocks are pending; `BrokerUnavailable` after *timeout_s*.

        *look* is called again and again meanwhile, and may raise to end it. If `wait` raises, no thread of the writer
        goes on trying.
        """


class Blocks(Protocol):
    """Reads blocks by reference."""

    def fetch(self, refs: Iterable[BlockRef]) -> Iterable[tuple[BlockRef, Block]]:
        """Every one of *refs* once, with its block; blocks of one key group in the order of *refs*.

        Raises `DamagedBlock`, which names the first that is damaged or gone, or `UnreadableBlock`.
        """


class BlockStorage(Blocks, Protocol):
    """Keeps the blocks of one pipeline. Any call may raise `StorageUnavailable`: it is away, and a retry may help."""

    def check(self, *, in_use: bool = False) -> None:
        """Raise `ConfigError` unless blocks can be put here. Called before anything is fenced.

        *in_use*: manifests name blocks here. So an empty place is another one, or not mounted: `StorageUnavailable`,
        and nothing is created there.
        """

    def begin(self, incarnation: int, attempt: int) -> AttemptBlocks:
        """Puts this process's blocks of *attempt*; the storage has answered. No two processes share a key."""

    def since(self, ends: Iterable[int]) -> Scanned:
        """The blocks put after *ends*, noted by an earlier `Scanned` or a manifest, and not dropped, of any writer.

        A storage without order has ends of zeros, and returns all its blocks.
        """

    def dropped(self, refs: Iterable[BlockRef]) -> None:
        """Remove *refs*, which a durable transaction of the decision log drops; tombstones do so in the topic.

        It may be called again, however late: no key is ever used again. Blocks that a crash leaves are found by a later
        `since`, and dropped again.
        """

    def erase(self) -> None:
        """Remove every block, for a pipeline that is deleted. Blocks in the checkpoint topic go with the topic."""

    def close(self) -> None:
        """Close the connection, if there is one; a later call connects again."""
