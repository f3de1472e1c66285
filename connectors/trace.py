"""The requests that a decision sent to brokers, for whoever asks where its time went.

Requests are noted by the clients that send them, each by its own thread, when their answers have come. A round is what
the leader waits for before it goes on: one question, or several that go out together, each by a client of its own.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

SENT_MAX = 1_000
"""Requests kept: far more than a decision has."""


class Sent(NamedTuple):
    """One request; times are seconds that only grow."""

    request: str
    began_s: float
    ended_s: float
    round: int = 0
    client: int = 0


class Trace:
    """The latest requests, as any number of clients tell of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: deque[Sent] = deque(maxlen=SENT_MAX)
        self._clients = 0
        self._round = 0

    def next_round(self) -> None:
        """What is sent from now on had to wait for what was sent before."""
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
        """What was sent after *begin_s* and answered by *end_s*, in the order in which it was sent."""
        with self._lock:
            found = [each for each in self._sent if begin_s <= each.began_s and each.ended_s <= end_s]
        return sorted(found, key=lambda each: each.began_s)


def in_sequence(sent: Iterable[Sent]) -> int:
    """How many had to wait for one another: in each round, the most that one client has sent one after the other.

    >>> found = Sent("Describe", 0, 2), Sent("Produce", 3, 5, client=1), Sent("Produce", 5, 7, client=1)
    >>> in_sequence([*found, Sent("EndTxn", 8, 9, round=1)])
    3
    """
    rounds: defaultdict[int, defaultdict[int, list[Sent]]] = defaultdict(lambda: defaultdict(list))
    for each in sent:
        rounds[each.round][each.client].append(each)
    return sum(max(map(_disjoint, clients.values())) for clients in rounds.values())


def _disjoint(sent: Iterable[Sent]) -> int:
    """The most of them that did not overlap."""
    count, end_s = 0, float("-inf")
    for each in sorted(sent, key=lambda one: one.ended_s):
        if each.began_s >= end_s:
            count, end_s = count + 1, each.ended_s
    return count


def as_fields(sent: Sequence[Sent], begin_s: float, end_s: float) -> dict[str, object]:
    """For an event: what was sent from *begin_s* to *end_s*."""
    return {
        "duration_ms": round(1000 * (end_s - begin_s), 1),
        "in_sequence": in_sequence(sent),
        "requests": [
            {
                "request": each.request,
                "began_ms": round(1000 * (each.began_s - begin_s), 1),
                "took_ms": round(1000 * (each.ended_s - each.began_s), 1),
            }
            for each in sent
        ],
    }
