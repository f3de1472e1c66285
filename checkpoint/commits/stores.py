"""The commit protocol of stores that keep a ledger: SQL, Redis, files, lakes, and stores of users.

Invariants: only committables that a durable manifest names are committed; those of one sink subtask come in the order
of the checkpoints at which they were cut; only the ledger proves a commit, never an answer or its absence; a ledger
that contradicts the decisions means that the store or the checkpoint topic was restored or made anew: going on would
write output again, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.decision import CommitProtocol, Fates
from exactlyonce.checkpoint.events import PendingCheckpoint
from exactlyonce.checkpoint.records.encoding import DamagedRecord
from exactlyonce.checkpoint.records.manifest import (
    COMMITTED,
    LOSS_ACCEPTED,
    Incarnation,
    Manifest,
    Repair,
    StoreCommittable,
)
from exactlyonce.checkpoint.requests import Procedure, Request
from exactlyonce.pipeline.errors import Halt, RecordsRefused, StoreError, StoreUnavailable, StoreUnready
from exactlyonce.pipeline.retries import OF_STORE

NOTED_INTERVAL_MS = 30_000

Positions = Mapping[tuple[str, int], int]
"""The checkpoint in a ledger, by sink and subtask."""
Batch = tuple[StoreCommittable, ...]
"""Committables of one sink that one request commits, oldest first."""


class StagingSink(NamedTuple):
    """A sink whose output waits until the leader commits it to a store."""

    digest: str
    """The digest of its description: only a sink with the same one can commit its staged output."""
    ledger: str = ""
    """The place of its ledger, for people."""
    at_once: bool = False
    """Whether its store commits all of a checkpoint's output for the sink in one step; else subtask by subtask."""


class UnderWay(NamedTuple):
    """An answer to any of the requests here: an attempt began so long ago, and has not ended. The same request, asked
    again, continues it."""

    duration_ms: int
    failure: str = ""
    """The text of the attempt's last failed request, which is asked again; empty: none has failed, or it is unknown."""


class ForeignLedger(Exception):
    """The ledger was begun for another checkpoint topic, whose id is *origin*; empty: there is no ledger."""

    def __init__(self, origin: str) -> None:
        super().__init__(origin)
        self.origin = origin


class LedgerBehind(Exception):
    """The ledger lacks earlier commits: it has *checkpoint*."""

    def __init__(self, checkpoint: int) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint


def positions_of(manifest: Manifest | None) -> dict[tuple[str, int], int]:
    """The positions of the ledgers once *manifest* is finalized."""
    return {(sink, subtask): checkpoint for sink, subtask, checkpoint in manifest.ledger} if manifest else {}


def in_order(
    committables: Iterable[StoreCommittable], before: Positions, sinks: Mapping[str, StagingSink]
) -> tuple[StoreCommittable, ...]:
    """*committables* in commit order, each with the ledger's position before it, and with its sink's digest.

    *before*: the present positions of the ledgers.
    """
    positions, ordered = dict(before), []
    for committable in sorted(committables, key=lambda committable: (committable.checkpoint, *committable.writer)):
        digest = sinks[committable.sink].digest if committable.sink in sinks else ""
        previous = positions.get(committable.writer, 0)
        ordered.append(msgspec.structs.replace(committable, previous=previous, description=digest))
        positions[committable.writer] = committable.checkpoint
    return tuple(ordered)


def ledger_after(committables: Iterable[StoreCommittable], before: Positions) -> tuple[tuple[str, int, int], ...]:
    """`Manifest.ledger` of a manifest with *committables*."""
    after = {**before, **{committable.writer: committable.checkpoint for committable in committables}}
    return tuple((sink, subtask, checkpoint) for (sink, subtask), checkpoint in sorted(after.items()))


@dataclass(kw_only=True)
class StagedCommits(CommitProtocol):
    """The `CommitProtocol` of output staged for stores.

    A ledger needs no check before a decision, and no watch after it: it always refuses fenced incarnations.
    """

    clock: Clock
    sinks: Mapping[str, StagingSink]
    timeout_ms: int
    """How long a store is waited for after the first failed attempt."""
    note: Callable[[str], None]
    meanwhile: Callable[[], Procedure[None]]
    """Run before each retry."""
    attempt: int = 0
    _incarnation: int = 0
    _origin: str = ""
    _noted_ms: int = -NOTED_INTERVAL_MS

    def begin(self, incarnation: Incarnation, fenced_below: tuple[int, int], origin: str) -> None:
        self._incarnation, self._origin = incarnation.incarnation, origin

    def begin_attempt(self, attempt: int) -> None:
        self.attempt = attempt

    def fence(self, newest: Manifest | None, finalized: Manifest | None) -> Procedure[None]:
        known = positions_of(finalized)
        highest = newest.checkpoint if newest is not None else 0
        for sink in self.sinks:
            try:
                positions = yield from self._persistently(ask.FenceStore(sink, self._incarnation, self._origin), sink)
            except ForeignLedger as foreign:
                raise Halt(_foreign(self._ledger(sink), self._origin, foreign.origin)) from None
            require_in_step(self._ledger(sink), positions, ledger_of(known, sink), highest)

    def finish(
        self, manifest: Manifest, repairs: Iterable[Repair], *, accept_loss: bool
    ) -> Procedure[Mapping[str, str]]:
        return (yield from self._commit(manifest, accept_loss=accept_loss))

    def clean(self) -> Procedure[None]:
        for sink in self.sinks:
            yield from self._persistently(ask.CleanStore(sink, self._incarnation, self.attempt), sink)

    def with_committables(self, manifest: Manifest, plan: PendingCheckpoint, before: Manifest | None) -> Manifest:
        positions = positions_of(before)
        staged = in_order((ack.committable for ack in plan.staged), positions, self.sinks)
        return msgspec.structs.replace(manifest, staged=staged, ledger=ledger_after(staged, positions))

    def commit(self, manifest: Manifest) -> Procedure[Fates]:
        return Fates((yield from self._commit(manifest, accept_loss=False)))

    def _commit(self, manifest: Manifest, *, accept_loss: bool) -> Procedure[dict[str, str]]:
        """Commit the staged output of *manifest*; returns the fate of each committable, by name.

        With *accept_loss*, output that a store refuses, or that is damaged, is given up, and the ledger counts it as
        committed.
        """
        fates: dict[str, str] = {}
        for batch in self._batches(manifest):
            sink = batch[0].sink
            fate = COMMITTED
            try:
                yield from self._persistently(ask.CommitStaged(batch, self._incarnation, self._origin), sink)
            except ForeignLedger as foreign:
                raise Halt(_foreign(self._ledger(sink), self._origin, foreign.origin)) from None
            except LedgerBehind as behind:
                previous = max(committable.previous for committable in batch)
                raise Halt(_behind(self._ledger(sink), _subtasks(batch), behind.checkpoint, previous)) from None
            except (StoreError, DamagedRecord) as error:
                if not accept_loss:
                    kind = DamagedRecord if isinstance(error, DamagedRecord) else Halt
                    raise kind(_lost(manifest, batch, error)) from error
                fate = LOSS_ACCEPTED
                emptied = tuple(msgspec.structs.replace(one, records=0, blocks=(), body=b"") for one in batch)
                yield from self._persistently(ask.CommitStaged(emptied, self._incarnation, self._origin), sink)
                self.note(
                    f"checkpoint {manifest.checkpoint}: all {_records(batch):,} records of {_subtasks(batch)} of sink "
                    f"{sink!r} are given up, not only those that could not be written: {error}"
                )
            fates.update(dict.fromkeys((committable.name for committable in batch), fate))
            yield ask.Reached("store-committed")
        return fates

    def _batches(self, manifest: Manifest) -> list[Batch]:
        """The committables of *manifest*: of a sink together if its store commits them at once."""
        batches: dict[str, list[StoreCommittable]] = {}
        for committable in manifest.staged:
            sink = self.sinks.get(committable.sink)
            together = sink is not None and sink.at_once
            batches.setdefault(committable.sink if together else committable.name, []).append(committable)
        return list(map(tuple, batches.values()))

    def _persistently(self, request: Request, sink: str) -> Procedure[Any]:
        """The answer to *request*, retried while the store of *sink* is away, or still at work on it.

        The timeout counts from the first of consecutive failures: a store that goes away after long work has all of it
        to come back. While an attempt is under way, nothing is given up.
        """
        failing_since_ms, pauses = None, iter(OF_STORE)
        while True:
            try:
                answer = yield request
            except StoreUnavailable as error:
                now_ms = self.clock.monotonic_ms()
                failing_since_ms = now_ms if failing_since_ms is None else failing_since_ms
                if now_ms >= failing_since_ms + self.timeout_ms:
                    raise StoreUnavailable(_given_up(sink, self.timeout_ms, error)) from error
                self._note(f"waiting for the store of sink {sink!r}: {error}")
                yield ask.Pause(next(pauses))
            else:
                if not isinstance(answer, UnderWay):
                    return answer
                if answer.duration_ms >= NOTED_INTERVAL_MS:
                    waited_s = answer.duration_ms / 1000
                    why = f"no answer yet to what began {waited_s:.0f} s ago"
                    if answer.failure:
                        why = f"what began {waited_s:.0f} s ago is not done yet. The last failure: {answer.failure}"
                    self._note(f"waiting for the store of sink {sink!r}: {why}")
            yield from self.meanwhile()

    def _ledger(self, sink: str) -> str:
        return named_ledger(sink, self.sinks[sink].ledger if sink in self.sinks else "")

    def _note(self, text: str) -> None:
        now_ms = self.clock.monotonic_ms()
        if now_ms >= self._noted_ms + NOTED_INTERVAL_MS:
            self._noted_ms = now_ms
            self.note(text)


def ledger_of(positions: Positions, sink: str) -> dict[int, int]:
    return {subtask: checkpoint for (name, subtask), checkpoint in positions.items() if name == sink}


def require_in_step(ledger: str, found: Mapping[int, int], known: Mapping[int, int], highest: int) -> None:
    """Raise `Halt` if a ledger, which has *found* by subtask, contradicts the decisions.

    *ledger* begins a sentence; *known* are its positions in the newest finalized manifest, *highest* is the newest
    checkpoint.
    """
    for subtask in sorted({*found, *known}):
        has, expected = found.get(subtask, 0), known.get(subtask, 0)
        if has < expected:
            raise Halt(_behind(ledger, f"subtask {subtask}", has, expected))
        if has > highest:
            raise Halt(_ahead(ledger, subtask, has, highest))


def require_own(ledger: str, origin: str, begun_for: str) -> None:
    """Raise `Halt` if a ledger was *begun_for* another checkpoint topic than *origin*."""
    if begun_for != origin:
        raise Halt(_foreign(ledger, origin, begun_for))


def named_ledger(sink: str, where: str = "") -> str:
    """The ledger of *sink*, as a sentence begins."""
    return f"The ledger of sink {sink!r}" + (f" ({where})" if where else "")


def _behind(ledger: str, subtasks: str, has: int, expected: int) -> str:
    position = f"has checkpoint {has}" if has else "has nothing"
    return (
        f"{ledger} {position} for {subtasks}, but checkpoint {expected} was committed there: the store was "
        f"restored from a backup, or its ledger was deleted. What was written since is missing.\n"
        f"  Choices: (1) restore the store as it was after checkpoint {expected}, and run again; (2) {_ANEW}; (3) if "
        f"the sink writes to another place than before, give it another id: it begins with what comes from now on."
    )


def _ahead(ledger: str, subtask: int, has: int, highest: int) -> str:
    return (
        f"{ledger} has checkpoint {has} for subtask {subtask}, but the newest that was decided is {highest}: the "
        f"checkpoint topic was restored from a backup. What comes next would count as written.\n"
        f"  Choices: (1) restore the topic as it was after checkpoint {has}, and run again; (2) restore the store as "
        f"it was after checkpoint {highest}; (3) {_ANEW}."
    )


def _foreign(ledger: str, origin: str, other: str) -> str:
    if not other:
        return (
            f"{ledger} is gone, which every run makes when it begins: it was deleted, or the store was restored from a "
            f"backup. Run again: the ledger is compared with the checkpoints before anything is written."
        )
    return (
        f"{ledger} was begun for another checkpoint topic, with id {other}; this one has id {origin}: the pipeline was "
        f"reset, or another one of its name, on another cluster, writes there.\n"
        f"  Choices: (1) if it was reset, empty the target, delete what the ledger has of the sink, and run again; (2) "
        f"give one of the two pipelines another name."
    )


def _given_up(sink: str, timeout_ms: int, error: StoreUnavailable) -> str:
    """The text of the error that ends a run after *timeout_ms* of failures, the last of which is *error*."""
    waited = f"for {timeout_ms / 1000:.0f} s (store_timeout, --store-timeout; on Spark storeTimeout)"
    if isinstance(error, StoreUnready):
        return (
            f"The store of sink {sink!r} has answers, but has not taken all records {waited}. Nothing is lost, and the "
            f"next run goes on there. {error.what}"
        )
    return (
        f"The store of sink {sink!r} has not answered {waited}: {error.what} Nothing is lost: run it again once the "
        f"store is there."
    )


def _lost(manifest: Manifest, batch: Batch, error: Exception) -> str:
    """The text of a halt where the store refuses *batch*, or it is damaged; see `--accept-loss`."""
    checkpoint, records, sink = manifest.checkpoint, _records(batch), batch[0].sink
    problem = f"the store of sink {sink!r} refuses its {records} records of {_subtasks(batch)}"
    remedy = "change the store so that it takes them"
    if isinstance(error, RecordsRefused):
        problem = (
            f"the store of sink {sink!r} refuses {error.records:,} or more of its {records:,} records of "
            f"{_subtasks(batch)}"
        )
        remedy = error.remedy
    if isinstance(error, DamagedRecord):
        problem = (
            f"the {records} records that wait for the store of sink {sink!r}, of {_subtasks(batch)}, are damaged in "
            f"the checkpoint topic"
        )
        remedy = "restore the topic from a replica or a backup"
    return (
        f"Checkpoint {checkpoint} was decided, but {problem}: {error}\n"
        f"  Choices: (1) {remedy}, and run again; (2) go on without all {records} of them, the good ones among them "
        f"too: `exactlyonce run ... --accept-loss {checkpoint}`, in Python accept_loss={checkpoint}.\n"
        f"  Nothing else is affected: state and the other sinks are at checkpoint {checkpoint}."
    )


def _records(batch: Batch) -> int:
    return sum(committable.records for committable in batch)


def _subtasks(batch: Batch) -> str:
    numbers = sorted({committable.subtask for committable in batch})
    return f"subtask{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


_ANEW = (
    "`exactlyonce reset` the pipeline, empty the target, delete what the ledger has of the sink, and compute all of it "
    "again from the input"
)
