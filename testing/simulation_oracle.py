"""The judge of a simulation: a broker that watches every request it passes on, and independent readers.

It knows the input and trusts nobody: what must be in a state or an output is counted from the input anew. Whatever
breaks an invariant of the protocol raises `Broken`, at the first request that shows it.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from exactlyonce.checkpoint.decision_log import DECISIONS
from exactlyonce.checkpoint.records.committable import Committable, TransactionalId, coordinator_id
from exactlyonce.checkpoint.records.encoding import BlockKey, DecisionKey, decode
from exactlyonce.checkpoint.records.manifest import BlockRef, Finalized, Manifest, Repair
from exactlyonce.checkpoint.transactions.commit import is_older
from exactlyonce.testing.broker.interface import Error, Initialized, Isolation, NoAnswer, Produced, Record
from exactlyonce.testing.broker.model import BrokerModel, _Marker
from exactlyonce.testing.broker.transaction_coordinator import State

TOPIC = "p.checkpoints"
Named = tuple[str, int, int]
"""Transactional id, producer id, epoch."""


class Broken(AssertionError):
    """An invariant does not hold."""

    trace: tuple[str, ...] = ()
    """What had happened before."""


def demand(condition: object, what: str) -> None:
    """Raise `Broken` unless *condition* holds."""
    if not condition:
        raise Broken(what)


def named(committable: Committable) -> Named:
    """The transaction that the committable stands for."""
    return committable.transactional_id, committable.producer_id, committable.epoch


class WatchedBroker(BrokerModel):
    """The broker model, and the oracle that watches what is done to it."""

    oracle: Oracle
    cleaned: set[tuple[str, int, int]]
    """Topic, partition and offset of the records that `clean_aborted` has removed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cleaned = set()
        self._decided = False

    def _write(self, marker: _Marker) -> None:
        super()._write(marker)
        self._decided |= marker.partition == (TOPIC, DECISIONS)

    def _catch_up(self) -> int:
        now_ms = super()._catch_up()
        if self._decided:
            self._decided = False
            self.oracle.decided()
        return now_ms

    def clean_aborted(self, topics: list[str]) -> bool:
        """Remove the records of aborted transactions, as cleaning may; their markers stay. Whether there were any."""
        self._catch_up()
        before = len(self.cleaned)
        for topic in topics:
            for partition, log in enumerate(self._topics[topic].logs):
                self.cleaned |= {(topic, partition, offset) for offset in log._aborted}
                log._keep([record for record in log._records if record.offset not in log._aborted])
        return len(self.cleaned) > before

    def init_transactions(self, transactional_id: str | None, timeout_ms: int = 60_000) -> Initialized:
        answer = super().init_transactions(transactional_id, timeout_ms)
        self.oracle.initialized(transactional_id)
        return answer

    def produce(self, transactional_id: str | None, *place: Any, **options: Any) -> Produced:
        answer = super().produce(transactional_id, *place, **options)
        if transactional_id is None and answer.error is Error.NONE:
            self.oracle.blocks_written([key for key, _ in place[-1]])
        if transactional_id is not None and answer.error is Error.NONE and transactional_id in self.oracle.fenced:
            state = self.describe_transactions([transactional_id])[transactional_id]
            aborting = state is not None and state.state == "PrepareAbort"  # late records go with the others
            demand(aborting, f"{transactional_id} writes though it was swept")
        return answer

    def end_txn(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> Error:
        self._catch_up()
        self.oracle.before_end(transactional_id, producer_id, epoch, commit)
        return super().end_txn(transactional_id, producer_id, epoch, commit)

    def is_committed(self, topic: str, partition: int, offset: int) -> bool:
        """Whether the record's transaction is, also where an older open one still hides it from readers."""
        log = self._log(topic, partition)
        assert log is not None
        return offset not in log._aborted and not any(offset in offsets for offsets in log._open.values())

    def overdue(self, timeout_ms: int) -> list[str]:
        """The sinks' transactions that have been open for longer than that, and for one check of the broker more."""
        self._catch_up()
        latest_ms = self._clock.monotonic_ms() - self.settings.timeout_check_interval_ms
        return [
            name
            for name, each in self._coordinator.transactions.items()
            if each.state is State.ONGOING
            and TransactionalId.parse(name)
            and max(each.started_at_ms + timeout_ms, self._started_ms) < latest_ms
            and name.startswith("eo:p:")
        ]

    def has_hanging(self) -> bool:
        """Whether a partition shows a transaction as open though it has ended and no marker is on its way."""
        known = self._coordinator.transactions.values()
        awaited = {(each.producer_id, p) for each in known if each.state is State.ONGOING for p in each.partitions}
        awaited |= {(each.producer_id, each.partition) for each in self._markers if each.partition is not None}
        return any(
            (producer_id, (name, index)) not in awaited
            for name, topic in self._topics.items()
            for index, log in enumerate(topic.logs)
            for producer_id in log._open
        )


class Oracle:
    """See the module. *inputs* are the keys of each partition's records."""

    def __init__(
        self,
        broker: WatchedBroker,
        inputs: list[list[str]],
        sinks: list[str],
        output_partitions: int,
        block_partitions: int,
        transaction_timeout_ms: int,
    ) -> None:
        self.broker, self.inputs, self.sinks = broker, inputs, sinks
        self._block_partitions, self._transaction_timeout_ms = block_partitions, transaction_timeout_ms
        self.coordinator = coordinator_id("p")
        self.manifests: dict[int, Manifest] = {}
        self.unfinalized: Manifest | None = None
        self._retained: dict[int, Manifest] = {}
        """Those that are not tombstoned."""
        self.ever_named: set[Named] = set()
        self.binding: dict[str, Named] = {}
        """Of the unfinalized checkpoint: by transactional id of the original, what must be committed now."""
        self.fenced: set[str | None] = set()
        """Ids that were swept, and not initialised since."""
        self._initialized: Counter[str | None] = Counter()
        self.decided_totals: Counter[str] = Counter()
        self.seen: dict[str, Counter[str]] = {sink: Counter() for sink in sinks}
        self._stand_ins: list[Committable] = []
        self._sources: dict[tuple[str, str, int], int] = {}
        self._updates: dict[tuple[str, int], tuple[int, int]] = {}
        """By key and total, the input record that it stems from: the same in every sink."""
        self._attempt_decided = (0, 0)
        """The newest attempt, of the newest incarnation, that has completed a checkpoint."""
        self._of_zombies: set[str] = set()
        """Blocks that older attempts wrote after that: nobody looks for them."""
        self._readers = {(sink, p): 0 for sink in sinks for p in range(output_partitions)}
        self._decisions_read = 0

    # --- requests -----------------------------------------------------------------------------------------------

    def before_init(self, transactional_id: str | None) -> None:
        """An id is not used again before the checkpoint that used it is finalized."""
        reserved = {name for name, _, _ in self.binding.values()} | set(self.binding)
        demand(transactional_id not in reserved, f"{transactional_id} is used again before its checkpoint is finalized")

    def before_end(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> None:
        """Commit only what a durable record names; abort nothing that must be committed; touch nothing foreign."""
        if transactional_id.startswith(self.coordinator):
            return
        name = TransactionalId.parse(transactional_id)
        demand(name is not None and name.pipeline == "p", f"{transactional_id} of another pipeline is ended")
        if commit:
            was_named = any(
                (transactional_id, producer_id) == (named_id, of) and epoch >= since  # later ones rewrite markers
                for named_id, of, since in self.ever_named
            )
            demand(was_named, f"{transactional_id} is committed though no durable record names it")
        elif any((transactional_id, producer_id) == each[:2] for each in self.binding.values()):
            state = self.broker.describe_transactions([transactional_id])[transactional_id]
            demand(state is None or state.state != "Ongoing", f"{transactional_id} is aborted though it is decided")

    def initialized(self, transactional_id: str | None) -> None:
        """A producer has been made, be it a zombie's."""
        self.fenced.discard(transactional_id)
        self._initialized[transactional_id] += 1

    def older(self, incarnation: int, attempt: int) -> dict[str, int]:
        """The ids of older attempts that are there now, and how often each was initialised."""
        try:
            listed = [each.transactional_id for each in self.broker.list_transactions("eo:p:")]
        except NoAnswer:
            return {}
        names = {each: TransactionalId.parse(each) for each in listed}
        return {e: self._initialized[e] for e, name in names.items() if name and is_older(name, incarnation, attempt)}

    def swept(self, older: dict[str, int]) -> None:
        """A sweep is over: what was there when it began can write no more, unless it was initialised anew."""
        self.fenced |= {each for each, times in older.items() if self._initialized[each] == times}

    def decided(self) -> None:
        """Readers of the decision log may see more than before: a decision counts from then on, for until its markers
        are there it may yet be taken back."""
        log = self.broker.fetch(TOPIC, DECISIONS, self._decisions_read, Isolation.READ_COMMITTED)
        self._decisions_read = log.last_stable_offset
        for transaction, records in groupby(log.records, lambda each: (each.producer_id, each.epoch)):
            self.look()
            self._transaction(transaction, list(records))

    def _transaction(self, transaction: tuple[int, int], records: list[Record]) -> None:
        keys = [DecisionKey.parse(each.key) for each in records]
        for key, record in zip(keys, records, strict=True):
            self._decision(key, record.value)
        for key, record in zip(keys, records, strict=True):
            if key is not None and key.kind is Finalized and record.value is not None:
                self._no_orphans(self.manifests[key.number], transaction)
        for manifest in self._retained.values():
            self._whole(manifest)
        pending = self.unfinalized
        demand(pending is None or pending.previous in self._retained, "an unfinalized checkpoint can be replayed")

    # --- decisions ----------------------------------------------------------------------------------------------

    def _decision(self, key: DecisionKey | None, value: tuple[bytes, bytes] | None) -> None:
        demand(key is not None, "the decision log holds nothing foreign")
        assert key is not None
        if value is None:
            if key.kind is Manifest:
                self._retained.pop(key.number, None)
        elif key.kind is Manifest:
            self._manifest(decode(value[0], Manifest))
        elif key.kind is Finalized:
            self._finalized(decode(value[0], Finalized))
        elif key.kind is Repair:
            self._repair(decode(value[0], Repair))

    def _manifest(self, manifest: Manifest) -> None:
        n = manifest.checkpoint
        demand(n not in self.manifests, f"there are two manifests of checkpoint {n}")
        demand(n > max(self.manifests, default=-1), f"checkpoint ids only grow, not to {n}")
        demand(self.unfinalized is None, f"checkpoint {n} is decided before the one before it is finalized")
        totals = self._expected(manifest)
        demand(self._state(manifest) == +totals, f"the state of checkpoint {n} is not that of the input before Sn")
        wanted = totals.total() - self.decided_totals.total()
        for sink in self.sinks:
            records = sum(c.records for c in manifest.committables if c.sink == sink)
            demand(records == wanted, f"sink {sink} of checkpoint {n} has {records} records, not {wanted}")
        self._retained[n] = manifest
        self.manifests[n], self.unfinalized, self.decided_totals = manifest, manifest, totals
        self._attempt_decided = (manifest.incarnation, manifest.attempt)
        self.binding = {c.transactional_id: named(c) for c in manifest.committables}
        self.ever_named.update(self.binding.values())

    def _expected(self, manifest: Manifest) -> Counter[str]:
        """The totals of the records before Sn."""
        offsets = {o.partition: o.offset for o in manifest.offsets}
        demand(len(offsets) == len(self.inputs), f"checkpoint {manifest.checkpoint} has Sn of every input")
        return Counter(key for p, keys in enumerate(self.inputs) for key in keys[: offsets[p]])

    def _whole(self, manifest: Manifest) -> None:
        """Everything is there that a restore of the checkpoint or a replay of its interval needs."""
        self._state(manifest)
        for ref in (ref for log in manifest.order_logs for ref in log.blocks):
            self._block(ref)

    def _state(self, manifest: Manifest) -> Counter[str]:
        """What the blocks of the manifest say."""
        totals: dict[str, int] = {}
        for operator in manifest.operators:
            for ref in (ref for index in operator.index for each in index for ref in self._block(each)):
                totals.update(self._block(ref))
        return Counter(totals)

    def _block(self, ref: BlockRef) -> Any:
        found = self.broker.fetch(TOPIC, ref.partition, ref.offset, Isolation.READ_UNCOMMITTED).records
        demand(found and found[0].key == ref.key, f"block {ref.key} is there")
        tombstones = [each.offset for each in found[1:] if each.key == ref.key]
        gone = any(self.broker.is_committed(TOPIC, ref.partition, offset) for offset in tombstones)
        demand(not gone, f"block {ref.key} is not tombstoned")
        return found[0].value

    def blocks_written(self, keys: list[str]) -> None:
        """By a worker, perhaps of an attempt that is over."""
        parsed = [(text, key) for text in keys if (key := BlockKey.parse(text)) is not None]
        self._of_zombies.update(text for text, key in parsed if (key.incarnation, key.attempt) < self._attempt_decided)

    def _no_orphans(self, manifest: Manifest, ending: tuple[int, int]) -> None:
        """Now that *manifest* is finalized, by the transaction *ending*, every block in the topic is referred to, but
        for those of checkpoints that are in flight behind it."""
        named_by = {ref.key for each in self._retained.values() for ref in self._references(each)}
        attempt = (manifest.incarnation, manifest.attempt)
        for text in self.live_blocks(ending) - named_by - self._of_zombies:
            key = BlockKey.parse(text)
            assert key is not None
            in_flight = (key.incarnation, key.attempt) == attempt and key.checkpoint > manifest.checkpoint
            demand(in_flight, f"checkpoint {manifest.checkpoint} leaves {text} behind, which nothing refers to")

    def _references(self, manifest: Manifest) -> set[BlockRef]:
        indexes = [ref for operator in manifest.operators for index in operator.index for ref in index]
        logs = [ref for log in manifest.order_logs for ref in log.blocks]
        return {*indexes, *logs, *(ref for each in indexes for ref in self._block(each))}

    def live_blocks(self, ending: tuple[int, int] = (-1, -1)) -> set[str]:
        """The keys of all blocks without a tombstone that is committed, or is by the transaction *ending*."""
        live: set[str] = set()
        for partition in range(1, self._block_partitions):
            for record in self.broker.fetch(TOPIC, partition, 0, Isolation.READ_UNCOMMITTED).records:
                if record.value is not None:
                    live.add(record.key)
                elif (record.producer_id, record.epoch) == ending or self.broker.is_committed(
                    TOPIC, partition, record.offset
                ):
                    live.discard(record.key)
        return live

    def _finalized(self, mark: Finalized) -> None:
        demand(
            self.unfinalized is not None and self.unfinalized.checkpoint == mark.checkpoint,
            f"checkpoint {mark.checkpoint} is finalized in its turn",
        )
        for name, producer_id, epoch in self.binding.values():
            demand(self._committed(name, producer_id, epoch), f"{name} is finalized though it is not committed")
        self.unfinalized, self.binding = None, {}

    def _committed(self, name: str, producer_id: int, epoch: int) -> bool:
        """Whether the transaction is committed, though its markers may be missing yet."""
        committables = [c for m in self.manifests.values() for c in m.committables] + self._stand_ins
        committable = next(each for each in committables if named(each) == (name, producer_id, epoch))
        state = self.broker.describe_transactions([name])[name]
        if state is not None and state.state == "PrepareCommit":
            return True
        first = committable.written[0]
        return self.broker.is_committed(first.topic, first.partition, first.first_offset)

    def _repair(self, repair: Repair) -> None:
        demand(repair.replaced in self.binding, f"{repair.replaced} is repaired while its checkpoint is unfinalized")
        self._stand_ins.append(repair.committable)
        self.binding[repair.replaced] = named(repair.committable)
        self.ever_named.add(named(repair.committable))

    # --- readers ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """What read_committed readers see now: each key's updates once, in order, and nothing undecided. Nor are they
        held back by a transaction for longer than it may last."""
        overdue = self.broker.overdue(self._transaction_timeout_ms)
        demand(not overdue, f"{overdue} have been open for longer than {self._transaction_timeout_ms} ms")
        for (sink, partition), offset in self._readers.items():
            log = self.broker.fetch(sink, partition, offset)
            for record in log.records:
                self._visible(sink, record.key, *record.value)
            self._readers[sink, partition] = max(offset, log.last_stable_offset)

    def _visible(self, sink: str, key: str, total: int, partition: int, offset: int) -> None:
        seen = self.seen[sink]
        demand(total == seen[key] + 1, f"update {total} of {key} in {sink} comes after update {seen[key]}")
        demand(total <= self.decided_totals[key], f"update {total} of {key} in {sink} is visible before its manifest")
        demand(self.inputs[partition][offset] == key, f"update {total} of {key} in {sink} is of another key's record")
        demand(
            offset > self._sources.get((sink, key, partition), -1),
            f"record {offset} of input {partition} comes out of order, or twice, in {sink}",
        )
        stems_from = self._updates.setdefault((key, total), (partition, offset))
        demand(stems_from == (partition, offset), f"update {total} of {key} in {sink} stems from another record")
        seen[key] = total
        self._sources[sink, key, partition] = offset

    def all_visible(self) -> None:
        """Everything decided can be read."""
        self.look()
        wanted = self.decided_totals.total()
        for sink, seen in self.seen.items():
            demand(seen == +self.decided_totals, f"{sink} shows {seen.total()} of {wanted} decided updates")

    def close(self) -> None:
        """At the end of everything: all of the input is counted and visible, nothing is open, readers are not held."""
        everything = Counter(key for keys in self.inputs for key in keys)
        self.look()
        demand(self.decided_totals == everything, "all of the input is counted")
        demand(self.unfinalized is None, "the last checkpoint is finalized")
        self.all_visible()
        self.nothing_open()
        for sink, partition in self._readers:
            log = self.broker.fetch(sink, partition)
            demand(log.last_stable_offset == log.high_watermark, f"readers of {sink}[{partition}] are held back")

    def nothing_open(self, incarnation: int | None = None) -> None:
        """No transaction of the pipeline is open; or none of one life's."""
        for each in self.broker.list_transactions("eo:p:"):
            name = TransactionalId.parse(each.transactional_id)
            if name is not None and incarnation in (None, name.incarnation):
                is_open = each.state in ("Ongoing", "PrepareCommit", "PrepareAbort")
                demand(not is_open, f"{each.transactional_id} is left {each.state}")
