"""The decision log: partition 0 of the checkpoint topic, as one incarnation of a coordinator writes it.

Only the transactional producer of the newest coordinator writes here. Its initialisation, once per incarnation, fences
every older coordinator before the log is read. So what is read is final, and only this incarnation appends to it. An
append is one transaction: all of it, or nothing; if its outcome is unknown, this incarnation ends, and the next one
reads the log. No transaction is ever ended by closing a client.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.encoding import (
    PART_BYTES,
    Decision,
    DecisionKey,
    ManifestPart,
    encode,
    encode_in_parts,
)
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    BlockRef,
    Failure,
    Incarnation,
    Manifest,
    StoredBlock,
    TopicInfo,
    coordinator_id,
)
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import (
    Ends,
    Fate,
    LogRead,
    Outcome,
    Procedure,
    Request,
    TransactionState,
    TxnState,
    Unreadable,
    Write,
    concurrently,
    relayed,
    retrying,
)
from exactlyonce.checkpoint.transactions.commit import held_by
from exactlyonce.checkpoint.transactions.transactional_writer import TransactionalWriter
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError, Facts, Fenced, Halt, Undetermined, require

R = TypeVar("R")

DECISIONS = 0
"""The partition of the decision log."""
APPEND_TIMEOUT_MS = 120_000
"""How long an append, and a coordinator's other requests, wait for a broker that is away."""
STABLE_TIMEOUT_MS, STABLE_PAUSE_MS = 10_000, 2
LOOK_WAIT_MS = 250
"""How long the first look waits: markers take some 10 ms, on a busy machine some 100."""
STABLE_PAUSE_SHARE = 10
"""Later pauses are this fraction of the time waited so far: markers take milliseconds, or do not come."""
SUCCESSOR_TIMEOUT_MS = 3_000
"""How long a fenced incarnation waits for its successor's first record, to name it."""
SUCCESSOR_PAUSE_MS = 100
HEARTBEAT_DUE_MS = 5_000
"""An append carries a heartbeat if the last one is older."""
INCARNATIONS_KEPT = 10
TOMBSTONES_REMEMBERED = 100_000
"""Only a defect could name a tombstoned block again, and it would name a recent one."""
DIGEST_HEADER = "sha256"


@dataclass(frozen=True)
class Staged:
    history: History
    writes: tuple[Write, ...]
    incarnation: Incarnation | None
    dropped: tuple[StoredBlock, ...]
    deadline_ms: int


class DecisionLog:
    """The decision log of *pipeline*, as one incarnation of its coordinator writes it. For one thread at a time.

    Before `open`, transactions of older incarnations must be settled (`checkpoint.transactions.commit.settle`).
    """

    def __init__(
        self,
        pipeline: str,
        topic: TopicInfo,
        clock: Clock,
        append_timeout_ms: int = APPEND_TIMEOUT_MS,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """*part_bytes*: see `encode_in_parts`."""
        self.pipeline = pipeline
        self.topic = topic
        self.append_timeout_ms = append_timeout_ms
        self._part_bytes = part_bytes
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
        return self._incarnation is not None

    # --- opening

    def open(self) -> Procedure[History]:
        """Fence every older coordinator of the pipeline, then read their decisions."""
        require(not self._opened, "A decision log is opened once: a second initialisation would fence itself")
        self._opened = True
        yield from self._writer.open()
        self._history = yield from self._read((yield from self._stable_end()))
        if self._history.latest is not None:
            self.topic = _frozen(self.topic, self._history.latest.block_partitions)
        return self._history

    def peek(self) -> Procedure[History | None]:
        """The decisions so far, without fencing anybody; None if something is undecided."""
        ends: Ends = yield ask.LogEnds()
        return (yield from self._read(ends.end)) if ends.stable == ends.end else None

    def peek_at_stable(self) -> Procedure[History]:
        """The decisions before anything undecided: they name the leader."""
        return (yield from self._read((yield ask.LogEnds()).stable))

    def begin(
        self, host: str, process: int, above: int = 0, *, machine: str = "", bounded: bool = False, storage: str = TOPIC
    ) -> Procedure[Incarnation]:
        """Write this incarnation's first record, which gives it its number; forget all but the last ones.

        The number is above all in the log, and above *above*, the highest in a transactional id. The record names
        *storage* before this incarnation writes any block there.
        """
        require(self._opened and self._incarnation is None, "An incarnation begins once, after the log is opened")
        now_ms = self._clock.now_ms()
        number = max(self._history.incarnation_latest, above) + 1
        fenced_below = max((life.fenced_below for life in self._history.incarnations.values()), default=0)
        first = Incarnation(
            incarnation=number, host=host, process=process, started_at_ms=now_ms, heartbeat_ms=now_ms,
            fenced_below=fenced_below, bounded=bounded, storage=storage, machine=machine,
        )  # fmt: skip
        kept = number - INCARNATIONS_KEPT
        forgotten = [DecisionKey(Incarnation, older) for older in self._history.incarnations if older <= kept]
        outcome = yield from self._append(self._staged([first], forgotten, []))
        if outcome is Outcome.NOT_WRITTEN:
            raise BrokerUnavailable(
                f"The broker did not take the start of {self.pipeline}: {self.refusal} Nothing was read or written "
                f"yet: run it again."
            )
        if outcome is not Outcome.DONE:
            raise BrokerUnavailable(
                f"The broker did not confirm the start of {self.pipeline} within {self.append_timeout_ms / 1000:.0f} "
                f"s. Nothing was read or written yet: run it again."
            )
        return first

    def resume(self, incarnation: int) -> Incarnation:
        """Continue an incarnation that another process has begun; `Fenced` if it is not the newest any more."""
        require(self._opened and self._incarnation is None, "An incarnation is taken up once, after the log is opened")
        newest = self._history.newest_incarnation
        if newest is None or newest.incarnation != incarnation:
            raise self._ended_by(fenced(self.pipeline, incarnation, newest))
        self._incarnation = newest
        return newest

    def _read(self, end: int) -> Procedure[History]:
        read: LogRead = yield ask.ReadLog(end)
        return history_of(self.pipeline, self.topic.name, read)

    def _stable_end(self) -> Procedure[int]:
        """The end of the log; nothing in it is undecided."""
        ends: Ends = yield ask.LogEnds()
        stable = yield from self._stable(ends)
        if stable < ends.end:
            producers = yield ask.DescribeProducers(((self.topic.name, DECISIONS),))
            if held_by(self._writer.producer.producer_id, producers):
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
        """How far readers get, once it is as far as *ends* goes, or missing markers do not come."""
        began_ms, end, now = self._clock.monotonic_ms(), ends.end, ends
        while now.stable < end and (yield from self._paused(began_ms)):
            now = yield ask.LogEnds()
        return now.stable

    def _paused(self, since_ms: int) -> Procedure[bool]:
        """Wait a little for markers; False: they have not come for too long."""
        waited_ms = self._clock.monotonic_ms() - since_ms
        if waited_ms > STABLE_TIMEOUT_MS:
            return False
        yield ask.Pause(max(STABLE_PAUSE_MS, waited_ms // STABLE_PAUSE_SHARE))
        return True

    def _is_visible(self, look: ask.LookOnce) -> Procedure[bool]:
        """Whether readers see the last commit; False also if the broker stays away.

        Only then may anything rely on it, and another transaction begin. That readers get past it proves nothing: this
        process may have slept and been fenced, and the transaction without markers aborted.
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
        """Write *records* and tombstone dropped ones in one transaction; blocks elsewhere are removed after it.

        A dropped manifest goes with its finalized mark and repairs. `NOT_WRITTEN` is certain: the commit was never
        asked for. After `UNKNOWN` the log refuses all further use: this incarnation must end. Raises `Fenced` when a
        newer coordinator has taken over, which then reads the fate of the append.
        """
        return (yield from self._append(self._admitted(records, manifests_dropped, blocks_dropped)))

    def heartbeat(
        self,
        fenced_below: int | None = None,
        *,
        ended: bool = False,
        cancelled: str = "",
        condemned: bool = False,
        failed: Failure | None = None,
    ) -> Procedure[Outcome]:
        """Write this incarnation's record again; the arguments are its fields."""
        require(self._incarnation is not None, "An incarnation must have begun")
        below = self.incarnation.fenced_below if fenced_below is None else fenced_below
        beat = msgspec.structs.replace(
            self.incarnation, heartbeat_ms=self._clock.now_ms(), fenced_below=below, ended=ended, cancelled=cancelled,
            condemned=condemned, **(failed._asdict() if failed is not None else {}),
        )  # fmt: skip
        return (yield from self._append(self._staged([beat], [], [])))

    def _append(self, staged: Staged) -> Procedure[Outcome]:
        if not (yield from self._produce(staged)):
            return Outcome.NOT_WRITTEN
        return (yield from self.commit())

    def recording(self, procedure: Procedure[R]) -> Procedure[R]:
        """*procedure*, with every `Append` written here, and announced by `Appended`."""
        return relayed(procedure, self._answered)

    def _answered(self, request: Request) -> Procedure[Any]:
        if not isinstance(request, ask.Append):
            return (yield request)
        outcome = yield from self._append(
            self._admitted(request.records, request.manifests_dropped, request.blocks_dropped)
        )
        if outcome is Outcome.DONE:
            yield ask.Appended(request.records)
        return outcome

    # --- an append in its steps

    def produce(self, *records: Decision) -> Procedure[bool]:
        """Bring *records* into a transaction, which waits for `commit` or `take_back`; False: it was not written.

        The call itself raises `InvariantViolation` if they must not be written, `TooLarge` for one over its limit.
        """
        return self._produce(self._admitted(records))

    def commit(self) -> Procedure[Outcome]:
        """Commit the produced records: `DONE` once readers see them, or `UNKNOWN`.

        A look waits at the brokers during the commit, and is answered as soon as the markers are there.
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
            self._remember_tombstones(block.ref.key for block in staged.dropped)
            self._incarnation = staged.incarnation or self._incarnation
            if elsewhere := tuple(block for block in staged.dropped if block.storage != TOPIC):
                yield ask.RemoveBlocks(elsewhere)
        return outcome

    def take_back(self, why: str) -> Procedure[None]:
        yield from self._unless_fenced(self._writer.take_back(why))

    def _produce(self, staged: Staged) -> Procedure[bool]:
        self._produced = staged
        return (yield from self._unless_fenced(self._writer.produce(staged.writes, staged.deadline_ms)))

    def _unless_fenced(self, procedure: Procedure[R]) -> Procedure[R]:
        """*procedure*; if this coordinator was fenced, the error names its successor."""
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
        """The append of *records*, as the history admits them; a heartbeat goes with it when one is due."""
        require(self._incarnation is not None, "Nothing is appended before the incarnation has begun")
        dropped = [key for checkpoint in manifests_dropped for key in self._history.keys_of(checkpoint)]
        blocks = list(blocks_dropped)
        anyway = not (records or dropped or tombstones(blocks))  # a transaction without records would be none
        return self._staged([*records, *self._due_heartbeat(anyway=anyway)], dropped, blocks)

    def _staged(self, records: Sequence[Decision], dropped: list[DecisionKey], blocks: list[StoredBlock]) -> Staged:
        staged, written = self._history.copy(), list[tuple[DecisionKey, bytes]]()
        for record in records:
            self._require_own(record)
            values = self._values(record)
            staged.admit(record, [key for key, _ in values[:-1]])
            written += values
        staged.forget(dropped)
        needed = staged.references() if blocks else set()
        require(not any(ref.key in needed for _, ref in blocks), "A block that a manifest names must not be dropped")
        newest = next((record for record in records if isinstance(record, Incarnation)), None)
        require(all(ref.partition != DECISIONS for _, ref in blocks), "Blocks do not lie among the decisions")
        writes = (*_writes(written, dropped), *tombstones(blocks))
        return Staged(staged, writes, newest, tuple(blocks), self._deadline_ms())

    def _values(self, record: Decision) -> list[tuple[DecisionKey, bytes]]:
        """What is written for *record*, its own value last."""
        if not isinstance(record, Manifest):
            return [(DecisionKey.of(record), encode(record))]
        *parts, value = encode_in_parts(record, self._part_bytes)
        numbered = [
            (DecisionKey(ManifestPart, record.checkpoint, number), part) for number, part in enumerate(parts, 1)
        ]
        return [*numbered, (DecisionKey.of(record), value)]

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
        """`Fenced` by a newer coordinator, named if it is known; or `Undetermined`: by the broker.

        The broker ends a transaction that takes too long, for instance of a suspended process. Then nobody has
        initialised the id since; a newer coordinator does so within milliseconds of ending an open transaction.
        """
        own = self._incarnation.incarnation if self._incarnation else self._history.incarnation_latest
        newest, deadline_ms = (yield from self._newest()), self._clock.monotonic_ms() + SUCCESSOR_TIMEOUT_MS
        while (newest is None or newest.incarnation <= own) and self._clock.monotonic_ms() < deadline_ms:
            yield ask.Pause(SUCCESSOR_PAUSE_MS)
            newest = yield from self._newest()
        if newest is None or newest.incarnation <= own:
            name = self._writer.transactional_id
            with suppress(BrokerUnavailable):
                state: TransactionState | None = (yield ask.DescribeTransactions((name,)))[name]
                if state is not None and state.state == TxnState.COMPLETE_ABORT:
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
        """The *refs* in the storage of this incarnation that may be gone, so that no manifest may name them.

        This incarnation may have dropped a block; older ones are fenced, and dropped only blocks that no manifest read
        here names. Or somebody deleted the topic, or the first records of a partition. A key is never written twice, so
        no other record can replace a block.
        """

        def attempt(_: int) -> Procedure[tuple[int, ...] | None]:
            firsts: tuple[int, ...] | None = yield ask.FirstOffsets()
            return firsts

        firsts = yield from retrying(attempt, self._clock, self._deadline_ms())
        if firsts is None:
            return list(refs)
        in_topic = self.incarnation.storage == TOPIC
        return [ref for ref in refs if ref.key in self._tombstoned or (in_topic and ref.offset < firsts[ref.partition])]

    def close(self) -> None:
        """Write nothing more, and end no transaction.

        Only after `UNKNOWN` one may be open. Aborting it might contradict a decision that the next incarnation reads,
        so it is left to that one's initialisation.
        """
        self._writer.end(BrokerUnavailable(f"The decision log of {self.pipeline} is closed."))


def _waited(look: ask.LookOnce) -> Procedure[bool]:
    """Whether readers see the commit within a short time; False if that is unknown."""
    try:
        fates: dict[int, Fate | None] = yield msgspec.structs.replace(look, wait_ms=LOOK_WAIT_MS)
    except BrokerUnavailable:
        return False
    return set(fates.values()) == {Fate.COMMITTED}


def fenced(pipeline: str, own: int, newest: Incarnation | None) -> Fenced:
    """The error of an incarnation that is not the newest any more; its facts name the newest, if it can be read."""
    if newest is None or newest.incarnation <= own:
        return Fenced(superseded(pipeline, own, newest))
    by: Facts = {"by_incarnation": newest.incarnation, "by_host": newest.host, "by_process": newest.process}
    return Fenced(superseded(pipeline, own, newest), **by)


def superseded(pipeline: str, own: int, newest: Incarnation | None) -> str:
    """The text of that error; *newest* if it can be read."""
    if newest is None or newest.incarnation <= own:
        return (
            f"Incarnation {own} of {pipeline} was fenced: a newer instance is starting. This one ends; nothing is lost."
        )
    return (
        f"Incarnation {newest.incarnation} of {pipeline} (process {newest.process} on {newest.host}) has "
        f"taken over from incarnation {own}. This one ends; nothing is lost."
    )


def take_in(history: History, read: LogRead) -> None:
    """Add the items of *read* to *history*."""
    for item in read.items:
        if isinstance(item, Unreadable):
            history.skip(item.first, item.behind)
        else:
            history.read(item.key, item.value, item.digest)
    history.finish_reading()


def history_of(pipeline: str, topic: str, read: LogRead) -> History:
    """The history in *read*, of the decision log of *pipeline*; Halt if its beginning is missing."""
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
    """*topic* with the partition count in its manifests: blocks of a key group stay in one partition."""
    if topic.partitions < partitions:
        raise Halt(
            f"Topic {topic.name} has {topic.partitions} partitions, but its manifests speak of {partitions}: it is not "
            f"the topic that they were written to. Restore it."
        )
    return msgspec.structs.replace(topic, partitions=partitions)


def _writes(written: Iterable[tuple[DecisionKey, bytes]], dropped: Iterable[DecisionKey]) -> tuple[Write, ...]:
    return (
        *(
            Write(DECISIONS, str(key), value, ((DIGEST_HEADER, hashlib.sha256(value).digest()),))
            for key, value in written
        ),
        *(Write(DECISIONS, str(key), None) for key in dropped),
    )


def tombstones(blocks: Iterable[StoredBlock]) -> tuple[Write, ...]:
    """The writes that remove the *blocks* that are in the checkpoint topic."""
    return tuple(Write(ref.partition, ref.key, None) for storage, ref in blocks if storage == TOPIC)
