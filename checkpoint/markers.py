"""Markers: what ends a transaction in each of its partitions, and what a broker may lose.

EndTxn answers before the markers are written. A partition without leader at that moment may never get its own
(KAFKA-20734): the transaction shows as complete, yet its records stay invisible, everything behind them too, and the
next marker of the same producer id decides them, be it that of an abort.

Invariants: a transaction counts as ended only once no partition shows it as open; a lost marker is written again with
the verdict of the durable record, by a transaction without records under the id's present epoch. No initialisation is
needed for that, so nothing can be aborted by it, and whoever repeats it, a zombie too, does the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from exactlyonce.checkpoint.committable import Committable
from exactlyonce.checkpoint.requests import DescribeProducers, Ending, Pause, Procedure, RewriteMarkers
from exactlyonce.pipeline.errors import BrokerUnavailable

MARKERS_LOST_AFTER_MS = 5_000
"""Markers take milliseconds. Writing one that was only late once more does no harm."""
PAUSE_FIRST_MS, PAUSE_LONGEST_MS = 3, 50

Missing = dict[Ending, tuple[tuple[str, int], ...]]
"""Which partitions still show a transaction as open."""


def ending(committable: Committable) -> Ending:
    """How *committable* is ended."""
    return Ending(committable.transactional_id, committable.producer_id, committable.epoch)


def await_markers(committables: Sequence[Committable], *, commit: bool) -> Procedure[None]:
    """Return once every partition has the markers of *committables*, all of which were ended by *commit* or by abort.

    A broker that is away is waited for, as in ending them.
    """
    waited_ms, pause_ms = 0, PAUSE_FIRST_MS
    while committables:
        try:
            missing = yield from _missing(committables)
        except BrokerUnavailable:
            waited_ms = 0
        else:
            if not missing:
                return
            if waited_ms >= MARKERS_LOST_AFTER_MS:
                for each, partitions in missing.items():
                    yield RewriteMarkers(each, partitions, commit)
                waited_ms, pause_ms = 0, PAUSE_FIRST_MS
        yield Pause(pause_ms)
        waited_ms += pause_ms
        pause_ms = min(pause_ms + 1, PAUSE_LONGEST_MS)


def _missing(committables: Sequence[Committable]) -> Procedure[Missing]:
    """Where a transaction that begins at our first record is still open."""
    first_offsets = {
        (written.topic, written.partition, each.producer_id, written.first_offset): ending(each)
        for each in committables
        for written in each.written
    }
    partitions = sorted({(topic, partition) for topic, partition, _, _ in first_offsets})
    found: defaultdict[Ending, list[tuple[str, int]]] = defaultdict(list)
    for each in (yield DescribeProducers(tuple(partitions))):
        ours = first_offsets.get((each.topic, each.partition, each.producer_id, each.transaction_start_offset))
        if ours is not None:
            found[ours].append((each.topic, each.partition))
    return {each: tuple(partitions) for each, partitions in found.items()}
