"""Retention: the manifests and blocks that are still needed.

Invariant: a block is dropped only after the manifest that no longer needs it is durable, and never while a retained
manifest, a pending checkpoint's base or a savepoint refers to it, whatever bytes are found at its place. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from exactlyonce.checkpoint.records.manifest import StoredBlock

Place = tuple[str, int, int, str]
"""What no other block has: its storage, partition, offset and key."""


class Ledger:
    """Blocks by the manifests that refer to them, and those that were written but belong to none yet."""

    def __init__(self, num_retained: int) -> None:
        self.num_retained = num_retained
        self._needs: dict[int, dict[Place, StoredBlock]] = {}
        self._kept: set[int] = set()
        self._released: set[int] = set()
        self._unclaimed: dict[Place, tuple[int, StoredBlock]] = {}

    @property
    def retained(self) -> list[int]:
        """The checkpoints whose manifests are in the topic, oldest first."""
        return sorted(self._needs)

    def written(self, checkpoint: int, blocks: Iterable[StoredBlock]) -> None:
        """*blocks* were written for *checkpoint*, whether or not it ever completes."""
        for block in blocks:
            self._unclaimed.setdefault(_place(block), (checkpoint, block))

    def completed(self, checkpoint: int, blocks: Iterable[StoredBlock], *, keep: bool = False) -> None:
        """The manifest of *checkpoint* is durable and refers to *blocks*; *keep* for a savepoint."""
        self._needs[checkpoint] = {_place(block): block for block in blocks}
        if keep:
            self._kept.add(checkpoint)

    def release(self, checkpoint: int) -> None:
        """A savepoint is wanted no more: it goes as soon as it is neither the newest checkpoint nor pinned."""
        self._kept.discard(checkpoint)
        self._released.add(checkpoint)

    def expire(self, pinned: Iterable[int] = ()) -> tuple[tuple[int, ...], tuple[StoredBlock, ...]]:
        """Forget, and return for tombstoning, the manifests beyond `num_retained` and the blocks nobody needs.

        The newest checkpoint stays, and so do savepoints, which do not count.

        *pinned* are checkpoints that something pending builds upon.
        """
        latest = max(self._needs, default=0)
        ordinary = [each for each in self.retained if each not in self._kept | self._released]
        recent = {*ordinary[-self.num_retained :], *self.retained[-1:], *self._kept, *pinned}
        dropped = [each for each in self.retained if each not in recent]
        candidates = {place: block for place, (written, block) in self._unclaimed.items() if written <= latest}
        for each in dropped:
            candidates |= self._needs.pop(each)
        for place in self._unclaimed.keys() & candidates.keys():
            del self._unclaimed[place]
        dead = set(candidates)
        # The newest needs nearly all of them, and of what is left little has to be looked for in the others: there may
        # be hundreds, savepoints, with tens of thousands of blocks each.
        for checkpoint in reversed(self.retained):
            dead = dead.difference(self._needs[checkpoint])
        return tuple(dropped), tuple(candidates[place] for place in sorted(dead))


def _place(block: StoredBlock) -> Place:
    storage, ref = block
    return storage, ref.partition, ref.offset, ref.key
