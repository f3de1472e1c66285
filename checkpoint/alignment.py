"""Alignment: a subtask with many inputs takes its snapshot once the barrier has come on every one of them.

Exactly once, an input that has delivered barrier *n* is held back until then, so that the snapshot of *n* has seen of
each input exactly the records before its barrier. At least once, none is: what comes behind the barrier is taken, is in
the snapshot, and comes again after a restart from it; only a savepoint's barrier holds back always. Barriers come on
every input in the same, growing order. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from exactlyonce.pipeline.errors import require


class Alignment:
    """The inputs of one subtask, and which of them are ahead: those whose barrier the others have yet to deliver.

    >>> alignment = Alignment(["left", "right"])
    >>> alignment.barrier("left", 1), alignment.is_held("left")
    (False, True)
    >>> alignment.barrier("right", 1), alignment.is_held("left")
    (True, False)
    """

    def __init__(self, inputs: Iterable[Hashable], *, exactly_once: bool = True) -> None:
        self.inputs = frozenset(inputs)
        self.exactly_once = exactly_once
        self.checkpoint_latest = 0
        """The newest whose barrier has come on every input."""
        self._delivered: dict[Hashable, int] = dict.fromkeys(self.inputs, 0)
        """By input, the newest barrier that has come on it."""
        self._pending: deque[int] = deque()
        """Barriers that have come on some inputs only, oldest first: one at most where inputs are held back."""
        self._aligned_latest = -1
        """The newest barrier behind which inputs are held back though the others' are not."""
        self._early_behind = -1
        """The newest barrier behind which anything was taken while the input was ahead."""
        self.exact = True
        """Of the last snapshot: whether what was taken since the one before is what lies between their barriers."""
        require(self.inputs, "a subtask has at least one input")

    def is_ahead(self, source: Hashable) -> bool:
        """Whether *source* has delivered a barrier that another input has not."""
        return self._delivered[source] > self.checkpoint_latest

    def is_held(self, source: Hashable) -> bool:
        """Whether *source* must wait."""
        return self.is_ahead(source) and (self.exactly_once or self._delivered[source] == self._aligned_latest)

    def take(self, source: Hashable) -> None:
        """What comes next of *source* goes to the operators."""
        if self.is_ahead(source):
            require(not self.is_held(source), "a held input delivers nothing")
            self._early_behind = max(self._early_behind, self._delivered[source])

    def barrier(self, source: Hashable, checkpoint: int, *, aligned: bool = False) -> bool:
        """Take barrier *checkpoint* from *source*; True when it was the last one awaited: snapshot now.

        *aligned*: inputs are held back behind this one, also where that is not done for others: it is a savepoint's.
        """
        require(source in self.inputs and not self.is_held(source), "a held input delivers nothing")
        awaited = next((each for each in self._pending if each > self._delivered[source]), None)
        require(
            checkpoint == awaited if awaited is not None else checkpoint > self._delivered[source],
            "barriers come in the same order on every input",
        )
        if awaited is None:
            self._pending.append(checkpoint)
        self._delivered[source] = checkpoint
        self._aligned_latest = checkpoint if aligned else self._aligned_latest
        if min(self._delivered.values()) < checkpoint:
            return False
        self.exact = self._early_behind < self.checkpoint_latest
        self.checkpoint_latest = self._pending.popleft()
        return True
