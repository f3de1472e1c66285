"""The store of a simulation, its faults, and the connection of a simulated coordinator.

A request is applied at once or late, its answer may be lost, the store may be away. If the store is restored from a
backup, or the checkpoint topic is recreated, every run must halt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from faults import EXPIRY_MS
from ledgers import WatchedStore, positions_of
from watched import TOPIC, demand

from exactlyonce.checkpoint import requests
from exactlyonce.checkpoint.commits.stores import UnderWay
from exactlyonce.checkpoint.records.manifest import TopicInfo, TransactionalId
from exactlyonce.checkpoint.requests import Answer
from exactlyonce.pipeline.errors import ExactlyOnceError, Fenced, Halt, StoreUnavailable
from exactlyonce.sinks.ledger import ForeignLedger, LedgerBehind, LedgerEntry
from exactlyonce.testing.broker.interface import NoAnswer
from exactlyonce.testing.simulation import coordinator as simulated
from exactlyonce.testing.simulation.clients import Steps
from exactlyonce.testing.simulation.coordinator import StoreAnswers
from exactlyonce.testing.store import MemorySink, StoreContents

if TYPE_CHECKING:
    from coordinator import SimulatedCoordinator
    from world import World

RESTORED, ANEW = "restored from a backup", ("another checkpoint topic", "the topic was deleted")
GONE = "is gone, which every run makes"
"""The text of the halts."""
HARMS = ("restore_while_down", "restore_while_away", "make_topic_anew", "reset")
FORGOTTEN_MS = EXPIRY_MS + 10_000
AGAIN_STEPS = 200
"""After so many steps it is tried again to put the store back, if it had nothing to lose."""


class SlowStoreAnswers(StoreAnswers):
    """Stores that take long: the leader hears an answer later, and that the store is at it until then."""

    world: World

    def __init__(self, coordinator: SimulatedCoordinator) -> None:
        super().__init__(coordinator)
        self._under_way: tuple[Any, Answer] | None = None
        """The request and its answer."""

    def __call__(self, request: requests.FenceStore | requests.CleanStore | requests.CommitStaged) -> Steps:
        """The answer, at once or, as of a store that takes long, when it is asked for again."""
        stores = self.world.stores
        assert stores is not None
        if self._under_way is None or self._under_way[0] != request:
            try:
                answer = Answer((yield from super().__call__(request)))
            except (ExactlyOnceError, ForeignLedger, LedgerBehind) as error:
                answer = Answer(error=error)
            self._under_way = request, answer
        if stores.slow_chance and stores.rng.random() < stores.slow_chance:
            self.world.seen["store under way"] += 1
            return UnderWay(1_000)
        (_, answer), self._under_way = self._under_way, None
        if answer.error is not None:
            raise answer.error
        return answer.value


class Stores:
    def __init__(self, world: World) -> None:
        self.world, self.rng, self.clock = world, world.rng, world.clock
        self.model = WatchedStore()
        choice = self.rng.choice
        self.timeout_ms = choice((300, 2_000, 6_000))
        self.network_chance = choice((0.0, 0.05, 0.3))
        self.away_chance = choice((0.0, 0.0, 0.001, 0.004))
        self.commit_chance = choice((0.0, 0.0, 0.1, 0.3))
        """That a coordinator ends or sleeps right before it asks for a commit."""
        self.rescale_chance = choice((0.0, 0.0, 0.5))
        self.slow_chance = 0.0
        """That a leader is told that the store is at it, though it has done what it was asked."""
        self.harm = choice(HARMS) if self.rng.random() < 0.2 else ""
        """The harm that people do to the store or to the checkpoint topic: a method."""
        self._backup_at = self.rng.randint(0, 2_000)
        self._harm_at = self._backup_at + self.rng.randint(1, 2_000)
        self._backup: StoreContents | None = None
        self._coordinators_harmed = 0
        """How many coordinators had begun when it was done."""
        self._away_until_ms = 0
        self._connected = 0
        """Grows whenever all connections break: what was under way is lost then."""

    def tilt(self, chances: Mapping[str, Any]) -> None:
        for name, value in chances.items():
            setattr(self, name, value)

    def sink(self, name: str) -> MemorySink[Any]:
        return MemorySink(name, self)

    # --- requests -----------------------------------------------------------------------------------------------

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        found: Mapping[int, int] = self._asked("fence", partial(self.model.fence, pipeline, sink, incarnation, origin))
        return found

    def apply(self, rows: Sequence[bytes], entry: LedgerEntry) -> bool:
        applied: bool = self._asked("apply", partial(self.model.apply, rows, entry))
        self.world.seen["applied" if applied else "applied before"] += 1
        return applied

    def write(self, rows: Sequence[bytes]) -> None:
        raise NotImplementedError("nothing is written here without the ledger")

    def _asked(self, name: str, request: Callable[[], Any]) -> Any:
        if self.clock.monotonic_ms() < self._away_until_ms and self.world.chaos:
            self.world.seen["store away"] += 1
            raise StoreUnavailable(f"{name}: it is away")
        if not self.world.chaos or self.rng.random() >= self.network_chance:
            return request()
        fault = self.rng.choice(("lost", "answer lost", "late", "late"))
        self.world.seen[f"store request {fault}"] += 1
        self.world.note(f"{name} at the store: {fault}")
        if fault == "answer lost":
            self._carry_out(name, request)
        elif fault == "late":
            delay_ms = self.rng.randint(1, self.rng.choice((20, 200, 2_000, 6_000)))
            self.clock.call_after(delay_ms, partial(self._land, name, request, self._connected))
        raise StoreUnavailable(f"{name}: {fault}")

    def _land(self, name: str, request: Callable[[], Any], connected: int) -> None:
        if connected == self._connected:
            self._carry_out(f"late {name}", request)

    def _carry_out(self, name: str, request: Callable[[], Any]) -> None:
        try:
            answer = request()
        except (Fenced, ForeignLedger, LedgerBehind) as error:
            answer = type(error).__name__
        self.world.seen[f"{name}: {answer if name.endswith('apply') else 'fence'}"] += 1
        self.world.note(f"{name} is carried out: {answer}")

    def before_commit(self, coordinator: simulated.SimulatedCoordinator) -> None:
        if self.world.chaos and coordinator is self.world.coordinator and self.rng.random() < self.commit_chance:
            self.world.seen["at store-committing"] += 1
            self.rng.choice((self.world.faults.crash, self.world.faults.sleep))(coordinator)

    # --- what happens -------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        world = self.world
        if not world.chaos or world.finished:
            return
        if self.away_chance and self.rng.random() < self.away_chance:
            self.go_away()
        if world.steps == self._backup_at:
            self._backup = self.model.backup()
        if self.harm and not self.harmed and world.steps >= self._harm_at:
            self._harm_at += AGAIN_STEPS
            getattr(self, self.harm)()

    def go_away(self) -> None:
        """Be away for a moment, or for longer than anybody waits. All that was under way is lost."""
        away_ms = self.rng.choice((10, 200, 1_000, self.timeout_ms + 500))
        self.world.note(f"the store is away for {away_ms} ms")
        self._away_until_ms = self.clock.monotonic_ms() + away_ms
        self._connected += 1

    def restore_while_down(self) -> None:
        if self._would_lose():
            self.world.faults.everybody_down(self.rng.randint(0, 3_000))
            self._restore()

    def restore_while_away(self) -> None:
        if self._would_lose():
            self.go_away()
            self._restore()

    def _would_lose(self) -> bool:
        return self._backup is not None and bool(self.model.ledgers.lost(self._backup))

    def _restore(self) -> None:
        assert self._backup is not None
        self._connected += 1
        self.model.ledgers.look(self.model.contents)
        self.model.restore(self._backup)
        self.model.ledgers.restored(self._backup)
        self.world.note(f"the store is put back: {self.model.ledgers.lacks} are not there any more")
        self.world.seen["store put back"] += 1
        self._coordinators_harmed = len(self.world.coordinators)

    def make_topic_anew(self) -> None:
        """Everybody is down, most often until the broker has forgotten all ids: who begins then finds nothing."""
        world = self.world
        if not positions_of(self.model.contents) or not world.faults.broker_is_up or world.broker.has_hanging():
            return
        world.faults.everybody_down(FORGOTTEN_MS if self.rng.random() < 0.8 else 0)
        world.broker.delete_topic(TOPIC)
        world.broker.create_topic(TOPIC, world.block_partitions, compact=True)
        world.topic = TopicInfo(TOPIC, world.broker.topic_id(TOPIC) or "", world.block_partitions, 1)
        world.oracle.topic_made_anew(world.topic.topic_id)
        world.note("the checkpoint topic is made anew")
        world.seen["checkpoint topic made anew"] += 1
        self._coordinators_harmed = len(self.world.coordinators)

    def reset(self) -> None:
        """The pipeline begins anew: topic, target and ledger are emptied while an older coordinator is to ask."""
        world, now_ms = self.world, self.clock.monotonic_ms()
        asleep = [e for e in world.coordinators if e.paused_until_ms > now_ms and e.step_name == "store-committing"]
        zombie = next((each for each in asleep if each.alive), None)
        if zombie is None or not world.faults.broker_is_up or world.broker.has_hanging() or world.faults.made_anew:
            return  # of an input topic that was made anew a reset would make the right one, which nobody feeds
        world.faults.everybody_down(FORGOTTEN_MS)
        with suppress(NoAnswer):
            world.network.topic_id(TOPIC)  # what was delayed arrives before it
        if not self._forgotten():
            return
        self.harm = ""
        zombie.alive = True
        zombie.paused_until_ms = self.clock.monotonic_ms() + self.rng.randint(0, 2_000)
        world.broker.delete_topic(TOPIC)
        world.broker.create_topic(TOPIC, world.block_partitions, compact=True)
        world.topic = TopicInfo(TOPIC, world.broker.topic_id(TOPIC) or "", world.block_partitions, 1)
        self.model.contents = StoreContents()
        world.judge_anew()
        world.note("the pipeline is reset")
        world.seen["reset"] += 1

    def _forgotten(self) -> bool:
        names = (each.transactional_id for each in self.world.broker.list_transactions("eo:p:"))
        return not any(TransactionalId.parse(name) for name in names)

    @property
    def harmed(self) -> bool:
        return self.model.ledgers.put_back or bool(self.model.ledgers.made_anew)

    @property
    def halts(self) -> bool:
        return bool(self.model.ledgers.lacks or self.model.ledgers.made_anew)

    def explains(self, error: Exception | None) -> bool:
        if not isinstance(error, Halt):
            return False
        put_back = self.model.ledgers.put_back and RESTORED in str(error)
        return put_back or (bool(self.model.ledgers.made_anew) and any(text in str(error) for text in ANEW))

    def outlives(self, error: Exception | None) -> bool:
        """Whether *error* ends a coordinator that has lived on through a reset."""
        foreign = isinstance(error, Halt) and any(text in str(error) for text in (ANEW[0], GONE))
        return foreign and bool(self.world.seen["reset"])

    def ended_cleanly(self, coordinator: SimulatedCoordinator) -> None:
        since = self.halts and self.world.coordinators.index(coordinator) >= self._coordinators_harmed
        demand(not since, f"{coordinator} goes on to a clean end though the store was put back, or the topic made anew")

    def close(self) -> None:
        demand(self.world.halted or not self.halts, "nobody has noticed that the store, or the topic, is another one")
