"""The decision log: partition 0 of the checkpoint topic.

Only the transactional producer of the newest coordinator writes here. Its initialisation, once per life, fences every
older coordinator before the log is read, so what is read is final, and whatever is appended later is appended by this
life. An append is one transaction: all of it, or nothing, or, when that cannot be known, the end of this life; the next
one reads what is true. No transaction is ever ended by closing a client.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from confluent_kafka import IsolationLevel

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.encoding import Decision, DecisionKey, encode
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Incarnation
from exactlyonce.checkpoint.store import client as store_client
from exactlyonce.checkpoint.store.scan import read_range
from exactlyonce.checkpoint.store.topic import TopicInfo, describe, find_topic
from exactlyonce.checkpoint.store.transaction import Write, Writer
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError, Fenced, Halt, require

T = TypeVar("T")

DECISIONS = 0
"""The partition of the decision log."""
APPEND_TIMEOUT_S = 120.0
"""How long an append, what is asked beside it, and a coordinator's other requests outlast a broker that is away."""
STABLE_TIMEOUT_S = 10.0
STABLE_PAUSE_S = 0.002
SUCCESSOR_TIMEOUT_S = 3.0
"""How long a fenced life waits for the first record of the one that fenced it, to say who it is."""
HEARTBEAT_PAUSE_MS = 5_000
"""An append carries a heartbeat if the last one is older."""
LIVES_KEPT = 10
TOMBSTONES_REMEMBERED = 100_000
"""Newest first. Only a defect could name a tombstoned block again, and it would name a recent one."""
DIGEST_HEADER = "sha256"
_INVISIBLE = (
    "The broker took a decision into {topic}, but does not show it to readers. This life ends; the next one sees to it."
)


class DecisionLog:
    """The decision log of *pipeline*, as one life of its coordinator writes it. For one thread at a time.

    Before `open`, whatever older lives have left is to be settled (`checkpoint.transactions.settling`).
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        pipeline: str,
        topic: TopicInfo,
        clock: Clock,
        writer: Writer,
        append_timeout_s: float = APPEND_TIMEOUT_S,
    ) -> None:
        self.pipeline = pipeline
        self.topic = topic
        self._config = config
        self._clock = clock
        self.append_timeout_s = append_timeout_s
        self._writer = writer
        self._opened = False
        self._admin = store_client.admin(config)
        self._history = History(pipeline)
        self._life: Incarnation | None = None
        self._tombstoned: dict[str, None] = {}

    @property
    def history(self) -> History:
        """What is durable in the log, including what this life has appended."""
        return self._history

    # --- opening

    def open(self) -> History:
        """Fence every older coordinator of the pipeline, then read what they have decided."""
        require(not self._opened, "A decision log is opened once: a second initialisation would fence itself")
        self._opened = True
        self._writer.open()
        self._history = _read(self._config, self.pipeline, self.topic, self._stable_end())
        if self._history.latest is not None:
            self.topic = _frozen(self.topic, self._history.latest.block_partitions)
        return self._history

    def _stable_end(self) -> int:
        """The end of the log; nothing in it is undecided."""
        end = self._end(IsolationLevel.READ_UNCOMMITTED)
        if not self._is_stable(end):
            stable = self._end(IsolationLevel.READ_COMMITTED)
            raise Halt(
                f"{self.topic.name}[{DECISIONS}] has an open transaction at offset {stable} that is not of "
                f"{self.pipeline}'s coordinator: what it hides cannot be read. Find its owner with "
                f"`kafka-transactions --bootstrap-server {self._config.get('bootstrap.servers')} find-hanging "
                f"--topic {self.topic.name}`, end it, and run again."
            )
        return end

    def _is_stable(self, end: int) -> bool:
        """Whether readers get as far as *end*; markers take milliseconds."""
        deadline = time.monotonic() + STABLE_TIMEOUT_S
        while self._end(IsolationLevel.READ_COMMITTED) < end:
            if time.monotonic() > deadline:
                return False
            self._admin.poll(STABLE_PAUSE_S)
        return True

    def _is_visible(self) -> bool:
        """Whether readers see what was just committed; False also if the broker stays away.

        Only then may anything rely on it, and another transaction begin: a broker may lose the markers of the last one
        (see `settling`), and the end of the next would decide it.
        """
        try:
            return self.retrying(lambda: self._is_stable(self._end(IsolationLevel.READ_UNCOMMITTED)))
        except BrokerUnavailable:
            return False

    def retrying(self, ask: Callable[[], T]) -> T:
        """The answer of *ask*, asked again while the broker is away: for as long as an append is tried."""
        deadline = time.monotonic() + self.append_timeout_s
        while True:
            try:
                return ask()
            except BrokerUnavailable:
                if time.monotonic() > deadline:
                    raise
                self._admin.poll(STABLE_PAUSE_S)

    def _end(self, isolation: IsolationLevel) -> int:
        with store_client.explained(self._config, f"asking for the end of {self.topic.name}"):
            name = self.topic.name
            return store_client.end_offsets(self._admin, name, [DECISIONS], isolation)[DECISIONS]

    def begin_life(self, host: str, process: int, above: int = 0) -> Incarnation:
        """Write this life's first record, which gives it its incarnation; forget all but the last lives.

        The incarnation is above all in the log, and above *above*, the highest that a transactional id names.
        """
        require(self._opened and self._life is None, "A life begins once, after the log is opened")
        now_ms = self._clock.now_ms()
        number = max(self._history.incarnation_latest, above) + 1
        fenced_below = max((life.fenced_below for life in self._history.incarnations.values()), default=0)
        life = Incarnation(number, host, process, now_ms, now_ms, fenced_below)
        forgotten = [each for each in self._history.incarnations if each <= number - LIVES_KEPT]
        outcome = self._commit([life], [DecisionKey(Incarnation, each) for each in forgotten], [])
        if outcome is not Outcome.DONE:
            raise BrokerUnavailable(
                f"The broker did not confirm the start of {self.pipeline} within {self.append_timeout_s:.0f} s. "
                f"Nothing was read or written yet: run it again."
            )
        self._life = life
        return life

    def look(self) -> History | None:
        """What is decided by now, for whoever may not need to `open`: fences nobody; None if something is undecided."""
        end = self._end(IsolationLevel.READ_UNCOMMITTED)
        if self._end(IsolationLevel.READ_COMMITTED) < end:
            return None
        return _read(self._config, self.pipeline, self.topic, end)

    def resume_life(self, incarnation: int) -> Incarnation:
        """Go on with a life that another process of it has begun; `Fenced` if it is not the newest any more."""
        require(self._opened and self._life is None, "A life is taken up once, after the log is opened")
        newest = self._history.newest_life
        if newest is None or newest.incarnation != incarnation:
            raise self._ended_by(Fenced(superseded(self.pipeline, incarnation, newest)))
        self._life = newest
        return newest

    # --- appending

    @property
    def refusal(self) -> str:
        """Why the last append was `NOT_WRITTEN`, in the broker's or its client's words."""
        return self._writer.refusal

    def append(
        self, *records: Decision, manifests_dropped: Iterable[int] = (), blocks_dropped: Iterable[BlockRef] = ()
    ) -> Outcome:
        """Write *records* and tombstone what is dropped, in one transaction.

        A dropped manifest goes with its finalized mark and repairs. `NOT_WRITTEN` is certain: the commit was never
        asked for. After `UNKNOWN` the log refuses all further use: this life must end. Raises `Fenced` when a newer
        coordinator has taken over; what became of the append is then the newer one's to read.
        """
        require(self._life is not None, "Nothing is appended before the life has begun")
        dropped = [key for checkpoint in manifests_dropped for key in self._history.keys_of(checkpoint)]
        return self._commit([*records, *self._due_heartbeat()], dropped, list(blocks_dropped))

    def heartbeat(self, fenced_below: int | None = None, *, ended: bool = False) -> Outcome:
        """Show that this life goes on; *fenced_below* records that all ids of older incarnations were fenced.

        *ended*: it is the last one, after a clean end. Whoever asks need not wait until this life has fallen silent.
        """
        require(self._life is not None, "A life must have begun")
        assert self._life is not None
        below = self._life.fenced_below if fenced_below is None else fenced_below
        now_ms = self._clock.now_ms()
        beat = msgspec.structs.replace(self._life, heartbeat_ms=now_ms, fenced_below=below, ended=ended)
        return self._commit([beat], [], [])

    def _due_heartbeat(self) -> list[Incarnation]:
        assert self._life is not None
        now_ms = self._clock.now_ms()
        if abs(now_ms - self._life.heartbeat_ms) < HEARTBEAT_PAUSE_MS:
            return []
        return [msgspec.structs.replace(self._life, heartbeat_ms=now_ms)]

    def _commit(self, records: list[Decision], dropped: list[DecisionKey], blocks: list[BlockRef]) -> Outcome:
        staged = self._history.copy()
        for record in records:
            self._require_own(record)
            staged.admit(record)
        staged.forget(dropped)
        needed = staged.references() if blocks else set()
        require(not any(ref.key in needed for ref in blocks), "A block that a manifest names must not be tombstoned")
        try:
            outcome = self._writer.write(_writes(records, dropped, blocks), self.append_timeout_s)
        except Fenced as error:
            raise self._ended_by(Fenced(self._who_fenced())) from error
        if outcome is Outcome.DONE and not self._is_visible():
            self._ended_by(BrokerUnavailable(_INVISIBLE.format(topic=self.topic.name)))
            return Outcome.UNKNOWN
        if outcome is Outcome.DONE:
            self._history = staged
            self._remember_tombstones(blocks)
            self._life = next((each for each in records if isinstance(each, Incarnation)), self._life)
        return outcome

    def _ended_by(self, reason: ExactlyOnceError) -> ExactlyOnceError:
        self._writer.end(reason)
        return reason

    def _remember_tombstones(self, blocks: list[BlockRef]) -> None:
        self._tombstoned.update((ref.key, None) for ref in blocks)
        for key in list(itertools.islice(self._tombstoned, max(0, len(self._tombstoned) - TOMBSTONES_REMEMBERED))):
            del self._tombstoned[key]

    def _require_own(self, record: Decision) -> None:
        if self._life is not None:
            require(record.incarnation == self._life.incarnation, "A life writes only decisions of its own")

    def _who_fenced(self) -> str:
        own = self._life.incarnation if self._life else self._history.incarnation_latest
        newest, deadline = self._newest_life(), time.monotonic() + SUCCESSOR_TIMEOUT_S
        while (newest is None or newest.incarnation <= own) and time.monotonic() < deadline:
            self._admin.poll(0.1)
            newest = self._newest_life()
        return superseded(self.pipeline, own, newest)

    def _newest_life(self) -> Incarnation | None:
        try:
            return _read(self._config, self.pipeline, self.topic, self._stable_end()).newest_life
        except ExactlyOnceError:
            return None

    # --- beside the log

    def dead(self, refs: Iterable[BlockRef]) -> list[BlockRef]:
        """Those of *refs* that a manifest must not name, because they may be gone.

        A block goes in three ways: this life tombstones it (older lives are fenced, and tombstoned only what a manifest
        that this life has read no longer names); somebody deletes the first records of a partition; somebody deletes
        the topic. A key is never written twice, so no other record can replace it.
        """
        firsts = self.retrying(self._first_offsets)
        if firsts is None:
            return list(refs)
        return [ref for ref in refs if ref.key in self._tombstoned or ref.offset < firsts[ref.partition]]

    def _first_offsets(self) -> dict[int, int] | None:
        """Of every partition; None if the topic is gone."""
        with store_client.explained(self._config, f"looking for the blocks in {self.topic.name}"):
            found = describe(self._admin, self.topic.name)
            if found is None or found.topic_id != self.topic.topic_id:
                return None
            return store_client.first_offsets(self._admin, self.topic.name, range(self.topic.partitions))

    def end_offsets(self) -> tuple[int, ...]:
        """The end of every partition of the topic: `Manifest.block_end_offsets`."""
        ends = self.retrying(self._end_offsets)
        return tuple(ends[partition] for partition in range(self.topic.partitions))

    def _end_offsets(self) -> dict[int, int]:
        with store_client.explained(self._config, f"asking for the ends of {self.topic.name}"):
            return store_client.end_offsets(self._admin, self.topic.name, range(self.topic.partitions))

    def close(self) -> None:
        """Let go of the clients, and end no transaction.

        After `DONE` and `NOT_WRITTEN` none is open. After `UNKNOWN` one may be: aborting it would contradict a decision
        that the next life may read, so it is left to that life's initialisation. The client library's own `close`
        aborts, hence it is never called.
        """
        self._writer.end(BrokerUnavailable(f"The decision log of {self.pipeline} is closed."))


def superseded(pipeline: str, own: int, newest: Incarnation | None) -> str:
    """What a life is told that is not the newest any more; *newest* as far as it can be read."""
    if newest is None or newest.incarnation <= own:
        return (
            f"Incarnation {own} of {pipeline} was fenced: a newer instance is starting, or the broker ended a "
            f"transaction that took too long. This one ends; nothing is lost."
        )
    return (
        f"Incarnation {newest.incarnation} of {pipeline} (process {newest.process} on {newest.host}) has "
        f"taken over from incarnation {own}. This one ends; nothing is lost."
    )


def read_history(config: Mapping[str, Any], pipeline: str) -> History:
    """What is decided in *pipeline* by now, for whoever only looks: fences nobody and takes no part."""
    topic = find_topic(config, pipeline)
    with store_client.explained(config, f"asking for the end of {topic.name}"):
        client = store_client.admin(config)
        stable = store_client.end_offsets(client, topic.name, [DECISIONS], IsolationLevel.READ_COMMITTED)
    return _read(config, pipeline, topic, stable[DECISIONS])


def _read(config: Mapping[str, Any], pipeline: str, topic: TopicInfo, end: int) -> History:
    """All committed decisions below offset *end*."""
    history = History(pipeline)
    with store_client.explained(config, f"reading {topic.name}"):
        starts = store_client.first_offsets(store_client.admin(config), topic.name, [DECISIONS])
        records = read_range(
            config, topic.name, DECISIONS, starts[DECISIONS], end, "read_committed", history.skip
        )
        for message in records:
            headers = dict(message.headers() or [])
            digest = headers.get(DIGEST_HEADER)
            history.read(message.key(), message.value(), digest if isinstance(digest, bytes) else None)
    history.finish_reading()
    if starts[DECISIONS] > 0 and history.latest is None:
        raise Halt(
            f"{topic.name}[{DECISIONS}] begins at offset {starts[DECISIONS]} and holds no manifest: its first records "
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
    return TopicInfo(topic.name, topic.topic_id, partitions, topic.replicas)


def _writes(records: list[Decision], dropped: list[DecisionKey], blocks: list[BlockRef]) -> list[Write]:
    require(all(ref.partition != DECISIONS for ref in blocks), "Blocks do not lie among the decisions")
    values = [(str(DecisionKey.of(record)), encode(record)) for record in records]
    return [
        *(Write(DECISIONS, key, value, ((DIGEST_HEADER, hashlib.sha256(value).digest()),)) for key, value in values),
        *(Write(DECISIONS, str(key), None) for key in dropped),
        *(Write(ref.partition, ref.key, None) for ref in blocks),
    ]
