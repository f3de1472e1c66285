"""Before a transactional id whose transactions are decisions gets a new producer: what was decided with it stays so.

A broker that dies behind its answer to EndTxn may lose the markers (KAFKA-20734). Then the record of a decision is
durable, yet invisible, and the next end of its producer id decides it anew; an initialisation, which hides what the
last end was, must not come before.

Invariants: where a transaction of the id is still open though it was ended, it gets its markers with the verdict that
the id shows; only then are the producers that hold the id fenced, by an end that changes nothing. A writer begins its
next transaction only after readers have seen the last one, so that at most one lacks its markers.
"""

from __future__ import annotations

from collections.abc import Collection

from exactlyonce.checkpoint.commit import end
from exactlyonce.checkpoint.markers import PAUSE_LONGEST_MS, Partition, await_ended, held_by
from exactlyonce.checkpoint.requests import DescribeProducers, DescribeTransactions, Ending, Pause, Procedure
from exactlyonce.checkpoint.transaction import EndAnswer, TransactionState
from exactlyonce.pipeline.errors import Halt

_ENDING = ("PrepareCommit", "PrepareAbort")
_ENDED = ("CompleteCommit", "CompleteAbort")


def settle(transactional_id: str, partitions: Collection[Partition]) -> Procedure[None]:
    """Return once no transaction of the id is open in *partitions* and no producer that exists can begin another.

    One that was never asked to be committed is aborted. Raises Halt where a transaction is open of which it cannot be
    known how it was ended.
    """
    while True:
        state = (yield DescribeTransactions((transactional_id,)))[transactional_id]
        if state is None:
            return
        if state.state in _ENDING:
            yield Pause(PAUSE_LONGEST_MS)
        elif state.state == "Ongoing":
            yield from end([_ending(state)], commit=False)
        elif (yield from _is_ended(state, partitions)):
            answers = yield from end([_ending(state)], commit=False)
            if answers[transactional_id] is EndAnswer.COMPLETED:
                break
    if held_by(state.producer_id, (yield DescribeProducers(tuple(sorted(partitions))))):
        raise _undeterminable(state, partitions)


def _is_ended(state: TransactionState, partitions: Collection[Partition]) -> Procedure[bool]:
    """Bring about that nothing of the id is open; whether *state* still holds then."""
    if state.state in _ENDED:
        commit = state.state == "CompleteCommit"
        yield from await_ended(state.transactional_id, state.producer_id, partitions, commit=commit)
    elif held_by(state.producer_id, (yield DescribeProducers(tuple(sorted(partitions))))):
        raise _undeterminable(state, partitions)
    now = (yield DescribeTransactions((state.transactional_id,)))[state.transactional_id]
    return bool(now == state)


def _ending(state: TransactionState) -> Ending:
    return Ending(state.transactional_id, state.producer_id, state.epoch)


def _undeterminable(state: TransactionState, partitions: Collection[Partition]) -> Halt:
    where = ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(partitions))
    return Halt(
        f"A transaction of {state.transactional_id} (producer id {state.producer_id}) is open somewhere in {where}, "
        f"and the broker does not know any more how it was ended: it lost the markers (KAFKA-20734) and has "
        f"initialised the id since. What it hides may be a decision.\n  Choices: restore the topic from a replica that "
        f"has the markers; or look at the records behind the last stable offset, end the transaction as they say "
        f"with `kafka-transactions abort`, and run again."
    )
