"""The transactions of one sink subtask, as a table of states.

Invariants: a slot's transactional id is not used again before the checkpoint that used it is finalized; a producer
writes one transaction and is dropped, never closed (closing would abort it); nothing is written before the coordinator
has read the producer's id and epoch. Pure: whoever uses the pool makes the producers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from exactlyonce.pipeline.errors import require


class SlotState(enum.Enum):
    """Where the transactional id of a slot stands."""

    FREE = "free"
    PREPARING = "preparing"
    PREPARED = "prepared"
    READY = "ready"
    WRITING = "writing"
    DRAINING = "draining"
    PRECOMMITTED = "precommitted"


SLOT_TRANSITIONS: dict[SlotState, SlotState] = {
    SlotState.FREE: SlotState.PREPARING,
    SlotState.PREPARING: SlotState.PREPARED,
    SlotState.PREPARED: SlotState.READY,
    SlotState.READY: SlotState.WRITING,
    SlotState.WRITING: SlotState.DRAINING,
    SlotState.DRAINING: SlotState.PRECOMMITTED,
    SlotState.PRECOMMITTED: SlotState.FREE,
}

AHEAD = 2
"""Producers kept ready or in use: the one that is written with, and the one after it."""


class TransactionPool:
    """The slots of one sink subtask. `move` is the only way to change one."""

    def __init__(self, transactional_ids: Iterable[str]) -> None:
        self._states = dict.fromkeys(transactional_ids, SlotState.FREE)
        self._checkpoints: dict[str, int] = {}

    def move(self, transactional_id: str, state: SlotState) -> None:
        """Change the state of a slot, as the table allows."""
        require(
            SLOT_TRANSITIONS[self._states[transactional_id]] is state,
            f"a transaction moves from {self._states[transactional_id]} to {state}",
        )
        self._states[transactional_id] = state

    def precommitted(self, transactional_id: str, checkpoint: int) -> None:
        """The slot's transaction is flushed for *checkpoint*; it waits for its finalization."""
        self.move(transactional_id, SlotState.PRECOMMITTED)
        self._checkpoints[transactional_id] = checkpoint

    def finalized(self, checkpoint: int) -> None:
        """*checkpoint* is finalized, and with it everything flushed before: those ids are free."""
        for name, used in list(self._checkpoints.items()):
            if used <= checkpoint:
                del self._checkpoints[name]
                self.move(name, SlotState.FREE)

    def wanted(self) -> str | None:
        """The id for which a producer should be prepared now, if any."""
        ahead = (SlotState.PREPARING, SlotState.PREPARED, SlotState.READY, SlotState.WRITING)
        if sum(state in ahead for state in self._states.values()) >= AHEAD:
            return None
        return next((name for name, state in self._states.items() if state is SlotState.FREE), None)

    @property
    def open(self) -> int:
        """How many transactions are open on the broker."""
        states = (SlotState.WRITING, SlotState.DRAINING, SlotState.PRECOMMITTED)
        return sum(state in states for state in self._states.values())
