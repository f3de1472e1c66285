"""The states of a job and of one checkpoint, and the moves between them: the two tables that the coordinator follows.

Any other move is a defect: the coordinator raises InvariantViolation. ARCHITECTURE.md draws them.
"""

from __future__ import annotations

import enum


class JobState(enum.Enum):
    RECOVERING = "recovering"
    DEPLOYING = "deploying"
    RUNNING = "running"
    ENDED = "ended"


JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.RECOVERING: frozenset({JobState.DEPLOYING, JobState.ENDED}),
    JobState.DEPLOYING: frozenset({JobState.RUNNING, JobState.RECOVERING, JobState.ENDED}),
    JobState.RUNNING: frozenset({JobState.RECOVERING, JobState.ENDED}),
    JobState.ENDED: frozenset(),
}


class CheckpointState(enum.Enum):
    TRIGGERED = "triggered"
    ACKNOWLEDGED = "acknowledged"
    DECIDING = "deciding"
    COMPLETED = "completed"
    """Decided: finalized as well, or finished by the restart that follows."""
    ABORTED = "aborted"


CHECKPOINT_TRANSITIONS: dict[CheckpointState, frozenset[CheckpointState]] = {
    CheckpointState.TRIGGERED: frozenset({CheckpointState.ACKNOWLEDGED, CheckpointState.ABORTED}),
    CheckpointState.ACKNOWLEDGED: frozenset({CheckpointState.DECIDING, CheckpointState.ABORTED}),
    CheckpointState.DECIDING: frozenset({CheckpointState.COMPLETED, CheckpointState.ABORTED}),
    CheckpointState.COMPLETED: frozenset(),
    CheckpointState.ABORTED: frozenset(),
}
