"""Key groups: their owners, and those that a checkpoint writes whole.

Every group has one owner, and a subtask's groups are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from math import isqrt

RATIO = 4
"""A larger one makes checkpoints cheaper and restarts slower: with 1,000,000 changing keys by 0.4 s at 4 against 2."""
CYCLE_MAX = 256
CYCLE_MIN = 16


def subtask_of(group: int, parallelism: int, max_parallelism: int) -> int:
    """The subtask that owns *group*."""
    return group * parallelism // max_parallelism


def group_range(subtask: int, parallelism: int, max_parallelism: int) -> range:
    """The groups that *subtask* owns.

    >>> [group_range(subtask, 3, 8) for subtask in range(3)]
    [range(0, 3), range(3, 6), range(6, 8)]
    """
    return range(
        -(-subtask * max_parallelism // parallelism),
        -(-(subtask + 1) * max_parallelism // parallelism),
    )


def common_groups(one: range, other: range) -> range:
    """Those in both.

    >>> common_groups(range(0, 3), range(2, 6)), len(common_groups(range(0, 3), range(6, 8)))
    (range(2, 3), 0)
    """
    return range(max(one.start, other.start), min(one.stop, other.stop))


def mask_of(groups: Iterable[int]) -> int:
    """*groups* as a set in one number: bit *g* is set if *g* is among them.

    >>> bin(mask_of([0, 3]))
    '0b1001'
    """
    mask = 0
    for group in groups:
        mask |= 1 << group
    return mask


class Merging:
    """Counts the increments of each key group since its image, and so chooses those that a checkpoint writes whole.

    Chains stay short: a few groups at a time, without spikes. Over any run, the entries in merged images are at most
    `1 / RATIO` of those in increments, or as many as rewriting the state once in `cycle` checkpoints takes, whichever
    is more. In return increments never grow far past `RATIO` times the state, and no needed increment is much older
    than `cycle` checkpoints. A run may be cut into any number of short runs: the credit for images is restored with the
    state. Only groups in the table are ever chosen.
    """

    def __init__(self, credit: float = 0.0, share: float = 1.0) -> None:
        self.credit = credit
        """Entries that may still go into images."""
        self.share = share
        """The share of the subtask's key groups in the table; the others are taken to be as large."""
        self.entries: dict[int, int] = {}
        """The entries in a group's increments since its image, by group."""
        self.oldest: dict[int, int] = {}
        """The checkpoint of a group's first increment since its image, by group."""

    def incremented(self, group: int, checkpoint: int, entries: int) -> None:
        """*group* got an increment. Checkpoints may come in any order."""
        self.entries[group] = self.entries.get(group, 0) + entries
        self.oldest[group] = min(checkpoint, self.oldest.get(group, checkpoint))

    def imaged(self, group: int) -> None:
        """*group* got an image; its increments are no longer needed."""
        self.entries.pop(group, None)
        self.oldest.pop(group, None)

    def choose(self, checkpoint: int, changed: int, tables: Mapping[int, Sized]) -> set[int]:
        """The groups most in need of an image at *checkpoint*, in which *changed* keys changed."""
        total = sum(map(len, tables.values())) / self.share
        cycle = _cycle(total)
        needs = {
            group: max(entries / (RATIO * (len(tables[group]) or 1)), (checkpoint - self.oldest[group]) / cycle)
            for group, entries in self.entries.items()
        }
        self.credit += max(changed / RATIO, total / cycle)
        chosen: set[int] = set()
        needy = (group for group, need in needs.items() if need >= 0.5)
        for group in sorted(needy, key=needs.__getitem__, reverse=True):
            cost = len(tables[group])
            if cost > self.credit:
                self.credit = min(self.credit, cost)
                return chosen
            self.credit -= cost
            chosen.add(group)
        self.credit = min(self.credit, max(map(len, tables.values()), default=0))
        return chosen


def _cycle(total: float) -> int:
    """Checkpoints between two images of a group, by entries in all groups.

    A long cycle makes long chains, and every checkpoint lists its chain (some 45 bytes a block); a short one rewrites
    the state often (some 16 bytes an entry). The sum is least near the square root of a quarter of the entries.
    """
    return max(CYCLE_MIN, min(CYCLE_MAX, isqrt(int(total) // 4)))
