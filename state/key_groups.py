"""The owners of key groups. Every group has one, and a subtask's groups are contiguous."""

from __future__ import annotations

from collections.abc import Iterable


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
