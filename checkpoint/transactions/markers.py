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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.requests import DescribeProducers, Ending, Pause, Procedure, RewriteMarkers
from exactlyonce.checkpoint.transactions.broker_answers import ProducerState
from exactlyonce.pipeline.errors import BrokerUnavailable

MARKERS_LOST_AFTER_MS = 5_000
"""Markers take milliseconds. Writing one that was only late once more does no harm."""
PAUSE_FIRST_MS, PAUSE_LONGEST_MS = 3, 50

Partition = tuple[str, int]


def ending(committable: Committable) -> Ending:
    """How *committable* is ended."""
    return Ending(committable.transactional_id, committable.producer_id, committable.epoch)


def await_markers(committables: Sequence[Committable], *, commit: bool) -> Procedure[set[str]]:
    """Return once every partition has the markers of *committables*, which were all ended by *commit* or by abort.

    What is returned are the transactional ids whose markers were written again. That takes a transaction, which the
    broker aborts if nobody ends it in time: only the records show what these markers say.
    """
    names = {
        (written.topic, written.partition, each.producer_id, written.first_offset): each.transactional_id
        for each in committables
        for written in each.written
    }

    def owner(state: ProducerState) -> str | None:
        place = (state.topic, state.partition, state.producer_id)
        start_offset = state.transaction_start_offset
        return None if start_offset is None else names.get((*place, start_offset))

    return (yield from _await_none_open({(topic, partition) for topic, partition, _, _ in names}, owner, commit=commit))


def release(names: Mapping[int, str], partitions: Collection[Partition]) -> Procedure[None]:
    """Return once no transaction of these producer ids holds readers of *partitions* back; all were aborted, or older
    ones are finalized. *names* are their transactional ids."""

    def owner(state: ProducerState) -> str | None:
        return None if state.transaction_start_offset is None else names.get(state.producer_id)

    yield from _await_none_open(partitions if names else (), owner, commit=False)


def await_ended(last: Ending, partitions: Collection[Partition], *, commit: bool) -> Procedure[bool]:
    """Whether nothing that the producer id of *last* wrote to *partitions* is open any more.

    *last* is the epoch at which the id shows that it was ended by *commit*. Where markers are lost they are written
    again at that epoch, once, and whoever asks looks at the id anew: it may show another end by now.
    """

    def owner(state: ProducerState) -> str | None:
        return last.transactional_id if held_by(last.producer_id, [state]) else None

    return not (yield from _await_none_open(partitions, owner, commit=commit, epoch=last.epoch))


def held_by(producer_id: int, producers: Iterable[ProducerState]) -> bool:
    """Whether a transaction of the producer id is open."""
    return any(each.producer_id == producer_id and each.transaction_start_offset is not None for each in producers)


def _await_none_open(
    partitions: Collection[Partition],
    owner: Callable[[ProducerState], str | None],
    *,
    commit: bool,
    epoch: int | None = None,
) -> Procedure[set[str]]:
    """Ask until *owner* claims no producer's transaction; after a while write the markers of those it does.

    A broker that is away is waited for, as in ending them. Returns the ids whose markers were written again. With an
    *epoch* they are written at that one only, and once: the verdict is right for no other.
    """
    rewritten: set[str] = set()
    waited_ms, pause_ms = 0, PAUSE_FIRST_MS
    while partitions:
        open_: defaultdict[tuple[str, int], list[Partition]] = defaultdict(list)
        try:
            for state in (yield DescribeProducers(tuple(sorted(partitions)))):
                if (name := owner(state)) is not None:
                    open_[name, state.producer_id].append((state.topic, state.partition))
            if not open_:
                break
        except BrokerUnavailable:
            waited_ms = 0
        if waited_ms >= MARKERS_LOST_AFTER_MS:
            for (name, producer_id), held in open_.items():
                rewritten.add(name)
                yield RewriteMarkers(name, producer_id, tuple(held), commit, epoch)
            if epoch is not None:
                break
            waited_ms, pause_ms = 0, PAUSE_FIRST_MS
        yield Pause(pause_ms)
        waited_ms += pause_ms
        pause_ms = min(pause_ms + 1, PAUSE_LONGEST_MS)
    return rewritten
