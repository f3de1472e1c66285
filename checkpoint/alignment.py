"""Alignment: a subtask with many inputs takes its snapshot once the barrier has come on every one of them.

In mode exactly once, an input that has delivered barrier *n* is held back until then, so that snapshot *n* has seen
exactly the records before it. In mode at least once, none is: records after the barrier are taken, are in the snapshot,
and come again after a restart from it; only a savepoint's barrier always holds back. Barriers come on every input in
the same, growing order.

A barrier that may overtake (exactly once) need not wait: `overtake` ends the alignment at once, and returns the inputs
that still owe the barrier. Records that come on these before it were in flight at the snapshot, and belong to the
checkpoint as well. Snapshots are taken in the order of their checkpoints, overtaking or not.

Snapshots never wait for feedback, whose barrier comes round only once this subtask has sent it on: records that come on
it before the barrier belong to the checkpoint as well (`owing`). If its barrier is there first, as with two loops that
feed each other, it is held back like any input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from exactlyonce.pipeline.errors import require


class Alignment:
    """The inputs of one subtask. An input is ahead if it has delivered a barrier that another one has not.

    >>> alignment = Alignment(["left", "right"])
    >>> alignment.barrier("left", 1), alignment.is_held("left")
    (False, True)
    >>> alignment.barrier("right", 1), alignment.is_held("left")
    (True, False)
    >>> alignment.barrier("left", 2), sorted(alignment.overtake(2)), alignment.is_held("left")
    (False, ['right'], False)
    >>> alignment.barrier("right", 2)
    False
    """

    def __init__(
        self, inputs: Iterable[Hashable], *, feedback: Iterable[Hashable] = (), exactly_once: bool = True
    ) -> None:
        """*feedback*: further inputs, for which no snapshot waits."""
        self._ordinary = frozenset(inputs)
        self.inputs = self._ordinary.union(feedback)
        self.exactly_once = exactly_once
        self.checkpoint_latest = 0
        """The newest checkpoint with a snapshot due: its barrier has come on every input, or has overtaken."""
        self._delivered: dict[Hashable, int] = dict.fromkeys(self.inputs, 0)
        """The newest barrier of each input."""
        self._pending: deque[int] = deque()
        """Barriers that have come or overtaken, and that some input has yet to deliver, oldest first."""
        self._aligned_latest = -1
        """The newest barrier of a savepoint, which holds inputs back in every mode."""
        self._early_behind = -1
        """The newest barrier after which records were taken while the input was ahead."""
        self.exact = True
        """Whether the records between the last two snapshots are exactly those between their barriers."""
        require(self._ordinary, "a subtask has at least one input that is no feedback")

    def is_ahead(self, source: Hashable) -> bool:
        """Whether *source* has delivered a barrier that another input has not."""
        return self._delivered[source] > self.checkpoint_latest

    def is_held(self, source: Hashable) -> bool:
        """Whether nothing may be taken from *source* now."""
        return self.is_ahead(source) and (self.exactly_once or self._delivered[source] == self._aligned_latest)

    def take(self, source: Hashable) -> None:
        """The next records of *source* go to the operators."""
        if self.is_ahead(source):
            require(not self.is_held(source), "a held input delivers nothing")
            self._early_behind = max(self._early_behind, self._delivered[source])

    def barrier(self, source: Hashable, checkpoint: int, *, aligned: bool = False) -> bool:
        """Take barrier *checkpoint* from *source*; True when it was the last one awaited: snapshot now.

        *aligned*: it is a savepoint's, and holds inputs back in every mode.
        """
        require(source in self.inputs and not self.is_held(source), "a held input delivers nothing")
        if source not in self._ordinary:
            require(checkpoint > self._delivered[source], "barriers come in the same order on every input")
            self._delivered[source] = checkpoint
            self._aligned_latest = checkpoint if aligned else self._aligned_latest
            return False
        awaited = next((barrier for barrier in self._pending if barrier > self._delivered[source]), None)
        require(
            checkpoint == awaited if awaited is not None else checkpoint > self._delivered[source],
            "barriers come in the same order on every input",
        )
        if awaited is None:
            self._pending.append(checkpoint)
        self._delivered[source] = checkpoint
        self._aligned_latest = checkpoint if aligned else self._aligned_latest
        if any(self._delivered[ordinary] < checkpoint for ordinary in self._ordinary):
            return False
        self._pending.popleft()
        if checkpoint <= self.checkpoint_latest:  # it had overtaken
            return False
        self.exact = self._early_behind < self.checkpoint_latest
        self.checkpoint_latest = checkpoint
        return True

    def owing(self, checkpoint: int) -> frozenset[Hashable]:
        """The inputs that have yet to deliver barrier *checkpoint*."""
        return frozenset(source for source, delivered in self._delivered.items() if delivered < checkpoint)

    def overtake(self, checkpoint: int) -> frozenset[Hashable]:
        """Barrier *checkpoint* waits for no input: snapshot now. Returns the inputs that have yet to deliver it.

        No older barrier may be due that has not overtaken.
        """
        due = [barrier for barrier in self._pending if barrier > self.checkpoint_latest]
        require(self.exactly_once, "a barrier overtakes where inputs are held back")
        require(checkpoint > self.checkpoint_latest, "a barrier overtakes before its snapshot is taken")
        require(not due or due[0] == checkpoint, "barriers overtake in their order")
        if not due:
            self._pending.append(checkpoint)
        self.checkpoint_latest = checkpoint
        return self.owing(checkpoint)
