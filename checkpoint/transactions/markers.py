"""Markers end a transaction in each of its partitions; a broker may lose them (docs/design/lost-markers.md).

Invariants: a transaction counts as ended only once no partition shows it as open; a lost marker is written again with
the verdict of the durable record, by a transaction without records under the id's present epoch. That epoch was asked
for before a partition showed the marker as lost: an id that has gone on since has another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.requests import Ending, Procedure
from exactlyonce.checkpoint.transactions.broker_answers import ProducerState, TransactionState
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt

MARKERS_LOST_AFTER_MS = 5_000
"""Markers take milliseconds. Writing one that was only late once more does no harm."""
PAUSE_FIRST_MS, PAUSE_LONGEST_MS = 3, 50

UNREACHABLE = "They cannot be written again"

Partition = tuple[str, int]
_Open = dict[tuple[str, int], list[Partition]]
"""The partitions of open transactions, by transactional id and producer id."""


def ending(committable: Committable) -> Ending:
    return Ending(committable.transactional_id, committable.producer_id, committable.epoch)


def await_markers(committables: Sequence[Committable], *, commit: bool) -> Procedure[set[str]]:
    """Wait until every partition has the markers of *committables*, which were all ended by *commit* or by abort.

    Returns the transactional ids whose markers were written again. That takes a transaction, which the broker aborts if
    nobody ends it in time: only the records show the verdict of these markers.
    """
    names = {
        (written.topic, written.partition, one.producer_id, written.first_offset): one.transactional_id
        for one in committables
        for written in one.written
    }

    def owner(state: ProducerState) -> str | None:
        place = (state.topic, state.partition, state.producer_id)
        start_offset = state.transaction_start_offset
        return None if start_offset is None else names.get((*place, start_offset))

    return (yield from _await_none_open({(topic, partition) for topic, partition, _, _ in names}, owner, commit=commit))


def release(names: Mapping[int, str], partitions: Collection[Partition]) -> Procedure[None]:
    """Wait until no transaction of these producer ids holds readers of *partitions* back.

    All were aborted, or older ones are finalized. *names* are their transactional ids.
    """

    def owner(state: ProducerState) -> str | None:
        return None if state.transaction_start_offset is None else names.get(state.producer_id)

    yield from _await_none_open(partitions if names else (), owner, commit=False)


def await_ended(last: Ending, partitions: Collection[Partition], *, commit: bool) -> Procedure[bool]:
    """Whether the producer id of *last* has no open transaction in *partitions*.

    *last* is the epoch at which the id shows that it was ended by *commit*. Lost markers are written again at that
    epoch, once; then the caller looks at the id anew, since it may show another end by now.
    """

    def owner(state: ProducerState) -> str | None:
        return last.transactional_id if held_by(last.producer_id, [state]) else None

    return not (yield from _await_none_open(partitions, owner, commit=commit, epoch=last.epoch))


def held_by(producer_id: int, producers: Iterable[ProducerState]) -> bool:
    """Whether a transaction of the producer id is open."""
    return any(state.producer_id == producer_id and state.transaction_start_offset is not None for state in producers)


def _await_none_open(
    partitions: Collection[Partition],
    owner: Callable[[ProducerState], str | None],
    *,
    commit: bool,
    epoch: int | None = None,
) -> Procedure[set[str]]:
    """Ask until *owner* claims no producer's transaction; after a while write the markers of those that it claims.

    A broker that is away is waited for. Returns the ids whose markers were written again. With an *epoch* they are
    written once, and only at that one: the verdict is right for no other.
    """
    rewritten: set[str] = set()
    waited_ms, pause_ms = 0, PAUSE_FIRST_MS
    open_: _Open = {}
    while partitions:
        try:
            # The epoch is asked for before the partitions, which then show no later transaction as open.
            lost = open_ if waited_ms >= MARKERS_LOST_AFTER_MS else {}
            epochs = dict.fromkeys(lost, epoch) if epoch is not None else (yield from _epochs(lost, commit=commit))
            open_ = yield from _claimed(partitions, owner)
            if not open_:
                break
            for (name, producer_id), present in epochs.items():
                if held := open_.get((name, producer_id)):
                    rewritten.add(name)
                    yield ask.RewriteMarkers(name, producer_id, tuple(held), commit, present)
            if epochs:
                if epoch is not None:
                    break
                waited_ms, pause_ms = 0, PAUSE_FIRST_MS
        except BrokerUnavailable:
            waited_ms = 0
        yield ask.Pause(pause_ms)
        waited_ms += pause_ms
        pause_ms = min(pause_ms + 1, PAUSE_LONGEST_MS)
    return rewritten


def _claimed(partitions: Collection[Partition], owner: Callable[[ProducerState], str | None]) -> Procedure[_Open]:
    open_: defaultdict[tuple[str, int], list[Partition]] = defaultdict(list)
    for state in (yield ask.DescribeProducers(tuple(sorted(partitions)))):
        if (name := owner(state)) is not None:
            open_[name, state.producer_id].append((state.topic, state.partition))
    return dict(open_)


def _epochs(lost: _Open, *, commit: bool) -> Procedure[dict[tuple[str, int], int]]:
    """The present epochs of ids whose markers are *lost*, except those that are just being ended.

    Raises Halt if an id has expired, or has another producer id: then nobody can write its markers.
    """
    if not lost:
        return {}
    states: Mapping[str, TransactionState | None] = yield ask.DescribeTransactions(tuple(name for name, _ in lost))
    epochs = {}
    for (name, producer_id), held in lost.items():
        state = states[name]
        if state is None or state.producer_id != producer_id:
            raise Halt(_unreachable(name, producer_id, held, commit=commit))
        if state.state not in ("PrepareCommit", "PrepareAbort"):
            epochs[name, producer_id] = state.epoch
    return epochs


def _unreachable(name: str, producer_id: int, held: Sequence[Partition], *, commit: bool) -> str:
    where = ", ".join(f"{topic}-{partition}" for topic, partition in held)
    by_hand = (
        "abort it there, as the broker has, and run again (`kafka-transactions --bootstrap-server <servers> "
        "find-hanging` shows its start offset, `... abort --topic <topic> --partition <n> --start-offset <offset>` "
        "ends it); or "
    )
    return (
        f"The broker has ended transaction {name} but lost its markers in {where} (KAFKA-20734). {UNREACHABLE}: its id "
        f"no longer has producer id {producer_id}, so that readers are held there permanently.\n"
        f"  Choices: {'' if commit else by_hand}restore these partitions from a replica that has the markers; or write "
        f"the output anew into another topic."
    )
