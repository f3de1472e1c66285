"""A modelled worker of the simulator: sources, a shuffle, running totals, sinks, with the real alignment and pool.

The pipeline: records (partition, offset, key) are read, shuffled by key, counted per key, and every update
(count, partition, offset) is written to each sink. Workers of one attempt share their channels; each does one small
thing per step, chosen by the world's randomness, and can be paused or killed between any two.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.checkpoint.coordinator import Ack, OperatorAck
from exactlyonce.checkpoint.decision import Precommit
from exactlyonce.checkpoint.records.committable import TransactionalId
from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, OrderLog, SourceOffset
from exactlyonce.pipeline.errors import require
from exactlyonce.sinks.kafka.transaction_pool import SlotState, TransactionPool
from exactlyonce.testing.broker.interface import Error, Isolation, NoAnswer

if TYPE_CHECKING:
    from exactlyonce.testing.simulated_coordinator import Life
    from exactlyonce.testing.simulation import World

Steps = Generator[int | None, None, Any]
"""A thread of control: yields between steps, and the time before which it need not be continued."""

BACKLOG_MAX = 12
CHAIN_MAX = 3
"""Blocks of a subtask's state before they are written anew as one."""
IDLE_MS = 4


@dataclass(frozen=True)
class Barrier:
    """Between the records before and after a checkpoint."""

    checkpoint: int
    base: int
    final: bool


@dataclass
class Attempt:
    """What the workers of one attempt have in common."""

    incarnation: int
    number: int
    manifest: Manifest
    parallelism: int
    channels: dict[tuple[int, int], deque[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        every = range(self.parallelism)
        self.channels = {(i, j): deque() for i in every for j in every}


@dataclass
class Producer:
    """A producer instance: what the client library knows of it, which is not what the worker may see."""

    producer_id: int
    epoch: int
    sequences: dict[tuple[str, int], int] = field(default_factory=dict)
    granted: tuple[int, int] | None = None
    """What the coordinator says that its producer id and epoch are."""
    used: bool = False


@dataclass
class Interval:
    """Output between two barriers."""

    records: deque[tuple[str, Any]] = field(default_factory=deque)
    checkpoint: int | None = None


class Sink:
    """One sink subtask: a transaction per checkpoint, produced in order, flushed at the barrier."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker, self.world, self.name = worker, worker.world, name
        attempt = worker.attempt
        ids = [
            str(TransactionalId("p", name, worker.index, attempt.incarnation, str(attempt.number), str(slot)))
            for slot in range(self.world.settings.slots)
        ]
        self.pool = TransactionPool(ids)
        self.producers: dict[str, Producer] = {}
        self.intervals = deque([Interval()])
        self.flushed: dict[int, tuple[Precommit, ...]] = {}
        self.writing: str | None = None
        self._opened_ms = 0
        self._produced = 0
        self._batch: tuple[int, list[tuple[str, Any]]] | None = None

    def cut(self, checkpoint: int) -> None:
        """The barrier: what was put out before belongs to *checkpoint*."""
        self.intervals[-1].checkpoint = checkpoint
        self.intervals.append(Interval())

    def ready(self) -> str | None:
        """A granted producer that nothing was written with."""
        return next((name for name, each in self.producers.items() if each.granted and not each.used), None)

    def step(self) -> bool:
        """Produce a batch, or flush; False if there is nothing to do."""
        interval = self.intervals[0]
        if interval.records:
            return self._produce(interval)
        if interval.checkpoint is None:
            return False
        self._flush(interval.checkpoint)
        return True

    def _produce(self, interval: Interval) -> bool:
        if self.writing is None and not self._begin():
            return False
        assert self.writing is not None
        if self._batch is None:
            self._batch = self._next_batch(interval)
        partition, records = self._batch
        if self.world.faults.on_delivery():
            return self._delivered(interval)  # a failed delivery that nobody has noticed: only the broker's count knows
        place, producer = (self.name, partition), self.producers[self.writing]
        sequence = producer.sequences.get(place, 0)
        try:
            answer = self.world.ask(
                "produce", self.writing, producer.producer_id, producer.epoch, *place, records,
                sequence=sequence, added=place in producer.sequences,
            )  # fmt: skip
        except NoAnswer:
            return True
        if answer.error is Error.CONCURRENT_TRANSACTIONS:
            return True
        if answer.error is not Error.NONE:
            self.worker.fail(f"{self.writing}: {answer.error.name}")
            return True
        producer.sequences[place] = sequence + len(records)
        return self._delivered(interval)

    def _begin(self) -> bool:
        self.writing = self.ready()
        if self.writing is None:
            return False
        self.pool.move(self.writing, SlotState.WRITING)
        self.producers[self.writing].used = True
        self._opened_ms, self._produced = self.world.clock.monotonic_ms(), 0
        return True

    def _next_batch(self, interval: Interval) -> tuple[int, list[tuple[str, Any]]]:
        """Up to three records of one partition from the front."""
        partition = self.world.output_partition(interval.records[0][0])
        records = []
        for record in list(interval.records)[: self.world.rng.randint(1, 3)]:
            if self.world.output_partition(record[0]) != partition:
                break
            records.append(record)
        return partition, records

    def _delivered(self, interval: Interval) -> bool:
        assert self._batch is not None
        for _ in self._batch[1]:
            interval.records.popleft()
        self._produced += len(self._batch[1])
        self._batch = None
        return True

    def _flush(self, checkpoint: int) -> None:
        precommits: tuple[Precommit, ...] = ()
        if self.writing is not None:
            name = self.writing
            granted = self.producers[name].granted
            assert granted is not None
            open_ms = self.world.clock.monotonic_ms() - self._opened_ms
            precommits = (
                Precommit(name, *granted, self.name, self.worker.index, checkpoint, self._produced, open_ms),
            )  # fmt: skip
            self.pool.move(name, SlotState.DRAINING)
            self.pool.precommitted(name, checkpoint)
            self.writing = None
        self.flushed[checkpoint] = precommits
        self.intervals.popleft()


@dataclass
class Snapshot:
    """The state of a subtask at a barrier, on its way into blocks."""

    barrier: Barrier
    values: dict[str, int]
    before: tuple[BlockRef, ...]
    """The blocks that this one adds to."""
    blocks: tuple[BlockRef, ...] = ()
    order: tuple[BlockRef, ...] = ()
    index: tuple[BlockRef, ...] = ()


def reference(partition: int, offset: int, key: str, value: Any) -> BlockRef:
    """Of a block of this topic."""
    return BlockRef(partition, offset, key, 1, hashlib.sha256(repr(value).encode()).digest())


class Worker:
    """Source subtask, running totals and sink subtasks of one index."""

    def __init__(self, world: World, life: Life, attempt: Attempt, index: int) -> None:
        self.world, self.life, self.attempt, self.index = world, life, attempt, index
        self.alive, self.paused_until_ms = True, 0
        self.triggers: deque[Barrier] = deque()
        self.alignment = Alignment(range(attempt.parallelism))
        self.totals: dict[str, int] = {}
        self.touched: dict[str, int] = {}
        """By key, the newest checkpoint whose snapshot does not hold its present total."""
        self.chains: dict[int, tuple[BlockRef, ...]] = {}
        self.sinks = [Sink(self, name) for name in world.sinks]
        self.snapshots: deque[Snapshot] = deque()
        self._read_order: list[int] = []
        """Of which partition each record was read since the last barrier."""
        self._taken_order: list[int] = []
        """From which source subtask each record was taken since the last snapshot."""
        self._read_orders: dict[int, tuple[int, ...]] = {}
        self._orders: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """The order logs by checkpoint: how this index read, and how it took."""
        self.positions = {
            o.partition: o.offset for o in attempt.manifest.offsets if o.partition % attempt.parallelism == index
        }
        self.reading = True
        self._blocks_written = 0
        self._block_producer: tuple[int, int] | None = None
        self._block: tuple[int, str, Any] | None = None
        world.spawn(self, self._main())
        world.spawn(self, self._prepare())

    def fail(self, reason: str) -> None:
        """Last words."""
        self.life.hear(self, "failed", f"worker {self.index}: {reason}")
        self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = False

    # --- threads ------------------------------------------------------------------------------------------------

    def _main(self) -> Steps:
        yield from self._restore()
        self.life.hear(self, "restored")
        actions = [self._read, self._process, self._write_block, self._acknowledge, *(s.step for s in self.sinks)]
        while self.alive:
            self.world.rng.shuffle(actions)
            done = any(action() for action in actions)
            yield None if done else self.world.clock.monotonic_ms() + IDLE_MS

    def _prepare(self) -> Steps:
        """The background thread that makes producers."""
        while self.alive:
            yield self.world.clock.monotonic_ms() + IDLE_MS
            for sink in self.sinks:
                name = sink.pool.wanted()
                if name is not None:
                    yield from self._initialize(sink, name)

    def _initialize(self, sink: Sink, name: str) -> Steps:
        sink.pool.move(name, SlotState.PREPARING)
        answer = yield from self.world.until_answered(
            "init_transactions", name, self.world.transaction_timeout_ms, again=(Error.CONCURRENT_TRANSACTIONS,)
        )
        sink.producers[name] = Producer(answer.producer_id, answer.epoch)
        sink.pool.move(name, SlotState.PREPARED)
        self.life.hear(self, "prepared", sink.name, name)

    def granted(self, sink_name: str, name: str, producer_id: int, epoch: int) -> None:
        """The coordinator has read the producer's id and epoch: it may be written with."""
        sink = next(each for each in self.sinks if each.name == sink_name)
        sink.producers[name].granted = producer_id, epoch
        sink.pool.move(name, SlotState.READY)

    def finalized(self, checkpoint: int) -> None:
        """Ids used up to *checkpoint* are free."""
        for sink in self.sinks:
            sink.pool.finalized(checkpoint)

    # --- source -------------------------------------------------------------------------------------------------

    def _read(self) -> bool:
        if self.triggers:
            self._inject(self.triggers.popleft())
            return True
        channels = [self.attempt.channels[self.index, j] for j in range(self.attempt.parallelism)]
        if not self.reading or any(len(each) > BACKLOG_MAX for each in channels):
            return False
        waiting = [p for p, position in self.positions.items() if position < self.world.available(p)]
        if not waiting:
            if all(position == len(self.world.inputs[p]) for p, position in self.positions.items()):
                self.life.hear(self, "source finished")
            return False
        partition = self.world.rng.choice(waiting)
        for _ in range(self.world.rng.randint(1, 3)):
            offset = self.positions[partition]
            if offset < self.world.available(partition):
                key = self.world.inputs[partition][offset]
                channels[self.world.owner(key)].append((partition, offset, key))
                self.positions[partition] += 1
                self._read_order.append(partition)
        return True

    def _inject(self, barrier: Barrier) -> None:
        """Note Sn, send the barrier down every channel, acknowledge."""
        offsets = self.offsets()
        self._read_orders[barrier.checkpoint], self._read_order = tuple(self._read_order), []
        for j in range(self.attempt.parallelism):
            self.attempt.channels[self.index, j].append(barrier)
        self.reading = self.reading and not barrier.final
        self.life.hear(self, "acknowledged", Ack("source", self.index, barrier.checkpoint, offsets))

    def offsets(self) -> tuple[SourceOffset, ...]:
        """Sn of the partitions of this subtask."""
        return tuple(SourceOffset("in", "in", "in-id", p, offset) for p, offset in sorted(self.positions.items()))

    # --- totals -------------------------------------------------------------------------------------------------

    def _process(self) -> bool:
        if any(len(sink.intervals[-1].records) > BACKLOG_MAX for sink in self.sinks):
            return False
        channels = self.attempt.channels
        open_ = [i for i in range(self.attempt.parallelism) if channels[i, self.index] and not self.is_held(i)]
        if not open_:
            return False
        source = self.world.rng.choice(open_)
        item = channels[source, self.index].popleft()
        if isinstance(item, Barrier):
            if self.alignment.barrier(source, item.checkpoint):
                self._orders[item.checkpoint] = self._read_orders.pop(item.checkpoint), tuple(self._taken_order)
                self._taken_order = []
                self._snapshot(item)
        else:
            self._taken_order.append(source)
            self._count(*item)
        return True

    def is_held(self, source: int) -> bool:
        """Whether alignment holds the channel from *source* back."""
        return self.alignment.is_held(source)

    def _count(self, partition: int, offset: int, key: str) -> None:
        self.totals[key] = self.totals.get(key, 0) + 1
        self.touched[key] = self.alignment.checkpoint_latest
        for sink in self.sinks:
            sink.intervals[-1].records.append((key, (self.totals[key], partition, offset)))

    def _snapshot(self, barrier: Barrier) -> None:
        """The synchronous part: what changed since the base, or all if the chain has grown long."""
        before = self.chains[barrier.base]
        if len(before) >= CHAIN_MAX or self.world.rng.random() < 0.2:
            before, values = (), dict(self.totals)
        else:
            values = {key: self.totals[key] for key, last in self.touched.items() if last >= barrier.base}
        self.snapshots.append(Snapshot(barrier, values, before))
        for sink in self.sinks:
            sink.cut(barrier.checkpoint)

    # --- blocks -------------------------------------------------------------------------------------------------

    def _restore(self) -> Steps:
        (operator,) = self.attempt.manifest.operators or (None,)
        index = operator.index[self.index] if operator else ()
        chain: tuple[BlockRef, ...] = ()
        for ref in index:
            chain += yield from self._fetched(ref)
        for ref in chain:
            self.totals.update((yield from self._fetched(ref)))
        self.chains[self.attempt.manifest.checkpoint] = chain
        self.alignment.checkpoint_latest = self.attempt.manifest.checkpoint

    def _fetched(self, ref: BlockRef) -> Steps:
        """The value of the block, which must be the one that was written."""
        answer = yield from self.world.until_answered(
            "fetch", "p.checkpoints", ref.partition, ref.offset, Isolation.READ_UNCOMMITTED
        )
        for found in answer.records[:1]:
            if (found.offset, found.key) == (ref.offset, ref.key):
                return found.value
        require(self.life is not self.world.life, f"block {ref.key} is where the manifest says")
        self.fail("the checkpoints of a zombie have gone")
        yield None

    def _write_block(self) -> bool:
        """One request of the asynchronous part: the state's block, the order log, then the index of the chain."""
        snapshot = next((each for each in self.snapshots if not each.index), None)
        if snapshot is None:
            return False
        if self._block is None:
            kind, value = self._next_block(snapshot)
            self._block = self._blocks_written, self._block_key(snapshot, kind), value
        try:
            ref = self._append_block(*self._block)
        except NoAnswer:
            return True
        if ref is not None:
            self._blocks_written, self._block = self._blocks_written + 1, None
            if not snapshot.blocks:
                snapshot.blocks = (*snapshot.before, ref)
            elif not snapshot.order:
                snapshot.order = (ref,)
            else:
                snapshot.index = (ref,)
                self.chains[snapshot.barrier.checkpoint] = snapshot.blocks
        return True

    def _next_block(self, snapshot: Snapshot) -> tuple[str, Any]:
        if not snapshot.blocks:
            return "totals", tuple(snapshot.values.items())
        return ("index", snapshot.blocks) if snapshot.order else ("order", self._orders[snapshot.barrier.checkpoint])

    def _block_key(self, snapshot: Snapshot, kind: str) -> str:
        life, number = self.attempt.incarnation, self.attempt.number
        nonce = self.world.rng.getrandbits(48)
        return str(BlockKey(life, snapshot.barrier.checkpoint, kind, self.index, 0, number, f"{nonce:x}"))

    def _append_block(self, sequence: int, key: str, value: Any) -> BlockRef | None:
        if self._block_producer is None:
            _, *self._block_producer = self.world.ask("init_transactions", None)
            return None
        partition = 1 + self.index % (self.world.block_partitions - 1)
        answer = self.world.ask(
            "produce", None, *self._block_producer, "p.checkpoints", partition, [(key, value)], sequence=sequence
        )  # fmt: skip
        if answer.error is not Error.NONE:
            self.fail(f"block: {answer.error.name}")
            return None
        return reference(partition, answer.first_offset, key, value)

    def _acknowledge(self) -> bool:
        """The oldest snapshot, once its blocks are written and every sink has flushed."""
        if not self.snapshots:
            return False
        snapshot, checkpoint = self.snapshots[0], self.snapshots[0].barrier.checkpoint
        if not snapshot.index or not all(checkpoint in sink.flushed for sink in self.sinks):
            return False
        precommits = tuple(p for sink in self.sinks for p in sink.flushed.pop(checkpoint))
        operator = OperatorAck("totals", snapshot.index, snapshot.blocks, 1)
        written = (snapshot.blocks[-1], *snapshot.order, *snapshot.index)
        order = OrderLog("totals", self.index, snapshot.order)
        ack = Ack(
            "totals", self.index, checkpoint,
            operators=(operator,), order_log=order, precommits=precommits, written=written,
        )  # fmt: skip
        self.snapshots.popleft()
        self.life.hear(self, "acknowledged", ack)
        return True
