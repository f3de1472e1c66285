"""The shipped leader, of which the oracle and the world hear what it has done."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from topologies import MAX_PARALLELISM

from exactlyonce.checkpoint import decision, requests
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.leader_config import LeaderConfig
from exactlyonce.checkpoint.orphans import KnownBlocks
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.settings import DELETE
from exactlyonce.engines.surroundings.stores import stages

if TYPE_CHECKING:
    from coordinator import SimulatedCoordinator


class WatchedLeader(Leader):
    def __init__(self, coordinator: SimulatedCoordinator, log: DecisionLog) -> None:
        self.world, self.coordinator = coordinator.world, coordinator
        world = coordinator.world
        config = LeaderConfig(
            pipeline="p", host="host", process=1, cluster_id="cluster", transaction_version=2,
            transaction_timeout_ms=world.transaction_timeout_ms, fingerprint=world.fingerprint,
            max_parallelism=MAX_PARALLELISM, parallelism=coordinator.scale.parallelism,
            staging=coordinator.stores.staging,
            store_timeout_ms=world.store_timeout_ms, storage=world.settings.storage,
            deletes=world.settings.retention == DELETE,
        )  # fmt: skip
        self.known_blocks = KnownBlocks(world.settings, staging=stages(world.graph))
        super().__init__(config, log, self.known_blocks, world.clock, lambda text: world.note(f"{coordinator}: {text}"))
        self._sweep = self.transactions.sweep
        vars(self.transactions)["sweep"] = self._watched_sweep

    def _watched_sweep(self, protected: Collection[str] = ()) -> requests.Procedure[None]:
        older = self.world.oracle.older(self.incarnation.incarnation, self.attempt)
        yield from self._sweep(protected)
        self.world.oracle.swept(older)

    def finish(self, manifest: Manifest, expire: decision.Expire) -> requests.Procedure[dict[str, str]]:
        self.world.seen["finish"] += 1
        fates = yield from super().finish(manifest, expire)
        self.world.note(f"{self.coordinator} finishes checkpoint {manifest.checkpoint}: {sorted(set(fates.values()))}")
        self.world.seen.update(fates.values())
        return fates
