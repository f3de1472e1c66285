"""Channels: ordered links between subtasks, one bounded queue each.

Invariants: a channel delivers frames in the order they were sent, each once; a send never blocks; a channel whose queue
is full says so, and its writer's task is not run until it has drained. A barrier is always accepted, so that a full
channel cannot hold up a checkpoint. Channels between subtasks of one worker are queues in memory, the others sockets.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import NamedTuple, Protocol

from exactlyonce.pipeline.errors import ExactlyOnceError

OUTBOX_BYTES_MAX = 1 << 20
INBOX_BYTES_MAX = 1 << 19
_HEADER = struct.Struct("<IBQ")
_DATA, _BARRIER = 0, 1


class PeerGone(ExactlyOnceError):
    """The worker at the other end has died; the coordinator restarts the job."""


class BarrierFrame(NamedTuple):
    """Barrier *checkpoint*, whose increments build upon *base*."""

    checkpoint: int
    base: int


Frame = bytes | BarrierFrame


class Channel(Protocol):
    """One direction of a link. Writers use `send*`, `full`, `flush`; readers `receive`, `fill`."""

    @property
    def full(self) -> bool: ...
    def send(self, data: bytes) -> None: ...
    def send_barrier(self, barrier: BarrierFrame) -> None: ...
    def flush(self) -> bool: ...
    def fill(self) -> bool: ...
    def receive(self) -> Frame | None: ...
    def fileno(self) -> int: ...


class LocalChannel:
    """Between two subtasks of one worker."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._bytes = 0

    @property
    def full(self) -> bool:
        return self._bytes >= OUTBOX_BYTES_MAX

    def send(self, data: bytes) -> None:
        self._frames.append(data)
        self._bytes += len(data)

    def send_barrier(self, barrier: BarrierFrame) -> None:
        self._frames.append(barrier)

    def flush(self) -> bool:
        return False

    def fill(self) -> bool:
        return False

    def receive(self) -> Frame | None:
        if not self._frames:
            return None
        frame = self._frames.popleft()
        if isinstance(frame, bytes):
            self._bytes -= len(frame)
        return frame

    def fileno(self) -> int:
        return -1


class SocketChannel:
    """Between two workers: one end of a Unix socket pair, used in one direction only."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._inbox = bytearray()
        self._read = 0

    @property
    def full(self) -> bool:
        """Whether the writer must pause."""
        return self._outbox_bytes >= OUTBOX_BYTES_MAX

    @property
    def unsent(self) -> bool:
        """Whether something waits to be written to the socket."""
        return bool(self._outbox)

    def send(self, data: bytes) -> None:
        """Queue a batch."""
        self._put(_HEADER.pack(len(data), _DATA, 0) + data)

    def send_barrier(self, barrier: BarrierFrame) -> None:
        """Queue a barrier, behind all that was sent before it."""
        self._put(_HEADER.pack(8, _BARRIER, barrier.checkpoint) + barrier.base.to_bytes(8, "little"))

    def _put(self, frame: bytes) -> None:
        self._outbox.append(memoryview(frame))
        self._outbox_bytes += len(frame)

    def flush(self) -> bool:
        """Write what the socket takes now; True if anything moved."""
        moved = False
        while self._outbox:
            head = self._outbox[0]
            try:
                sent = self._socket.send(head)
            except BlockingIOError:
                break
            except OSError as error:
                raise PeerGone(f"the worker at the other end of a channel is gone: {error}") from None
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
        while len(self._inbox) - self._read < INBOX_BYTES_MAX:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError as error:
                raise PeerGone(f"the worker at the other end of a channel is gone: {error}") from None
            if not data:
                raise PeerGone("the worker at the other end of a channel is gone")
            self._inbox += data
            moved = True
        return moved

    def receive(self) -> Frame | None:
        """The next whole frame, or None."""
        available = len(self._inbox) - self._read
        if available < _HEADER.size:
            return None
        size, kind, checkpoint = _HEADER.unpack_from(self._inbox, self._read)
        if available < _HEADER.size + size:
            return None
        begin = self._read + _HEADER.size
        body = bytes(self._inbox[begin : begin + size])
        self._read = begin + size
        if self._read > 1 << 20 or self._read == len(self._inbox):
            del self._inbox[: self._read]
            self._read = 0
        return body if kind == _DATA else BarrierFrame(checkpoint, int.from_bytes(body, "little"))

    def fileno(self) -> int:
        return self._socket.fileno()
