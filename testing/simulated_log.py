"""The decision log of the simulator: what `checkpoint.store.decision_log.DecisionLog` does, on the broker model, in
single steps.

Every step can be the last: a crash, a pause or a lost answer may come between any two requests.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Generator, Iterable
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.committable import coordinator_id
from exactlyonce.checkpoint.records.encoding import Decision, DecisionKey, encode
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Incarnation
from exactlyonce.checkpoint.store.decision_log import LIVES_KEPT
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError, Fenced
from exactlyonce.testing.broker.interface import Error, Isolation, NoAnswer

World = Any
"""Of the simulation that it is part of."""
TOPIC = "p.checkpoints"
TIMEOUT_MS = 20_000
PAUSE_MS = 5


class SimulatedLog:
    """The decision log as one life writes it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.history = History("p")
        self.life = Incarnation(0, "", 0, 0, 0)
        self._transactional_id = coordinator_id("p")
        self._producer_id, self._epoch = -1, -1
        self._ended: ExactlyOnceError | None = None

    def open(self) -> Generator[int | None, None, History]:
        """Fence every older coordinator, then read what they decided."""
        answer = yield from self.world.until_answered(
            "init_transactions", self._transactional_id, TIMEOUT_MS, again=(Error.CONCURRENT_TRANSACTIONS,)
        )
        self._producer_id, self._epoch = answer.producer_id, answer.epoch
        while True:
            log = yield from self.world.until_answered("fetch", TOPIC, 0, 0, Isolation.READ_COMMITTED)
            if log.last_stable_offset == log.high_watermark:
                break
            yield self.world.clock.monotonic_ms() + PAUSE_MS
        for record in log.records:
            value, digest = record.value or (None, None)
            self.history.read(record.key.encode(), value, digest)
        self.history.finish_reading()
        self.history.halt_if_damaged()
        return self.history

    def begin_life(self) -> Generator[int | None, None, Incarnation]:
        """Write this life's first record, which gives it its incarnation."""
        now_ms = self.world.clock.now_ms()
        fenced_below = max((each.fenced_below for each in self.history.incarnations.values()), default=0)
        number = self.history.incarnation_latest + 1
        life = Incarnation(number, "host", 1, now_ms, now_ms, fenced_below)
        old = [each for each in self.history.incarnations if each <= number - LIVES_KEPT]
        forgotten = [DecisionKey(Incarnation, each) for each in old]
        if (yield from self._commit([life], forgotten, [])) is not Outcome.DONE:
            raise BrokerUnavailable("The start of this life was not confirmed.")
        self.life = life
        return life

    def append(
        self, *records: Decision, manifests_dropped: Iterable[int] = (), blocks_dropped: Iterable[BlockRef] = ()
    ) -> Generator[int | None, None, Outcome]:
        """All of it in one transaction, or nothing."""
        dropped = [key for checkpoint in manifests_dropped for key in self.history.keys_of(checkpoint)]
        return (yield from self._commit(list(records), dropped, list(blocks_dropped)))

    def heartbeat(self, fenced_below: int | None = None) -> Generator[int | None, None, Outcome]:
        """Show that this life goes on; and what was fenced."""
        below = self.life.fenced_below if fenced_below is None else fenced_below
        beat = msgspec.structs.replace(self.life, heartbeat_ms=self.world.clock.now_ms(), fenced_below=below)
        outcome = yield from self._commit([beat], [], [])
        if outcome is Outcome.DONE:
            self.life = beat
        return outcome

    def _commit(
        self, records: list[Decision], dropped: list[DecisionKey], blocks: list[BlockRef]
    ) -> Generator[int | None, None, Outcome]:
        if self._ended is not None:
            raise self._ended
        staged = self.history.copy()
        for record in records:
            staged.admit(record)
        staged.forget(dropped)
        batches: defaultdict[int, list[tuple[str, Any]]] = defaultdict(list)
        for record in records:
            value = encode(record)
            batches[0].append((str(DecisionKey.of(record)), (value, hashlib.sha256(value).digest())))
        batches[0] += [(str(key), None) for key in dropped]
        for ref in blocks:
            batches[ref.partition].append((ref.key, None))
        for partition, batch in batches.items():
            if batch and not (yield from self._produce(partition, batch)):
                yield from self._abort()
                return Outcome.NOT_WRITTEN
        outcome = yield from self._end()
        if outcome is Outcome.DONE:
            self.history = staged
        return outcome

    def _produce(self, partition: int, batch: list[tuple[str, Any]]) -> Generator[int | None, None, bool]:
        """Whether the batch is written; repeated under the same sequence while no answer comes."""
        deadline_ms = self.world.deadline_ms()
        place = (self._transactional_id, self._producer_id, self._epoch, TOPIC, partition, batch)
        while True:
            yield None
            try:
                error = self.world.ask("produce", *place, sequence=0).error
            except NoAnswer:
                if self.world.clock.monotonic_ms() >= deadline_ms:
                    return False
                continue
            if error is Error.NONE:
                return True
            if error is not Error.CONCURRENT_TRANSACTIONS:
                self._fenced(error)

    def _abort(self) -> Generator[int | None, None, None]:
        """The commit was not asked for: nothing of it can ever be seen."""
        yield None
        try:
            error = self.world.ask("end_txn", self._transactional_id, self._producer_id, self._epoch, False)
        except NoAnswer:
            self._ended = BrokerUnavailable("A transaction could neither be written nor aborted.")
            return
        if error is not Error.NONE:
            self._fenced(error)
        self._epoch += 1

    def _end(self) -> Generator[int | None, None, Outcome]:
        """Ask for the commit; from here on only its success proves anything."""
        deadline_ms = self.world.deadline_ms()
        while True:
            yield None
            try:
                error = self.world.ask("end_txn", self._transactional_id, self._producer_id, self._epoch, True)
            except NoAnswer:
                if self.world.clock.monotonic_ms() < deadline_ms:
                    continue
                self._ended = BrokerUnavailable("What became of a decision is not known.")
                return Outcome.UNKNOWN
            if error is Error.NONE:
                self._epoch += 1
                return Outcome.DONE
            if error is not Error.CONCURRENT_TRANSACTIONS:
                self._fenced(error)

    def _fenced(self, error: Error) -> None:
        self._ended = Fenced(f"A newer coordinator has taken over ({error.name}).")
        raise self._ended
