"""The committer of an HTTP sink: sends the records of a decided checkpoint, and notes what was answered.

Invariants: a record counts as sent once the service has taken or refused it; the ledger says so only afterwards. What
the ledger does not say is sent again, with the same numbers: so a service that remembers numbers has each record once.
Requests of a lane go out in order, and no record of the next window before all answers to the last, in any process: so
the first time that the service sees the records of a key is in their order, also where a zombie still sends.
A refusal's dead letter is in the transaction of the ledger's entry: see `deliveries`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.dead_letters import RECORD, DeadLetter, Reason
from exactlyonce.pipeline.errors import ConfigError, RecordsRefused, StoreUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.retries import OF_STORE
from exactlyonce.sinks.committer import CommitsBySubtask, CommitterContext, StoreView
from exactlyonce.sinks.http.deliveries import Deliveries, DeliveryLog
from exactlyonce.sinks.http.receiver import Answers, Outgoing, Receiver, Refusal
from exactlyonce.sinks.http.requests import Request, Window, windows
from exactlyonce.sinks.http.sink import HttpSink
from exactlyonce.sinks.ledger import LedgerEntry
from exactlyonce.sinks.write_ahead.writer import KIND, staged_chunks

PAUSE_MAX_S = 60.0
"""The longest pause within a call; the leader asks again after a longer one."""
_URL_SAFE = str.maketrans("+/", "-_")


class HttpCommitter(CommitsBySubtask):
    """See `Committer`. *sink* describes the service."""

    kind = KIND

    def __init__(self, context: CommitterContext, sink: HttpSink[Any]) -> None:
        if context.client is None:
            raise ConfigError("HttpSink keeps its ledger in Kafka, and needs the cluster of the checkpoints.")
        self._context, self._sink = context, sink
        self._log = DeliveryLog(context.client, context.pipeline, context.sink)
        self._receiver = Receiver(sink)
        self._window: tuple[LedgerEntry, int] | None = None
        """The window that `_answers` belongs to: an entry, and the number of the first record."""
        self._answers: Answers = {}
        self._pause = threading.Event()
        self._failure = ""

    @property
    def ledger(self) -> str:
        """See `Committer.ledger`."""
        return self._sink.ledger_of(self._context.pipeline, self._context.sink)

    @property
    def failure(self) -> str:
        """See `Hindered`."""
        return self._failure

    def check(self) -> None:
        """Create the ledger's topic, and connect to the service."""
        self._log.create()
        self._receiver.check()

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        ledger, fenced = self._log.judged(
            lambda ledger: ledger.fenced(self._context.pipeline, self._context.sink, incarnation, origin)
        )
        if fenced != ledger:
            self._log.write(msgspec.structs.replace(ledger, incarnation=fenced.incarnation, origin=fenced.origin))
        return ledger.checkpoints

    def clean(self, incarnation: int, attempt: int) -> None:
        """Nothing: blocks that no manifest names are dropped with all other orphans."""

    def look(self) -> StoreView:
        """See `Inspectable`: the ledger; the service is not asked."""
        return StoreView.of(self._log.look())

    def close(self) -> None:
        self._log.close()
        self._receiver.close()

    # --- commits ----------------------------------------------------------------------------------------------------

    def commit_one(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        entry = LedgerEntry.of(self._context.pipeline, self._context.sink, committable, incarnation, origin)
        ledger, after = self._log.judged(lambda ledger: ledger.applied(entry))
        if after is None:
            return False
        start, refused = ledger.start(entry), 0
        for window in self._windows(committable, start):
            self._deliver(entry, window)
            letters = list(self._letters(entry, window))
            refused += len(letters)
            self._require_few(refused, committable.records)
            hit("request-answered")
            if window.end < committable.records:
                ledger = ledger.progressed(entry, window.end)
                self._log.write(ledger, letters, self._context.letters)
            else:
                self._log.write(_finished(ledger, entry), letters, self._context.letters)
        if start >= committable.records:
            self._log.write(_finished(ledger, entry))
        if refused:
            self._context.note(
                f"dead letter: sink {entry.sink!r}: {self._receiver.shown} has refused {refused:,} of "
                f"{committable.records:,} records of checkpoint {entry.checkpoint}; `exactlyonce dead-letters list "
                f"{self._context.letters}` has the reasons"
            )
        return True

    def _windows(self, committable: StoreCommittable, start: int) -> Iterator[Window]:
        return windows(staged_chunks(committable, self._context.blocks), start, self._sink.batch)

    def _lanes(self, window: Window) -> list[list[Request]]:
        return window.lanes(self._sink.batch)

    def _deliver(self, entry: LedgerEntry, window: Window) -> None:
        """Have `_answers` to all requests of *window*. Those of an earlier call are kept: it asks for the others."""
        of = msgspec.structs.replace(entry, incarnation=0), window.start
        if self._window != of:
            self._window, self._answers = of, {}
        lanes = [
            [
                Outgoing(request.number, idempotency_key(entry, request.number), request.body(self._sink.batch))
                for request in lane
            ]
            for lane in self._lanes(window)
        ]
        pauses = iter(OF_STORE)
        try:
            while True:
                before = len(self._answers)
                try:
                    self._receiver.deliver(lanes, self._answers)
                    return
                except StoreUnavailable as error:
                    self._failure = error.what
                    answered = len(self._answers) - before
                    if answered > sum(any(one.number not in self._answers for one in lane) for lane in lanes):
                        pauses = iter(OF_STORE)  # most requests are answered
                    pause_s = max(next(pauses) / 1000, self._receiver.not_before_s - time.monotonic())
                    if answered == 0 or pause_s > PAUSE_MAX_S:
                        raise  # while it answers others it is busy, and not away
                    self._pause.wait(pause_s)
        finally:
            self._failure = ""

    def _letters(self, entry: LedgerEntry, window: Window) -> Iterator[DeadLetter]:
        """The dead letters of refused records. `RecordsRefused` if there is no place for them."""
        for lane in self._lanes(window):
            for request in lane:
                refusal = self._answers[request.number]
                if refusal is not None:
                    key = idempotency_key(entry, request.number)
                    if self._context.letters == "":
                        raise RecordsRefused(
                            f"{self._receiver.shown} refuses {_counted(request)}, Idempotency-Key {key}: {refusal}.",
                            len(request.records),
                            "give the sink on_error=DeadLetters(...), which keeps such records, or let the service "
                            "take them",
                        )
                    yield from (self._letter(record, refusal, key) for record in request.records)

    def _letter(self, record: bytes, refusal: Refusal, key: str) -> DeadLetter:
        reason = Reason(
            pipeline=self._context.pipeline, operator=self._context.sink, kind="sink", holds=RECORD,
            error=f"HTTP {refusal.status}", message=f"{refusal.text}\nIdempotency-Key: {key}".strip(),
        )  # fmt: skip
        return Record(record, headers=tuple(reason.headers()))

    def _require_few(self, letters: int, records: int) -> None:
        limits = self._context.letter_limits
        if limits is not None and (exceeded := limits.exceeded(letters, records)):
            raise RecordsRefused(
                f"{self._receiver.shown} refuses {letters:,} of {records:,} records, and {exceeded}.",
                letters,
                "correct the service, or raise the limit of on_error=DeadLetters(...)",
            )


def idempotency_key(entry: LedgerEntry, number: int) -> str:
    """The name of a request, the same in each process: pipeline, checkpoint topic, sink, checkpoint, subtask, number.

    No field has a "/": names cannot, and the topic's id, which is in base64, is in its form for addresses.

    >>> of = {"pipeline": "shop", "sink": "hook", "subtask": 0, "incarnation": 2, "origin": "kZ+c/q3JTe2x0P7yLw5u8A"}
    >>> idempotency_key(LedgerEntry(checkpoint=7, previous=5, **of), 41)
    'shop/kZ-c_q3JTe2x0P7yLw5u8A/hook/7/0/41'
    """
    origin = entry.origin.translate(_URL_SAFE)
    return f"{entry.pipeline}/{origin}/{entry.sink}/{entry.checkpoint}/{entry.subtask}/{number}"


def _finished(ledger: Deliveries, entry: LedgerEntry) -> Deliveries:
    """*ledger* once all of *entry* is answered."""
    answered = {subtask: place for subtask, place in ledger.answered.items() if subtask != entry.subtask}
    checkpoints = {**ledger.checkpoints, entry.subtask: entry.checkpoint}
    return msgspec.structs.replace(ledger, checkpoints=checkpoints, answered=answered)


def _counted(request: Request) -> str:
    return "a record" if len(request.records) == 1 else f"{len(request.records):,} records"
