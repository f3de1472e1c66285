"""Channels: ordered links between subtasks, each a bounded queue in memory or, between workers, a socket.

Invariants: a channel delivers each frame once, in order. A send never blocks. A writer's task is not run until its full
channels have drained. A signal is always accepted, so that a full channel delays no checkpoint. The window that the
reader grants only delays the writer: frames, their order and the order log do not depend on it. An `InFlightCapture`
gets all in-flight frames in order: with the reader, in the socket, or unsent. See
docs/design/unaligned-checkpoints.md.

A loop is a back edge, between subtasks of one number, described there too. It accepts everything it is fed, so that no
subtask waits for itself. Its head neither takes nor is sent new records while more than `ROUND_RECORDS_MAX` or
`ROUND_BYTES_MAX` wait to come round. A loop that grows beyond `LOOP_RECORDS_MAX` or `LOOP_BYTES_MAX` ends the job. A
frame comes when its pause is over and the frames before it have come. A capture includes resting frames.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from exactlyonce.engines.runtime import watermarks
from exactlyonce.engines.runtime.cut import InFlightCapture
from exactlyonce.engines.runtime.watermarks import Signal, Watermark
from exactlyonce.pipeline.errors import ExactlyOnceError, GraphError
from exactlyonce.pipeline.graph import Node

OUTBOX_BYTES_MAX = 1 << 20
INBOX_BYTES_MAX = 1 << 19
WINDOW_AT_FIRST = 4
ROUND_RECORDS_MAX = 10_000
ROUND_BYTES_MAX = 16 << 20
"""Bounds of all loops of one subtask: new input pauses while more wait to come round. A loop may hold as much in
addition to its restored records."""
LOOP_RECORDS_MAX = 1_000_000
LOOP_BYTES_MAX = 256 << 20
"""Bounds of one loop of one subtask: the job ends if more wait."""
_HEADER = struct.Struct("<IBQ")
_DATA, _SIGNAL, _TAKEN = 0, 1, 2
_GONE = "the worker at the other end of a channel is gone"


class PeerGone(ExactlyOnceError):
    """The worker at the other end is dead. The coordinator restarts the job."""


Frame = bytes | Signal
"""A batch, encoded, or a signal."""


class _Arrivals:
    """The frames that have arrived and are not taken, and their captures."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.size = 0
        """Bytes."""
        self.captures: list[InFlightCapture] = []
        """The captures whose barrier has not come."""

    def append(self, frame: Frame) -> None:
        if isinstance(frame, Watermark) and self.frames and isinstance(self.frames[-1], Watermark):
            self.frames.pop()  # the later one says more
        self.frames.append(frame)
        self.size += len(frame) if isinstance(frame, bytes) else 0
        for capture in self.captures:
            capture.arrived(frame)
        self.captures = [capture for capture in self.captures if not capture.whole]

    def popleft(self) -> Frame | None:
        if not self.frames:
            return None
        frame = self.frames.popleft()
        self.size -= len(frame) if isinstance(frame, bytes) else 0
        return frame

    def capture(self, capture: InFlightCapture) -> None:
        for frame in self.frames:
            if not capture.whole:
                capture.arrived(frame)
        self.captures += [] if capture.whole else [capture]


class Pipe(Protocol):
    """One end of a small byte buffer in both directions: a Unix socket that does not block.

    BlockingIOError: it is full, or empty. Any other OSError, or no bytes received: the other end is gone.
    """

    def send(self, data: memoryview, /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def fileno(self) -> int: ...


@dataclass
class Flow:
    """The records sent and taken, and the window, as one end knows them."""

    sent: int = 0
    taken: int = 0
    window: int = WINDOW_AT_FIRST

    @property
    def room(self) -> int:
        """The records that may be sent; 0 until half the window is free, for small batches cost more."""
        room = self.window - (self.sent - self.taken)
        return max(0, room) if 2 * room >= self.window else 0


class Channel(ABC):
    """One direction of a link. Writers use `send*`, `records`, `room`, `full`, `closed`; readers `receive`, `waits`,
    `took` and `capture`."""

    def __init__(self) -> None:
        self._arrivals = _Arrivals()
        self._flow = Flow()

    @property
    def records(self) -> int:
        """The records sent so far."""
        return self._flow.sent

    @property
    def room(self) -> int:
        """The records that its writer may send; 0: it must pause."""
        return 0 if self.full else self._flow.room

    @property
    def closed(self) -> bool:
        """Whether its reader only takes records before a barrier that is due."""
        return not self._flow.window

    @property
    @abstractmethod
    def full(self) -> bool:
        """Whether it holds as many bytes as it may."""

    @property
    def waits(self) -> bool:
        """Whether something has arrived that is not received."""
        return bool(self._arrivals.frames)

    @abstractmethod
    def send(self, data: bytes, records: int) -> None:
        """Queue a batch."""

    @abstractmethod
    def send_signal(self, signal: Signal) -> None:
        """Queue a signal after all that was sent before."""

    @abstractmethod
    def receive(self) -> Frame | None:
        """The next whole frame, or None."""

    def capture(self, capture: InFlightCapture) -> None:
        """Give *capture* the frames before its barrier that are not received, now and as they arrive."""
        self._arrivals.capture(capture)

    def took(self, records: int, window: int) -> None:
        """*records* more are processed, and *window* may be in flight from now on; 0: it is closed."""
        self._flow.taken += records
        self._flow.window = window


class LocalChannel(Channel):
    """A channel between two subtasks of one worker."""

    @property
    def full(self) -> bool:
        return self._arrivals.size >= OUTBOX_BYTES_MAX

    def send(self, data: bytes, records: int) -> None:
        self._arrivals.append(data)
        self._flow.sent += records

    def send_signal(self, signal: Signal) -> None:
        self._arrivals.append(signal)

    def receive(self) -> Frame | None:
        return self._arrivals.popleft()


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


class SocketChannel(Channel):
    """One end of a channel between two workers, over a Unix socket pair. The reader's window goes the other way."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._socket = pipe
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._inbox = bytearray()
        """The bytes from `_read` on come after the arrivals, which were decoded early for a capture."""
        self._read = 0
        self._untold = False
        """Whether the writer has yet to hear what was taken."""

    @property
    def full(self) -> bool:
        return self._outbox_bytes >= OUTBOX_BYTES_MAX

    @property
    def waits(self) -> bool:
        return super().waits or self._read < len(self._inbox)

    @property
    def unsent(self) -> bool:
        """Whether bytes wait to be written to the socket."""
        return bool(self._outbox)

    @property
    def hungry(self) -> bool:
        """Whether to read more: there is room, a capture waits for its barrier, or no frame is whole."""
        available = len(self._inbox) - self._read
        if self._arrivals.captures or self._arrivals.size + available < INBOX_BYTES_MAX:
            return True
        if self._arrivals.frames:
            return False
        size, _, _ = _HEADER.unpack_from(self._inbox, self._read)
        return available < _HEADER.size + int(size)

    def send(self, data: bytes, records: int) -> None:
        self._flow.sent += records
        self._put(_HEADER.pack(len(data), _DATA, 0) + data)

    def took(self, records: int, window: int) -> None:
        super().took(records, window)
        self._untold = True

    def send_signal(self, signal: Signal) -> None:
        body = watermarks.encode_signal(signal)
        self._put(_HEADER.pack(len(body), _SIGNAL, 0) + body)

    def _put(self, frame: bytes) -> None:
        self._outbox.append(memoryview(frame))
        self._outbox_bytes += len(frame)

    def flush(self) -> bool:
        """Write what the socket takes now; True if anything moved."""
        moved = False
        if self._untold and not self._outbox:  # totals: the next one includes what could not be sent now
            self._put(_HEADER.pack(8, _TAKEN, self._flow.taken) + self._flow.window.to_bytes(8, "little"))
            self._untold = False
        while self._outbox:
            head = self._outbox[0]
            try:
                sent = self._socket.send(head)
            except BlockingIOError:
                break
            except OSError as error:
                raise PeerGone(f"{_GONE}: {error}") from None
            moved = True
            self._outbox_bytes -= sent
            if sent == len(head):
                self._outbox.popleft()
            else:
                self._outbox[0] = head[sent:]
        return moved

    def fill(self) -> bool:
        """Read what has come, while the inbox has room; True if anything moved."""
        moved = False
        while self.hungry:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError as error:
                raise PeerGone(f"{_GONE}: {error}") from None
            if not data:
                raise PeerGone(_GONE)
            self._inbox += data
            moved = True
            if self._arrivals.captures:
                self._look_ahead()
        return moved

    def hear(self) -> None:
        """On the writer's end, read what the reader has taken."""
        while (frame := self._next()) is not None:
            _, self._flow.taken, body = frame
            self._flow.window = int.from_bytes(body, "little")

    def receive(self) -> Frame | None:
        return self._arrivals.popleft() if self._arrivals.frames else self._whole()

    def capture(self, capture: InFlightCapture) -> None:
        self._look_ahead()
        super().capture(capture)

    def _look_ahead(self) -> None:
        while (frame := self._whole()) is not None:
            self._arrivals.append(frame)

    def _whole(self) -> Frame | None:
        frame = self._next()
        if frame is None:
            return None
        kind, _, body = frame
        return body if kind == _DATA else watermarks.decode_signal(body)

    def _next(self) -> tuple[int, int, bytes] | None:
        """Kind, number and body of the next frame, if all of it is here."""
        available = len(self._inbox) - self._read
        if available < _HEADER.size:
            return None
        size, kind, number = _HEADER.unpack_from(self._inbox, self._read)
        if available < _HEADER.size + size:
            return None
        begin = self._read + _HEADER.size
        body = bytes(self._inbox[begin : begin + size])
        self._read = begin + size
        if self._read > 1 << 20 or self._read == len(self._inbox):
            del self._inbox[: self._read]
            self._read = 0
        return kind, number, body

    def fileno(self) -> int:
        return self._socket.fileno()
