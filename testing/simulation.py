"""Simulates lives of a pipeline: the real protocol core against the broker model, with everything that can go wrong.

One seed is one history: which thread goes on, what is lost, delayed or repeated on the network, who crashes before
which request, who wakes as a zombie, which transactions time out. The same seed gives the same history. Bad luck ends
after a while; then the job must reach the end of its input. `simulation_oracle` judges every request and all output.

    python -m exactlyonce.testing.simulation --seed 123         # replay, with its trace
    python -m exactlyonce.testing.simulation --seeds 10000      # soak
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter, deque
from collections.abc import Generator
from typing import Any
from unittest.mock import patch

import msgspec

from exactlyonce.checkpoint import decision_log, leader
from exactlyonce.checkpoint.coordinator import End
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.transactions import markers, writing
from exactlyonce.pipeline.errors import BrokerUnavailable, Fenced, Undetermined
from exactlyonce.testing.broker.interface import Error, NoAnswer
from exactlyonce.testing.broker.model import BrokerSettings
from exactlyonce.testing.broker.unreliable import UnreliableBroker
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.simulated_coordinator import UPKEEP_INTERVAL_MS, Life
from exactlyonce.testing.simulated_misfortune import EXPIRY_MS, FaultInjector
from exactlyonce.testing.simulated_worker import Steps, Worker
from exactlyonce.testing.simulation_oracle import TOPIC, Broken, Oracle, WatchedBroker, demand

STEPS_MAX = 60_000
"""A history that has not come to its end by then never will."""
CHAOS_STEPS = 8_000
LOOK_STEPS = 20
"""How often the readers of the output look."""
RETRY_PAUSE_MS = 10
MARKERS_LOST_AFTER_MS = 200
"""Everything goes faster here."""
STABLE_TIMEOUT_MS = 400
TRANSACTION_TIMEOUT_MAX_MS = 20_000
SURVIVABLE = (Fenced, Undetermined, BrokerUnavailable)
"""What a life may end with, and the next one goes on."""


class Thread:
    """One thread of a life or a worker."""

    __slots__ = ("owner", "steps", "wake_ms")

    def __init__(self, owner: Life | Worker, steps: Steps) -> None:
        self.owner, self.steps, self.wake_ms = owner, steps, 0

    @property
    def due_ms(self) -> int:
        """When it may go on."""
        return max(self.wake_ms, self.owner.paused_until_ms)


class World:
    """Everything there is, for one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = SimulatedClock()
        self.seen: Counter[str] = Counter()
        """How often what happened."""
        self.trace: deque[str] = deque(maxlen=400)
        self.steps = 0
        self.finished = False
        self.life: Life | None = None
        """The newest; None while there is none."""
        self.lives: list[Life] = []
        self._next_life_ms = 0
        self._threads: list[Thread] = []
        self._shape()
        self.settings = self._settings()
        self.broker = WatchedBroker(self.clock, self._broker_settings())
        self.network = UnreliableBroker(self.broker, self.clock)
        self.oracle = self.broker.oracle = Oracle(
            self.broker, self.inputs, self.sinks, self.output_partitions, self.block_partitions,
            self.transaction_timeout_ms,
        )  # fmt: skip
        self.faults = FaultInjector(self)
        self._topics()

    def _shape(self) -> None:
        """The pipeline and its input."""
        rng = self.rng
        self.parallelism = rng.randint(1, 3)
        self.sinks = ["out", "copy"][: rng.randint(1, 2)]
        keys = [f"k{i}" for i in range(rng.randint(2, 5))]
        self.inputs = [[rng.choice(keys) for _ in range(rng.randint(20, 120))] for _ in range(rng.randint(1, 3))]
        self.output_partitions = rng.randint(1, 3)
        self.block_partitions = rng.randint(2, 3)
        self.topic = TopicInfo(TOPIC, "id", self.block_partitions, 1)
        self._steps_per_record = rng.choice((1, 10, 40))
        every = range(self.parallelism)
        self.subtasks = {(task, i) for task in ("source", "totals") for i in every}
        self.sink_subtasks = {(sink, i) for sink in self.sinks for i in every}

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
        needed_ms = settings.transaction_timeout_needed_ms
        settings = msgspec.structs.replace(settings, transaction_timeout_ms=self.rng.randint(needed_ms, 2 * needed_ms))
        self.transaction_timeout_ms = settings.transaction_timeout_for(TRANSACTION_TIMEOUT_MAX_MS)
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
        for sink in self.sinks:
            self.broker.create_topic(sink, self.output_partitions)
        self.broker.create_topic("foreign")
        foreign = "eo:p-q:out:0:0.0:0"
        _, producer_id, epoch = self.broker.init_transactions(foreign, TRANSACTION_TIMEOUT_MAX_MS)
        self.broker.produce(foreign, producer_id, epoch, "foreign", 0, [(None, "x")])

    # --- for lives and workers ----------------------------------------------------------------------------------

    @property
    def chaos(self) -> bool:
        """Whether bad luck goes on."""
        return self.steps < CHAOS_STEPS

    def spawn(self, owner: Life | Worker, steps: Steps) -> None:
        """A new thread."""
        self._threads.append(Thread(owner, steps))

    def note(self, text: str) -> None:
        """One line of the trace."""
        self.trace.append(f"{self.clock.monotonic_ms():>7} {text}")

    def ask(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """One request over the network."""
        if operation == "init_transactions":
            self.oracle.before_init(arguments[0])
        self.faults.on_network(operation)
        return getattr(self.network, operation)(*arguments, **options)

    def until_answered(
        self, operation: str, *arguments: Any, again: tuple[Error, ...] = (), **options: Any
    ) -> Generator[int | None, None, Any]:
        """Asked until there is an answer, and none of *again*."""
        while True:
            yield None
            try:
                answer = self.ask(operation, *arguments, **options)
            except NoAnswer:
                pass
            else:
                if getattr(answer, "error", None) not in again:
                    return answer
            yield self.clock.monotonic_ms() + RETRY_PAUSE_MS

    def deadline_ms(self) -> int:
        """Until when a life waits for an answer; it asks once in any case."""
        return self.clock.monotonic_ms() + (self.rng.choice((0, 50, 800)) if self.chaos else 5_000)

    def available(self, partition: int) -> int:
        """How much of the input has been produced by now."""
        return min(len(self.inputs[partition]), self.steps // self._steps_per_record)

    def owner(self, key: str) -> int:
        """The subtask that counts *key*."""
        return int(key[1:]) % self.parallelism

    def output_partition(self, key: str) -> int:
        """Where updates of *key* go in every sink."""
        return (int(key[1:]) + 1) % self.output_partitions

    # --- history ------------------------------------------------------------------------------------------------

    def next_life(self, delay_ms: int) -> None:
        """The newest life is over, or no longer the newest."""
        self.life, self._next_life_ms = None, self.clock.monotonic_ms() + delay_ms

    def ended(self, life: Life, end: End) -> None:
        """A life has ended by itself."""
        self.note(f"{life} ends: {end.error!r}")
        life.kill_workers()
        life.alive = False
        demand(end.error is None or isinstance(end.error, SURVIVABLE), f"{life} ends with {end.error!r}")
        self.seen[type(end.error).__name__ if end.error else "clean end"] += 1
        if life is self.life:
            self.next_life(self.rng.randint(0, 100))
            if end.error is None and self.faults.broker_is_up:
                self._ended_cleanly(life, end)

    def _ended_cleanly(self, life: Life, end: End) -> None:
        """Everything decided is committed and nothing of this life is open."""
        demand(end.manifest is not None and self.oracle.unfinalized is None, "a clean end leaves nothing unfinalized")
        assert end.manifest is not None
        self.clock.advance(100)
        self.oracle.nothing_open(life.log.incarnation.incarnation)
        if not any(each.owner.alive for each in self._threads):
            self.oracle.all_visible()
        self.finished = all(o.offset == len(self.inputs[o.partition]) for o in end.manifest.offsets)

    def run(self) -> None:
        """Live through it; `Broken` if an invariant does not hold."""
        while not self._is_over():
            self.steps += 1
            demand(self.steps < STEPS_MAX, f"the job has not come to its end in {STEPS_MAX} steps")
            self.faults.before_step()
            if self.life is None and not self.finished and self._next_life_ms <= self.clock.monotonic_ms():
                self.life = Life(self)
                self.lives.append(self.life)
            self._step()
            if self.steps % LOOK_STEPS == 0 and self.faults.broker_is_up:
                self.oracle.look()
        self.faults.start_broker()
        self.clock.advance(TRANSACTION_TIMEOUT_MAX_MS + 5_000)  # zombies die, and what they left open times out
        self.oracle.close()

    def _is_over(self) -> bool:
        """Whether the job is done and all are gone. One that had slept before it fenced anybody may have taken over
        from a clean end, decided, and died: then the job is run again."""
        if not self.finished or any(each.alive for each in self.lives):
            return False
        self.faults.start_broker()
        self.oracle.look()
        if self.oracle.unfinalized is not None:
            self.finished = False
            self.next_life(0)
        return self.finished

    def _step(self) -> None:
        """One step of one thread that is due; or time passes until one is."""
        now_ms = self.clock.monotonic_ms()
        self._threads = threads = [each for each in self._threads if each.owner.alive]
        due = [each for each in threads if each.due_ms <= now_ms]
        if not due:
            wakes = [each.due_ms for each in threads]
            if self.life is None and not self.finished:
                wakes.append(self._next_life_ms)
            self.clock.advance(max(1, min(wakes, default=0) - now_ms))
            return
        thread = due[int(self.rng.random() * len(due))]
        try:
            thread.wake_ms = next(thread.steps) or 0
        except StopIteration:
            self._threads.remove(thread)
        if self.rng.random() < (0.3 if self.chaos else 0.1):
            self.clock.advance(1)


def simulate(seed: int) -> World:
    """Live through the history of *seed*; what breaks is raised as `Broken`, with the command that replays it."""
    world = World(seed)
    try:
        with (
            patch.object(markers, "MARKERS_LOST_AFTER_MS", MARKERS_LOST_AFTER_MS),
            patch.object(decision_log, "STABLE_TIMEOUT_MS", STABLE_TIMEOUT_MS),
            patch.object(writing, "MARKERS_TIMEOUT_MS", STABLE_TIMEOUT_MS),
            patch.object(leader, "SWEEP_AGAIN_MS", UPKEEP_INTERVAL_MS),
        ):
            world.run()
    except Exception as error:
        broken = Broken(f"{type(error).__name__}: {error}\n  replay: {replay_command(seed)}")
        broken.trace = tuple(world.trace)
        raise broken from error
    world.seen["checkpoint"] = len(world.oracle.manifests)
    return world


def replay_command(seed: int) -> str:
    """What to type to see the history of *seed* again."""
    return f"python -m exactlyonce.testing.simulation --seed {seed}"


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 if a seed breaks."""
    parser = argparse.ArgumentParser(description="Simulate lives of a pipeline with everything that can go wrong.")
    parser.add_argument("--seed", type=int, help="replay one seed, with its trace")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run (default: 100)")
    parser.add_argument("--start", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--mutant", help="plant this defect first; see simulation_mutants")
    options = parser.parse_args(arguments)
    if options.mutant is None:
        return _run(options)
    from exactlyonce.testing.simulation_mutants import planted

    with planted(options.mutant):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    one = options.seed is not None
    seen: Counter[str] = Counter()
    seeds = range(options.seed, options.seed + 1) if one else range(options.start, options.start + options.seeds)
    for seed in seeds:
        try:
            world = simulate(seed)
        except Broken as broken:
            print("\n".join(broken.trace))
            traceback.print_exception(broken.__cause__)
            print(f"seed {seed}: {broken}")
            return 1
        seen.update(world.seen)
        if one:
            print("\n".join(world.trace))
    print(f"{len(seeds)} seeds, all invariants hold. Seen: {dict(sorted(seen.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
