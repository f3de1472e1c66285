"""The faults of a simulation: crashes, zombies, slow subtasks, a network and a broker that fail, time that passes.

Some histories have few kinds of faults, but many of each. The world's `seen` counts all faults, so that a test can
assert that every kind occurs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from luck import Luck
from topologies import topic_of
from watched import TOPIC

from exactlyonce.checkpoint.records.manifest import coordinator_id
from exactlyonce.checkpoint.requests import FindReferences
from exactlyonce.connectors.kafka.checkpoint_topic.mailbox import CANCEL, DELETE
from exactlyonce.engines.local.messages import WorkerFailed
from exactlyonce.pipeline.errors import Facts
from exactlyonce.testing.broker.interface import Fault, NoAnswer
from exactlyonce.testing.simulation.world import Faults

if TYPE_CHECKING:
    from world import World

    from exactlyonce.testing.simulation.coordinator import SimulatedCoordinator
    from exactlyonce.testing.simulation.world import Process

EXPIRY_MS = 60_000
"""After so long the broker forgets a transactional id."""

BEGINNINGS_MAX = 8
"""Then one of them is left to complete a checkpoint."""


class FaultInjector(Faults):
    def __init__(self, world: World, luck: Luck) -> None:
        self.world, self.rng, self.clock = world, world.rng, world.clock
        self.broker_is_up = True
        self.made_anew, self.made_anew_ms = "", 0
        """The input topic that was deleted and created again, and when."""
        self._leaders: dict[str, int] = {}
        """How often a partition or an id has moved."""
        self._unreachable: dict[str, int] = {}
        """Until when a partition or an id that is moving is, or a broker that is away."""
        rng = self.rng
        kinds: list[Callable[[], None]] = [
            self.crash_coordinator, self.slow_worker, self.kill_worker, self.restart_broker, self.downtime,
            self.expire_ids, self.compact, self.clean, self.stop, self.move, self.lose_broker,
        ]  # fmt: skip
        self._kinds = rng.sample(kinds, rng.randint(1, 4))
        if world.settings.tolerable_failed:
            self._kinds.append(self.slow_worker)
        self._chance = rng.choice((0.0, 0.002, 0.006))
        self._network_chance = rng.choice((0.0, 0.003, 0.02))
        self._request_chance = rng.choice((0.0, 0.03, 0.15))
        self._delivery_chance = rng.choice((0.0, 0.0, 0.005))
        self._marker_chance = rng.choice((0.0, 0.0, 0.1, 0.3))
        self._decided_chance = rng.choice((0.0, 0.0, 0.1))
        self._remakes = rng.random() < 0.03
        self._adds_at = rng.randint(100, 4_000)
        fates: list[Callable[[SimulatedCoordinator], None]] = [self.crash, self.sleep, lambda _: self.downtime()]
        self._fates = rng.sample(fates, 2)
        self.last_chance = 0.3
        """That what a killed process had under way arrives."""
        self.cleaned_chance = 0.5
        """That what is to be copied is gone."""
        self.carried_chance = 0.2
        """That all are down before a request of a decision that carries output of aborted checkpoints."""
        self.rewriting_chance = 0.2
        """That a coordinator that writes lost markers does not end it."""
        self.ending_factor = 5
        """How much likelier the network fails where a transaction is ended."""
        self.failed_chance = 0.0
        """That a client library gives a batch up, and says so."""
        self.unread_chance = 0.0
        """That nobody can tell a coordinator what an older checkpoint stands on, where blocks lie outside."""
        self.wakes_apart = False
        """Whether the workers of a coordinator that sleeps wake before it."""
        self._tilt(luck)

    def _tilt(self, luck: Luck) -> None:
        if luck.kinds:
            self._kinds = [getattr(self, name) for name in luck.kinds]
        if luck.fates:
            self._fates = [getattr(self, name) for name in luck.fates]
        for name, value in luck.chances.items():
            setattr(self, name, value)

    # --- when ---------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        world = self.world
        if world.steps >= self._adds_at:
            self._add_partitions()
        if not world.chaos:
            self.start_broker()
            self._unreachable.clear()
        elif self.rng.random() < self._chance:
            self.rng.choice(self._kinds)()

    def unread(self, asked: FindReferences) -> bool:
        """Whether what the checkpoint stands on cannot be looked at now, though it is there."""
        older = self.world.chaos and self.world.outside is not None and not asked.needed
        return older and self.unread_chance > 0.0 and self.rng.random() < self.unread_chance

    def before_request(self, coordinator: SimulatedCoordinator) -> None:
        """End *coordinator* or let it sleep, perhaps, before a request of a procedure.

        Between a decision and its commits everything may be down until a transaction times out and has to be repaired;
        the records to copy may be gone. That is likely if the checkpoint carries output of aborted ones, and during the
        rare and delicate writing of lost markers.
        """
        if coordinator.step_name == "CopyTransaction" and self.world.chaos and self.rng.random() < self.cleaned_chance:
            self.clean()
        if coordinator.step_name == "EndTransactions" and self.world.chaos and self.rng.random() < self._decided_chance:
            self.downtime()
            return
        chance = self._request_chance / (2 if coordinator.log.has_begun else 8)  # a beginning alone takes dozens
        if coordinator.carries or coordinator.step_name == "RewriteMarkers":
            chance = self.carried_chance if coordinator.carries else self.rewriting_chance
        if not self.world.chaos or coordinator is not self.world.coordinator or self.rng.random() >= chance:
            return
        self.world.seen[f"at {coordinator.step_name}"] += 1
        if coordinator.carries:
            self.downtime(min)
        elif coordinator.step_name == "RewriteMarkers" and self.rng.random() < 0.6:
            self.rng.choice((self.nap, lambda _: self.downtime(max)))(coordinator)
        elif self.rng.random() < 0.05:
            self.expire_ids()
        else:
            self.rng.choice(self._fates)(coordinator)

    def on_network(self, operation: str, arguments: tuple[Any, ...]) -> None:
        """Perhaps the next request or its answer is lost, delayed or repeated; or nobody is there who leads."""
        if self._unreachable:
            self._reach(operation, arguments)
        chance = self._network_chance * (self.ending_factor if operation == "end_txn" else 1)
        if self.world.chaos and self.rng.random() < chance:
            fault = self.rng.choice(tuple(Fault))
            self.world.seen[fault.value] += 1
            self.world.note(f"{operation}: {fault.value}")
            self.world.network.inject(operation, fault, delay_ms=self.rng.randint(1, 500))

    def on_delivery(self) -> bool:
        lost = self.world.chaos and self.rng.random() < self._delivery_chance
        self.world.seen["delivery lost"] += lost
        return lost

    def fails_delivery(self) -> bool:
        """Whether the client library gives a batch up, and says so."""
        return bool(self.failed_chance and self.world.chaos and self.rng.random() < self.failed_chance)

    def shuffled(self, numbers: Iterable[int]) -> list[int]:
        found = list(numbers)
        self.rng.shuffle(found)
        return found

    def before_commit(self, coordinator: SimulatedCoordinator) -> None:
        if self.world.stores is not None:
            self.world.stores.before_commit(coordinator)

    def after_end(self) -> None:
        """Crash the broker, perhaps, after an answered EndTxn: the markers of all ending transactions are lost.

        It does not happen after the end of the job, which would not write them again.
        """
        if not self.world.chaos or self.world.finished or not self.broker_is_up:
            return
        if self.rng.random() >= self._marker_chance:
            return
        listed = [each.transactional_id for each in self.world.broker.list_transactions() if "Prepare" in each.state]
        states = self.world.broker.describe_transactions(listed).values()
        prepared = [each.transactional_id for each in states if each is not None and each.partitions]
        decides = coordinator_id("p") in prepared
        if prepared and not (decides and self.rng.random() < 0.8):  # there are far more decisions than commits
            self.world.seen["markers lost"] += 1
            self.world.seen["markers of a decision lost"] += decides
            self.world.note(f"the broker crashes and loses the markers of {prepared}")
            self.world.broker.stop()
            self.world.broker.start(lose_markers=True)

    # --- what ---------------------------------------------------------------------------------------------------

    def crash_coordinator(self) -> None:
        if self.world.coordinator is not None:
            self.crash(self.world.coordinator)

    def crash_beginning(self) -> None:
        """A first run ends before its first checkpoint, or before it has noted where it starts."""
        coordinator, decided = self.world.coordinator, self.world.oracle.manifests
        if coordinator is not None and not any(decided) and len(self.world.coordinators) < BEGINNINGS_MAX:
            self.world.seen["ended before its first checkpoint" if decided else "ended before manifest 0"] += 1
            self.crash(coordinator)

    def crash(self, coordinator: SimulatedCoordinator) -> None:
        """*coordinator* is over; its workers go with it, or live on for a while."""
        self.world.seen["coordinator crashed"] += 1
        self.world.note(f"{coordinator} crashes at {coordinator.step_name}")
        for worker in coordinator.workers:
            if self.rng.random() < 0.3:
                self._linger(worker)
            else:
                worker.kill()
        coordinator.alive = False
        self.world.next_coordinator(self.rng.randint(0, 200))

    def _linger(self, worker: Process) -> None:
        self.world.seen["zombie worker"] += 1
        if self.rng.random() < 0.5:
            worker.paused_until_ms = self.clock.monotonic_ms() + self.rng.randint(10, 1_000)
        self.clock.call_after(self.rng.randint(50, 2_500), worker.kill)

    def sleep(self, coordinator: SimulatedCoordinator) -> None:
        """*coordinator* sleeps, perhaps its workers, too; most often a new one begins, and it wakes as a zombie."""
        now_ms = self.clock.monotonic_ms()
        wake_ms = now_ms + self.rng.randint(20, self.rng.choice((300, 3_000, 8_000)))
        self.world.note(f"{coordinator} sleeps at {coordinator.step_name} until {wake_ms}")
        coordinator.paused_until_ms = wake_ms
        for worker in coordinator.workers:
            if self.rng.random() < 0.5:
                worker.paused_until_ms = self.rng.randint(now_ms, wake_ms) if self.wakes_apart else wake_ms
        if self.rng.random() < 0.3:
            self.world.seen["coordinator slept"] += 1
        else:
            self.world.seen["zombie coordinator"] += 1
            self.world.next_coordinator(self.rng.randint(0, 50))

    def sleep_at_start(self) -> None:
        """The coordinator sleeps while its workers begin, and they wake before it."""
        coordinator = self.world.coordinator
        if coordinator is not None and any(worker.worker is None for worker in coordinator.workers):
            self.sleep(coordinator)

    def nap(self, coordinator: SimulatedCoordinator) -> None:
        """*coordinator* sleeps longer than a transaction may last, and nobody notices."""
        self.world.seen["coordinator slept"] += 1
        pause_ms = self.world.transaction_timeout_ms + self.rng.randint(0, 1_000)
        self.world.note(f"{coordinator} naps at {coordinator.step_name} for {pause_ms} ms")
        coordinator.paused_until_ms = self.clock.monotonic_ms() + pause_ms

    def slow_worker(self) -> None:
        coordinator = self.world.coordinator
        if coordinator is not None and coordinator.core.attempt.in_flight and coordinator.workers:
            self.world.seen["slow subtask"] += 1
            pause_ms = int(self.world.settings.timeout_ms * self.rng.uniform(0.9, 1.3))
            self.rng.choice(coordinator.workers).paused_until_ms = self.clock.monotonic_ms() + pause_ms

    def kill_writing_worker(self) -> None:
        workers = self.world.coordinator.workers if self.world.coordinator is not None else []
        writing = [each for each in workers if any(p.queued and p.transactional_id is None for p in each.producers)]
        if writing:
            self.world.seen["worker crashed"] += 1
            self.rng.choice(writing).fail("killed")

    def kill_worker(self) -> None:
        if self.world.coordinator is not None and self.world.coordinator.workers:
            self.world.seen["worker crashed"] += 1
            self.rng.choice(self.world.coordinator.workers).fail("killed")

    def poison(self) -> None:
        """A worker meets a record that its function refuses, which ends the run."""
        coordinator = self.world.coordinator
        workers = [worker for worker in coordinator.workers if worker.worker is not None] if coordinator else []
        if workers:
            self.world.seen["record refused"] += 1
            worker = self.rng.choice(workers)
            facts: Facts = {"topic": "t", "partition": 0, "offset": 1}
            worker.control.send(WorkerFailed(worker.subtask, "RecordError", "It cannot be processed.", {}, facts))
            worker.kill()

    def restart_broker(self) -> None:
        if self.broker_is_up:
            self.world.seen["broker restarted"] += 1
            self.world.note("the broker goes down")
            self.world.broker.stop()
            self.broker_is_up = False
            self.clock.call_after(self.rng.choice((5, 100, 1_000)), self.start_broker)

    def start_broker(self) -> None:
        if not self.broker_is_up:
            self.world.broker.start()
        self.broker_is_up = True

    def downtime(self, choose: Callable[[list[int]], int] | None = None) -> None:
        """Everybody is down until some open transaction times out, or the one that *choose* chooses by its time."""
        self.start_broker()
        listed = [each.transactional_id for each in self.world.broker.list_transactions("eo:p:")]
        states = self.world.broker.describe_transactions(listed).values()
        ends_ms = [each.start_time_ms + each.timeout_ms for each in states if each and each.state == "Ongoing"]
        if ends_ms:
            self.world.seen["downtime"] += 1
            end_ms = (choose or self.rng.choice)(ends_ms)
            self.everybody_down(end_ms - self.clock.now_ms() + self.rng.randint(0, 400))

    def expire_ids(self) -> None:
        if self.rng.random() < 0.3 and not self.world.broker.has_hanging():
            self.world.seen["ids expired"] += 1
            self.everybody_down(EXPIRY_MS + 10_000)

    def everybody_down(self, duration_ms: int) -> None:
        self.world.note(f"everybody is down for {duration_ms} ms")
        for coordinator in self.world.coordinators:
            coordinator.kill_workers()
            coordinator.alive = False
        self.clock.advance(max(0, duration_ms))
        self.world.next_coordinator(0)

    def compact(self) -> None:
        if self.broker_is_up:
            self.world.seen["compacted"] += 1
            known, cleaned = (self.world.part_rng.choice((1.0, self.world.part_rng.random())) for _ in range(2))
            self.world.broker.compact(TOPIC, drop_tombstones=self.rng.random() < 0.3, known=known, cleaned=cleaned)

    def compact_while_down(self) -> None:
        """The next coordinator reads a log that the cleaner has half done."""
        self.compact()
        self.crash_coordinator()

    def clean(self) -> None:
        """The cleaner takes the records of aborted transactions, as it may in a compacted output topic."""
        if self.broker_is_up and self.world.broker.clean_aborted(self.world.sinks):
            self.world.seen["aborted output removed"] += 1
            self.world.note("aborted records are removed from the output")

    def stop(self) -> None:
        if self.world.coordinator is not None:
            self.world.seen["stop asked for"] += 1
            self.world.coordinator.job.stop()

    def cancel(self) -> None:
        if self.world.coordinator is not None:
            self.world.seen["cancel asked for"] += 1
            self.world.coordinator.leader.is_asked(CANCEL)

    def ask_for_savepoint(self) -> None:
        stop = self.rng.random() < 0.1
        self.world.seen["savepoint asked for"] += 1
        self.world.oracle.savepoints.ask(stop=stop)

    def delete_savepoint(self) -> None:
        found = self.world.oracle.savepoints.to_delete
        if found and self.world.coordinator is not None:
            self.world.seen["savepoint deleted"] += 1
            self.world.coordinator.leader.is_asked(DELETE, self.rng.choice(found))

    # --- two brokers --------------------------------------------------------------------------------------------

    def move(self) -> None:
        """Partitions and ids get another leader or coordinator; until it is elected nobody answers for them."""
        self.world.seen["leader moved"] += 1
        now_ms = self.clock.monotonic_ms()
        for name in self.rng.sample(sorted(self._places()), 3):
            self._leaders[name] = self._leaders.get(name, 0) + 1
            self._unreachable[name] = now_ms + self.rng.choice((5, 50, 500))

    def lose_broker(self) -> None:
        """One of the two brokers is away for a moment, with all that it leads; the other one answers."""
        self.world.seen["one broker away"] += 1
        broker = self.rng.randint(0, 1)
        self._unreachable[f"broker {broker}"] = self.clock.monotonic_ms() + self.rng.choice((5, 100, 800))

    def _places(self) -> Iterator[str]:
        for sink in self.world.sinks:
            yield from (f"{sink}-{p}" for p in range(self.world.output_partitions))
        yield from (f"{TOPIC}-{p}" for p in range(self.world.block_partitions))
        for source in self.world.inputs:
            yield from (f"{topic_of(source)}-{p}" for p in range(self.world.partitions_of(topic_of(source))))
        yield coordinator_id("p")

    def _reach(self, operation: str, arguments: tuple[Any, ...]) -> None:
        """Raise `NoAnswer` if a request is for a partition or an id that nobody answers for now."""
        now_ms = self.clock.monotonic_ms()
        self._unreachable = {name: until_ms for name, until_ms in self._unreachable.items() if until_ms > now_ms}
        for name in _touched(operation, arguments):
            if name in self._unreachable or f"broker {self._broker_of(name)}" in self._unreachable:
                self.world.seen["not leader"] += 1
                raise NoAnswer(f"{operation}: nobody leads {name}")

    def _broker_of(self, name: str) -> int:
        if name.startswith("broker "):
            return int(name[-1])
        return (zlib.crc32(name.encode()) + self._leaders.get(name, 0)) % 2

    # --- input topics -------------------------------------------------------------------------------------------

    def _add_partitions(self) -> None:
        """The partitions that are not there from the beginning are added; or a topic is deleted and made anew, once
        something is decided: before that, a new pipeline may begin with the new topic."""
        if not self.broker_is_up or (self._remakes and not self.world.oracle.manifests):
            return
        self._adds_at = 1 << 60
        for source, each in self.world.inputs.items():
            if each.at_first < len(each.partitions):
                self.world.seen["partitions added"] += 1
                self.world.note(f"{source} gets a partition")
                self.world.broker.add_partitions(topic_of(source), len(each.partitions))
                if self.world.coordinator is not None:
                    self.world.coordinator.reads_more = True
        if self._remakes and not self.world.finished:
            self.made_anew = topic_of(self.rng.choice(sorted(self.world.inputs)))
            self.made_anew_ms = self.world.clock.now_ms()
            self.world.seen["topic made anew"] += 1
            self.world.note(f"{self.made_anew} is made anew")
            self.world.broker.delete_topic(self.made_anew)
            self.world.broker.create_topic(self.made_anew, 3)


def _touched(operation: str, arguments: tuple[Any, ...]) -> Iterator[str]:
    match operation:
        case "fetch":
            yield f"{arguments[0]}-{arguments[1]}"
        case "produce" | "add_to_transaction":
            if arguments[0] is not None:
                yield arguments[0]
            yield f"{arguments[3]}-{arguments[4]}"
        case "init_transactions" | "end_txn":
            if arguments[0] is not None:
                yield arguments[0]
        case "describe_transactions":
            yield from arguments[0]
        case "describe_producers":
            yield from (f"{topic}-{partition}" for topic, partition in arguments[0])
        case "list_transactions":
            yield from ("broker 0", "broker 1")
