"""Retries of a request: the pauses between its attempts, and when it is given up. Pure: clock and sleep are arguments.

A wait for something that others do, such as a transaction's markers or an end, is no retry, and has its own pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Pauses:
    """Pauses in ms, each twice the one before, up to the longest; without end.

    >>> pauses = iter(Pauses(5, 18))
    >>> [next(pauses) for _ in range(4)]
    [5, 10, 18, 18]
    """

    first_ms: int
    longest_ms: int

    def __iter__(self) -> Iterator[int]:
        pause_ms = self.first_ms
        while True:
            yield pause_ms
            pause_ms = min(2 * pause_ms, self.longest_ms)


OF_BROKER = Pauses(5, 1_000)
"""Most obstacles of a broker, such as a leader that moves, are over within milliseconds."""
OF_STORE = Pauses(50, 2_000)
"""A store or a storage is away."""
OF_SERVICE = Pauses(100, 5_000)
"""A service that a user's function asks has failed: others ask it, too."""


def retried(
    attempt: Callable[[], T],
    error: type[Exception],
    pauses: Pauses,
    deadline_s: float,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], object],
) -> T:
    """The result of *attempt*, retried while it raises *error*, until *deadline_s* of *clock*; then *error* is raised.

    There is at least one attempt. *sleep* waits for seconds, and returns True if no other attempt is to follow.
    """
    left = iter(pauses)
    while True:
        try:
            return attempt()
        except error:
            left_s = deadline_s - clock()
            if left_s <= 0 or sleep(min(next(left) / 1000, left_s)) is True:
                raise
