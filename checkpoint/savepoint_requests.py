"""Requests for savepoints: which of them the next checkpoint serves, and when an ordinary one has to go first.

A savepoint may take longer than the timeout, or kill a worker, where checkpoints do not. So behind one that has come to
nothing an ordinary one goes first, or whoever asks often enough would stop all progress; behind that the savepoint is
tried again, `TRIES_MAX` times in all. Where request after request is given up, twice as many go first each time: else
whoever asks for what never fits would leave an interval of progress to every timeout. Nobody tells whoever asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

TRIES_MAX = 3
FIRST_MAX = 64
"""Ordinary checkpoints that go first, at most."""


class SavepointRequests:
    """What one incarnation was asked for."""

    def __init__(self) -> None:
        self._waiting: dict[str, bool] = {}
        """Those that no completed savepoint serves, and whether the job is to stop behind it."""
        self._served: set[str] = set()
        self._tries: Counter[str] = Counter()
        """By request, how many savepoints for it have come to nothing."""
        self._from = 0
        """Savepoints wait, whoever asks, until this checkpoint or a later one is complete."""
        self._going_first = 1
        """How many go first at present."""

    def ask(self, request: str, *, stop: bool) -> None:
        """Take a request, which may come again and again."""
        if request not in self._served and self._tries[request] < TRIES_MAX:
            self._waiting.setdefault(request, stop)

    def is_served(self, request: str) -> bool:
        """Whether a completed savepoint serves it."""
        return request in self._served

    def due(self, completed: int, under_way: Collection[str]) -> tuple[str, ...]:
        """Those that the next checkpoint is to serve, where *completed* is the newest that is complete, and savepoints
        for some are *under_way*."""
        return tuple(each for each in self._waiting if each not in under_way) if completed >= self._from else ()

    def stops(self, completed: int) -> bool:
        """Whether the next checkpoint is a savepoint behind which the job stops, or one is under way."""
        return completed >= self._from and any(self._waiting.values())

    def serve(self, requests: Collection[str]) -> bool:
        """A savepoint for *requests* is complete; whether the job is to stop behind it."""
        self._served.update(requests)
        self._going_first = 1 if requests else self._going_first
        stops = any(self._waiting.get(request, False) for request in requests)
        for request in requests:
            self._waiting.pop(request, None)
        return stops

    def fail(self, requests: Collection[str], first: int) -> None:
        """A savepoint for *requests*, if these are any, has come to nothing: checkpoint *first* goes first, and perhaps
        some behind it."""
        self._tries.update(requests)
        given_up = [request for request in requests if self._tries[request] >= TRIES_MAX]
        for request in given_up:
            self._waiting.pop(request, None)
        if given_up:
            self._going_first = min(FIRST_MAX, 2 * self._going_first)
        if requests:
            self._from = first + self._going_first - 1
