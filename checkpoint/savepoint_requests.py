"""Requests for savepoints: which of them the next checkpoint serves, and when an ordinary one has to go first.

A savepoint may take longer than the timeout, or kill a worker, where checkpoints do not. So after a failed savepoint an
ordinary checkpoint goes first, or frequent requests would stop all progress; then the savepoint is tried again,
`TRIES_MAX` times in all. After each request that is given up, twice as many ordinary checkpoints go first: else
requests that never succeed would leave one interval of progress to every timeout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

TRIES_MAX = 3
FIRST_MAX = 64
"""Ordinary checkpoints that go first, at most."""


class SavepointRequests:
    """The requests to one incarnation."""

    def __init__(self) -> None:
        self._waiting: dict[str, bool] = {}
        """Requests that no completed savepoint serves, and whether the job is to stop after it."""
        self._served: set[str] = set()
        self._tries: Counter[str] = Counter()
        """Failed savepoints by request."""
        self._from = 0
        """All savepoints wait until this checkpoint or a later one is complete."""
        self._going_first = 1
        """How many ordinary checkpoints go first after a failed savepoint."""

    def ask(self, request: str, *, stop: bool) -> None:
        """Take a request, which may be repeated."""
        if request not in self._served and self._tries[request] < TRIES_MAX:
            self._waiting.setdefault(request, stop)

    def is_served(self, request: str) -> bool:
        """Whether a completed savepoint serves *request*."""
        return request in self._served

    def due(self, completed: int, under_way: Collection[str]) -> tuple[str, ...]:
        """The requests that the next checkpoint is to serve, after *completed*, while others are *under_way*."""
        if completed < self._from:
            return ()
        return tuple(request for request in self._waiting if request not in under_way)

    def stops(self, completed: int) -> bool:
        """Whether the next checkpoint is a savepoint after which the job stops, or one is under way."""
        return completed >= self._from and any(self._waiting.values())

    def serve(self, requests: Collection[str]) -> bool:
        """A savepoint for *requests* is complete; returns whether the job is to stop after it."""
        self._served.update(requests)
        self._going_first = 1 if requests else self._going_first
        stops = any(self._waiting.get(request, False) for request in requests)
        for request in requests:
            self._waiting.pop(request, None)
        return stops

    def fail(self, requests: Collection[str], first: int) -> None:
        """A savepoint for *requests*, if there are any, has failed: *first* goes first, and perhaps later ones."""
        self._tries.update(requests)
        given_up = [request for request in requests if self._tries[request] >= TRIES_MAX]
        for request in given_up:
            self._waiting.pop(request, None)
        if given_up:
            self._going_first = min(FIRST_MAX, 2 * self._going_first)
        if requests:
            self._from = first + self._going_first - 1
