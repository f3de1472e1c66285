"""Retention: the manifests and blocks that are still needed.

Invariant: a block is dropped only after the manifest that no longer needs it is durable, and never while a retained
manifest, a pending checkpoint's base or a savepoint refers to its key, whatever bytes are found there, and in whatever
storage: one that has two names shows each of its blocks under both. Of a checkpoint of which it is not known what it
stands on, that is every block that may be of it: no checkpoint stands on a block that was written for a later one.
Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.manifest import BlockRef, StoredBlock

_key: Callable[[BlockRef], str] = attrgetter("key")
"""What no other block of the pipeline has, wherever it lies."""
_place: Callable[[BlockRef], tuple[int, int, str]] = attrgetter("partition", "offset", "key")


def by_storage(blocks: Iterable[StoredBlock]) -> dict[str, list[BlockRef]]:
    """Where each of *blocks* lies, by the storage that it lies in."""
    found = defaultdict[str, list[BlockRef]](list)
    for storage, ref in blocks:
        found[storage].append(ref)
    return found


def may_be_of(checkpoint: int, key: str) -> bool:
    """Whether *checkpoint* may stand on the block *key*: only on what was written for it or for one before it.

    What a sink sets aside has the number after the last barrier that its subtask knew of, and none that came later.
    """
    parsed = BlockKey.parse(key)
    return parsed is None or parsed.checkpoint <= checkpoint


def all_that_may_be_of(checkpoint: int, blocks: Iterable[StoredBlock]) -> dict[str, list[BlockRef]]:
    """Those of *blocks* that *checkpoint* may stand on, by storage."""
    return by_storage(each for each in blocks if may_be_of(checkpoint, each.ref.key))


class Ledger:
    """Blocks by the manifests that refer to them, and those that were written but belong to none yet.

    A large state has tens of thousands, and each checkpoint names nearly all of them again, between the commit and the
    mark that finalizes it: nothing is done with them one by one.
    """

    def __init__(self, num_retained: int) -> None:
        self.num_retained = num_retained
        self._needs: dict[int, dict[str, dict[str, BlockRef]]] = {}
        """By checkpoint and storage."""
        self._kept: set[int] = set()
        self._released: set[int] = set()
        self._unknown: set[int] = set()
        """Checkpoints that may stand on more than is known."""
        self._let_be: set[str] = set()
        """Storages of which nothing is dropped."""
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
        """The manifest of *checkpoint* is durable and refers to *blocks*, by storage; *keep* for a savepoint. Unless
        that is *known*, it may refer to any other that `may_be_of` it, too."""
        needs = {storage: tuple(refs) for storage, refs in blocks.items()}
        self._needs[checkpoint] = {
            storage: dict(zip(map(_key, refs), refs, strict=True)) for storage, refs in needs.items()
        }
        if keep:
            self._kept.add(checkpoint)
        (self._unknown.discard if known else self._unknown.add)(checkpoint)

    def let_be(self, storage: str) -> None:
        """Nothing of *storage* is dropped any more: what is needed of it cannot be looked at."""
        self._let_be.add(storage)

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
        candidates = defaultdict[str, dict[str, BlockRef]](dict)
        for storage, unclaimed in self._unclaimed.items():
            candidates[storage] = {key: ref for key, (written, ref) in unclaimed.items() if written <= latest}
        for each in dropped:
            for storage, needs in self._needs.pop(each).items():
                candidates[storage] |= needs
        self._unknown.difference_update(dropped)
        return tuple(dropped), tuple(
            StoredBlock(storage, ref)
            for storage, found in sorted(candidates.items())
            if storage not in self._let_be
            for ref in sorted((found[key] for key in self._dead(storage, found)), key=_place)
        )

    def _dead(self, storage: str, candidates: Mapping[str, BlockRef]) -> Iterable[str]:
        """Those of *candidates*, which are claimed from now on, that nobody needs."""
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
        """Those of *keys* that a checkpoint may stand on of which that is not known."""
        if not self._unknown:
            return set()
        newest = max(self._unknown)
        return {key for key in keys if may_be_of(newest, key)}
