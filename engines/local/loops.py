"""Loops: the channel of a back edge, from a subtask's end to the beginning of the one of its number, and its input.

Invariants: a loop takes all that it is fed, however much, so that no subtask ever waits for itself; in return its head
takes no new input while more than `ROUND_RECORDS_MAX` or `ROUND_BYTES_MAX` wait to come round, nor is it sent any. So
what cannot get out of a loop for hours stays within these. A loop that feeds itself ends the job: ever more wait in it,
beside what it has taken over. Order is kept. What rests comes no sooner than its pause is over, and what is
behind it no sooner than it; a capture has it all the same. After the last barrier of a run nothing is taken, and all
that comes until it has gone round is captured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from exactlyonce.engines.local.channels import Frame, LocalChannel
from exactlyonce.engines.local.inputs import ChannelInput
from exactlyonce.engines.runtime.signals import Signal
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.graph import Node

ROUND_RECORDS_MAX = 10_000
ROUND_BYTES_MAX = 16 << 20
"""Of one subtask, of all its loops: new input pauses while more wait to come round. So much more than it has taken over
a loop may hold at least."""
LOOP_RECORDS_MAX = 1_000_000
LOOP_BYTES_MAX = 256 << 20
"""Of one subtask and loop: the job ends where more wait."""


class LoopChannel(LocalChannel):
    """What goes round *loop* in one subtask; *fed_by* is the node that feeds it."""

    def __init__(self, loop: Node, fed_by: Node, now_s: Callable[[], float]) -> None:
        super().__init__()
        self._loop, self._fed_by, self._now_s = loop, fed_by, now_s
        self._records_max, self._bytes_max = LOOP_RECORDS_MAX, LOOP_BYTES_MAX
        self._due_s: deque[float] = deque()
        """By frame, when its pause is over; a barrier has none."""

    def takes_over(self, records: int, size: int) -> None:
        """So much goes round at the restored checkpoint, and comes first: of several subtasks, where these were more.
        What it feeds waits until all of it has come, and breeds only where that is more still."""
        self._records_max = max(LOOP_RECORDS_MAX, records + ROUND_RECORDS_MAX)
        self._bytes_max = max(LOOP_BYTES_MAX, size + ROUND_BYTES_MAX)

    @property
    def waiting(self) -> int:
        """How many records were fed and are not taken."""
        return self._flow.sent - self._flow.taken

    @property
    def size(self) -> int:
        """How many bytes were fed and are not received."""
        return self._arrivals.size

    @property
    def ready(self) -> bool:
        """Whether there is something that does not rest."""
        return bool(self._due_s) and self._due_s[0] <= self._now_s()

    def send(self, data: bytes, records: int) -> None:
        """Raises `GraphError` where ever more goes round."""
        super().send(data, records)
        self._due_s.append(self._now_s() + self._loop.pause_ms / 1000)
        if self.waiting > self._records_max or self._arrivals.size > self._bytes_max:
            raise GraphError(
                f"Operator {self._fed_by.id!r} ({self._fed_by.location}) feeds more and more records to loop "
                f"{self._loop.id!r}: {self.waiting:,} wait in one subtask, and {self._records_max:,} are allowed, or "
                f"{self._bytes_max >> 20} MB. The job has stopped, and nothing is lost. Let fewer records come round "
                f"than go in, or run it with a higher parallelism."
            )

    def send_signal(self, signal: Signal) -> None:
        super().send_signal(signal)
        self._due_s.append(0.0)

    def receive(self) -> Frame | None:
        if not self.ready:
            return None
        self._due_s.popleft()
        return super().receive()


@dataclass
class FeedbackInput(ChannelInput):
    """A loop's channel, as an input of its head."""

    channel: LoopChannel

    @property
    def waiting(self) -> int:
        """How many records are to come round."""
        return self.channel.waiting

    @property
    def size(self) -> int:
        """How many bytes, but for what is being handed out."""
        return self.channel.size

    @property
    def ready(self) -> bool:
        """Whether `next` gives something."""
        return self.slices.rest is not None or self.channel.ready
