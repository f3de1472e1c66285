"""Events of event-time pipelines, and what has to come of them: folds of the input topics in plain Python.

An event is late by the times before it in its own partition, so a fold needs each partition in its order, and nothing
of when a record was read. No code of the product is called; durations are those of `crossing`, in milliseconds.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from crossing import WAIT_MS

BEGIN_MS = 1_790_000_000_000
STEP_MS = 20
"""The time between two events; each is rounded down to a multiple of 100."""
DELAYS_MS = (0, 0, 0, 0, 300, 300, 1_900, 2_000, 2_600, 15_000)
"""One of more than DISORDER_MS makes an event late, unless its window is open."""
USERS = 12
DISORDER_MS, WINDOW_MS, GAP_MS, WITHIN_MS = 2_000, 2_000, 400, 500
END_MS = BEGIN_MS + 10**10
"""Nothing is open so late."""
END_USER = "end"

Row = tuple[Any, ...]


class Event(NamedTuple):
    id: int
    user: str
    at: int
    amount: int


def events(first: int, count: int) -> Iterator[Event]:
    """Events with ids from *first* on: the same id is always the same event."""
    for id in range(first, first + count):
        chance = random.Random(id)
        at = BEGIN_MS + id * STEP_MS - chance.choice(DELAYS_MS)
        yield Event(id, f"u{chance.randrange(USERS)}", at - at % 100, chance.randrange(100))


def crowd(first: int, count: int) -> Iterator[Event]:
    """Events with ids from *first* on, each of a user of its own, at one time."""
    at = BEGIN_MS + first * STEP_MS
    return (Event(id, f"c{id}", at - at % 100, 1) for id in range(first, first + count))


def ending(number: int) -> Event:
    """An event after all others: what these wait for is over."""
    return Event(-1 - number, f"{END_USER}{number}", END_MS, 0)


class Taken(NamedTuple):
    """The events of a topic that are in time for an operator, and the ids of those that are late."""

    in_time: Sequence[Event]
    late: Sequence[Event]


def taken(partitions: Iterable[Iterable[Event]], last_ms: Callable[[Event], int]) -> Taken:
    """*last_ms* is the last time at which an event counts: the watermark of its partition before it must be lower."""
    in_time, late = list[Event](), list[Event]()
    for partition in partitions:
        floor_ms = -1
        for event in partition:
            (in_time if last_ms(event) > floor_ms else late).append(event)
            floor_ms = max(floor_ms, event.at - DISORDER_MS - 1)
    return Taken([event for event in in_time if not event.user.startswith(END_USER)], late)


def expected(shape: str, topics: Sequence[Sequence[Sequence[Event]]]) -> tuple[Counter[Row], Counter[Row]]:
    """The results of *shape*, and its late events, from each topic's partitions."""
    last_ms = (lambda event: event.at - event.at % WINDOW_MS + WINDOW_MS - 1) if shape == "windows" else _time
    sides = [taken(topic, last_ms) for topic in topics]
    rows: Iterator[Row] = _joined(sides[0].in_time, sides[1].in_time) if shape == "join" else _of_users(shape, sides[0])
    return Counter(rows), Counter(tuple(event) for side in sides for event in side.late)


def _time(event: Event) -> int:
    return event.at


def _of_users(shape: str, side: Taken) -> Iterator[Row]:
    by_user: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(side.in_time, key=_time):
        by_user[event.user].append(event)
    for user, of_user in by_user.items():
        for group in {"windows": _windows, "sessions": _sessions, "timers": _counted}[shape](of_user):
            n, amount = len(group), sum(event.amount for event in group)
            start_ms = group[0].at
            if shape == "windows":
                yield user, start_ms - start_ms % WINDOW_MS, start_ms - start_ms % WINDOW_MS + WINDOW_MS, n, amount
            elif shape == "sessions":
                yield user, start_ms, group[-1].at + GAP_MS, n, amount
            else:
                yield user, start_ms + WAIT_MS, n


def _windows(of_user: Sequence[Event]) -> Iterator[list[Event]]:
    return _split(of_user, lambda group, event: group[0].at // WINDOW_MS != event.at // WINDOW_MS)


def _sessions(of_user: Sequence[Event]) -> Iterator[list[Event]]:
    return _split(of_user, lambda group, event: event.at - group[-1].at >= GAP_MS)


def _counted(of_user: Sequence[Event]) -> Iterator[list[Event]]:
    return _split(of_user, lambda group, event: event.at > group[0].at + WAIT_MS)


def _split(of_user: Sequence[Event], begins: Callable[[list[Event], Event], bool]) -> Iterator[list[Event]]:
    group = [of_user[0]]
    for event in of_user[1:]:
        if begins(group, event):
            yield group
            group = []
        group.append(event)
    yield group


def _joined(lefts: Sequence[Event], rights: Sequence[Event]) -> Iterator[Row]:
    """Pairs of a user not further apart than WITHIN_MS, and each event that is in none."""
    by_user: dict[str, list[Event]] = defaultdict(list)
    for right in rights:
        by_user[right.user].append(right)
    paired = set[int]()
    for left in lefts:
        partners = [right.id for right in by_user[left.user] if abs(right.at - left.at) <= WITHIN_MS]
        paired.update(partners)
        yield from ((left.id, partner) for partner in partners)
        if not partners:
            yield left.id, None
    yield from ((None, right.id) for right in rights if right.id not in paired)


def event_of(value: bytes | None) -> Event:
    return Event(**json.loads(value or b""))
