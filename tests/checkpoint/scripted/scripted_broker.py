"""A broker of scripted answers for the decision's procedures, and what they are asked to decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from blank_manifest import blank_committable, blank_manifest

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.commits.kafka import TransactionCommits
from exactlyonce.checkpoint.decision import finish
from exactlyonce.checkpoint.records.manifest import (
    BlockRef,
    Committable,
    Finalized,
    Manifest,
    Precommit,
    Repair,
    Written,
)
from exactlyonce.checkpoint.requests import EndAnswer, Fate, ListedTransaction, Outcome, ProducerState, TransactionState


def transactions(incarnation: int = 3, attempt: int = 1, timeout_ms: int = 100_000) -> TransactionCommits:
    return TransactionCommits(
        pipeline="p", incarnation=incarnation, attempt=attempt, cluster_id="cluster", transaction_version=2,
        transaction_timeout_ms=timeout_ms,
    )  # fmt: skip


MANIFEST = blank_manifest(
    incarnation=3, completed_at_ms=99, fingerprint="print", block_partitions=4, block_end_offsets=(0, 5, 5, 5)
)
BLOCK = BlockRef(1, 0, "block", 1, b"")


def name(slot: object, subtask: int = 0, incarnation: str = "2.0") -> str:
    return f"eo:p:out:{subtask}:{incarnation}:{slot}"


def precommit(slot: int, records: int = 5, subtask: int = 0, checkpoint: int = 7) -> Precommit:
    return Precommit(
        transactional_id=name(slot, subtask), producer_id=10 + slot, epoch=3, sink="out", subtask=subtask,
        checkpoint=checkpoint, records=records, open_ms=40,
    )  # fmt: skip


def committable(slot: int, subtask: int = 0, checkpoint: int = 7, records: int = 5) -> Committable:
    written = (Written("t", 0, 100 * slot, records),)
    return blank_committable(
        transactional_id=name(slot, subtask), producer_id=10 + slot, subtask=subtask, checkpoint=checkpoint,
        written=written,
    )  # fmt: skip


def manifest(*committables: Committable) -> Manifest:
    return msgspec.structs.replace(MANIFEST, committables=committables)


class World:
    """A broker of scripted answers: EndTxn by id (the last permanently), fates by id, outcomes of appends in turn."""

    def __init__(
        self,
        answers: Mapping[str, str] | None = None,
        fates: Mapping[str, Fate] | None = None,
        outcomes: Iterable[Outcome] = (),
        copies: Mapping[str, str] | None = None,
        replays: Mapping[str, str | int] | None = None,
    ) -> None:
        self.answers = {each: list(script) for each, script in (answers or {}).items()}
        self.fates = fates or {}
        self.outcomes = list(outcomes)
        self.copies = copies or {}
        self.replays = replays or {}
        """Reasons why no replay is possible, or numbers of records, by id; else as many as there were."""
        self.asked: list[ask.Request] = []
        self.listed: list[ListedTransaction] = []
        self.raising: dict[type, Exception] = {}
        self.ended: set[int] = set()
        self.states: dict[str, str] = {}
        """States that are not Ongoing, by id."""
        self.outputs: list[ask.Outputs] = [MANIFEST.sinks]
        """Outputs as they are counted in turn (the last permanently), from memory and not by a request."""
        self.taken_back: list[str] = []
        self.refusal = "the disk is full"

    def __call__(self, request: ask.Request) -> Any:
        if isinstance(request, ask.KnownOutputs):
            return self.outputs.pop(0) if len(self.outputs) > 1 else self.outputs[0]
        if isinstance(request, ask.Appended):
            return None
        self.asked.append(request)
        if type(request) in self.raising:
            raise self.raising[type(request)]
        match request:
            case ask.DescribeTransactions(ids):
                return {each: self._state(each) for each in ids}
            case ask.DescribeProducers():
                return [ProducerState("t", 0, 10 + n, 3, 4, 0, 100 * n) for n in range(9) if n not in self.ended]
            case ask.Together(requests):
                return tuple(ask.answered(each, self) for each in requests)
            case ask.Reached() | ask.CheckRemoteInputs() | ask.LookAtTopics():
                return None
            case ask.Append():
                return self.outcomes.pop(0) if self.outcomes else Outcome.DONE
            case ask.EndTransactions(endings, commit):
                self.ended.update(each.producer_id - 10 for each in endings)
                return [self._end(each.transactional_id, commit) for each in endings]
            case ask.ListTransactions():
                return self.listed
            case ask.Look(wanted):
                return self.fates[wanted.transactional_id]
            case ask.CopyTransaction(wanted, transactional_id):
                return self._copy(wanted, transactional_id)
            case ask.ReplayTransaction(_, wanted, transactional_id):
                return self._replay(wanted, transactional_id)
            case ask.Pause():
                return None
        raise AssertionError(request)

    # --- a manifest, in two steps

    _outcome = Outcome.UNKNOWN

    def produce(self, made: Manifest) -> ask.Procedure[bool]:
        """Notes the request to produce as that of an append; `NOT_WRITTEN` is the outcome of this step."""
        outcome = yield ask.Append((made,))
        self._outcome = outcome
        return outcome is not Outcome.NOT_WRITTEN

    def commit(self) -> ask.Procedure[Outcome]:
        return self._outcome
        yield  # never: it makes this a procedure

    def take_back(self, why: str) -> ask.Procedure[None]:
        self.taken_back.append(why)
        yield ask.Reached("taken back")

    def _state(self, transactional_id: str) -> TransactionState:
        slot = int(transactional_id[-1])
        state = self.states.get(transactional_id, "Ongoing")
        return TransactionState(transactional_id, state, 10 + slot, 3, 100_000, 0, (("t", 0),))

    def _end(self, transactional_id: str, commit: bool) -> EndAnswer:
        if not commit:
            return EndAnswer.COMPLETED
        script = self.answers.get(transactional_id, ["C"])
        letter = script.pop(0) if len(script) > 1 else script[0]
        letters = {"C": EndAnswer.COMPLETED, "R": EndAnswer.REFUSED, "U": EndAnswer.UNKNOWN, "B": EndAnswer.BUSY}
        return letters[letter]

    def _copy(self, wanted: Committable, transactional_id: str) -> Committable | str:
        if wanted.transactional_id in self.copies:
            return self.copies[wanted.transactional_id]
        return msgspec.structs.replace(wanted, transactional_id=transactional_id, producer_id=77, epoch=0)

    def _replay(self, wanted: Committable, transactional_id: str) -> Committable | str:
        result = self.replays.get(wanted.transactional_id, "no input")
        if isinstance(result, str):
            return result
        written = (msgspec.structs.replace(wanted.written[0], count=result),)
        return msgspec.structs.replace(
            wanted, transactional_id=transactional_id, producer_id=78, epoch=0, written=written
        )

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.asked if isinstance(each, kind)]

    @property
    def appended(self) -> list[Manifest | Finalized | Repair]:
        return [record for each in self.of(ask.Append) for record in each.records]

    def asked_for(self, commit: bool) -> list[str]:
        asked = [each.endings for each in self.of(ask.EndTransactions) if each.commit is commit]
        return [each.transactional_id for endings in asked for each in endings]


def finished(
    world: World, made: Manifest, repairs: Iterable[Repair] = (), *, accept_loss: bool = False
) -> dict[str, str]:
    return ask.drive(finish(made, repairs, [transactions()], 3, lambda: 99, accept_loss=accept_loss), world)


def finished_after_a_crash(stop: int, made: Manifest, **script: Any) -> dict[str, str]:
    """Run the finish up to its request number *stop*, then again by one that knows what was recorded."""
    crashed, world = World(**script), World(**script)
    procedure = finish(made, [], [transactions()], 3, lambda: 99)
    request = next(procedure)
    for _ in range(stop - 1):
        request = procedure.send(crashed(request))
    procedure.close()
    repairs = [each for each in crashed.appended if isinstance(each, Repair)]
    fates = ask.drive(finish(made, repairs, [transactions(incarnation=4, attempt=0)], 4, lambda: 99), world)
    repairs += [each for each in world.appended if isinstance(each, Repair)]
    known = {each.transactional_id for each in (*made.committables, *(repair.committable for repair in repairs))}
    assert {*crashed.asked_for(commit=True), *world.asked_for(commit=True)} <= known
    return fates
