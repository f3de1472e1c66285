"""Work in steps: a generator that yields True after some work, and False while it waits.

A loop with other work takes one step at a time; others call `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

R = TypeVar("R")
Steps = Generator[bool, None, R]


def finish(steps: Steps[R], wait: Callable[[], None]) -> R:
    """The result of all *steps*. *wait* is called while they wait.

    >>> def counted():
    ...     yield True
    ...     yield False
    ...     return 2
    >>> finish(counted(), lambda: print("waits"))
    waits
    2
    """
    while True:
        try:
            worked = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what a generator returns has no type there
        if not worked:
            wait()
