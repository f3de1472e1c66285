"""Retention: the manifests and blocks that are still needed.

Invariant: a block is dropped only after the manifest that no longer needs it is durable, and never while a retained
manifest, a pending checkpoint's base or a savepoint refers to its key, in whatever storage: a storage with two names
shows each of its blocks under both. If the references of a checkpoint cannot be read, every block that it may need
stays: no checkpoint needs a block that was written for a later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.manifest import BlockRef, StoredBlock

_key: Callable[[BlockRef], str] = attrgetter("key")
"""Unique among all blocks of the pipeline, in any storage."""
_place: Callable[[BlockRef], tuple[int, int, str]] = attrgetter("partition", "offset", "key")


def by_storage(blocks: Iterable[StoredBlock]) -> dict[str, list[BlockRef]]:
    refs = defaultdict[str, list[BlockRef]](list)
    for storage, ref in blocks:
        refs[storage].append(ref)
    return refs


def may_need(checkpoint: int, key: str) -> bool:
    """Whether *checkpoint* may need the block *key*: only if it was written for that checkpoint or an earlier one.

    Staged rows have the number after the last barrier that their subtask knew of.
    """
    parsed = BlockKey.parse(key)
    return parsed is None or parsed.checkpoint <= checkpoint


def possible_needs(checkpoint: int, blocks: Iterable[StoredBlock]) -> dict[str, list[BlockRef]]:
    """Those of *blocks* that *checkpoint* may need, by storage."""
    return by_storage(block for block in blocks if may_need(checkpoint, block.ref.key))


class Ledger:
    """Blocks by the manifests that refer to them, and blocks that were written but belong to none yet.

    A large state has tens of thousands, and each checkpoint names nearly all of them again before it is finalized:
    nothing is done with them one by one.
    """

    def __init__(self, num_retained: int) -> None:
        self.num_retained = num_retained
        self._needs: dict[int, dict[str, dict[str, BlockRef]]] = {}
        """By checkpoint and storage."""
        self._kept: set[int] = set()
        self._released: set[int] = set()
        self._unknown: set[int] = set()
        """Checkpoints that may need more blocks than `_needs` has."""
        self._untouched: set[str] = set()
        """Storages from which nothing is dropped."""
        self._unclaimed = defaultdict[str, dict[str, tuple[int, BlockRef]]](dict)
        """By storage."""

    @property
    def retained(self) -> list[int]:
        """The checkpoints whose manifests are in the topic, oldest first."""
        return sorted(self._needs)

    def written(self, checkpoint: int, blocks: Iterable[StoredBlock]) -> None:
        """*blocks* were written for *checkpoint*, whether or not it ever completes."""
        for storage, ref in blocks:
            self._unclaimed[storage].setdefault(_key(ref), (checkpoint, ref))

    def completed(
        self, checkpoint: int, blocks: Mapping[str, Iterable[BlockRef]], *, keep: bool = False, known: bool = True
    ) -> None:
        """The manifest of *checkpoint* is durable and refers to *blocks*, by storage; *keep* for a savepoint.

        Unless its references are *known*, it also needs every other block that it `may_need`.
        """
        needs = {storage: tuple(refs) for storage, refs in blocks.items()}
        self._needs[checkpoint] = {
            storage: dict(zip(map(_key, refs), refs, strict=True)) for storage, refs in needs.items()
        }
        if keep:
            self._kept.add(checkpoint)
        (self._unknown.discard if known else self._unknown.add)(checkpoint)

    def keep_all_of(self, storage: str) -> None:
        """Drop nothing from *storage* any more: the blocks that are needed there cannot be listed."""
        self._untouched.add(storage)

    def release(self, checkpoint: int) -> None:
        """Let a savepoint expire once it is neither the newest checkpoint nor pinned."""
        self._kept.discard(checkpoint)
        self._released.add(checkpoint)

    def expire(self, pinned: Iterable[int] = ()) -> tuple[tuple[int, ...], tuple[StoredBlock, ...]]:
        """Forget, and return for tombstoning, the manifests beyond `num_retained` and the blocks nobody needs.

        The newest checkpoint stays, and so do savepoints, which do not count, and *pinned* checkpoints, which are bases
        of pending ones.
        """
        latest = max(self._needs, default=0)
        ordinary = [checkpoint for checkpoint in self.retained if checkpoint not in self._kept | self._released]
        recent = {*ordinary[-self.num_retained :], *self.retained[-1:], *self._kept, *pinned}
        dropped = [checkpoint for checkpoint in self.retained if checkpoint not in recent]
        candidates = defaultdict[str, dict[str, BlockRef]](dict)
        for storage, unclaimed in self._unclaimed.items():
            candidates[storage] = {key: ref for key, (written, ref) in unclaimed.items() if written <= latest}
        for checkpoint in dropped:
            for storage, needs in self._needs.pop(checkpoint).items():
                candidates[storage] |= needs
        self._unknown.difference_update(dropped)
        return tuple(dropped), tuple(
            StoredBlock(storage, ref)
            for storage, refs in sorted(candidates.items())
            if storage not in self._untouched
            for ref in sorted((refs[key] for key in self._dead(storage, refs)), key=_place)
        )

    def _dead(self, storage: str, candidates: Mapping[str, BlockRef]) -> Iterable[str]:
        """Take *candidates* out of the unclaimed blocks, and return those that nobody needs."""
        unclaimed = self._unclaimed[storage]
        for key in unclaimed.keys() & candidates.keys():
            del unclaimed[key]
        dead: Iterable[str] = candidates
        for needs in reversed(self._needs.values()):  # the newest leaves few to ask the others, savepoints too, about
            for needed in needs.values():
                dead = [key for key in dead if key not in needed]
        held = self._held(dead)
        unclaimed.update((key, (0, candidates[key])) for key in held)  # until it is known, or its manifest goes
        return [key for key in dead if key not in held] if held else dead

    def _held(self, keys: Iterable[str]) -> set[str]:
        """Those of *keys* that a checkpoint with unknown references may need."""
        if not self._unknown:
            return set()
        newest = max(self._unknown)
        return {key for key in keys if may_need(newest, key)}
