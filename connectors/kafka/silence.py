"""The partitions of a consumer whose leader has not answered for a while.

librdkafka retries silently without end while a broker is away. Its statistics show it, and also tell a silent broker
from one without new records, which answers twice a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

INTERVAL_MS = 5_000
SILENT_AFTER_S = 30.0
"""The time from the first sign of silence until a partition is reported. A leader is silent if it is unknown or not
connected, or has sent nothing for as long while the client fetches."""

Place = tuple[str, int]
"""Topic and partition."""
_NO_LEADER = -1


class _Broker(msgspec.Struct):
    nodeid: int
    state: str
    rxidle: int = -1
    """Microseconds since the last answer; -1: none yet on this connection."""


class _Partition(msgspec.Struct):
    leader: int
    fetchq_cnt: int


class _Topic(msgspec.Struct):
    partitions: dict[str, _Partition]


class _Statistics(msgspec.Struct):
    brokers: dict[str, _Broker]
    topics: dict[str, _Topic]


_decode = msgspec.json.Decoder(_Statistics).decode


class Silence:
    """Listens to the statistics of a consumer, by the callback in `settings`. *places* gives topic and partition of all
    that it reads now."""

    def __init__(self, places: Callable[[], Iterable[Place]], clock: Callable[[], float] = time.monotonic) -> None:
        self._places, self._clock = places, clock
        self._heard_s = 0.0
        self._missed_since_s: dict[Place, float] = {}

    @property
    def settings(self) -> dict[str, Any]:
        return {"statistics.interval.ms": INTERVAL_MS, "stats_cb": self.hear}

    def hear(self, statistics: str) -> None:
        """Take in statistics; called while the consumer is polled."""
        self._heard_s, missed = self._clock(), self._missed(_decode(statistics))
        self._missed_since_s = {place: self._missed_since_s.get(place, self._heard_s) for place in missed}

    @property
    def missed(self) -> Collection[Place]:
        """The partitions whose leader shows any sign of silence, as of the last statistics."""
        return self._missed_since_s.keys()

    @property
    def partitions(self) -> dict[Place, float]:
        """The partitions with a silent leader, and for how many seconds, as of the last statistics."""
        silent = {place: self._heard_s - since_s for place, since_s in self._missed_since_s.items()}
        return {place: silent_s for place, silent_s in silent.items() if silent_s >= SILENT_AFTER_S}

    def _missed(self, statistics: _Statistics) -> set[Place]:
        known = {
            (name, int(number)): partition
            for name, topic in statistics.topics.items()
            for number, partition in topic.partitions.items()
        }
        brokers = {broker.nodeid: broker for broker in statistics.brokers.values() if broker.nodeid >= 0}
        # With records in its queue it may have enough, and ask for no more.
        asks = not any(partition.fetchq_cnt for partition in known.values())
        return {place for place in self._places() if self._is_missed(known.get(place), brokers, asks)}

    @staticmethod
    def _is_missed(partition: _Partition | None, brokers: dict[int, _Broker], asks: bool) -> bool:
        if partition is None or partition.leader == _NO_LEADER:
            return True
        leader = brokers.get(partition.leader)
        if leader is None or leader.state != "UP":
            return True
        return asks and not 0 <= leader.rxidle < SILENT_AFTER_S * 1_000_000
