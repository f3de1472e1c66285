"""The settling of a coordinator's transactional id: before it gets a new producer, none of its transactions is open.

See docs/design/decision-log.md. Invariants: nobody acts upon a decision, or begins another, before readers see it. So
at most one lacks its markers, and either end is right, if it is the same in every partition. It gets the end that the
id shows, at the epoch that the id shows. Afterwards no older producer of the id can write.
"""

from __future__ import annotations

from collections.abc import Collection

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.requests import Ending, Procedure
from exactlyonce.checkpoint.transactions.broker_answers import EndAnswer
from exactlyonce.checkpoint.transactions.commit import end
from exactlyonce.checkpoint.transactions.markers import PAUSE_LONGEST_MS, Partition, await_ended, held_by


def settle(transactional_id: str, partitions: Collection[Partition]) -> Procedure[None]:
    """Wait until no transaction of the id is open in *partitions* and no existing producer can begin another.

    A transaction whose commit was never asked for is aborted.
    """
    while True:
        state = (yield ask.DescribeTransactions((transactional_id,)))[transactional_id]
        if state is None:
            return
        now = Ending(transactional_id, state.producer_id, state.epoch)
        if state.state in ("PrepareCommit", "PrepareAbort"):
            yield ask.Pause(PAUSE_LONGEST_MS)
        elif state.state == "Ongoing":
            yield from end([now], commit=False)
        else:
            commit = state.state == "CompleteCommit"
            if not (yield from await_ended(now, partitions, commit=commit)):
                continue
            answer = (yield from end([now], commit=False))[transactional_id]
            producers = yield ask.DescribeProducers(tuple(sorted(partitions)))
            if answer is EndAnswer.COMPLETED and not held_by(state.producer_id, producers):
                return
