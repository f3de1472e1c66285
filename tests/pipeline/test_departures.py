"""What may wait in a place, by what has left it."""

from __future__ import annotations

from collections import deque

import pytest

from exactlyonce.pipeline.departures import AVERAGED_STRETCHES_MIN, Departures

ROUND_TRIP_S = 0.01
LEAST = 20


class Quota:
    """A broker's quota of records a second: an average over ten seconds, beyond which the client is muted for as long
    as it takes to be within it."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._taken: deque[tuple[float, int]] = deque()

    def muted_s(self, records: int, now_s: float) -> float:
        self._taken.append((now_s, records))
        while self._taken[0][0] <= now_s - 10:
            self._taken.popleft()
        return max(0.0, sum(count for _, count in self._taken) / self.rate - 10)


@pytest.mark.parametrize("rate", [50, 1_000, 50_000])
def test_a_burst_does_not_let_in_what_a_quota_holds_for_long(rate: int) -> None:
    """Once the first ten seconds are over, what may wait is gone in two seconds at the rate of the quota."""
    place, quota, now_s, left_s, waits_s = Departures(1.0), Quota(rate), 0.0, 0.0, list[float]()
    while now_s < 120:
        may_wait = max(LEAST, place.lately(now_s))
        now_s += ROUND_TRIP_S
        place.left(may_wait, since_s=left_s, until_s=now_s)
        left_s = now_s
        now_s += quota.muted_s(may_wait, now_s)
        waits_s += [may_wait / rate] if now_s > 30 else []
    assert max(waits_s) < 2


def test_a_fast_place_is_not_slowed() -> None:
    """What may wait grows by a third with each round trip, and reaches a million in some fifty."""
    place, now_s, may_wait, turns = Departures(1.0), 0.0, LEAST, 0
    while may_wait < 1_000_000 and turns < 100:
        place.left(may_wait, since_s=now_s, until_s=now_s + ROUND_TRIP_S)
        now_s += ROUND_TRIP_S
        may_wait, turns = max(LEAST, place.lately(now_s)), turns + 1
    assert turns < 20 + 12 * AVERAGED_STRETCHES_MIN
