"""The commit protocol of stores that keep a ledger: PostgreSQL, MySQL, Redis, files, and whatever a user adds.

Invariants: nothing is committed that no durable manifest names; of one sink subtask, committables come in the order of
the checkpoints at which they were cut; the ledger alone says whether one has been committed, and an answer, or none,
says nothing; a ledger that is not where the decisions say it is belongs to a store, or to a checkpoint topic, that was
put back or made anew: going on would write again, or never. Pure procedures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.commits.protocol import CommitProtocol, Fates, Planned
from exactlyonce.checkpoint.records.encoding import DamagedRecord
from exactlyonce.checkpoint.records.manifest import LOSS_ACCEPTED, Incarnation, Manifest, Repair, StoreCommittable
from exactlyonce.checkpoint.requests import (
    CleanStore,
    CommitStaged,
    FenceStore,
    Pause,
    Procedure,
    Reached,
    Request,
)
from exactlyonce.pipeline.errors import Halt, StoreError, StoreUnavailable

PAUSE_FIRST_MS, PAUSE_LONGEST_MS = 50, 2_000
NOTED_INTERVAL_MS = 30_000

Positions = Mapping[tuple[str, int], int]
"""By sink and subtask, the checkpoint that a ledger has."""
Batch = tuple[StoreCommittable, ...]
"""Committables of one sink that a store is asked for in one request, oldest first."""


class StagingSink(NamedTuple):
    """A sink whose output waits until the leader commits it to a store."""

    digest: str
    """Of its description: only a sink of the same one knows what was set aside, and for what."""
    ledger: str = ""
    """Where its ledger is, for people."""
    at_once: bool = False
    """Whether its store commits all that a checkpoint has for the sink in one step; else subtask by subtask."""


class UnderWay(NamedTuple):
    """An answer to any of the requests here: an attempt began so long ago, and has not ended; whether the store is at
    work it does not say. Asked the same again, it goes on."""

    duration_ms: int


class ForeignLedger(Exception):
    """The ledger was begun for another checkpoint topic, whose id is *origin*; empty: there is no ledger (any more)."""

    def __init__(self, origin: str) -> None:
        super().__init__(origin)
        self.origin = origin


class LedgerBehind(Exception):
    """The ledger does not have what was committed before: it has *checkpoint*."""

    def __init__(self, checkpoint: int) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint


def positions_of(manifest: Manifest | None) -> dict[tuple[str, int], int]:
    """What the ledgers say once *manifest* is finalized."""
    return {(sink, subtask): checkpoint for sink, subtask, checkpoint in manifest.ledger} if manifest else {}


def in_order(
    committables: Iterable[StoreCommittable], before: Positions, sinks: Mapping[str, StagingSink]
) -> tuple[StoreCommittable, ...]:
    """*committables* as they are to be committed, each with what the ledger has by then, and with its sink's digest.

    *before*: what the ledgers have now."""
    positions, ordered = dict(before), []
    for committable in sorted(committables, key=lambda committable: (committable.checkpoint, *committable.writer)):
        digest = sinks[committable.sink].digest if committable.sink in sinks else ""
        previous = positions.get(committable.writer, 0)
        ordered.append(msgspec.structs.replace(committable, previous=previous, description=digest))
        positions[committable.writer] = committable.checkpoint
    return tuple(ordered)


def ledger_after(committables: Iterable[StoreCommittable], before: Positions) -> tuple[tuple[str, int, int], ...]:
    """`Manifest.ledger` of a manifest with *committables*."""
    after = {**before, **{each.writer: each.checkpoint for each in committables}}
    return tuple((sink, subtask, checkpoint) for (sink, subtask), checkpoint in sorted(after.items()))


@dataclass(kw_only=True)
class StagedCommits(CommitProtocol):
    """The `CommitProtocol` of what is staged for stores. A ledger needs no check before a decision, and no watch behind
    it: it refuses whoever was fenced, at whatever time."""

    clock: Clock
    sinks: Mapping[str, StagingSink]
    timeout_ms: int
    """For how long a store is waited for from the first attempt on that failed."""
    note: Callable[[str], None]
    """Told what is waited for, or given up."""
    meanwhile: Callable[[], Procedure[None]]
    """Run whenever one is asked again."""
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
                found = yield from self._persistently(FenceStore(sink, self._incarnation, self._origin), sink)
            except ForeignLedger as foreign:
                raise Halt(_foreign(self._ledger(sink), self._origin, foreign.origin)) from None
            require_in_step(self._ledger(sink), found, ledger_of(known, sink), highest)

    def finish(
        self, manifest: Manifest, repairs: Iterable[Repair], *, accept_loss: bool
    ) -> Procedure[Mapping[str, str]]:
        return (yield from self._commit(manifest, accept_loss=accept_loss))

    def clean(self) -> Procedure[None]:
        for sink in self.sinks:
            yield from self._persistently(CleanStore(sink, self._incarnation, self.attempt), sink)

    def entered(self, manifest: Manifest, plan: Planned, before: Manifest | None) -> Manifest:
        positions = positions_of(before)
        staged = in_order((each.committable for each in plan.staged), positions, self.sinks)
        return msgspec.structs.replace(manifest, staged=staged, ledger=ledger_after(staged, positions))

    def commit(self, manifest: Manifest) -> Procedure[Fates]:
        return Fates((yield from self._commit(manifest, accept_loss=False)))

    def _commit(self, manifest: Manifest, *, accept_loss: bool) -> Procedure[dict[str, str]]:
        """Commit what *manifest* has staged: the fate of each, by name.

        With *accept_loss*, what a store refuses, or the topic does not hold any more, is given up, and the ledger says
        that it was committed.
        """
        fates: dict[str, str] = {}
        for batch in self._batches(manifest):
            sink = batch[0].sink
            fate = "committed"
            try:
                yield from self._persistently(CommitStaged(batch, self._incarnation, self._origin), sink)
            except ForeignLedger as foreign:
                raise Halt(_foreign(self._ledger(sink), self._origin, foreign.origin)) from None
            except LedgerBehind as behind:
                previous = max(committable.previous for committable in batch)
                raise Halt(_behind(self._ledger(sink), _subtasks(batch), behind.checkpoint, previous)) from None
            except (StoreError, DamagedRecord) as error:
                if not accept_loss and isinstance(error, DamagedRecord):
                    raise DamagedRecord(_damaged(manifest, batch, error)) from error
                if not accept_loss:
                    raise Halt(_refused(manifest, batch, error)) from error
                fate = LOSS_ACCEPTED
                nothing = tuple(msgspec.structs.replace(each, records=0, blocks=(), body=b"") for each in batch)
                yield from self._persistently(CommitStaged(nothing, self._incarnation, self._origin), sink)
                self.note(
                    f"checkpoint {manifest.checkpoint}: all {_records(batch):,} records of {_subtasks(batch)} of sink "
                    f"{sink!r} are given up, not only those that could not be written: {error}"
                )
            fates.update(dict.fromkeys((committable.name for committable in batch), fate))
            yield Reached("store-committed")
        return fates

    def _batches(self, manifest: Manifest) -> list[Batch]:
        """The committables of *manifest*, in requests: those of a sink together if its store commits them at once."""
        batches: dict[str, list[StoreCommittable]] = {}
        for committable in manifest.staged:
            sink = self.sinks.get(committable.sink)
            together = sink is not None and sink.at_once
            batches.setdefault(committable.sink if together else committable.name, []).append(committable)
        return list(map(tuple, batches.values()))

    def _persistently(self, request: Request, sink: str) -> Procedure[Any]:
        """The answer to *request*, asked again while the store of *sink* is away, or has not done with it.

        Time counts from the first of the failures that follow one another: a store that goes away after long work has
        the whole timeout to come back. While an attempt is under way, which proves neither, nothing is given up.
        """
        failing_since_ms, pause_ms = None, PAUSE_FIRST_MS
        while True:
            try:
                answer = yield request
            except StoreUnavailable as error:
                now_ms = self.clock.monotonic_ms()
                failing_since_ms = now_ms if failing_since_ms is None else failing_since_ms
                if now_ms >= failing_since_ms + self.timeout_ms:
                    raise StoreUnavailable(
                        f"The store of sink {sink!r} has not answered for {self.timeout_ms / 1000:.0f} s "
                        f"(store_timeout, --store-timeout; on Spark storeTimeout): {error} Nothing is lost: run it "
                        f"again once the store is there."
                    ) from error
                self._note(f"waiting for the store of sink {sink!r}: {error}")
                yield Pause(pause_ms)
                pause_ms = min(2 * pause_ms, PAUSE_LONGEST_MS)
            else:
                if not isinstance(answer, UnderWay):
                    return answer
                if answer.duration_ms >= NOTED_INTERVAL_MS:
                    waited_s = answer.duration_ms / 1000
                    self._note(
                        f"waiting for the store of sink {sink!r}: no answer yet to what began {waited_s:.0f} s ago"
                    )
            yield from self.meanwhile()

    def _ledger(self, sink: str) -> str:
        return named_ledger(sink, self.sinks[sink].ledger if sink in self.sinks else "")

    def _note(self, text: str) -> None:
        """Say what is waited for, now and then."""
        now_ms = self.clock.monotonic_ms()
        if now_ms >= self._noted_ms + NOTED_INTERVAL_MS:
            self._noted_ms = now_ms
            self.note(text)


def ledger_of(positions: Positions, sink: str) -> dict[int, int]:
    """What of *positions* is of *sink*, by subtask."""
    return {subtask: checkpoint for (name, subtask), checkpoint in positions.items() if name == sink}


def require_in_step(ledger: str, found: Mapping[int, int], known: Mapping[int, int], highest: int) -> None:
    """Raise `Halt` unless a ledger, which has *found* by subtask, is where the decisions say it is.

    *ledger* begins a sentence; *known* is what the newest finalized manifest says of it, *highest* the newest
    checkpoint."""
    for subtask in sorted({*found, *known}):
        has, expected = found.get(subtask, 0), known.get(subtask, 0)
        if has < expected:
            raise Halt(_behind(ledger, f"subtask {subtask}", has, expected))
        if has > highest:
            raise Halt(_ahead(ledger, subtask, has, highest))


def require_own(ledger: str, origin: str, begun_for: str) -> None:
    """Raise `Halt` where a ledger was *begun_for* another checkpoint topic than *origin*."""
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


def _refused(manifest: Manifest, batch: Batch, error: Exception) -> str:
    return (
        f"Checkpoint {manifest.checkpoint} was decided, but the store of sink {batch[0].sink!r} refuses its "
        f"{_records(batch)} records of {_subtasks(batch)}: {error}\n"
        f"  Choices: (1) change the store so that it takes them, and run again; "
        f"{_without(manifest, batch)}"
    )


def _damaged(manifest: Manifest, batch: Batch, error: Exception) -> str:
    return (
        f"Checkpoint {manifest.checkpoint} was decided, but the {_records(batch)} records that wait for the "
        f"store of sink {batch[0].sink!r}, of {_subtasks(batch)}, are damaged in the checkpoint topic: "
        f"{error}\n"
        f"  Choices: (1) restore the topic from a replica or a backup, and run again; "
        f"{_without(manifest, batch)}"
    )


def _records(batch: Batch) -> int:
    return sum(committable.records for committable in batch)


def _subtasks(batch: Batch) -> str:
    numbers = sorted({committable.subtask for committable in batch})
    return f"subtask{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _without(manifest: Manifest, batch: Batch) -> str:
    return (
        f"(2) go on without all {_records(batch)} of them, the good ones among them too: "
        f"`exactlyonce run ... --accept-loss {manifest.checkpoint}`, in Python "
        f"accept_loss={manifest.checkpoint}.\n"
        f"  Nothing else is affected: state and the other sinks are at checkpoint {manifest.checkpoint}."
    )


_ANEW = (
    "`exactlyonce reset` the pipeline, empty the target, delete what the ledger has of the sink, and compute all of it "
    "again from the input"
)
