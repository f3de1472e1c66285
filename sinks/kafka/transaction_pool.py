"""The transactions of one sink subtask, as a table of states.

Invariants: a slot's transactional id is not used again before the checkpoint that used it is finalized; a producer
writes one transaction and is dropped, never closed (closing would abort it); nothing is written before the coordinator
has read the producer's id and epoch. Pure: the writer makes the producers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from exactlyonce.pipeline.errors import require


class SlotState(enum.Enum):
    """The state of a slot's transactional id."""

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
"""Producers kept ready or in use: the current one, and the next."""
_AHEAD = (SlotState.PREPARING, SlotState.PREPARED, SlotState.READY, SlotState.WRITING)
_OPEN = (SlotState.WRITING, SlotState.DRAINING, SlotState.PRECOMMITTED)


class TransactionPool:
    """The slots of one sink subtask. `move` is the only way to change one."""

    def __init__(self, transactional_ids: Iterable[str]) -> None:
        self._states = dict.fromkeys(transactional_ids, SlotState.FREE)
        self._checkpoints: dict[str, int] = {}
        self._ahead = 0
        """The number of producers kept ready or in use."""
        self.open = 0
        """The number of transactions open on the broker."""

    def move(self, transactional_id: str, state: SlotState) -> None:
        """Change the state of a slot, as the table allows."""
        before = self._states[transactional_id]
        require(SLOT_TRANSITIONS[before] is state, f"a transaction moves from {before} to {state}")
        self._states[transactional_id] = state
        self._ahead += (state in _AHEAD) - (before in _AHEAD)
        self.open += (state in _OPEN) - (before in _OPEN)

    def precommitted(self, transactional_id: str, checkpoint: int) -> None:
        """Let the slot, whose transaction is flushed for *checkpoint*, wait for its finalization."""
        self.move(transactional_id, SlotState.PRECOMMITTED)
        self._checkpoints[transactional_id] = checkpoint

    def finalized(self, checkpoint: int) -> None:
        """Free the ids used up to *checkpoint*."""
        for name, used in list(self._checkpoints.items()):
            if used <= checkpoint:
                del self._checkpoints[name]
                self.move(name, SlotState.FREE)

    def wanted(self) -> str | None:
        """The id for which a producer should be prepared now, if any."""
        if self._ahead >= AHEAD:
            return None
        return next((name for name, state in self._states.items() if state is SlotState.FREE), None)
