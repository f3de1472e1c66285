"""The shipped leader, of which the oracle and the world hear what it has done."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from exactlyonce.checkpoint import decision, requests
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.events import Decided, PendingCheckpoint, Verdict
from exactlyonce.checkpoint.kept_blocks import BlockRetention
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.mailbox import DELETE, SAVEPOINT, Asked
from exactlyonce.engines.external_checks.stores import stages

if TYPE_CHECKING:
    from coordinator import SimulatedCoordinator


class WatchedLeader(Leader):
    def __init__(self, coordinator: SimulatedCoordinator, log: DecisionLog) -> None:
        self.world, self.coordinator = coordinator.world, coordinator
        world = coordinator.world
        self.known_blocks = BlockRetention(world.settings, staging=stages(world.graph))
        super().__init__(coordinator.leader_config(), log, self.known_blocks, world.clock, coordinator._note)
        self.asked: deque[Asked] = deque()
        """Requests of people to this incarnation, except savepoints."""
        self._looks = 0
        self.cancelled_behind: int | None = None
        """The last checkpoint that may be decided, once somebody has cancelled the run."""
        self._sweep = self.transactions.sweep
        vars(self.transactions)["sweep"] = self._watched_sweep

    def _watched_sweep(self, protected: Collection[str] = ()) -> requests.Procedure[None]:
        older = self.world.oracle.older(self.incarnation.incarnation, self.attempt)
        older = {name: times for name, times in older.items() if name not in protected}
        yield from self._sweep(protected)
        self.world.oracle.swept(older)

    def finish(self, manifest: Manifest, expire: decision.Expire) -> requests.Procedure[dict[str, str]]:
        self.world.seen["finish"] += 1
        fates = yield from super().finish(manifest, expire)
        self.world.note(f"{self.coordinator} finishes checkpoint {manifest.checkpoint}: {sorted(set(fates.values()))}")
        self.world.seen.update(fates.values())
        return fates

    # --- as a job asks it ---------------------------------------------------------------------------------------

    def decide(self, plan: PendingCheckpoint, pinned: Iterable[int]) -> requests.Procedure[Verdict]:
        verdict = yield from super().decide(plan, pinned)
        self.coordinator.carries = False
        if isinstance(verdict, Decided):
            self.world.seen["refused commit"] += "refused" in verdict.unsettled.values()
            self.world.seen["unknown commit"] += "unknown" in verdict.unsettled.values()
        reason = getattr(verdict, "reason", "")
        self.world.note(f"{self.coordinator}: checkpoint {plan.checkpoint}: {type(verdict).__name__} {reason}")
        return verdict

    def present_request(self) -> Asked | None:
        """One at a time; a request for a savepoint is left there until one is known to serve it."""
        savepoints = self.world.oracle.savepoints
        if self.asked:
            asked = self.asked.popleft()
            if asked.action == DELETE:
                savepoints.kept.discard(asked.checkpoint)
            elif self.cancelled_behind is None:
                self.cancelled_behind = (self.coordinator.core.attempt.deciding or self.manifest).checkpoint
            return asked
        if not savepoints.asked:
            return None
        self._looks += 1
        request, stop = [*savepoints.asked.items()][self._looks % len(savepoints.asked)]
        return Asked(id=request, incarnation=self.coordinator.number, action=SAVEPOINT, stop=stop)

    def is_asked(self, action: str, savepoint: int = 0) -> None:
        """Note an action that somebody leaves in the mailbox."""
        number = self.coordinator.number
        self.asked.append(Asked(id=f"{action}-{savepoint}", incarnation=number, action=action, checkpoint=savepoint))

    def forget_savepoint(self, checkpoint: int, pinned: Iterable[int]) -> requests.Procedure[None]:
        yield from super().forget_savepoint(checkpoint, pinned)
        self.world.oracle.savepoints.deleted(checkpoint, self.incarnation.incarnation)
