"""Alignment: a subtask with many inputs takes its snapshot once the barrier has come on every one of them.

Exactly once, an input that has delivered barrier *n* is held back until then, so that the snapshot of *n* has seen of
each input exactly the records before its barrier. At least once, none is: what comes behind the barrier is taken, is in
the snapshot, and comes again after a restart from it; only a savepoint's barrier holds back always. Barriers come on
every input in the same, growing order.

A barrier that may overtake (exactly once) need not wait: `overtake` ends the alignment at once, and says which inputs
still owe the barrier. What comes on these before it was on its way at the snapshot, and belongs to the checkpoint
beside the snapshot. Snapshots are taken in the order of their checkpoints, overtaking or not.

Of feedback, whose barrier comes round only once this subtask has sent it on, no snapshot ever waits: what comes on it
before the barrier belongs to the checkpoint likewise (`owing`). If its barrier is there first, as where two loops feed
each other, it is held back like any input. Pure: no I/O, no clock.
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
    >>> alignment.barrier("left", 2), sorted(alignment.overtake(2)), alignment.is_held("left")
    (False, ['right'], False)
    >>> alignment.barrier("right", 2)
    False
    """

    def __init__(
        self, inputs: Iterable[Hashable], *, feedback: Iterable[Hashable] = (), exactly_once: bool = True
    ) -> None:
        """*feedback*: further inputs, which no snapshot waits for."""
        self._ordinary = frozenset(inputs)
        self.inputs = self._ordinary.union(feedback)
        self.exactly_once = exactly_once
        self.checkpoint_latest = 0
        """The newest whose snapshot is due: its barrier has come on every input, or it has overtaken."""
        self._delivered: dict[Hashable, int] = dict.fromkeys(self.inputs, 0)
        """By input, the newest barrier that has come on it."""
        self._pending: deque[int] = deque()
        """Barriers that some input has yet to deliver, of those that have come or overtaken, oldest first."""
        self._aligned_latest = -1
        """The newest barrier behind which inputs are held back though the others' are not."""
        self._early_behind = -1
        """The newest barrier behind which anything was taken while the input was ahead."""
        self.exact = True
        """Of the last snapshot: whether what was taken since the one before is what lies between their barriers."""
        require(self._ordinary, "a subtask has at least one input that is no feedback")

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
        if source not in self._ordinary:
            require(checkpoint > self._delivered[source], "barriers come in the same order on every input")
            self._delivered[source] = checkpoint
            self._aligned_latest = checkpoint if aligned else self._aligned_latest
            return False
        awaited = next((each for each in self._pending if each > self._delivered[source]), None)
        require(
            checkpoint == awaited if awaited is not None else checkpoint > self._delivered[source],
            "barriers come in the same order on every input",
        )
        if awaited is None:
            self._pending.append(checkpoint)
        self._delivered[source] = checkpoint
        self._aligned_latest = checkpoint if aligned else self._aligned_latest
        if any(self._delivered[each] < checkpoint for each in self._ordinary):
            return False
        self._pending.popleft()
        if checkpoint <= self.checkpoint_latest:  # it had overtaken what was before it
            return False
        self.exact = self._early_behind < self.checkpoint_latest
        self.checkpoint_latest = checkpoint
        return True

    def owing(self, checkpoint: int) -> frozenset[Hashable]:
        """The inputs that have yet to deliver barrier *checkpoint*."""
        return frozenset(each for each, delivered in self._delivered.items() if delivered < checkpoint)

    def overtake(self, checkpoint: int) -> frozenset[Hashable]:
        """Barrier *checkpoint* waits for no input: snapshot now. The inputs that have yet to deliver it.

        Its turn must have come: no older one may be due that has not overtaken.
        """
        due = [each for each in self._pending if each > self.checkpoint_latest]
        require(self.exactly_once, "a barrier overtakes where inputs are held back")
        require(checkpoint > self.checkpoint_latest, "a barrier overtakes before its snapshot is taken")
        require(not due or due[0] == checkpoint, "barriers overtake in their order")
        if not due:
            self._pending.append(checkpoint)
        self.checkpoint_latest = checkpoint
        return self.owing(checkpoint)
