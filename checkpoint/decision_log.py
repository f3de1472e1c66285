"""The decision log: partition 0 of the checkpoint topic, as one incarnation of a coordinator writes it. Pure.

Only the transactional producer of the newest coordinator writes here. Its initialisation, once per incarnation, fences
every older coordinator before the log is read, so what is read is final, and whatever is appended later is appended by
this incarnation. An append is one transaction: all of it, or nothing, or, when that cannot be known, the end of this
incarnation; the next one reads what is true. No transaction is ever ended by closing a client. Every function that asks
is a procedure (see `requests`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.committable import coordinator_id
from exactlyonce.checkpoint.records.encoding import Decision, DecisionKey, encode
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Incarnation, StoredBlock
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.references import tombstones
from exactlyonce.checkpoint.requests import (
    Append,
    Appended,
    DescribeProducers,
    DescribeTransactions,
    Ends,
    FirstOffsets,
    LogEnds,
    LogRead,
    LookOnce,
    Pause,
    Procedure,
    ReadLog,
    RemoveBlocks,
    Request,
    Unreadable,
    Write,
    concurrently,
    relayed,
    retrying,
)
from exactlyonce.checkpoint.transactions.broker_answers import Fate, Outcome, TransactionState
from exactlyonce.checkpoint.transactions.markers import held_by
from exactlyonce.checkpoint.transactions.transactional_writer import TransactionalWriter
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError, Facts, Fenced, Halt, Undetermined, require

R = TypeVar("R")

DECISIONS = 0
"""The partition of the decision log."""
APPEND_TIMEOUT_MS = 120_000
"""How long an append, what is asked beside it, and a coordinator's other requests outlast a broker that is away."""
STABLE_TIMEOUT_MS, STABLE_PAUSE_MS = 10_000, 2
LOOK_WAIT_MS = 250
"""How long the first look waits: markers take some 10 ms, on a busy machine some 100."""
STABLE_PAUSE_SHARE = 10
"""Later pauses are this fraction of what was waited: markers take milliseconds, or do not come."""
SUCCESSOR_TIMEOUT_MS = 3_000
"""How long a fenced incarnation waits for the first record of the one that fenced it, to say who it is."""
SUCCESSOR_PAUSE_MS = 100
HEARTBEAT_DUE_MS = 5_000
"""An append carries a heartbeat if the last one is older."""
INCARNATIONS_KEPT = 10
TOMBSTONES_REMEMBERED = 100_000
"""The newest ones. Only a defect could name a tombstoned block again, and it would name a recent one."""
DIGEST_HEADER = "sha256"


@dataclass(frozen=True)
class Staged:
    """The records of one append, and the history that they lead to."""

    history: History
    writes: tuple[Write, ...]
    incarnation: Incarnation | None
    dropped: tuple[StoredBlock, ...]
    deadline_ms: int


class DecisionLog:
    """The decision log of *pipeline*, as one incarnation of its coordinator writes it. For one thread at a time.

    Before `open`, whatever older incarnations have left is to be settled (`checkpoint.transactions.settling`).
    """

    def __init__(
        self, pipeline: str, topic: TopicInfo, clock: Clock, append_timeout_ms: int = APPEND_TIMEOUT_MS
    ) -> None:
        self.pipeline = pipeline
        self.topic = topic
        self.append_timeout_ms = append_timeout_ms
        self._clock = clock
        self._writer = TransactionalWriter(coordinator_id(pipeline), topic.name, clock)
        self._opened = False
        self._history = History(pipeline)
        self._incarnation: Incarnation | None = None
        self._produced: Staged | None = None
        self._tombstoned: dict[str, None] = {}

    @property
    def history(self) -> History:
        """The durable decisions, including those that this incarnation has appended."""
        return self._history

    @property
    def incarnation(self) -> Incarnation:
        """The record of this incarnation, as it last appended it."""
        assert self._incarnation is not None, "it has begun"
        return self._incarnation

    @property
    def has_begun(self) -> bool:
        """Whether there is an `incarnation`."""
        return self._incarnation is not None

    # --- opening

    def open(self) -> Procedure[History]:
        """Fence every older coordinator of the pipeline, then read what they have decided."""
        require(not self._opened, "A decision log is opened once: a second initialisation would fence itself")
        self._opened = True
        yield from self._writer.open()
        self._history = yield from self._read((yield from self._stable_end()))
        if self._history.latest is not None:
            self.topic = _frozen(self.topic, self._history.latest.block_partitions)
        return self._history

    def peek(self) -> Procedure[History | None]:
        """The decisions so far, for whoever may not need to `open`: fences nobody; None if something is undecided."""
        ends: Ends = yield LogEnds()
        return (yield from self._read(ends.end)) if ends.stable == ends.end else None

    def peek_at_stable(self) -> Procedure[History]:
        """Those before whatever is undecided, which say who leads."""
        return (yield from self._read((yield LogEnds()).stable))

    def begin(
        self, host: str, process: int, above: int = 0, *, machine: str = "", bounded: bool = False, storage: str = TOPIC
    ) -> Procedure[Incarnation]:
        """Write this incarnation's first record, which gives it its number; forget all but the last ones.

        It is above all in the log and *above*, the highest that a transactional id names. *storage* is where it
        writes blocks: whoever comes later knows that before there is any.
        """
        require(self._opened and self._incarnation is None, "An incarnation begins once, after the log is opened")
        now_ms = self._clock.now_ms()
        number = max(self._history.incarnation_latest, above) + 1
        fenced_below = max((each.fenced_below for each in self._history.incarnations.values()), default=0)
        first = Incarnation(
            incarnation=number, host=host, process=process, started_at_ms=now_ms, heartbeat_ms=now_ms,
            fenced_below=fenced_below, bounded=bounded, storage=storage, machine=machine,
        )  # fmt: skip
        kept = number - INCARNATIONS_KEPT
        forgotten = [DecisionKey(Incarnation, each) for each in self._history.incarnations if each <= kept]
        outcome = yield from self._append(self._staged([first], forgotten, []))
        if outcome is not Outcome.DONE:
            raise BrokerUnavailable(
                f"The broker did not confirm the start of {self.pipeline} within {self.append_timeout_ms / 1000:.0f} "
                f"s. Nothing was read or written yet: run it again."
            )
        return first

    def resume(self, incarnation: int) -> Incarnation:
        """Go on with one that another process of it has begun; `Fenced` if it is not the newest any more."""
        require(self._opened and self._incarnation is None, "An incarnation is taken up once, after the log is opened")
        newest = self._history.newest_incarnation
        if newest is None or newest.incarnation != incarnation:
            raise self._ended_by(fenced(self.pipeline, incarnation, newest))
        self._incarnation = newest
        return newest

    def _read(self, end: int) -> Procedure[History]:
        read: LogRead = yield ReadLog(end)
        return history_of(self.pipeline, self.topic.name, read)

    def _stable_end(self) -> Procedure[int]:
        """The end of the log; nothing in it is undecided."""
        ends: Ends = yield LogEnds()
        stable = yield from self._stable(ends)
        if stable < ends.end:
            if held_by(self._writer.producer.producer_id, (yield DescribeProducers(((self.topic.name, DECISIONS),)))):
                raise BrokerUnavailable(
                    f"The broker has ended a transaction of an older coordinator in {self.topic.name} and lost the "
                    f"marker that shows it. Nothing is lost: run it again, the next incarnation sees to it first."
                )
            raise Halt(
                f"{self.topic.name}[{DECISIONS}] has an open transaction at offset {stable} that is not of "
                f"{self.pipeline}'s coordinator: what it hides cannot be read. Find its owner with "
                f"`kafka-transactions --bootstrap-server <servers> find-hanging --topic {self.topic.name}`, end it, "
                f"and run again."
            )
        return ends.end

    def _stable(self, ends: Ends) -> Procedure[int]:
        """How far readers get, once that is as far as *ends* goes, or the markers that are missing do not come."""
        began_ms, end, now = self._clock.monotonic_ms(), ends.end, ends
        while now.stable < end and (yield from self._paused(began_ms)):
            now = yield LogEnds()
        return now.stable

    def _paused(self, since_ms: int) -> Procedure[bool]:
        """Wait a little for markers; False: they do not come, after so long."""
        waited_ms = self._clock.monotonic_ms() - since_ms
        if waited_ms > STABLE_TIMEOUT_MS:
            return False
        yield Pause(max(STABLE_PAUSE_MS, waited_ms // STABLE_PAUSE_SHARE))
        return True

    def _is_visible(self, look: LookOnce) -> Procedure[bool]:
        """Whether readers see what was just committed; False also if the broker stays away.

        Only then may anything rely on it, and another transaction begin: a broker may lose the markers of the last one
        (see `settling`), and the end of the next would decide it. That readers get past it proves nothing: whoever
        slept here may have been fenced, and what lacked its markers may have been aborted for it.
        """
        began_ms = self._clock.monotonic_ms()

        def attempt(_: int) -> Procedure[bool]:
            fates: dict[int, Fate | None] = yield look
            while None in fates.values() and (yield from self._paused(began_ms)):
                fates = yield look
            return set(fates.values()) == {Fate.COMMITTED}

        try:
            return (yield from retrying(attempt, self._clock, self._deadline_ms()))
        except BrokerUnavailable:
            return False

    def _deadline_ms(self) -> int:
        return self._clock.monotonic_ms() + self.append_timeout_ms

    # --- appending

    @property
    def refusal(self) -> str:
        """Why the last append was `NOT_WRITTEN`, in the broker's or its client's words."""
        return self._writer.refusal

    def append(
        self, *records: Decision, manifests_dropped: Iterable[int] = (), blocks_dropped: Iterable[StoredBlock] = ()
    ) -> Procedure[Outcome]:
        """Write *records* and tombstone what is dropped, in one transaction; blocks elsewhere are removed behind it.

        A dropped manifest goes with its finalized mark and repairs. `NOT_WRITTEN` is certain: the commit was never
        asked for. After `UNKNOWN` the log refuses all further use: this incarnation must end. Raises `Fenced` when a
        newer coordinator has taken over; what became of the append is then the newer one's to read.
        """
        return (yield from self._append(self._admitted(records, manifests_dropped, blocks_dropped)))

    def heartbeat(
        self, fenced_below: int | None = None, *, ended: bool = False, cancelled: str = "", condemned: bool = False
    ) -> Procedure[Outcome]:
        """Show that this incarnation goes on, or has *ended*; all others are fields of `Incarnation`."""
        require(self._incarnation is not None, "An incarnation must have begun")
        below = self.incarnation.fenced_below if fenced_below is None else fenced_below
        beat = msgspec.structs.replace(
            self.incarnation, heartbeat_ms=self._clock.now_ms(), fenced_below=below, ended=ended, cancelled=cancelled,
            condemned=condemned,
        )  # fmt: skip
        return (yield from self._append(self._staged([beat], [], [])))

    def _append(self, staged: Staged) -> Procedure[Outcome]:
        if not (yield from self._produce(staged)):
            return Outcome.NOT_WRITTEN
        return (yield from self.commit())

    def recording(self, procedure: Procedure[R]) -> Procedure[R]:
        """*procedure*, whose every `Append` is written here; whoever watches is told by `Appended`."""
        return relayed(procedure, self._answered)

    def _answered(self, request: Request) -> Procedure[Any]:
        if not isinstance(request, Append):
            return (yield request)
        outcome = yield from self._append(
            self._admitted(request.records, request.manifests_dropped, request.blocks_dropped)
        )
        if outcome is Outcome.DONE:
            yield Appended(request.records)
        return outcome

    # --- an append in its steps

    def produce(self, *records: Decision) -> Procedure[bool]:
        """Bring *records* into a transaction, which waits for `commit` or `take_back`; False: it was not written.

        The call itself raises `InvariantViolation` if they must not be, `TooLarge` for one that is over its limit.
        """
        return self._produce(self._admitted(records))

    def commit(self) -> Procedure[Outcome]:
        """Decide what was produced: `DONE` once readers see it, or `UNKNOWN`.

        A look waits at the brokers while the commit is asked for, and is answered as soon as the markers are there.
        """
        assert self._produced is not None, "it was produced"
        staged, look = self._produced, self._writer.look
        outcome: Outcome
        committed = concurrently(self._writer.commit(staged.deadline_ms), _waited(look))
        outcome, seen = yield from self._unless_fenced(committed)
        if outcome is Outcome.DONE and not (seen or (yield from self._is_visible(look))):
            self._ended_by(
                BrokerUnavailable(
                    f"The broker took a decision into {self.topic.name}, but does not show it to readers. This "
                    f"incarnation ends; the next one sees to it."
                )
            )
            return Outcome.UNKNOWN
        if outcome is Outcome.DONE:
            self._history = staged.history
            self._remember_tombstones(each.ref.key for each in staged.dropped)
            self._incarnation = staged.incarnation or self._incarnation
            if elsewhere := tuple(each for each in staged.dropped if each.storage != TOPIC):
                yield RemoveBlocks(elsewhere)
        return outcome

    def take_back(self, why: str) -> Procedure[None]:
        """Abort what was produced: it was never decided."""
        yield from self._unless_fenced(self._writer.take_back(why))

    def _produce(self, staged: Staged) -> Procedure[bool]:
        self._produced = staged
        return (yield from self._unless_fenced(self._writer.produce(staged.writes, staged.deadline_ms)))

    def _unless_fenced(self, procedure: Procedure[R]) -> Procedure[R]:
        """*procedure*; where this coordinator was fenced, the error says by whom."""
        try:
            return (yield from procedure)
        except Fenced as error:
            raise self._ended_by((yield from self._fenced())) from error

    def _admitted(
        self,
        records: Sequence[Decision],
        manifests_dropped: Iterable[int] = (),
        blocks_dropped: Iterable[StoredBlock] = (),
    ) -> Staged:
        """What an append of *records* writes, as the history admits it; a heartbeat goes with it when one is due."""
        require(self._incarnation is not None, "Nothing is appended before the incarnation has begun")
        dropped = [key for checkpoint in manifests_dropped for key in self._history.keys_of(checkpoint)]
        blocks = list(blocks_dropped)
        anyway = not (records or dropped or tombstones(blocks))  # a transaction without records would be none
        return self._staged([*records, *self._due_heartbeat(anyway=anyway)], dropped, blocks)

    def _staged(self, records: Sequence[Decision], dropped: list[DecisionKey], blocks: list[StoredBlock]) -> Staged:
        staged = self._history.copy()
        for record in records:
            self._require_own(record)
            staged.admit(record)
        staged.forget(dropped)
        needed = staged.references() if blocks else set()
        require(not any(ref.key in needed for _, ref in blocks), "A block that a manifest names must not be dropped")
        newest = next((each for each in records if isinstance(each, Incarnation)), None)
        require(all(ref.partition != DECISIONS for _, ref in blocks), "Blocks do not lie among the decisions")
        writes = (*_writes(records, dropped), *tombstones(blocks))
        return Staged(staged, writes, newest, tuple(blocks), self._deadline_ms())

    def _due_heartbeat(self, *, anyway: bool) -> list[Incarnation]:
        now_ms = self._clock.now_ms()
        if not anyway and abs(now_ms - self.incarnation.heartbeat_ms) < HEARTBEAT_DUE_MS:
            return []
        return [msgspec.structs.replace(self.incarnation, heartbeat_ms=now_ms)]

    def _ended_by(self, reason: ExactlyOnceError) -> ExactlyOnceError:
        self._writer.end(reason)
        return reason

    def _remember_tombstones(self, keys: Iterable[str]) -> None:
        self._tombstoned.update(dict.fromkeys(keys))
        for key in list(itertools.islice(self._tombstoned, max(0, len(self._tombstoned) - TOMBSTONES_REMEMBERED))):
            del self._tombstoned[key]

    def _require_own(self, record: Decision) -> None:
        if self._incarnation is not None:
            own = record.incarnation == self._incarnation.incarnation
            require(own, "An incarnation writes only decisions of its own")

    def _fenced(self) -> Procedure[ExactlyOnceError]:
        """`Fenced` by a newer coordinator, as far as it can be learnt by which; or `Undetermined`: by the broker.

        It ends a transaction that takes too long, as where this process stood still in one. Nobody has initialised the
        id since then; a newer coordinator does so within milliseconds of ending what it finds.
        """
        own = self._incarnation.incarnation if self._incarnation else self._history.incarnation_latest
        newest, deadline_ms = (yield from self._newest()), self._clock.monotonic_ms() + SUCCESSOR_TIMEOUT_MS
        while (newest is None or newest.incarnation <= own) and self._clock.monotonic_ms() < deadline_ms:
            yield Pause(SUCCESSOR_PAUSE_MS)
            newest = yield from self._newest()
        if newest is None or newest.incarnation <= own:
            name = self._writer.transactional_id
            with suppress(BrokerUnavailable):
                state: TransactionState | None = (yield DescribeTransactions((name,)))[name]
                if state is not None and state.state == "CompleteAbort":
                    return Undetermined(
                        f"The broker has ended a transaction in {self.topic.name} that took too long. This incarnation "
                        f"ends; the next one reads what is true. Nothing is lost."
                    )
        return fenced(self.pipeline, own, newest)

    def _newest(self) -> Procedure[Incarnation | None]:
        try:
            history: History = yield from self._read((yield from self._stable_end()))
        except ExactlyOnceError:
            return None
        return history.newest_incarnation

    # --- beside the log

    def dead(self, refs: Iterable[BlockRef]) -> Procedure[list[BlockRef]]:
        """Those of *refs*, in the storage of this incarnation, that a manifest must not name: they may be gone.

        A block goes in three ways: this incarnation drops it (older ones are fenced, and dropped only what a manifest
        that this one has read no longer names); of the topic, somebody deletes the first records of a partition, or
        the topic. A key is never written twice, so no other record can replace it.
        """

        def attempt(_: int) -> Procedure[tuple[int, ...] | None]:
            firsts: tuple[int, ...] | None = yield FirstOffsets()
            return firsts

        firsts = yield from retrying(attempt, self._clock, self._deadline_ms())
        if firsts is None:
            return list(refs)
        in_topic = self.incarnation.storage == TOPIC
        return [ref for ref in refs if ref.key in self._tombstoned or (in_topic and ref.offset < firsts[ref.partition])]

    def close(self) -> None:
        """Write nothing more, and end no transaction.

        After `DONE` and `NOT_WRITTEN` none is open. After `UNKNOWN` one may be: aborting it would contradict a decision
        that the next incarnation may read, so it is left to that one's initialisation.
        """
        self._writer.end(BrokerUnavailable(f"The decision log of {self.pipeline} is closed."))


def _waited(look: LookOnce) -> Procedure[bool]:
    """Whether readers see it before a short time is over; not to know is no."""
    try:
        fates: dict[int, Fate | None] = yield msgspec.structs.replace(look, wait_ms=LOOK_WAIT_MS)
    except BrokerUnavailable:
        return False
    return set(fates.values()) == {Fate.COMMITTED}


def fenced(pipeline: str, own: int, newest: Incarnation | None) -> Fenced:
    """The error of an incarnation that is not the newest any more; its facts say which is, as far as it can be read."""
    if newest is None or newest.incarnation <= own:
        return Fenced(superseded(pipeline, own, newest))
    by: Facts = {"by_incarnation": newest.incarnation, "by_host": newest.host, "by_process": newest.process}
    return Fenced(superseded(pipeline, own, newest), **by)


def superseded(pipeline: str, own: int, newest: Incarnation | None) -> str:
    """The text for an incarnation that is not the newest any more; *newest* as far as it can be read."""
    if newest is None or newest.incarnation <= own:
        return (
            f"Incarnation {own} of {pipeline} was fenced: a newer instance is starting. This one ends; nothing is lost."
        )
    return (
        f"Incarnation {newest.incarnation} of {pipeline} (process {newest.process} on {newest.host}) has "
        f"taken over from incarnation {own}. This one ends; nothing is lost."
    )


def take_in(history: History, read: LogRead) -> None:
    """Go on with *history* by what *read* found behind it."""
    for each in read.items:
        if isinstance(each, Unreadable):
            history.skip(each.first, each.behind)
        else:
            history.read(each.key, each.value, each.digest)
    history.finish_reading()


def history_of(pipeline: str, topic: str, read: LogRead) -> History:
    """The history that *read*, of the decision log of *pipeline*, gives; Halt if its beginning is missing."""
    history = History(pipeline)
    take_in(history, read)
    if read.start > 0 and history.latest is None:
        raise Halt(
            f"{topic}[{DECISIONS}] begins at offset {read.start} and holds no manifest: its first records "
            f"were deleted, and with them what {pipeline} has emitted. Restore the topic, or "
            f"`exactlyonce reset {pipeline}`."
        )
    return history


def _frozen(topic: TopicInfo, partitions: int) -> TopicInfo:
    """*topic* with the partition count that its manifests were written with: blocks stay where they are looked for."""
    if topic.partitions < partitions:
        raise Halt(
            f"Topic {topic.name} has {topic.partitions} partitions, but its manifests speak of {partitions}: it is not "
            f"the topic that they were written to. Restore it."
        )
    return msgspec.structs.replace(topic, partitions=partitions)


def _writes(records: Sequence[Decision], dropped: list[DecisionKey]) -> tuple[Write, ...]:
    values = [(str(DecisionKey.of(record)), encode(record)) for record in records]
    return (
        *(Write(DECISIONS, key, value, ((DIGEST_HEADER, hashlib.sha256(value).digest()),)) for key, value in values),
        *(Write(DECISIONS, str(key), None) for key in dropped),
    )
