"""Work in steps: a generator that yields True after some work, and False while it waits for something else.

A loop that has other work takes one step at a time. Who has none takes all of them by `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

R = TypeVar("R")
Steps = Generator[bool, None, R]


def finish(steps: Steps[R], wait: Callable[[], None]) -> R:
    """Take all *steps* and return their result. *wait* is called where they wait: it lets something happen.

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
