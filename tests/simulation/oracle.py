"""The judge of a simulation: it sees every request that the broker applies, and has its own readers.

It derives from the words of the topology's steps and the input by which ways each record comes to which count and sink,
and so what every state and output must hold. The first request that breaks an invariant raises `Broken`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from itertools import groupby
from typing import Any

from ledgers import Ledgers, WatchedStore
from outside import Left, Outside
from readers import Place, Readers, all_ways
from savepoints import Savepoints
from topologies import CYCLE, KEEPING, MAX_PARALLELISM, Event, Input, Tally, Topology, rule_of
from watched import TOPIC, Broken, WatchedBroker, demand

from exactlyonce.checkpoint.decision_log import DECISIONS
from exactlyonce.checkpoint.records.encoding import Block, BlockKey, DecisionKey, ManifestPart, decode
from exactlyonce.checkpoint.records.manifest import (
    RESTORED,
    BlockRef,
    ChannelLog,
    Committable,
    Finalized,
    Incarnation,
    Manifest,
    OperatorSnapshot,
    Repair,
    TransactionalId,
    coordinator_id,
)  # fmt: skip
from exactlyonce.checkpoint.transactions.commit import is_older
from exactlyonce.engines.runtime.in_flight import listed_in
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.state.backend import CheckpointedState
from exactlyonce.state.chain import decode_index
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.testing.broker.interface import Isolation, NoAnswer, Record

Named = tuple[str, int, int]
"""Transactional id, producer id, epoch."""


def named(committable: Committable) -> Named:
    return committable.transactional_id, committable.producer_id, committable.epoch


class Oracle:
    readers_of = Readers
    held = 0
    """The records in windows at the newest checkpoint."""

    def __init__(
        self,
        broker: WatchedBroker,
        topology: Topology,
        inputs: dict[str, Input],
        *,
        output_partitions: int,
        block_partitions: int,
        transaction_timeout_ms: int,
        store: WatchedStore | None,
        incremental: bool,
    ) -> None:
        self.broker, self.topology, self.inputs = broker, topology, inputs
        self.sinks = topology.sinks
        self.met: Counter[str] = Counter()
        """How often what was judged."""
        self.aligned: set[tuple[int, int, int]] = set()
        """Incarnation, attempt and number of checkpoints that must be aligned, whatever the others are."""
        self._block_partitions, self._transaction_timeout_ms = block_partitions, transaction_timeout_ms
        self.coordinator = coordinator_id("p")
        self._ways = all_ways(topology)
        self.manifests: dict[int, Manifest] = {}
        self.unfinalized: Manifest | None = None
        self._retained: dict[int, Manifest] = {}
        """Those that are not tombstoned."""
        self._parts: dict[int, list[bytes]] = {}
        """The values of the parts of manifests that are not tombstoned, by checkpoint."""
        self._stands_on: dict[int, set[BlockRef]] = {}  # by checkpoint that is retained
        self.ever_named: set[Named] = set()
        self.binding: dict[str, Named] = {}
        """Transactions that the unfinalized checkpoint must commit now, by transactional id of the original."""
        self.fenced: set[str | None] = set()
        """Ids that were swept, and not initialised since."""
        self._initialized: Counter[str | None] = Counter()
        self.decided: dict[Place, int] = {
            (name, p): 0 for name, each in inputs.items() for p in range(len(each.partitions))
        }
        """Sn of the newest manifest."""
        self._arrived: dict[str, Counter[str]] = {each.id: Counter() for each in topology.of("count", "tally")}
        """The number of records before Sn that have come, by count and key."""
        self._owed: Counter[str] = Counter()
        """The number of records before Sn that come to each sink."""
        self.readers = self.readers_of(topology, inputs, self._ways, self.decided)
        self._stand_ins: list[Committable] = []
        self._attempt_decided = (0, 0)
        """The newest attempt, of the newest incarnation, that has completed a checkpoint, or is behind a clean end."""
        self._of_zombies: set[str] = set()  # blocks that older attempts wrote after that: nobody looks for them
        self._read_to = {(sink, p): self._end_of(sink, p) for sink in self.sinks for p in range(output_partitions)}
        self._decisions_read = 0
        self._blocks_read = [0] * block_partitions
        self._live: dict[str, BlockRef | None] = {}
        """Blocks that are there and have no tombstone that counts."""
        self._tombstones: list[tuple[int, Record]] = []
        """Tombstones of which nobody knows yet what becomes of them, with their partitions."""
        self._bodies: dict[BlockRef, bytes] = {}
        self._store = store
        self._outside: Outside | None = None  # where blocks lie, if not in the topic
        self._left: Left | None = None
        self.ledgers = Ledgers(self._body, self.readers.read)
        self.savepoints = Savepoints(self._body, incremental=incremental)
        if store is not None:
            store.ledgers, store.before = self.ledgers, self._catch_up

    def _end_of(self, topic: str, partition: int) -> int:
        return self.broker.log_of(topic, partition).end_offset if self.broker.topic_id(topic) else 0

    def _catch_up(self) -> None:
        with suppress(NoAnswer):
            self.broker.list_transactions("")

    def keep_outside(self, outside: Outside) -> None:
        self._outside, self._left = outside, Left(outside)

    # --- requests -----------------------------------------------------------------------------------------------

    def before_init(self, transactional_id: str | None) -> None:
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

    def decided_more(self) -> None:
        """Readers of the decision log may see more than before: a decision counts once its markers are there."""
        log = self.broker.fetch(TOPIC, DECISIONS, self._decisions_read, Isolation.READ_COMMITTED)
        self._decisions_read = log.last_stable_offset
        for transaction, records in groupby(log.records, lambda each: (each.producer_id, each.epoch)):
            self.look()
            self._transaction(transaction, list(records))

    def topic_made_anew(self, topic_id: str) -> None:
        """The checkpoint topic is another one, and empty; nothing may be decided in it."""
        self.ledgers.made_anew = topic_id
        self._decisions_read, self._blocks_read = 0, [0] * self._block_partitions

    def _transaction(self, transaction: tuple[int, int], records: list[Record]) -> None:
        self.read_blocks(transaction)
        keys = [DecisionKey.parse(text_of(each.key)) for each in records]
        for key, record in zip(keys, records, strict=True):
            self._decision(key, record.value)
        demand(self._parts.keys() <= self._retained.keys(), "the parts of a manifest go with it")
        for key, record in zip(keys, records, strict=True):
            if key is not None and key.kind is Finalized and record.value is not None:
                self._no_orphans(self.manifests[key.number])
        for checkpoint, refs in self._stands_on.items():
            for ref in refs:
                demand(ref.key in self._live, f"checkpoint {checkpoint} stands on block {ref.key}, which is tombstoned")
        pending = self.unfinalized
        demand(pending is None or pending.previous in self._retained, "an unfinalized checkpoint can be replayed")

    def read_blocks(self, ending: tuple[int, int] = (-1, -1)) -> None:
        """Read new blocks. Tombstones count once they are committed; those of the transaction *ending* do."""
        if self._outside is not None:
            self._live = dict.fromkeys(self._outside.contents)
        for partition in range(1, self._block_partitions if self._outside is None else 1):
            log = self.broker.log_of(TOPIC, partition)
            begin = bisect_left(log._offsets, self._blocks_read[partition])
            for record in log._records[begin:]:
                if record.value is None:
                    self._tombstones.append((partition, record))
                else:
                    self._live[text_of(record.key)] = None
            self._blocks_read[partition] = log.end_offset
        waiting = []
        for partition, record in self._tombstones:
            log = self.broker.log_of(TOPIC, partition)
            if (record.producer_id, record.epoch) == ending or self.broker.is_committed(
                TOPIC, partition, record.offset
            ):
                self._live.pop(text_of(record.key), None)
            elif record.offset not in log._aborted:
                waiting.append((partition, record))
        self._tombstones = waiting

    # --- decisions ----------------------------------------------------------------------------------------------

    def _decision(self, key: DecisionKey | None, value: Any) -> None:
        demand(key is not None, "the decision log holds nothing foreign")
        assert key is not None
        if isinstance(value, tuple):
            value = value[0]
        if value is None:
            if key.kind is ManifestPart:
                self._parts.pop(key.number, None)
            elif key.kind is Manifest:
                self._retained.pop(key.number, None)
                self.savepoints.dropped(key.number)
                self._stands_on.pop(key.number, None)
        elif key.kind is ManifestPart:
            self.met["part of a manifest"] += 1
            self._parts.setdefault(key.number, []).append(value)
        elif key.kind is Manifest:
            self._manifest(decode(value, Manifest, self._parts.get(key.number, ())))
        elif key.kind is Finalized:
            self._finalized(decode(value, Finalized))
        elif key.kind is Repair:
            self._repair(decode(value, Repair))
        elif key.kind is Incarnation:
            self.savepoints.condemned |= decode(value, Incarnation).condemned

    def _manifest(self, manifest: Manifest) -> None:
        n = manifest.checkpoint
        if self._left is not None:
            self._left.decided(manifest)
        self.ledgers.decided(manifest)
        demand(n not in self.manifests, f"there are two manifests of checkpoint {n}")
        demand(n > max(self.manifests, default=-1), f"checkpoint ids only grow, not to {n}")
        demand(self.unfinalized is None, f"checkpoint {n} is decided before the one before it is finalized")
        before = self._owed.copy()
        self._advance(manifest)
        for operator in manifest.operators:
            self._state(manifest, operator)
        if n:
            have = {operator.operator for operator in manifest.operators}
            demand(have == self._kept(), f"checkpoint {n} has state of {sorted(have)}")
        for sink in self.sinks:
            self._judge_records(n, sink, sum(c.records for c in manifest.committables if c.sink == sink), before[sink])
        for sink in self.topology.stores:
            self._judge_records(n, sink, sum(c.records for c in manifest.staged if c.sink == sink), before[sink])
        if self.topology.of("rules"):
            self.readers.rules_decided(self._rules(manifest))
        self.savepoints.decided(manifest)
        self._retained[n], self._stands_on[n] = manifest, self._references(manifest)
        self.manifests[n], self.unfinalized = manifest, manifest
        self._attempt_decided = max(self._attempt_decided, (manifest.incarnation, manifest.attempt))
        self.binding = {c.transactional_id: named(c) for c in manifest.committables}
        self.ever_named.update(self.binding.values())

    def _kept(self) -> set[str]:
        """The operators with state."""
        kept = {step.id for step in self.topology.of(*KEEPING)}
        return kept | {f"{step.id}-rows" for step in self.topology.of("rules")}

    def _judge_records(self, checkpoint: int, sink: str, records: int, owed_before: int) -> None:
        wanted = self._owed[sink] - owed_before
        demand(records == wanted, f"sink {sink} of checkpoint {checkpoint} has {records} records, not {wanted}")

    def _advance(self, manifest: Manifest) -> None:
        n = manifest.checkpoint
        offsets = {(each.source, each.partition): each.offset for each in manifest.offsets}
        for source, each in self.inputs.items():
            wanted = {(source, p) for p in range(each.at_first)}
            demand(wanted <= offsets.keys(), f"checkpoint {n} has no Sn of a partition of {source}")
        for place, begin in self.decided.items():
            end = offsets.get(place, 0)
            demand(end >= begin, f"Sn of {place} goes back from {begin} to {end} at checkpoint {n}")
            for offset in range(begin, end):
                self._arrive(place, offset)
            self.decided[place] = end

    def _arrive(self, place: Place, offset: int) -> None:
        first, second = self.inputs[place[0]].partitions[place[1]][offset]
        ways = self._ways.of(place[0], offset)
        for step in self.topology.steps:
            if step.kind in ("count", "tally"):
                self._arrived[step.id][first if step.key == "first" else second] += len(ways[step.id])
            elif step.kind in ("sink", "store"):
                self._owed[step.id] += len(ways[step.id])

    def _state(self, manifest: Manifest, operator: OperatorSnapshot) -> None:
        step = next((each for each in self.topology.steps if each.id == operator.operator), None)
        if step is None or step.kind not in ("count", "tally"):
            return
        n, tally = manifest.checkpoint, step.kind == "tally"
        try:
            table = self._stored(n, operator, Tally if tally else int).table(HashMapBackend())
        except DamagedState as error:
            raise Broken(f"the state of {step.id} at checkpoint {n} cannot be read: {error}") from error
        found = {key: state.total if tally else state for key, state in table.items()}
        self._judge_state(n, step.id, found)

    def _rules(self, manifest: Manifest) -> dict[str, int]:
        """The rows at *manifest*, by rule the offset of the record that each is."""
        kept = [operator for operator in manifest.operators if operator.operator.endswith("-rows")]
        tables = [self._stored(manifest.checkpoint, operator, Event).table(HashMapBackend()) for operator in kept]
        rules = {rule_of(row.partition, row.first): row.offset for table in tables for _, row in table.items()}
        self.met["rules of a checkpoint"] += bool(rules)
        return rules

    def _stored(self, checkpoint: int, operator: OperatorSnapshot, type_: Any) -> CheckpointedState:
        """The state of *operator* for all key groups."""
        return CheckpointedState(
            operator=operator.operator, type=type_, groups=range(MAX_PARALLELISM), max_parallelism=MAX_PARALLELISM,
            checkpoint=checkpoint, indexes=[self._body(ref) for index in operator.index for ref in index],
            fetch=lambda refs: [(ref, self._body(ref)) for ref in refs],
        )  # fmt: skip

    def _judge_state(self, checkpoint: int, step: str, found: dict[bytes, int]) -> None:
        arrived = self._arrived[step]
        wanted = {canonical_key(key): count % CYCLE for key, count in arrived.items() if count % CYCLE}
        demand(found == wanted, f"the state of {step} at checkpoint {checkpoint} is not that of the input before Sn")

    def _references(self, manifest: Manifest) -> set[BlockRef]:
        indexes = [ref for operator in manifest.operators for index in operator.index for ref in index]
        logs = [ref for log in manifest.order_logs for ref in log.blocks]
        listed = [block.ref for each in indexes for block in decode_index(self._body(each)).blocks]
        for ref in logs:
            self._body(ref)
        return {*indexes, *logs, *listed, *self._on_their_way(manifest), *self.ledgers.stood_on(manifest)}

    def _on_their_way(self, manifest: Manifest) -> set[BlockRef]:
        """The blocks of records that were read before Sn, and are in no state."""
        demand(not manifest.channel_logs, f"checkpoint {manifest.checkpoint} is aligned")
        return set()

    def _blocks_on_their_way(self, manifest: Manifest) -> set[BlockRef]:
        named = {ref for log in manifest.channel_logs for ref in log.blocks}
        return named.union(*(self._listed(log) for log in manifest.channel_logs if log.indexed))

    def _listed(self, log: ChannelLog) -> list[BlockRef]:
        self.met["list of records on their way"] += 1
        return [ref for each in log.blocks for ref in listed_in(self._body(each))]

    def _body(self, ref: BlockRef) -> bytes:
        if self._outside is not None:
            return self._outside.body(ref)
        if ref not in self._bodies:
            found = self.broker.fetch(TOPIC, ref.partition, ref.offset, Isolation.READ_UNCOMMITTED).records[:1]
            there = [(each.offset, text_of(each.key)) for each in found]
            demand(there == [(ref.offset, ref.key)], f"block {ref.key} is not where it is referred to")
            self._bodies[ref] = decode(found[0].value, Block).body
        return self._bodies[ref]

    def blocks_written(self, keys: list[str]) -> None:
        """A record of a worker, perhaps of an attempt that is over."""
        parsed = [(text, key) for text in keys if (key := BlockKey.parse(text)) is not None]
        self._of_zombies.update(text for text, key in parsed if (key.incarnation, key.attempt) < self._attempt_decided)

    def _no_orphans(self, manifest: Manifest) -> None:
        """Now that *manifest* is finalized every block in the topic is referred to, but for those of checkpoints that
        are in flight behind it. A restored checkpoint is looked behind at once, by another transaction."""
        if manifest.kind == RESTORED:
            return
        named_by = {ref.key for refs in self._stands_on.values() for ref in refs}
        attempt = (manifest.incarnation, manifest.attempt)
        left = set[str]()
        for text in sorted(self._live.keys() - named_by - self._of_zombies):
            key = BlockKey.parse(text)
            assert key is not None
            if (key.incarnation, key.attempt) != attempt or key.checkpoint <= manifest.checkpoint:  # not in flight
                left.add(text)
        if self._left is not None:
            self._left.finalized(manifest, left, self._retained)
        else:
            what = f"checkpoint {manifest.checkpoint} leaves {min(left, default='')} behind, which nothing refers to"
            demand(not left, what)

    def file_removed(self, key: str) -> None:
        self._catch_up()
        for checkpoint, refs in self._stands_on.items():
            named = any(ref.key == key for ref in refs)
            demand(not named, f"checkpoint {checkpoint} stands on block {key}, which is removed")

    def live_blocks(self) -> set[str]:
        self.read_blocks()
        return set(self._live)

    def _finalized(self, mark: Finalized) -> None:
        pending = self.unfinalized
        in_turn = pending is not None and pending.checkpoint == mark.checkpoint
        demand(in_turn, f"checkpoint {mark.checkpoint} is finalized in its turn")
        assert pending is not None
        for name, producer_id, epoch in self.binding.values():
            demand(self._committed(name, producer_id, epoch), f"{name} is finalized though it is not committed")
        self.ledgers.finished(pending)
        self.savepoints.finalized(pending, mark.incarnation)
        self.unfinalized, self.binding = None, {}

    def _committed(self, name: str, producer_id: int, epoch: int) -> bool:
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
        """Check that read_committed readers see updates once, in order and decided, and are not held back long."""
        overdue = self.broker.overdue(self._transaction_timeout_ms)
        demand(not overdue, f"{overdue} have been open for longer than {self._transaction_timeout_ms} ms")
        for (sink, partition), offset in self._read_to.items():
            if self.broker.log_of(sink, partition).last_stable_offset <= offset:
                continue
            log = self.broker.fetch(sink, partition, offset)
            for record in log.records:
                self.readers.read(sink, record.value)
            self._read_to[sink, partition] = log.last_stable_offset
        if self._store is not None:
            self.ledgers.look(self._store.contents)

    def may_be_deleted(self) -> None:
        self.look()
        demand(self.savepoints.condemned, "only what is condemned is deleted")
        pending = self.unfinalized.checkpoint if self.unfinalized is not None else None
        demand(pending is None, f"checkpoint {pending} is condemned before it is known to be committed")
        demand(not self.savepoints.kept, f"savepoints {sorted(self.savepoints.kept)} are condemned")
        self.nothing_open()
        self.all_visible()

    def all_visible(self) -> None:
        self.look()
        stores = [] if self.ledgers.put_back else self.topology.stores
        for sink in (*self.sinks, *stores):
            self._judge_shown(sink)

    def _judge_shown(self, sink: str) -> None:
        there = self.readers.seen[sink] == self._owed[sink]
        demand(there, f"{sink} shows {self.readers.seen[sink]} of {self._owed[sink]} decided records")

    def close(self) -> None:
        everything = {
            (source, p): len(records)
            for source, each in self.inputs.items()
            for p, records in enumerate(each.partitions)
        }
        self.look()
        demand(self.decided == everything, "all of the input is counted")
        self.nothing_left()
        if not self.ledgers.put_back:
            self.readers.alike()

    def nothing_left(self) -> None:
        demand(self.unfinalized is None, "the last checkpoint is finalized")
        self.all_visible()
        self.nothing_open()
        for sink, partition in self._read_to:
            log = self.broker.fetch(sink, partition)
            demand(log.last_stable_offset == log.high_watermark, f"readers of {sink}[{partition}] are held back")

    def nothing_open(self, incarnation: int | None = None) -> None:
        """No transaction of the pipeline is open; or none of one incarnation's."""
        for each in self.broker.list_transactions("eo:p:"):
            name = TransactionalId.parse(each.transactional_id)
            if name is not None and incarnation in (None, name.incarnation):
                is_open = each.state in ("Ongoing", "PrepareCommit", "PrepareAbort")
                demand(not is_open, f"{each.transactional_id} is left {each.state}")


def text_of(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode()
