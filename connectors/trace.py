"""The requests of a decision to brokers, with their times: a breakdown of its latency. Workers load it, and no client.

Each client notes its requests in its own thread when they are answered. In a round the leader waits for one request, or
for several that go out together, each by a client of its own.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

SENT_MAX = 1_000
"""The requests kept: far more than a decision makes."""


class Sent(NamedTuple):
    request: str
    began_s: float
    ended_s: float
    round: int = 0
    client: int = 0


class Trace:
    """The latest requests of any number of clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: deque[Sent] = deque(maxlen=SENT_MAX)
        self._clients = 0
        self._round = 0

    def next_round(self) -> None:
        """Begin a round: later requests have waited for the earlier ones."""
        self._round += 1

    def client(self) -> Callable[[str, float, float], None]:
        """A `kafka_protocol.Observe` for one more client."""
        self._clients += 1
        client = self._clients

        def observe(request: str, began_s: float, ended_s: float) -> None:
            with self._lock:
                self._sent.append(Sent(request, began_s, ended_s, self._round, client))

        return observe

    def between(self, begin_s: float, end_s: float) -> list[Sent]:
        """The requests sent after *begin_s* and answered by *end_s*, in the order of their sending."""
        with self._lock:
            requests = [request for request in self._sent if begin_s <= request.began_s and request.ended_s <= end_s]
        return sorted(requests, key=lambda request: request.began_s)


def in_sequence(sent: Iterable[Sent]) -> int:
    """The number of requests in sequence: in each round, the most that one client has sent one after the other.

    >>> sent = Sent("Describe", 0, 2), Sent("Produce", 3, 5, client=1), Sent("Produce", 5, 7, client=1)
    >>> in_sequence([*sent, Sent("EndTxn", 8, 9, round=1)])
    3
    """
    rounds: defaultdict[int, defaultdict[int, list[Sent]]] = defaultdict(lambda: defaultdict(list))
    for request in sent:
        rounds[request.round][request.client].append(request)
    return sum(max(map(_disjoint, clients.values())) for clients in rounds.values())


def _disjoint(sent: Iterable[Sent]) -> int:
    """The largest number of requests without an overlap."""
    count, end_s = 0, float("-inf")
    for request in sorted(sent, key=lambda one: one.ended_s):
        if request.began_s >= end_s:
            count, end_s = count + 1, request.ended_s
    return count


def as_fields(sent: Sequence[Sent], begin_s: float, end_s: float) -> dict[str, object]:
    """The fields of an event about the requests from *begin_s* to *end_s*."""
    return {
        "duration_ms": round(1000 * (end_s - begin_s), 1),
        "in_sequence": in_sequence(sent),
        "requests": [
            {
                "request": request.request,
                "began_ms": round(1000 * (request.began_s - begin_s), 1),
                "took_ms": round(1000 * (request.ended_s - request.began_s), 1),
            }
            for request in sent
        ],
    }
