"""The answers to what a simulated leader asks of stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exactlyonce.checkpoint import requests
from exactlyonce.engines.external_checks.stores import PipelineStores
from exactlyonce.testing.simulation.clients import Awaited, FetchedBlocks, Steps

if TYPE_CHECKING:
    from exactlyonce.testing.simulation.coordinator import SimulatedCoordinator


class StoreAnswers:
    """Answers as a process does, by the shipped `PipelineStores`."""

    def __init__(self, coordinator: SimulatedCoordinator) -> None:
        self.coordinator, self.world = coordinator, coordinator.world
        self._blocks = FetchedBlocks()
        self._stores = PipelineStores(self.world.graph, self._blocks)
        self.staging = self._stores.staging

    def __call__(self, request: requests.FenceStore | requests.CleanStore | requests.CommitStaged) -> Steps:
        """The answer. Blocks are read anew for each request; before a commit the process may end or sleep."""
        self._blocks.found.clear()
        while True:
            try:
                return self._stores(request)
            except Awaited as wanted:
                refs = wanted.refs
            yield from self._blocks.get(self.world, refs)
            self.coordinator.step_name = "store-committing"
            self.world.faults.before_request(self.coordinator)
            self.world.faults.before_commit(self.coordinator)
            yield None
