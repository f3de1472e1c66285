"""Which subtask owns which key group. Every group has one owner, and a subtask's groups are contiguous."""

from __future__ import annotations


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
