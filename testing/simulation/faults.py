"""The seams of a simulation to all that can go wrong in it.

Invariant: what is here does nothing; subclasses and implementations draw or plan their faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from exactlyonce.checkpoint.block_storage import AttemptBlocks
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.requests import FindReferences

if TYPE_CHECKING:
    from exactlyonce.testing.simulation.clients import Steps
    from exactlyonce.testing.simulation.coordinator import SimulatedCoordinator
    from exactlyonce.testing.simulation.processes import Attempt, Process


class Faults:
    """No faults."""

    last_chance = 0.0
    """The chance that a killed process's request in flight still arrives."""

    def before_request(self, coordinator: SimulatedCoordinator) -> None:
        """Called before each request of a procedure."""

    def unread(self, request: FindReferences) -> bool:
        """Whether the references of an older checkpoint cannot be read now."""
        return False

    def on_delivery(self) -> bool:
        """Whether a client loses a batch without a word."""
        return False

    def fails_delivery(self) -> bool:
        """Whether a client gives a batch up and reports it."""
        return False

    def shuffled(self, numbers: Iterable[int]) -> list[int]:
        """The order in which concurrent requests go out."""
        return [*numbers]

    def after_end(self) -> None:
        """Called after each answered EndTxn."""

    def before_commit(self, coordinator: SimulatedCoordinator) -> None:
        """Called before rows are committed to a store."""


class Load(Protocol):
    """Costs of records."""

    def begins(self, attempt: Attempt) -> None:
        """The workers of *attempt* begin."""

    def begins_turn(self, process: Process) -> None:
        """The loop of *process* begins a turn."""

    def muted_ms(self, worker: int, batch: list[tuple[Any, Any]]) -> int:
        """How long the broker lets *worker* wait before it takes *batch*."""

    def leaves(self, step: str, attempt: Attempt) -> None:
        """The broker has taken a record for topic *step*."""


class OutsideBlocks(Protocol):
    """Blocks outside of the checkpoint topic."""

    @property
    def not_known(self) -> dict[int, set[int]]:
        """By incarnation, the checkpoints whose references it could not read."""

    def until_answered(self, asked: Callable[[], Any]) -> Steps:
        """Ask until the storage answers."""

    def block(self, ref: BlockRef) -> Block:
        """The block; `DamagedBlock` if it is gone."""

    def scanned(self, ends: tuple[int, ...]) -> Steps:
        """A `Scanned` of all blocks."""

    def let_go(self, coordinator: SimulatedCoordinator, refs: list[BlockRef]) -> None:
        """Remove them in the background."""

    def writer(self, process: Process) -> AttemptBlocks:
        """The writer of one process."""
