"""The errors of state."""

from __future__ import annotations

from exactlyonce.pipeline.errors import ExactlyOnceError, Halt, UserError

UNDECODABLE = (ValueError, RecursionError, MemoryError)
"""Errors of msgspec on damaged bytes; `ValueError` includes its own errors and Unicode's."""
BEGIN_EMPTY = (
    "To let the operator begin empty, take a savepoint with the old code and begin from it with --allow-dropped-state; "
    "or start over with `exactlyonce reset`"
)
"""The ways out for whoever gives up the state of an operator."""


class ApplyFailed(Exception):
    """A user's function raised, or did not return a pair, on the record at `index` of the batch: see `__cause__`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class SnapshotDeclined(ExactlyOnceError):
    """A snapshot cannot be taken now, but a later one can: the table is whole. The text says why."""


class StateUnstorable(UserError):
    """A state value is not of its operator's declared type, or is too large: it could not be restored."""


class StateIncompatible(UserError):
    """The state in the checkpoint is of another type, or was laid out with another `max_parallelism`."""


class DamagedState(Halt):
    """The blocks of the checkpoint do not hold the state that it names."""
