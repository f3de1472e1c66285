"""The judge of a simulation: a broker that watches every request it passes on, and independent readers.

It knows the steps of the topology and the input, and trusts nobody: from the words of the steps it works out by which
ways each input record comes to which count and sink, and what must be in a state or an output is counted from that.
Whatever breaks an invariant of the protocol raises `Broken`, at the first request that shows it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import Any

import msgspec
from topologies import CYCLE, MAX_PARALLELISM, Event, Input, Tally, Topology

from exactlyonce.checkpoint.records.committable import Committable, TransactionalId, coordinator_id
from exactlyonce.checkpoint.records.encoding import Block, BlockKey, DecisionKey, decode
from exactlyonce.checkpoint.records.manifest import BlockRef, Finalized, Manifest, OperatorSnapshot, Repair
from exactlyonce.checkpoint.transactions.commit import is_older
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.index import decode_index
from exactlyonce.state.restore import restore
from exactlyonce.testing.broker.interface import Error, Initialized, Isolation, NoAnswer, Produced
from exactlyonce.testing.broker.model import BrokerModel
from exactlyonce.testing.broker.transaction_coordinator import State

TOPIC = "p.checkpoints"
Named = tuple[str, int, int]
"""Transactional id, producer id, epoch."""
Place = tuple[str, int]
"""A source and a partition of its topic."""
PERIOD = 12
"""What the steps do depends on the offset modulo this."""


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
        if transactional_id is None and answer.error is Error.NONE and place[2] == TOPIC:
            self.oracle.blocks_written([key for key, _ in place[-1]])
        if transactional_id is not None and answer.error is Error.NONE and transactional_id in self.oracle.fenced:
            state = self.describe_transactions([transactional_id])[transactional_id]
            aborting = state is not None and state.state == "PrepareAbort"  # late records go with the others
            demand(aborting, f"{transactional_id} writes though it was swept")
        return answer

    def end_txn(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> Error:
        self._catch_up()
        self.oracle.before_end(transactional_id, producer_id, epoch, commit)
        answer = super().end_txn(transactional_id, producer_id, epoch, commit)
        if commit and answer is Error.NONE and transactional_id.startswith(self.oracle.coordinator):
            self.oracle.transaction_decided(producer_id, epoch)
        return answer

    def log_of(self, topic: str, partition: int) -> Any:
        """The log itself, whether or not the broker is up."""
        log = self._log(topic, partition)
        assert log is not None
        return log

    def is_committed(self, topic: str, partition: int, offset: int) -> bool:
        """Whether the record's transaction is, also where an older open one still hides it from readers."""
        log = self.log_of(topic, partition)
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


def ways_of(topology: Topology, source: str, offset: int) -> dict[str, list[str]]:
    """By step, the `way` of each record that it passes on for the input record at *offset* of *source*."""
    ways: dict[str, list[str]] = {}
    for step in topology.steps:
        come = [way for each in step.inputs for way in ways[each]]
        match step.kind:
            case "source":
                ways[step.id] = [""] if step.id == source else []
            case "branch":
                ways[step.id] = [f"{way}{step.id}/" for way in come]
            case "twice":
                ways[step.id] = [f"{way}{step.id}{mark}/" for way in come for mark in "12"]
            case "keep":
                ways[step.id] = come if offset % 3 != 1 else []
            case "split":
                ways[step.id] = come if offset % 4 else []
                ways[f"{step.id}~"] = [] if offset % 4 else come
            case _:
                ways[step.id] = come
    return ways


class Oracle:
    """See the module."""

    def __init__(
        self,
        broker: WatchedBroker,
        topology: Topology,
        inputs: dict[str, Input],
        *,
        output_partitions: int,
        block_partitions: int,
        transaction_timeout_ms: int,
    ) -> None:
        self.broker, self.topology, self.inputs = broker, topology, inputs
        self.sinks = topology.sinks
        self._block_partitions, self._transaction_timeout_ms = block_partitions, transaction_timeout_ms
        self.coordinator = coordinator_id("p")
        self._ways = {
            (source, k): ways_of(topology, source, k) for source in topology.sources for k in range(PERIOD)
        }
        self._count_before = {
            step.id: next((e for e in topology.of("count", "tally") if e.id == step.inputs[0]), None)
            for step in topology.of("sink")
        }
        """By sink, the count right before it, if it is one."""
        self._ordered = {
            step.id
            for step in topology.of("sink")
            if (count := self._count_before[step.id]) is not None and count.key == step.key
        }
        """Sinks that have all updates of a key in one partition."""
        self.manifests: dict[int, Manifest] = {}
        self.unfinalized: Manifest | None = None
        self._retained: dict[int, Manifest] = {}
        """Those that are not tombstoned."""
        self._stands_on: dict[int, set[BlockRef]] = {}
        """By checkpoint that is retained."""
        self.ever_named: set[Named] = set()
        self.binding: dict[str, Named] = {}
        """Of the unfinalized checkpoint: by transactional id of the original, what must be committed now."""
        self.fenced: set[str | None] = set()
        """Ids that were swept, and not initialised since."""
        self._initialized: Counter[str | None] = Counter()
        self.decided: dict[Place, int] = {
            (source, p): 0 for source, each in inputs.items() for p in range(len(each.partitions))
        }
        """Sn of the newest manifest."""
        self._arrived: dict[str, Counter[str]] = {each.id: Counter() for each in topology.of("count", "tally")}
        """By count and key, how many records before Sn have come to it."""
        self._owed: Counter[str] = Counter()
        """By sink, how many records of those before Sn come to it."""
        self.seen: Counter[str] = Counter()
        """By sink, how many of them are visible."""
        self._shown: dict[str, set[tuple[str, int, int, str]]] = {sink: set() for sink in self.sinks}
        self._newest: dict[tuple[Any, ...], int] = {}
        """By sink, place, way and keys, the offset of the newest record that is visible."""
        self._totals: dict[str, Counter[str]] = {sink: Counter() for sink in self.sinks}
        """By sink and key, how many updates are visible."""
        self._updates: dict[tuple[str, str, int], tuple[str, int, int, str]] = {}
        """By count, key and number, the record that the update stems from: the same in every sink."""
        self._given: dict[tuple[Any, ...], tuple[int, ...]] = {}
        """By count and record, its totals: the same in every sink."""
        self._stand_ins: list[Committable] = []
        self._attempt_decided = (0, 0)
        """The newest attempt, of the newest incarnation, that has completed a checkpoint."""
        self._of_zombies: set[str] = set()
        """Blocks that older attempts wrote after that: nobody looks for them."""
        self._readers = {(sink, p): 0 for sink in self.sinks for p in range(output_partitions)}
        self._decisions_read = 0
        self._blocks_read = [0] * block_partitions
        self._live: dict[str, BlockRef | None] = {}
        """Blocks that are there and have no tombstone that counts."""
        self._tombstones: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        """By producer, those that its transaction, open or ended otherwise, has written."""
        self._bodies: dict[BlockRef, bytes] = {}

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

    def transaction_decided(self, producer_id: int, epoch: int) -> None:
        """A transaction of the decision log has become durable."""
        self.look()
        self._read_blocks()
        for block in self._tombstones.pop((producer_id, epoch), ()):
            self._live.pop(block, None)
        log = self.broker.fetch(TOPIC, 0, self._decisions_read, Isolation.READ_UNCOMMITTED)
        ours = [each for each in log.records if (each.producer_id, each.epoch) == (producer_id, epoch)]
        keys = [DecisionKey.parse(text_of(each.key)) for each in ours]
        for key, record in zip(keys, ours, strict=True):
            self._decision(key, record.value)
        self._decisions_read = log.high_watermark
        for key, record in zip(keys, ours, strict=True):
            if key is not None and key.kind is Finalized and record.value is not None:
                self._no_orphans(self.manifests[key.number])
        for checkpoint, refs in self._stands_on.items():
            for ref in refs:
                demand(ref.key in self._live, f"checkpoint {checkpoint} stands on block {ref.key}, which is tombstoned")
        pending = self.unfinalized
        demand(pending is None or pending.previous in self._retained, "an unfinalized checkpoint can be replayed")

    def _read_blocks(self) -> None:
        """What was written to the block partitions since the last look."""
        for partition in range(1, self._block_partitions):
            log = self.broker.log_of(TOPIC, partition)
            begin = bisect_left(log._offsets, self._blocks_read[partition])
            for record in log._records[begin:]:
                key = text_of(record.key)
                if record.value is None:
                    self._tombstones[record.producer_id, record.epoch].append(key)
                else:
                    self._live[key] = None
            self._blocks_read[partition] = log.end_offset

    # --- decisions ----------------------------------------------------------------------------------------------

    def _decision(self, key: DecisionKey | None, value: Any) -> None:
        demand(key is not None, "the decision log holds nothing foreign")
        assert key is not None
        if isinstance(value, tuple):
            value = value[0]
        if value is None:
            if key.kind is Manifest:
                self._retained.pop(key.number, None)
                self._stands_on.pop(key.number, None)
        elif key.kind is Manifest:
            self._manifest(decode(value, Manifest))
        elif key.kind is Finalized:
            self._finalized(decode(value, Finalized))
        elif key.kind is Repair:
            self._repair(decode(value, Repair))

    def _manifest(self, manifest: Manifest) -> None:
        n = manifest.checkpoint
        demand(n not in self.manifests, f"there are two manifests of checkpoint {n}")
        demand(n > max(self.manifests, default=-1), f"checkpoint ids only grow, not to {n}")
        demand(self.unfinalized is None, f"checkpoint {n} is decided before the one before it is finalized")
        before = self._owed.copy()
        self._advance(manifest)
        for operator in manifest.operators:
            self._state(manifest, operator)
        if n:
            have = {operator.operator for operator in manifest.operators}
            demand(have == set(self._arrived), f"checkpoint {n} has state of {sorted(have)}")
        for sink in self.sinks:
            wanted = self._owed[sink] - before[sink]
            records = sum(c.records for c in manifest.committables if c.sink == sink)
            demand(records == wanted, f"sink {sink} of checkpoint {n} has {records} records, not {wanted}")
        self._retained[n], self._stands_on[n] = manifest, self._references(manifest)
        self.manifests[n], self.unfinalized = manifest, manifest
        self._attempt_decided = (manifest.incarnation, manifest.attempt)
        self.binding = {c.transactional_id: named(c) for c in manifest.committables}
        self.ever_named.update(self.binding.values())

    def _advance(self, manifest: Manifest) -> None:
        """Count the records between the last Sn and this one."""
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
        ways = self._ways[place[0], offset % PERIOD]
        for step in self.topology.steps:
            if step.kind in ("count", "tally"):
                self._arrived[step.id][first if step.key == "first" else second] += len(ways[step.id])
            elif step.kind == "sink":
                self._owed[step.id] += len(ways[step.id])

    def _state(self, manifest: Manifest, operator: OperatorSnapshot) -> None:
        """What the blocks of the manifest say of *operator* is what the records before Sn make of it."""
        step = next(each for each in self.topology.steps if each.id == operator.operator)
        n, tally = manifest.checkpoint, step.kind == "tally"
        try:
            table = restore(
                step.id, Tally if tally else int, range(MAX_PARALLELISM), MAX_PARALLELISM, n,
                [self._body(ref) for index in operator.index for ref in index],
                lambda refs: [(ref, self._body(ref)) for ref in refs],
            )  # fmt: skip
        except DamagedState as error:
            raise Broken(f"the state of {step.id} at checkpoint {n} cannot be read: {error}") from error
        found = {key: state.total if tally else state for key, state in table.items()}
        arrived = self._arrived[step.id]
        wanted = {canonical_key(key): count % CYCLE for key, count in arrived.items() if count % CYCLE}
        demand(found == wanted, f"the state of {step.id} at checkpoint {n} is not that of the input before Sn")

    def _references(self, manifest: Manifest) -> set[BlockRef]:
        indexes = [ref for operator in manifest.operators for index in operator.index for ref in index]
        logs = [ref for log in manifest.order_logs for ref in log.blocks]
        listed = [block.ref for each in indexes for block in decode_index(self._body(each)).blocks]
        for ref in logs:
            self._body(ref)
        return {*indexes, *logs, *listed}

    def _body(self, ref: BlockRef) -> bytes:
        """What the block holds, which must be where the reference says."""
        if ref not in self._bodies:
            found = self.broker.fetch(TOPIC, ref.partition, ref.offset, Isolation.READ_UNCOMMITTED).records[:1]
            there = [(each.offset, text_of(each.key)) for each in found]
            demand(there == [(ref.offset, ref.key)], f"block {ref.key} is not where it is referred to")
            self._bodies[ref] = decode(found[0].value, Block).body
        return self._bodies[ref]

    def blocks_written(self, keys: list[str]) -> None:
        """By a worker, perhaps of an attempt that is over."""
        parsed = [(text, key) for text in keys if (key := BlockKey.parse(text)) is not None]
        self._of_zombies.update(text for text, key in parsed if (key.incarnation, key.attempt) < self._attempt_decided)

    def _no_orphans(self, manifest: Manifest) -> None:
        """Now that *manifest* is finalized every block in the topic is referred to, but for those of checkpoints that
        are in flight behind it."""
        named_by = {ref.key for refs in self._stands_on.values() for ref in refs}
        attempt = (manifest.incarnation, manifest.attempt)
        for text in sorted(self._live.keys() - named_by - self._of_zombies):
            key = BlockKey.parse(text)
            assert key is not None
            in_flight = (key.incarnation, key.attempt) == attempt and key.checkpoint > manifest.checkpoint
            demand(in_flight, f"checkpoint {manifest.checkpoint} leaves {text} behind, which nothing refers to")

    def live_blocks(self) -> set[str]:
        """The keys of all blocks without a tombstone that counts."""
        self._read_blocks()
        return set(self._live)

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
                self._visible(sink, _event(record.value))
            self._readers[sink, partition] = max(offset, log.last_stable_offset)

    def _visible(self, sink: str, event: Event) -> None:
        place, offset = (event.source, event.partition), event.offset
        it = f"record {offset} of {event.source}[{event.partition}] by way of {event.way or 'nothing'}"
        known = place in self.decided and offset < len(self.inputs[event.source].partitions[event.partition])
        demand(known, f"{it} in {sink} stems from nothing")
        keys = self.inputs[event.source].partitions[event.partition][offset]
        demand(keys == (event.first, event.second), f"{it} in {sink} has other keys")
        ways = self._ways[event.source, offset % PERIOD][sink]
        demand(event.way in ways, f"{it} does not come to {sink}")
        demand(offset < self.decided[place], f"{it} is visible in {sink} before its manifest")
        name = (*place, offset, event.way)
        demand(name not in self._shown[sink], f"{it} is visible twice in {sink}")
        stream = (sink, *place, event.way, *keys)
        demand(offset > self._newest.get(stream, -1), f"{it} comes out of order in {sink}")
        count = self._count_before[sink]
        if count is not None:
            given = self._given.setdefault((count.id, *name), event.totals)
            demand(event.totals == given, f"{it} has {event.totals} in {sink}, and {given} in another sink")
        if count is not None and sink in self._ordered:
            key = event.first if count.key == "first" else event.second
            number = self._totals[sink][key] = self._totals[sink][key] + 1
            total = (number - 1) % CYCLE + 1
            demand(event.totals[-1] == total, f"update {event.totals[-1]} of {key} in {sink} comes instead of {total}")
            stems = self._updates.setdefault((count.id, key, number), name)
            demand(stems == name, f"update {number} of {key} stems from another record in {sink}")
        self._shown[sink].add(name)
        self._newest[stream] = offset
        self.seen[sink] += 1

    def all_visible(self) -> None:
        """Everything decided can be read."""
        self.look()
        for sink in self.sinks:
            demand(
                self.seen[sink] == self._owed[sink],
                f"{sink} shows {self.seen[sink]} of {self._owed[sink]} decided records",
            )

    def close(self) -> None:
        """At the end of everything: all of the input is counted and visible, nothing is open, readers are not held."""
        everything = {
            (source, p): len(records)
            for source, each in self.inputs.items()
            for p, records in enumerate(each.partitions)
        }
        demand(self.decided == everything, "all of the input is counted")
        self.nothing_left()

    def nothing_left(self) -> None:
        """Whatever was read, of it everything is finalized, visible and closed."""
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


_decode_event = msgspec.json.Decoder(Event).decode


def _event(value: bytes) -> Event:
    return _decode_event(value)


def text_of(key: str | bytes) -> str:
    """A key of the checkpoint topic."""
    return key if isinstance(key, str) else key.decode()
