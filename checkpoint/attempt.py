"""An attempt: the part of the coordinator's state that a restart of the workers drops as a whole.

Output that is acknowledged and in no manifest yet is carried from an aborted checkpoint to the next one while the
attempt goes on. A new attempt begins without it: its transactions are aborted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from exactlyonce.checkpoint.events import Ack, Failed, PendingCheckpoint, Subtask
from exactlyonce.checkpoint.records.committable import Precommit
from exactlyonce.checkpoint.records.manifest import OrderLog, StagedAck
from exactlyonce.checkpoint.states import CheckpointState
from exactlyonce.pipeline.errors import require


@dataclass
class UndecidedOutput:
    """Acknowledged output and order logs, also of aborted checkpoints, that no manifest holds yet."""

    precommits: list[tuple[Precommit, int]] = field(default_factory=list)
    """Each with the time at which its transaction began."""
    staged: list[StagedAck] = field(default_factory=list)
    order_logs: list[tuple[int, OrderLog]] = field(default_factory=list)
    """Each with its checkpoint."""

    def add(self, ack: Ack, now_ms: int) -> None:
        self.precommits += [(precommit, now_ms - precommit.open_ms) for precommit in ack.precommits]
        self.staged += ack.staged
        if ack.order_log is not None:
            self.order_logs.append((ack.checkpoint, ack.order_log))

    def assign(self, plan: PendingCheckpoint, now_ms: int) -> None:
        """Let the manifest of *plan* carry everything up to its checkpoint."""
        carried = [(p, begun_ms) for p, begun_ms in self.precommits if p.checkpoint <= plan.checkpoint]
        plan.precommits = [precommit for precommit, _ in carried]
        plan.ages_ms = {precommit.transactional_id: now_ms - begun_ms for precommit, begun_ms in carried}
        plan.staged = [staged for staged in self.staged if staged.committable.checkpoint <= plan.checkpoint]
        plan.order_logs = [log for checkpoint, log in self.order_logs if checkpoint <= plan.checkpoint]

    def completed(self, completed: int) -> None:
        """Drop the output that the manifest of checkpoint *completed* carries."""
        self.precommits = [(p, begun_ms) for p, begun_ms in self.precommits if p.checkpoint > completed]
        self.staged = [staged for staged in self.staged if staged.committable.checkpoint > completed]
        self.order_logs = [(checkpoint, log) for checkpoint, log in self.order_logs if checkpoint > completed]

    def transactions_max(self) -> int:
        """The largest number of undecided transactions of one sink subtask."""
        return max(Counter((p.sink, p.subtask) for p, _ in self.precommits).values(), default=0)


@dataclass
class Attempt:
    """The reports of one set of workers since their start."""

    number: int = 0
    delay_ms: int = 0
    """The pause before its workers start."""
    ready_by_ms: int = 0
    """While the job deploys: when its workers count as failed."""
    in_flight: list[PendingCheckpoint] = field(default_factory=list)
    """Oldest first."""
    undecided: UndecidedOutput = field(default_factory=UndecidedOutput)
    producers: dict[Subtask, int] = field(default_factory=dict)
    """Producers that are ready, by sink subtask."""
    acked: dict[Subtask, int] = field(default_factory=dict)
    """The newest checkpoint that each subtask has acknowledged."""
    failed_in_row: int = 0
    """Late checkpoints since the last completed one."""
    full_workers: set[int] = field(default_factory=set)
    """Workers without room for their state on the disk."""
    held: bool = False
    """Whether sources are paused."""
    read_by: int | None = None
    """The newest checkpoint when every source had reached its target; None: not yet."""
    drained: bool = False
    """Whether nothing is left to read, and no record is in a loop or may be overtaken."""
    pending_failure: Failed | None = None
    """The gravest failure that waits for the outcome of a decision."""

    @property
    def deciding(self) -> PendingCheckpoint | None:
        """The checkpoint whose decision is under way."""
        return next((plan for plan in self.in_flight if plan.state is CheckpointState.DECIDING), None)

    @property
    def awaited(self) -> list[PendingCheckpoint]:
        """The checkpoints that some subtask has yet to acknowledge."""
        return [plan for plan in self.in_flight if plan.state is CheckpointState.TRIGGERED]

    def granted(self, sink: Subtask) -> None:
        self.producers[sink] = self.producers.get(sink, 0) + 1

    def lacking(self, sinks: frozenset[Subtask], needed: int) -> list[Subtask]:
        """Those of *sinks* that have fewer producers ready than *needed*."""
        return sorted(sink for sink in sinks if self.producers.get(sink, 0) < needed)

    def acknowledged(self, subtask: Subtask, ack: Ack, now_ms: int) -> None:
        """Keep the output of *ack*, whatever becomes of its checkpoint."""
        require(ack.checkpoint > self.acked.get(subtask, 0), "acknowledgements of one subtask come in order")
        self.acked[subtask] = ack.checkpoint
        self.undecided.add(ack, now_ms)
        for precommit in ack.precommits:
            self.producers[precommit.sink, precommit.subtask] -= 1

    def postpone(self, failure: Failed) -> None:
        """Keep the gravest pending failure; on a tie, the first."""
        pending = self.pending_failure or failure
        self.pending_failure = max(pending, failure, key=lambda one: (one.error is not None, one.counts))
