"""The seam between engines and what keeps their blocks: put, get many, list since, drop.

Invariants: a block is put once, under a key that no other block has, and that it is there means nothing: only a
manifest makes it part of a checkpoint. A reference names the bytes by their SHA-256: whoever gets a block gets exactly
these, or `DamagedBlock`. A block that may not be durable never gives a reference. A storage that is away is waited for,
and never in the way of whoever puts. Decisions are not kept here: their log is Kafka's. `testing/storage_contract/`
asks all of it of any storage.
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
"""A writer knows the keys that it has written for so many checkpoints before the newest."""


class DamagedBlock(DamagedRecord):
    """A block that a manifest refers to is missing, or is not what was written."""

    def __init__(self, message: str, ref: BlockRef) -> None:
        super().__init__(message, ref)
        self.ref = ref

    def __str__(self) -> str:
        return str(self.args[0])


class UnreadableBlock(ConfigError):
    """A block that its storage refuses to read, for want of a right, or because something else has its place."""

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

    def at(self, partition: int, offset: int) -> BlockRef:
        """The reference that it has once it is durable at this place."""
        return BlockRef(partition, offset, self.key, self._size, self._sha256)

    def written(self, partition: int, offset: int) -> None:
        """It is durable, at this place."""
        self._ref = self.at(partition, offset)

    def failed(self, reason: str) -> None:
        """It may be durable, or not."""
        self._failure = reason


class KeysWritten:
    """The keys of one writer: one that is written twice would name two blocks. Those of checkpoints that are long over
    are forgotten."""

    def __init__(self) -> None:
        self._keys: dict[int, set[BlockKey]] = {}

    def add(self, key: BlockKey) -> None:
        """*key* is about to be written; `InvariantViolation` if it was, or is no key."""
        require(BlockKey.parse(str(key)) == key, f"{key} is a well-formed key")
        if key.checkpoint not in self._keys:
            for older in [each for each in self._keys if each < key.checkpoint - CHECKPOINTS_KNOWN]:
                del self._keys[older]
        known = self._keys.setdefault(key.checkpoint, set())
        require(key not in known, f"A block is written once, under a key that no other has: {key}")
        known.add(key)

    def forget(self, key: BlockKey) -> None:
        """It was not written after all."""
        self._keys[key.checkpoint].discard(key)


def verified_value(ref: BlockRef, value: bytes, named: str) -> Block:
    """The block that *value* is; `DamagedBlock`, which calls it *named*, unless it is the one that was written."""
    if len(value) != ref.size or hashlib.sha256(value).digest() != ref.sha256:
        raise DamagedBlock(f"{named} is damaged: its bytes are not those that were written.", ref)
    try:
        return decode(value, Block)
    except DamagedRecord as error:
        raise DamagedBlock(f"{named}: {error}", ref) from error


@dataclass(frozen=True)
class Scanned:
    """The findings of a scan of what is kept."""

    blocks: tuple[BlockRef, ...]
    end_offsets: tuple[int, ...]
    """How far it went."""
    unreadable: tuple[str, ...] = ()
    """Damaged places, which it has skipped."""
    written_at_ms: Mapping[str, int] = field(default_factory=dict)
    """By key, when a block was put, for people; none of a storage that does not say so."""


class AttemptBlocks(Protocol):
    """Puts the blocks of one attempt of one process. It waits in `wait` alone."""

    @property
    def pending(self) -> int:
        """How many blocks are on their way."""

    @property
    def waiting(self) -> str:
        """Where blocks cannot be put at the moment and why, for people; empty: nothing is waited for, or it is the
        broker, of which others tell."""

    def write(self, block: Block, key_group: int, part: int = 0) -> Ticket:
        """Put *block*, once for every (operator, checkpoint, key group, part), and return at once.

        `BrokerUnavailable` where there is no room for more, `InvariantViolation` for one that is put twice, or larger
        than `BLOCK_SIZE_MAX`.
        """

    def poll(self, timeout_s: float = 0.0) -> int:
        """Let tickets learn their fate; how many are still pending. To be called now and then while any is."""

    def wait(self, timeout_s: float, look: Callable[[], None] = lambda: None, *, left: int = 0) -> None:
        """Poll until at most *left* blocks are pending, at most *timeout_s*; then `BrokerUnavailable`.

        *look* is called again and again meanwhile, and may raise what ends it. Where `wait` raises, no thread of the
        writer goes on trying.
        """


class Blocks(Protocol):
    """Where blocks are read by reference."""

    def fetch(self, refs: Iterable[BlockRef]) -> Iterable[tuple[BlockRef, Block]]:
        """Every one of *refs* once, with its block; `DamagedBlock`, which names the first that is not what was written,
        or is gone, or `UnreadableBlock`. Those of one key group that are given in the order in which they were put come
        in that order."""


class BlockStorage(Blocks, Protocol):
    """Where the blocks of one pipeline are kept. `StorageUnavailable`, of any call: it is away, and asking again may
    help."""

    def check(self, *, in_use: bool = False) -> None:
        """Raise unless blocks can be put here: `ConfigError` says what is missing. Asked before anything is fenced.

        *in_use*: manifests name blocks that lie here, so that an empty place is another one, or not mounted:
        `StorageUnavailable`, and nothing is made there."""

    def begin(self, incarnation: int, attempt: int) -> AttemptBlocks:
        """Puts this process's blocks of *attempt*; the storage has answered. No two processes share a key."""

    def since(self, ends: Iterable[int]) -> Scanned:
        """The blocks that were put behind *ends*, which an earlier `Scanned` or a manifest has noted, and were not
        dropped, whoever has put them and whether or not a checkpoint ever completed. A storage that knows no order has
        ends of zeros, and gives all that there are: whoever asks knows what manifests stand on."""

    def dropped(self, refs: Iterable[BlockRef]) -> None:
        """A transaction of the decision log that drops *refs* is durable: they are removed, unless that has done so: by
        tombstones, where they lie in the checkpoint topic.

        It may be asked again, after a failure or by a process that had the same to drop, however late: no key is ever
        used again. What a crash leaves is found by whoever looks in `since`, and dropped again.
        """

    def erase(self) -> None:
        """Remove every block, whoever put it and whatever needs it: the pipeline is to be forgotten. What lies in the
        checkpoint topic goes with the topic."""

    def close(self) -> None:
        """Let go of the connection, if there is one; a call that comes later connects again."""
