"""The simulated coordinator of drawn histories: savepoints, repairs, and what the oracle hears.

What it answers in any simulation is in `exactlyonce.testing.simulation.coordinator`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from repair import copied, replayed
from restored import judge_behind_the_fence, restored, savepoint_to_restore
from stores import SlowStoreAnswers
from watched_leader import WatchedLeader

from exactlyonce.checkpoint import events, requests
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.engines.local.job import Failed, Then
from exactlyonce.engines.savepoints.restoring import Restoring
from exactlyonce.testing.simulation import coordinator as simulated
from exactlyonce.testing.simulation.clients import Steps
from exactlyonce.testing.simulation.coordinator import StoreAnswers

if TYPE_CHECKING:
    from world import World


class WatchedJob(simulated.SimulatedJob):
    """The shipped job, of which the oracle and the world hear what it does."""

    coordinator: SimulatedCoordinator
    world: World

    def _perform(self, effect: events.Effect) -> None:
        world, savepoints = self.world, self.world.oracle.savepoints
        match effect:
            case events.Trigger():
                effect = self._triggered(effect)
            case events.Hold(held):
                world.seen["held" if held else "held no more"] += 1
            case events.Restart():
                savepoints.restarted(self.coordinator.number)
            case events.Note():
                world.seen["aborted checkpoint"] += 1
        super()._perform(effect)

    def _triggered(self, trigger: events.Trigger) -> events.Trigger:
        """The checkpoint must be aligned, by luck."""
        world, number, checkpoint = self.world, self.coordinator.number, trigger.checkpoint
        world.oracle.savepoints.triggered(number, checkpoint, final=trigger.final, savepoint=trigger.savepoint)
        chance = world.luck.aligned_chance
        aligned = bool(chance) and world.rng.random() < chance
        if aligned or (trigger.final and not world.topology.loops):
            world.oracle.aligned.add((number, self.core.attempt.number, checkpoint))
        return msgspec.structs.replace(trigger, overtakes_after_ms=None) if aligned else trigger


class SimulatedCoordinator(simulated.SimulatedCoordinator):
    world: World
    leader: WatchedLeader

    def __init__(self, world: World) -> None:
        self._restoring: Restoring | None = None
        self.reads_more = False
        """Whether an input got a partition meanwhile. A real run to an end ignores it; here it is read."""
        super().__init__(world)

    def _store_answers(self) -> StoreAnswers:
        return SlowStoreAnswers(self)

    def _leader(self) -> WatchedLeader:
        return WatchedLeader(self, self.log)

    def _job(self) -> WatchedJob:
        return WatchedJob(self)

    def _begun(self) -> requests.Procedure[None]:
        self._restoring = yield from savepoint_to_restore(self, self.topics.inputs)
        yield from super()._begun()
        if self._restoring is not None:
            judge_behind_the_fence(self, self._restoring)

    def look_at_mailbox(self, then: Then, failed: Failed) -> None:
        """What people ask is seen at once."""
        then(self.leader.present_request())

    def _answer(self, request: requests.Request) -> Steps:
        match request:
            case requests.Appended(records):
                self.world.seen["chain repaired"] += len(records) > 1
                self._note_carried(records)
            case requests.RestoreSavepoint(checkpoint):
                assert self._restoring is not None
                return restored(self, self._restoring, checkpoint)
            case requests.CopyTransaction(committable, name):
                return (yield from copied(self, committable, name))
            case requests.ReplayTransaction(manifest, committable, name):
                return (yield from replayed(self, manifest, committable, name))
        return (yield from super()._answer(request))

    def _note_carried(self, records: tuple[Any, ...]) -> None:
        for each in records:
            if isinstance(each, Manifest):
                self.carries = any(c.checkpoint < each.checkpoint for c in each.committables)
                self.world.seen["carried"] += self.carries
                if any(c.checkpoint < each.checkpoint for c in each.staged):
                    self.world.seen["rows carried"] += 1
