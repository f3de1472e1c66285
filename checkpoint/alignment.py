"""Alignment: a subtask with many inputs holds back those whose barrier has come, until all have.

Invariant: an input that delivered barrier *n* delivers nothing further to the operators before the snapshot of *n* is
taken. Barriers come on every input in the same, growing order. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from exactlyonce.pipeline.errors import require


class Alignment:
    """The inputs of one subtask, and which of them are held back.

    >>> alignment = Alignment(["left", "right"])
    >>> alignment.barrier("left", 1), alignment.is_held("left")
    (False, True)
    >>> alignment.barrier("right", 1), alignment.is_held("left")
    (True, False)
    """

    def __init__(self, inputs: Iterable[Hashable]) -> None:
        self.inputs = frozenset(inputs)
        self.checkpoint_latest = 0
        self.pending: int | None = None
        self._held: set[Hashable] = set()
        require(self.inputs, "a subtask has at least one input")

    def is_held(self, source: Hashable) -> bool:
        """Whether *source* has delivered the pending barrier and must wait."""
        return source in self._held

    def barrier(self, source: Hashable, checkpoint: int) -> bool:
        """Take barrier *checkpoint* from *source*; True when it was the last one awaited: snapshot now."""
        require(source in self.inputs and source not in self._held, "a held input delivers nothing")
        require(
            checkpoint == self.pending if self.pending is not None else checkpoint > self.checkpoint_latest,
            "barriers come in the same order on every input",
        )
        self.pending = checkpoint
        self._held.add(source)
        if len(self._held) < len(self.inputs):
            return False
        self.checkpoint_latest, self.pending = checkpoint, None
        self._held.clear()
        return True
