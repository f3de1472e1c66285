"""A simulated pipeline: the shipped coordinator and workers against the broker model, with all that can go wrong.

A seed gives one history: topology, scheduling, lost, delayed and repeated requests, crashes, zombies, transaction
timeouts. Faults end after a while; then the job must reach the end of its input. The oracle judges every request and
all output.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from bounds import bounds
from coordinator import SimulatedCoordinator
from faults import EXPIRY_MS, FaultInjector
from joins import OracleJoins, OraclePairs
from judges import OracleAlignedWindows, OracleAtLeastOnce, OracleUnaligned, OracleWindows
from load import Load
from local_files import LocalState, fetching_seldom
from luck import LUCK, NONE
from oracle import Oracle
from outside import Outside
from remembered import remembered
from stores import Stores
from topologies import (
    HOLDING,
    PAIRING,
    PIPELINE,
    Event,
    built,
    drawn,
    graph_of,
    inputs_for,
    is_gone,
    topic_of,
    under_load,
)
from watched import TOPIC, Asserted, Broken, WatchedBroker, demand

from exactlyonce.checkpoint.commits.kafka import TRIES_AGAIN
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.events import End
from exactlyonce.checkpoint.records.encoding import PART_BYTES, DamagedRecord
from exactlyonce.checkpoint.records.manifest import TopicInfo
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.transactions.commit import UNREACHABLE
from exactlyonce.engines.options import StateSettings
from exactlyonce.pipeline.errors import (
    BrokerUnavailable,
    ConfigError,
    Fenced,
    Halt,
    RecordError,
    StoppedShort,
    StoreUnavailable,
    TopicError,
    Undetermined,
)
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.sink import EXACTLY_ONCE
from exactlyonce.testing.broker.interface import Error, UnreliableBroker
from exactlyonce.testing.broker.model import BrokerSettings
from exactlyonce.testing.simulation import coordinator as simulated
from exactlyonce.testing.simulation.coordinator import READERS_HELD
from exactlyonce.testing.simulation.world import Attempt, SimulatedWorld

STEPS_MAX = 60_000
"""A history that has not come to its end by then never will."""
LOADED_STEPS_MAX = 300_000
"""Under load, where more records take their time."""
CHAOS_STEPS = 8_000
LOOK_STEPS = 20
"""How often the readers of the output look."""
FEED_STEPS = 8
"""How often the input grows."""
PART_BYTES_SMALL = 40
"""So that a manifest has several parts."""
TRANSACTION_TIMEOUT_MAX_MS = 20_000
CONDEMNED = "are to be deleted"
SURVIVABLE = (Fenced, Undetermined, BrokerUnavailable, StoreUnavailable, StoppedShort, RecordError)
"""Errors with which a coordinator may end before the next one goes on."""
HALTS = (Halt, TopicError)
"""The error of a coordinator whose input topic is not the one that was read."""


class World(SimulatedWorld):
    asserted = Asserted
    broker: WatchedBroker
    network: UnreliableBroker
    faults: FaultInjector
    outside: Outside | None
    load: Load | None
    coordinator: SimulatedCoordinator | None

    def __init__(self, seed: int, shape: str | None = None, luck: str | None = None) -> None:
        """*shape* names the topology; None: it is drawn, too. *luck*: see there."""
        super().__init__(random.Random(seed))
        self.part_rng = random.Random(f"parts {seed}")
        self.luck = LUCK[luck] if luck else NONE
        self.local_state = LocalState(self, seed, self.luck.local_files)
        self.halted = False
        self.coordinators: list[SimulatedCoordinator] = []
        self._shape(shape, seed)
        self.settings = self._settings()
        self.outside = Outside(self) if self.settings.storage else None
        self.broker = WatchedBroker(self.clock, self._broker_settings())
        self.network = UnreliableBroker(self.broker, self.clock)
        self.judge_anew()
        self.faults = FaultInjector(self, self.luck)
        self._topics()

    def _graph(self) -> LogicalGraph:
        if self.load:
            return under_load(self.topology, self.load.calls)
        return built(self.topology, self.stores.sink) if self.stores else graph_of(self.topology)

    def _shape(self, name: str | None, seed: int) -> None:
        rng = self.rng
        self.topology = drawn(rng, name)
        self.stores = Stores(self) if self.topology.stores else None
        if self.stores:
            self.stores.tilt(self.luck.stores)
        self.load = Load(self, seed) if self.luck.load else None
        self.drains = self.topology.has_times
        self.fires_slowly = self.drains and random.Random(f"firings of {seed}").random() < 0.5
        self.graph = self._graph()
        self.fingerprint = self.graph.fingerprint()
        self.inputs = self.load.inputs() if self.load else inputs_for(self.topology, rng)
        self.plan = self.planned(self.luck.parallelism or rng.randint(1, 3))
        self.sinks = self.topology.sinks
        self.output_partitions = self.luck.output_partitions or rng.randint(1, 3)
        self.block_partitions = rng.randint(2, 3)
        self._steps_per_record = 1 if self.load else rng.choice((1, 5, 15))
        self._fed = {(source, p): 0 for source, each in self.inputs.items() for p in range(len(each.partitions))}

    def judge_anew(self) -> None:
        """Nothing is decided, and what is visible now is nobody's business."""
        judge = Oracle if self.settings.mode == EXACTLY_ONCE or self.topology.is_stateless else OracleAtLeastOnce
        if self.settings.unaligned or (self.topology.loops and self.settings.mode == EXACTLY_ONCE):
            judge = OracleUnaligned
        if self.topology.of(*HOLDING, "expiring"):
            judge = OracleWindows if self.settings.unaligned else OracleAlignedWindows
        if self.topology.tables:
            judge = OracleJoins
        if self.topology.of(*PAIRING):
            judge = OraclePairs
        self.oracle = self.broker.oracle = judge(
            self.broker, self.topology, self.inputs, output_partitions=self.output_partitions,
            block_partitions=self.block_partitions, transaction_timeout_ms=self.transaction_timeout_ms,
            store=self.stores.model if self.stores else None, incremental=self.settings.incremental,
        )  # fmt: skip
        if self.outside is not None:
            self.oracle.keep_outside(self.outside)

    def _rescale(self) -> None:
        chance = self.stores.rescale_chance if self.stores else self.luck.rescale_chance
        if (self.stores or chance) and self.rng.random() < chance:
            self.seen["rescaled"] += 1
            self.plan = self.planned(self.rng.randint(1, 3))
            self.oracle.readers.rescaled = True
            self.note(f"parallelism is {self.plan.parallelism}")

    def _settings(self) -> CheckpointSettings:
        choice = self.rng.choice
        settings = CheckpointSettings(
            interval_ms=choice((20, 60, 150)),
            timeout_ms=choice((200, 400)),
            max_concurrent=choice((1, 1, 2, 3)),
            tolerable_failed=choice((0, 1, 2)),
            num_retained=choice((1, 2, 3)),
            restart_budget_ms=500,
        )
        settings = msgspec.structs.replace(settings, **self.luck.settings)
        needed_ms = settings.transaction_timeout_needed_ms
        settings = msgspec.structs.replace(settings, transaction_timeout_ms=self.rng.randint(needed_ms, 2 * needed_ms))
        self.transaction_timeout_ms = settings.transaction_timeout_for(TRANSACTION_TIMEOUT_MAX_MS, decisions_ms=0)
        return settings

    def _broker_settings(self) -> BrokerSettings:
        return BrokerSettings(
            transaction_timeout_max_ms=TRANSACTION_TIMEOUT_MAX_MS,
            timeout_check_interval_ms=self.rng.choice((20, 100, 300)),
            transactional_id_expiration_ms=EXPIRY_MS,
            expiration_check_interval_ms=EXPIRY_MS // 10,
            marker_delay_ms=self.rng.randint(1, 6),
        )

    def _topics(self) -> None:
        """And a transaction of another pipeline, whose name begins alike and which is none of our business."""
        self.broker.create_topic(TOPIC, self.block_partitions, compact=True)
        self.topic = TopicInfo(TOPIC, self.broker.topic_id(TOPIC) or "", self.block_partitions, 1)
        for source, each in self.inputs.items():
            self.broker.create_topic(topic_of(source), each.at_first)
        self.feed()
        for sink in self.sinks:
            self.broker.create_topic(sink, self.output_partitions)
        self.broker.create_topic("foreign")
        foreign = f"eo:{PIPELINE}-q:out:0:0.0:0"
        _, producer_id, epoch = self.broker.init_transactions(foreign, TRANSACTION_TIMEOUT_MAX_MS)
        self.broker.produce(foreign, producer_id, epoch, "foreign", 0, [(None, "x")])

    def decision_log(self, append_timeout_ms: int) -> DecisionLog:
        """The decision log for a process, in some of which a manifest is larger than a record."""
        part_bytes = PART_BYTES_SMALL if self.part_rng.random() < self.luck.parts_chance else PART_BYTES
        return DecisionLog(PIPELINE, self.topic, self.clock, append_timeout_ms, part_bytes)

    @property
    def store_timeout_ms(self) -> int:
        return self.stores.timeout_ms if self.stores else 0

    # --- for coordinators and workers ---------------------------------------------------------------------------

    @property
    def chaos(self) -> bool:
        return self.steps < CHAOS_STEPS

    def ask(self, operation: str, *arguments: Any, **options: Any) -> Any:
        if operation == "init_transactions":
            self.oracle.before_init(arguments[0])
        self.faults.on_network(operation, arguments)
        return super().ask(operation, *arguments, **options)

    def deadline_ms(self) -> int:
        """Until when a coordinator waits for an answer; it asks once in any case."""
        hurried = self.chaos and self.load is None
        return self.clock.monotonic_ms() + (self.rng.choice((0, 50, 800)) if hurried else 5_000)

    def feed(self) -> None:
        if not self.faults_allow_feeding:
            return
        goal = self.steps // self._steps_per_record + (1 << 20 if self.topology.idle else 1)
        for (source, partition), fed in self._fed.items():
            records = self.inputs[source].partitions[partition]
            if fed < min(goal, len(records)) and partition < self.partitions_of(topic_of(source)):
                end = min(goal, len(records))
                batch = [self._message(source, partition, offset) for offset in range(fed, end)]
                if self.broker.produce(None, self._feeder(), 0, topic_of(source), partition, batch).error is Error.NONE:
                    self._fed[source, partition] = end

    def _message(self, source: str, partition: int, offset: int) -> tuple[bytes | None, bytes | None]:
        first, second = self.inputs[source].partitions[partition][offset]
        value = _encode(Event(source, partition, offset, first, second))
        if source not in self.topology.tables:
            return None, value
        return first.encode(), None if is_gone(offset) else value

    def _feeder(self) -> int:
        return self.broker.init_transactions(None).producer_id

    @property
    def faults_allow_feeding(self) -> bool:
        return not hasattr(self, "faults") or (self.faults.broker_is_up and not self.faults.made_anew)

    @property
    def targets(self) -> Mapping[str, Mapping[int, int]]:
        return {source: dict(enumerate(map(len, each.partitions))) for source, each in self.inputs.items()}

    def state_settings(self, attempt: Attempt) -> StateSettings:
        return self.local_state.settings(attempt)

    def is_cleaned(self, place: tuple[str, int, int]) -> bool:
        """The marker that cleaning leaves behind shows it."""
        return place in self.broker.cleaned

    # --- history ------------------------------------------------------------------------------------------------

    def is_newest(self, coordinator: simulated.SimulatedCoordinator) -> bool:
        """Whether nobody has taken over from it: one that was begun later, or had slept before it fenced anybody."""
        return coordinator is self.coordinator and coordinator.number == max(each.number for each in self.coordinators)

    def ended(self, coordinator: simulated.SimulatedCoordinator, end: End) -> None:
        assert isinstance(coordinator, SimulatedCoordinator)
        self.note(f"{coordinator} ends: {end.error!r}")
        coordinator.kill_workers()
        coordinator.alive = False
        if isinstance(end.error, ConfigError) and CONDEMNED in str(end.error):
            self._condemned()
            return
        if self.faults.made_anew and isinstance(end.error, HALTS):
            self._halt("halt")
            return
        if self.stores and self.stores.explains(end.error):
            self._halt("halt for a store")
            return
        unreachable = isinstance(end.error, Halt) and UNREACHABLE in str(end.error)
        held = isinstance(end.error, BrokerUnavailable) and READERS_HELD in str(end.error)
        if (unreachable or held) and self.broker.has_forgotten():
            self._halt("readers held by an id that is forgotten")
            return
        again = isinstance(end.error, Halt) and TRIES_AGAIN in str(end.error)
        # Of what a zombie replays, a newer one may have dropped blocks.
        foreign = self.stores is not None and self.stores.outlives(end.error)
        outlived = not self.is_newest(coordinator) and (foreign or isinstance(end.error, DamagedRecord))
        if end.error is not None and not (outlived or again or isinstance(end.error, SURVIVABLE)):
            raise Asserted(f"{coordinator} ends with {end.error!r}")
        self.seen[type(end.error).__name__ if end.error else "clean end"] += 1
        was_newest = self.is_newest(coordinator)
        if coordinator.log.has_begun and coordinator.log.incarnation.ended and end.error is not None:
            self._failed(coordinator)
        if coordinator is self.coordinator:
            self.next_coordinator(self.rng.randint(0, 100))
            if was_newest and end.error is None and self.faults.broker_is_up:
                self._ended_cleanly(coordinator, end)

    def _failed(self, coordinator: SimulatedCoordinator) -> None:
        """It has noted why, and aborted what nothing has decided."""
        if self.faults.broker_is_up and coordinator.log.history.unfinalized is None:
            self.seen["failed in order"] += 1
            self.clock.advance(100)
            self.oracle.nothing_open(coordinator.log.incarnation.incarnation)

    def _condemned(self) -> None:
        if self.faults.broker_is_up:
            self.clock.advance(100)
            self.oracle.may_be_deleted()
        self._halt("condemned")

    def _halt(self, why: str) -> None:
        self.seen[why] += 1
        self.halted = self.finished = True

    def _ended_cleanly(self, coordinator: SimulatedCoordinator, end: End) -> None:
        if coordinator.log.history.condemned:
            self._condemned()
        demand(end.manifest is not None and self.oracle.unfinalized is None, "a clean end leaves nothing unfinalized")
        assert end.manifest is not None
        self.clock.advance(100)
        self.oracle.nothing_open(coordinator.log.incarnation.incarnation)
        if not any(each.owner.alive for each in self._threads):
            self.oracle.all_visible()
        ends = {(each.source, each.partition): each.offset for each in end.manifest.offsets}
        goal = {(s, p): len(r) for s, each in self.inputs.items() for p, r in enumerate(each.partitions)}
        made_anew = self.faults.made_anew and end.manifest.completed_at_ms > self.faults.made_anew_ms
        if self.stores:
            self.stores.ended_cleanly(coordinator)
        demand(not made_anew, "an input topic that was made anew is read on")
        rounds = bool(end.manifest.channel_logs)
        cancelled = coordinator.leader.cancelled_behind is not None
        ended_early = coordinator.core.stopping or cancelled
        demand(ended_early or coordinator.reads_more or not rounds, "a bounded run ends while records go round")
        if coordinator.leader.cancelled_behind is not None:
            self.seen["cancelled"] += 1
            late = end.manifest.checkpoint > coordinator.leader.cancelled_behind
            demand(not late, "a run that was cancelled takes another checkpoint")
        undrained = self.drains and ended_early
        stopped_short = rounds or undrained or self.oracle.held or (self.stores and self.stores.halts)
        self.finished = self.halted or (ends == goal and not stopped_short)

    def run(self) -> None:
        steps_max = LOADED_STEPS_MAX if self.load else STEPS_MAX
        endless = f"the job has not come to its end in {steps_max} steps"
        while not (self.finished and self._is_over()):
            self.steps += 1
            demand(self.steps < steps_max, endless)
            self.faults.before_step()
            if self.stores:
                self.stores.before_step()
            if self._begins:
                self._rescale()
                self.coordinator = SimulatedCoordinator(self)
                self.coordinators.append(self.coordinator)
            self._step()
            if self.steps % FEED_STEPS == 0:
                self.feed()
            if self.steps % LOOK_STEPS == 0 and self.faults.broker_is_up:
                self.oracle.look()
                if self.load:
                    self.load.judge()
        self._broker_settles()
        if self.stores:
            self.stores.close()
        if not self.halted:
            self.oracle.close()

    def _is_over(self) -> bool:
        """Whether all are gone, now that the job is done. One that had slept before it fenced anybody may have taken
        over from a clean end, decided, and died, or its decision is still on its way: then the job is run again."""
        if any(each.alive for each in self.coordinators):
            return False
        if self.halted:
            return True
        self._broker_settles()
        self.oracle.look()
        if self.oracle.unfinalized is not None:
            self.finished = False
            self.next_coordinator(0)
        return self.finished

    def _broker_settles(self) -> None:
        """The broker is there, what was on its way to it has come, and what was left open has timed out."""
        self.faults.start_broker()
        self.clock.advance(TRANSACTION_TIMEOUT_MAX_MS + 5_000)


def simulate(seed: int, shape: str | None = None, luck: str | None = None) -> World:
    """Live through the history of *seed*. `Broken` is what breaks an invariant, with the command that replays it; any
    other exception is a fault of the simulator, or of what it runs, which no invariant speaks of."""
    world = World(seed, shape, luck)
    try:
        with bounds(), fetching_seldom(), remembered():
            world.run()
    except Broken as error:
        broken = type(error)(f"{error}\n  replay: {replay_command(seed, shape, luck)}")
        broken.trace = tuple(world.trace)
        raise broken from error
    finally:
        world.local_state.close()
    world.seen["checkpoint"] = len(world.oracle.manifests)
    world.seen["incarnation"] = len(world.coordinators)
    world.seen.update(world.oracle.met)
    world.seen[f"topology {world.topology.name}"] += 1
    return world


def lived(seeds: Iterable[int], shape: str | None = None, luck: str | None = None) -> Counter[str]:
    """Live through the histories of *seeds*; how often what was seen in all of them."""
    return sum((simulate(seed, shape, luck).seen for seed in seeds), Counter())


def replay_command(seed: int, shape: str | None = None, luck: str | None = None) -> str:
    return f"make simulate SEED={seed}" + (f" SHAPE={shape}" if shape else "") + (f" LUCK='{luck}'" if luck else "")


_encode = msgspec.json.Encoder().encode
