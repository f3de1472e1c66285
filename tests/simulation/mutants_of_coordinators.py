"""Planted defects of the coordinator's side: each patches shipped code. See `mutants`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import msgspec
from planting import (
    ABORTED,
    COUNT,
    DISORDER,
    OPEN,
    RETAKEN,
    STUCK,
    SWEPT,
    TOMBSTONED,
    TWICE,
    UNCOMMITTED,
    UNNAMED,
    Table,
    unchecked,
)

from exactlyonce.checkpoint import decision, decision_log, leader, requests, retention
from exactlyonce.checkpoint.commits import of_transactions
from exactlyonce.checkpoint.commits.protocol import Refuse
from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.decision import Decided
from exactlyonce.checkpoint.events import Stop, Tick
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.records import history
from exactlyonce.checkpoint.records.committable import Committable, coordinator_id
from exactlyonce.checkpoint.states import JobState
from exactlyonce.checkpoint.transactions import commit, markers
from exactlyonce.checkpoint.transactions.broker_answers import EndAnswer, Outcome
from exactlyonce.checkpoint.transactions.resolution import Resolution
from exactlyonce.checkpoint.transactions.transactional_writer import TransactionalWriter

COORDINATORS = Table()
"""By name."""
mutant = COORDINATORS.mutant


# --- the decision ---------------------------------------------------------------------------------------------------


@mutant("commit before the manifest", UNNAMED)
def _commit_first() -> Iterable[Any]:
    real = decision.decide

    def decide(plan: Any, protocols: Any, *more: Any, **named: Any) -> Any:
        checked = yield from protocols[0].check_uncounted(plan.precommits, plan.ages_ms)
        if not isinstance(checked, Refuse):
            yield from commit.commit(checked)
        return (yield from real(plan, protocols, *more, **named))

    yield patch.object(leader, "decide", decide)


@mutant("abort after an unknown answer", ABORTED, luck="network", first=2)
def _abort_after_unknown() -> Iterable[Any]:
    def end(endings: Any, *, commit: bool) -> Any:
        asked = tuple(endings)
        answers = dict(zip(asked, (yield requests.EndTransactions(asked, commit)), strict=True))
        unsure = tuple(each for each in asked if answers[each] is EndAnswer.BUSY)
        if unsure and commit:
            yield requests.EndTransactions(unsure, False)
            answers.update(dict.fromkeys(unsure, EndAnswer.REFUSED))
        return {each.transactional_id: answer for each, answer in answers.items()}

    yield patch.object(commit, "end", end)


@mutant(
    "an unknown manifest counts as not written",
    ABORTED + r"|is decided before the one before it is finalized",
    luck="unanswered",
    first=224,
)
def _unknown_is_not_written() -> Iterable[Any]:
    real = TransactionalWriter.commit

    def commit(self: TransactionalWriter, deadline_ms: int) -> Any:
        outcome = yield from real(self, deadline_ms)
        if outcome is Outcome.UNKNOWN:
            self._ended, self._begun, self._produced = None, False, False
            self._producer = self._producer._replace(epoch=self._producer.epoch + 1)
            outcome = Outcome.NOT_WRITTEN
        return outcome

    yield patch.object(TransactionalWriter, "commit", commit)
    yield patch.object(decision, "Unresolved", lambda checkpoint: Refuse(f"{checkpoint} was not written"))


@mutant("the broker's count is not checked", COUNT, luck="deliveries", first=1)
def _no_count() -> Iterable[Any]:
    yield patch.object(of_transactions, "_is_whole", lambda committable, precommit: True)


@mutant("a commit does not wait for its markers", UNCOMMITTED + "|" + TWICE, luck="markers", first=6)
def _no_markers() -> Iterable[Any]:
    yield patch.object(commit, "await_markers", lambda committables, *, commit: _nothing(set()))


@mutant("what a lost marker holds back is not released", STUCK + "|" + OPEN, luck="markers")
def _no_release() -> Iterable[Any]:
    yield patch.object(commit, "release", lambda names, partitions: _nothing(None))


@mutant("what is lost in one partition counts as lost in all", TWICE, luck="markers", first=8)
def _all_or_nothing() -> Iterable[Any]:
    yield patch.object(Committable, "within", lambda self, other: self)


@mutant("finalized with unknown fates", UNCOMMITTED, luck="naps", first=2)
def _finalized_anyway() -> Iterable[Any]:
    real = decision.finalize

    def finalize(manifest: Any, fates: Any, *more: Any) -> Any:
        return real(manifest, {c.transactional_id: "committed" for c in manifest.committables} | dict(fates), *more)

    yield patch.object(Decided, "finalized", True)
    yield patch.object(decision, "finalize", finalize)
    yield patch.object(leader, "finalize", finalize)


@mutant(
    "zombie coordinators are not fenced",
    r"there are two manifests|checkpoint ids only grow|is decided before|is finalized in its turn",
    luck="zombies",
    first=70,
)
def _no_fence() -> Iterable[Any]:
    numbers = itertools.count()
    yield patch.object(decision_log, "coordinator_id", lambda pipeline: f"{coordinator_id(pipeline)}-{next(numbers)}")


# --- recovery -------------------------------------------------------------------------------------------------------


@mutant("producers are initialised before the decided transactions are committed", RETAKEN)
def _init_first() -> Iterable[Any]:
    real = Leader.finish

    def finish(self: Leader, manifest: Any, expire: Any) -> Any:
        for each in manifest.committables:
            yield requests.InitTransactions(
                transactional_id=each.transactional_id, transaction_timeout_ms=60_000, wait_ms=0
            )
        return (yield from real(self, manifest, expire))

    yield patch.object(Leader, "finish", finish)


@mutant("no sweep of older transactions", SWEPT + "|" + OPEN)
def _no_sweep() -> Iterable[Any]:
    def sweep(*_: Any, **__: Any) -> Any:
        return 0
        yield

    yield patch.object(of_transactions, "sweep", sweep)


@mutant("empty ids are not swept", SWEPT + "|" + OPEN, luck="zombies")
def _no_sweep_of_empty() -> Iterable[Any]:
    real = commit.sweep

    def sweep(*arguments: Any, **options: Any) -> Any:
        procedure = real(*arguments, **options)
        request = next(procedure)
        try:
            while True:
                answer = yield request
                if isinstance(request, requests.ListTransactions):
                    answer = [each for each in answer if each.state != "Empty"]
                request = procedure.send(answer)
        except StopIteration as end:
            return end.value

    yield patch.object(of_transactions, "sweep", sweep)


@mutant("a sweep that does not spare what is decided", ABORTED, luck="carried", first=831)
def _unprotected() -> Iterable[Any]:
    real = commit.sweep

    def sweep(pipeline: str, incarnation: int, attempt: int, **options: Any) -> Any:
        return real(pipeline, incarnation, attempt, **{**options, "protected": ()})

    yield patch.object(of_transactions, "sweep", sweep)


@mutant("older transactions are swept before the decided ones are committed", ABORTED, first=5)
def _sweep_first() -> Iterable[Any]:
    real = Leader.finish

    def finish(self: Leader, manifest: Any, expire: Any) -> Any:
        yield from self.transactions.sweep()
        return (yield from real(self, manifest, expire))

    yield patch.object(Leader, "finish", finish)


@mutant("a repair is committed before it is recorded", UNNAMED, first=5)
def _commit_unrecorded() -> Iterable[Any]:
    real = of_transactions._record

    def record(manifest: Any, repairs: Any) -> Any:
        yield from commit.commit([each.committable for each in repairs])
        yield from real(manifest, repairs)

    yield patch.object(of_transactions, "_record", record)


@mutant("recovery does not follow repairs", ABORTED + "|" + TWICE, luck="replays", first=9)
def _forget_repairs() -> Iterable[Any]:
    real = Resolution.__init__

    def init(self: Any, manifest: Any, repairs: Any, **options: Any) -> None:
        real(self, manifest, repairs, **options)
        for each in self._all.values():
            each.current = each.original

    yield patch.object(Resolution, "__init__", init)


@mutant(
    "later transactions of a subtask do not wait for earlier ones", DISORDER + "|" + TWICE, luck="carried", first=780
)
def _no_chain() -> Iterable[Any]:
    yield patch.object(Committable, "writer", property(lambda self: (self.transactional_id, 0)))


@mutant("markers that were written again are believed", UNCOMMITTED + "|" + TWICE, luck="markers", first=566)
def _believed_markers() -> Iterable[Any]:
    real = markers.await_markers

    def await_markers(committables: Any, *, commit: bool) -> Any:
        yield from real(committables, commit=commit)
        return set()

    yield patch.object(commit, "await_markers", await_markers)


# --- the coordinator ------------------------------------------------------------------------------------------------


@mutant("output of aborted checkpoints is not carried", COUNT, luck="carried", first=2)
def _drop_carried() -> Iterable[Any]:
    real = Coordinator._late

    def late(self: Coordinator, tick: Tick, now_ms: int) -> Any:
        effects = real(self, tick, now_ms)
        if effects:
            self._precommits = []
        return effects

    yield patch.object(Coordinator, "_late", late)


@mutant("late output of aborted checkpoints is not carried", COUNT, luck="carried")
def _drop_late() -> Iterable[Any]:
    real = Coordinator._acknowledged

    def acknowledged(self: Coordinator, ack: Any, now_ms: int) -> Any:
        if all(plan.checkpoint != ack.checkpoint for plan in self.in_flight):
            ack = msgspec.structs.replace(ack, precommits=())
        return real(self, ack, now_ms)

    yield patch.object(Coordinator, "_acknowledged", acknowledged)


@mutant(
    "a restart does not finish what is decided",
    r"is decided before the one before it is finalized|" + ABORTED,
    luck="naps",
    first=12,
)
def _unfinished_restart() -> Iterable[Any]:
    real = Leader.finish

    def finish(self: Leader, *given: Any) -> Any:
        return real(self, *given) if self.attempt == self.led.attempt else _nothing({})

    yield patch.object(Leader, "finish", finish)
    yield unchecked(history, "Checkpoint ")


def _nothing(result: Any) -> Any:
    """A procedure that asks for nothing."""
    return result
    yield


@mutant(
    "a clean end while a checkpoint is unfinished",
    r"a clean end leaves nothing unfinalized|is left ",
    luck="naps",
    first=19,
)
def _careless_stop() -> Iterable[Any]:
    real = Coordinator.handle

    def handle(self: Coordinator, event: Any, now_ms: int) -> Any:
        if isinstance(event, Stop) and self.state is JobState.RECOVERING and self.manifest is not None:
            return self._end(None)
        return real(self, event, now_ms)

    yield patch.object(Coordinator, "handle", handle)


@mutant("blocks of the chain are forgotten", TOMBSTONED)
def _short_memory() -> Iterable[Any]:
    real = retention.Ledger.completed

    def completed(self: Any, checkpoint: int, blocks: Any, **options: Any) -> None:
        newest = {
            storage: sorted(refs, key=lambda each: (each.partition, each.offset))[-2:]
            for storage, refs in blocks.items()
        }
        real(self, checkpoint, newest, **options)

    yield patch.object(retention.Ledger, "completed", completed)
    yield unchecked(decision_log, "A block that a manifest names")
