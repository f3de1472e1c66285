"""The partitions of a consumer whose leader has not answered for a while.

librdkafka tries again permanently when a broker is away or does not answer, and tells nobody. Its statistics show it,
and
also tell a silent broker from one that has nothing new, which answers twice a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec

INTERVAL_MS = 5_000
SILENT_AFTER_S = 30.0
"""A partition is named this long after its leader was first missed. A leader is missed when it is unknown or not
connected, or has sent nothing for as long while the client asks it."""

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
    """Listens to the statistics of a consumer of *topic*; `settings` go into its configuration. *partitions* may
    change meanwhile."""

    def __init__(self, topic: str, partitions: Collection[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._topic, self._partitions, self._clock = topic, partitions, clock
        self._heard_s = 0.0
        self._missed_since_s: dict[int, float] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """What makes librdkafka tell of itself."""
        return {"statistics.interval.ms": INTERVAL_MS, "stats_cb": self.hear}

    def hear(self, statistics: str) -> None:
        """Statistics have come; called while the consumer is polled."""
        self._heard_s, missed = self._clock(), self._missed(_decode(statistics))
        self._missed_since_s = {each: self._missed_since_s.get(each, self._heard_s) for each in missed}

    @property
    def partitions(self) -> dict[int, float]:
        """The partitions whose leader is silent, and for how many seconds, as of the last statistics: while nobody
        polls, nothing is known."""
        silent = {each: self._heard_s - since_s for each, since_s in self._missed_since_s.items()}
        return {each: silent_s for each, silent_s in silent.items() if silent_s >= SILENT_AFTER_S}

    def _missed(self, statistics: _Statistics) -> set[int]:
        topic = statistics.topics.get(self._topic)
        found = {int(number): each for number, each in topic.partitions.items()} if topic else {}
        brokers = {each.nodeid: each for each in statistics.brokers.values() if each.nodeid >= 0}
        asks = not any(each.fetchq_cnt for each in found.values())  # else it may have enough, and ask for no more
        return {each for each in self._partitions if self._is_missed(found.get(each), brokers, asks)}

    @staticmethod
    def _is_missed(partition: _Partition | None, brokers: dict[int, _Broker], asks: bool) -> bool:
        if partition is None or partition.leader == _NO_LEADER:
            return True
        leader = brokers.get(partition.leader)
        if leader is None or leader.state != "UP":
            return True
        return asks and not 0 <= leader.rxidle < SILENT_AFTER_S * 1_000_000
