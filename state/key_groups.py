"""Key groups: their owners, and those that a checkpoint writes whole.

Every group has one owner, and a subtask's groups are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from math import isqrt
from typing import Any

RATIO = 4
"""A larger one makes checkpoints cheaper and restarts slower: with 1,000,000 changing keys by 0.4 s at 4 against 2."""
CYCLE_MAX = 256
CYCLE_MIN = 16
PART_ENTRIES = 4096
"""The fewest entries of a part, but for the last one."""
PARTED_ENTRIES = 4 * PART_ENTRIES
"""The fewest entries of a key group in parts."""


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


@dataclass
class Parts:
    """A key group whose image is written in parts, by several checkpoints."""

    since: int
    """The first one."""
    written: int = 0
    """Entries in its parts."""
    entries: int = 0
    """Entries in its parts, and in its increments since then."""
    rest: Any = None
    """Where its table goes on."""
    complete: bool = False


class Merging:
    """Counts the increments of each key group since its image, and so chooses those that a checkpoint writes whole.

    Chains stay short: a few groups at a time, without spikes. A group too large for the credit of one checkpoint is
    written in parts, which a restart loses: so none begins before the process has earned the credit of a whole one, and
    processes that live shortly save it for that. Over any run, the entries in merged images are at most
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
        self.parts: dict[int, Parts] = {}
        """The groups of which the first parts are written."""
        self._earned = 0.0
        """All credit that this process got."""

    def incremented(self, group: int, checkpoint: int, entries: int) -> None:
        """*group* got an increment. Checkpoints may come in any order."""
        self.entries[group] = self.entries.get(group, 0) + entries
        self.oldest[group] = min(checkpoint, self.oldest.get(group, checkpoint))
        if group in self.parts:
            self.parts[group].entries += entries

    def imaged(self, group: int) -> None:
        """*group* got an image; its increments are no longer needed."""
        self.entries.pop(group, None)
        self.oldest.pop(group, None)
        self.parts.pop(group, None)

    def joined(self, group: int) -> int:
        """The parts of *group* are complete; the checkpoint of the first one, before which no increment is needed."""
        parts = self.parts.pop(group)
        self.entries[group], self.oldest[group] = parts.entries, parts.since
        return parts.since

    def whole(self, groups: Iterable[int]) -> dict[int, int | None]:
        """*groups* get an image each, whatever it costs; see `choose`."""
        chosen: dict[int, int | None] = dict.fromkeys(groups)
        for group in chosen:
            self.parts.pop(group, None)
        return chosen

    def choose(self, checkpoint: int, changed: int, tables: Mapping[int, Sized]) -> dict[int, int | None]:
        """The groups most in need of an image at *checkpoint*, in which *changed* keys changed, those in `parts` first.

        For each, how many entries make its next part; None: all that is left of it.
        """
        total = sum(map(len, tables.values())) / self.share
        cycle = _cycle(total)
        needs = {
            group: max(entries / (RATIO * (len(tables[group]) or 1)), (checkpoint - self.oldest[group]) / cycle)
            for group, entries in self.entries.items()
            if group in tables  # others were read after the barrier
        }
        earned = max(changed / RATIO, total / cycle)
        self.credit += earned
        self._earned += earned
        at_once = max(2 * earned, PARTED_ENTRIES)
        chosen: dict[int, int | None] = {}
        needy = (group for group, need in needs.items() if need >= 0.5 and group not in self.parts)
        for group in (*self.parts, *sorted(needy, key=needs.__getitem__, reverse=True)):
            size, begun = len(tables[group]), self.parts.get(group)
            left = size if begun is None else max(0, size - begun.written)
            in_parts = begun is not None or PARTED_ENTRIES <= size <= self._earned
            affordable = min(self.credit, at_once) if in_parts else self.credit
            if left <= affordable:
                self.credit -= left
                at_once -= left
                chosen[group] = None
                continue
            if in_parts and affordable >= PART_ENTRIES:
                chosen[group] = entries = int(affordable)
                self.parts.setdefault(group, Parts(checkpoint)).written += entries
                self.credit -= entries
            self.credit = min(self.credit, left)
            return chosen
        self.credit = min(self.credit, max(map(len, tables.values()), default=0))
        return chosen


def _cycle(total: float) -> int:
    """Checkpoints between two images of a group, by entries in all groups.

    A long cycle makes long chains, and every checkpoint lists its chain (some 45 bytes a block); a short one rewrites
    the state often (some 16 bytes an entry). The sum is least near the square root of a quarter of the entries.
    """
    return max(CYCLE_MIN, min(CYCLE_MAX, isqrt(int(total) // 4)))
