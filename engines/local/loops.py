"""Loops: the channel of a back edge, between subtasks of one number, and its input; see docs/design/loops.md.

Invariants: a loop accepts everything it is fed, so that no subtask waits for itself. Its head neither takes nor is sent
new records while more than `ROUND_RECORDS_MAX` or `ROUND_BYTES_MAX` wait to come round. A loop that grows beyond
`LOOP_RECORDS_MAX` or `LOOP_BYTES_MAX` ends the job. Order is kept: a frame comes when its pause is over and the frames
before it have come. A capture includes resting frames.
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
"""Bounds of all loops of one subtask: new input pauses while more wait to come round. A loop may hold as much in
addition to its restored records."""
LOOP_RECORDS_MAX = 1_000_000
LOOP_BYTES_MAX = 256 << 20
"""Bounds of one loop of one subtask: the job ends if more wait."""


class LoopChannel(LocalChannel):
    """The channel of *loop* in one subtask, fed by node *fed_by*."""

    def __init__(self, loop: Node, fed_by: Node, now_s: Callable[[], float]) -> None:
        super().__init__()
        self._loop, self._fed_by, self._now_s = loop, fed_by, now_s
        self._records_max, self._bytes_max = LOOP_RECORDS_MAX, LOOP_BYTES_MAX
        self._due_s: deque[float] = deque()
        """The end of each frame's pause; a barrier has none."""

    def takes_over(self, records: int, size: int) -> None:
        """*records* of *size* bytes go round at the restored checkpoint, perhaps of several earlier subtasks. Records
        fed meanwhile wait until all of these have come: only more than that counts as growth."""
        self._records_max = max(LOOP_RECORDS_MAX, records + ROUND_RECORDS_MAX)
        self._bytes_max = max(LOOP_BYTES_MAX, size + ROUND_BYTES_MAX)

    @property
    def waiting(self) -> int:
        """The records fed and not taken."""
        return self._flow.sent - self._flow.taken

    @property
    def size(self) -> int:
        """The bytes fed and not received."""
        return self._arrivals.size

    @property
    def ready(self) -> bool:
        """Whether the first frame rests no longer."""
        return bool(self._due_s) and self._due_s[0] <= self._now_s()

    def send(self, data: bytes, records: int) -> None:
        """Raises `GraphError` if the loop grows beyond its bounds."""
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
    """A loop's channel as an input of its head."""

    channel: LoopChannel

    @property
    def ready(self) -> bool:
        """Whether `next` would hand out something."""
        return self.slices.rest is not None or self.channel.ready
