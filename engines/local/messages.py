"""The messages between coordinator and workers: msgpack frames over one socket pair for each worker.

The client configuration, which may hold secrets, goes over this socket, never through an argument or a file.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Collection, Iterator

import msgspec

from exactlyonce.checkpoint.events import Ack
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.source import LogRead
from exactlyonce.engines.options import StateSettings
from exactlyonce.engines.plan import TaskSpec
from exactlyonce.engines.runtime.faults import Repeated
from exactlyonce.pipeline.event_time import NO_WATERMARK


class Load(msgspec.Struct, tag=True):
    """Coordinator to worker, first: import the pipeline, and wait for `Start`."""

    subtask: int
    reference: dict[str, object]
    """How the pipeline is imported; see `pipeline.loading`."""


class Start(msgspec.Struct, tag=True, kw_only=True):
    """Coordinator to worker, second: what to run, and where it goes on."""

    spec: TaskSpec
    subtask: int
    client: dict[str, str]
    offsets: dict[str, dict[int, SourceOffset]]
    """The next offset to read, by source and split."""
    targets: dict[str, dict[int, int]]
    """The offset to stop at, by source and partition; a source without its own runs on."""
    settings: CheckpointSettings
    state: StateSettings
    transaction_timeout_ms: int
    channels: dict[str, int]
    """File descriptors by channel name: this worker writes to "out:...", and reads from "in:..."."""


class Trigger(msgspec.Struct, tag=True):
    """Coordinator to worker: note Sn and inject barrier *checkpoint*."""

    checkpoint: int
    base: int
    final: bool
    added: dict[str, tuple[SourceOffset, ...]]
    """The starts of this worker's splits that no completed checkpoint has, by source: they are read from this barrier
    on."""
    savepoint: bool = False
    """Whether it is a savepoint: aligned in every mode, with its state written whole."""
    overtakes_after_ms: int | None = None
    """The time that it waits behind records before it overtakes them; None: it does not overtake."""
    drains: bool = False
    """Whether all windows close before it."""
    completes: bool = False
    """Whether it is the last one only if all results that are due are out before it; see `Ack.goes_on`."""


class Granted(msgspec.Struct, tag=True):
    """Coordinator to worker: write with this transactional id, which belongs to this producer id and epoch."""

    sink: str
    transactional_id: str
    producer_id: int
    epoch: int


class CheckpointFinalized(msgspec.Struct, tag=True):
    """Coordinator to worker: transactional ids of *checkpoint* and older ones are free."""

    checkpoint: int


class Hold(msgspec.Struct, tag=True):
    """Coordinator to worker: read nothing but barriers, or go on."""

    held: bool


class Elsewhere(msgspec.Struct, tag=True):
    """Coordinator to worker: how far the other workers are with sources that are read in step with its own."""

    lowest: dict[str, int]
    """The lowest watermark, in ms, of each group in which it has changed; `END_OF_TIME`: it waits for none of them."""


class Shutdown(msgspec.Struct, tag=True):
    """Coordinator to worker: nothing is open and nothing more will come. End."""


class Ready(msgspec.Struct, tag=True):
    """Worker to coordinator: state restored, channels open."""

    subtask: int
    fingerprint: str
    restore_ms: int


class Prepared(msgspec.Struct, tag=True):
    """Worker to coordinator: a producer for this transactional id is initialised and has written nothing."""

    sink: str
    subtask: int
    transactional_id: str


class Acknowledge(msgspec.Struct, tag=True):
    """Worker to coordinator: a subtask's snapshot is durable."""

    ack: Ack


class SourceFinished(msgspec.Struct, tag=True):
    """Worker to coordinator: a source subtask has reached its targets."""

    task: str
    subtask: int


class WatermarkOf(msgspec.Struct):
    """The watermark of a source or an operator in one worker."""

    time_ms: int
    """In ms of event time, `NO_WATERMARK` before the first."""
    idle: bool
    """Whether no record is expected."""
    held_back_by: str = ""
    """The partition of a source whose records come last."""
    silent_ms: int = 0
    """The time for which that partition has been at its end, without a record; 0: it is not there, or may not be."""
    furthest_ms: int = NO_WATERMARK
    """The event time up to which the furthest partition of a source has come."""


class Progress(msgspec.Struct, tag=True, kw_only=True):
    """Worker to coordinator, a few times a second: its figures since it started."""

    subtask: int
    records_in: int
    records_out: int
    skipped: int
    longest_gap_ms: float
    open_transactions: int
    first_record_ms: int
    """The wall clock of the first batch; 0 before it."""
    lags: dict[str, list[tuple[str, int, int]]]
    """Topic, partition, and the records up to the last stable offset that are not read, by source."""
    logs: dict[str, list[LogRead]] = {}
    """The logs of servers that are read, by source; their records are not among `lags`."""
    going_round: int
    """Records that wait to come round a loop."""
    waiting: list[str]
    """The reasons why sources and the storage of blocks wait."""
    full: list[str]
    """The operators whose state has no room on the disk."""
    notes: list[str]
    """Notes for a person since the last message."""
    repeated: Repeated = {}
    """See `Notes.take`."""
    held_up: list[str] = []
    """The reasons why the flush of a sink would wait."""
    unwritten: dict[str, int] = {}
    """The records not written though their checkpoint is finalized, by sink."""
    operators: dict[str, tuple[float, int]] = {}
    """The seconds in each operator and the records that came to it."""
    watermarks: dict[str, WatermarkOf] = {}
    """Of sources and operators with event time, by id."""
    lowest_watermarks: dict[str, int] = {}
    """Of sources that others wait for, by group; see `engines.local.pacing`."""
    late: dict[str, int] = {}
    """The late records by operator."""
    busiest: str = ""
    """The operator that took most of the last seconds; empty: none took any."""
    busiest_ms: float = 0.0
    """Its time for a record."""
    busiest_share: float = 0.0
    """Its share of the worker's time."""

    @property
    def lag_by_source(self) -> dict[str, int]:
        return {source: sum(lag for _, _, lag in places) for source, places in self.lags.items()}


def records_unread(workers: Collection[Progress]) -> int | None:
    """The lag of *workers* in records; None: they read logs alone, whose records nobody counts."""
    lags = [lag for worker in workers for places in worker.lags.values() for _, _, lag in places]
    return None if not lags and any(worker.logs for worker in workers) else sum(lags)


class Occupied(msgspec.Struct, tag=True):
    """Worker to coordinator, every second from the watching thread: its loop has not come round for *occupied_s*."""

    subtask: int
    place: str
    """Its place, in words."""
    occupied_s: float


class WorkerFailed(msgspec.Struct, tag=True):
    """Worker to coordinator, last: its error."""

    subtask: int
    error: str
    """The name of the class in `pipeline.errors`; empty: unexpected, a restart may help."""
    message: str
    unwritten: dict[str, int] = {}
    """See `Progress`."""
    facts: dict[str, str | int] = {}
    """See `ExactlyOnceError`."""


class AllWritten(msgspec.Struct, tag=True):
    """Worker to coordinator, after `Shutdown`: everything is written."""

    subtask: int


ToWorker = Load | Start | Trigger | Granted | CheckpointFinalized | Hold | Elsewhere | Shutdown
ToCoordinator = Ready | Prepared | Acknowledge | SourceFinished | Progress | Occupied | WorkerFailed | AllWritten

_HEADER = struct.Struct("<I")


class Connection:
    """One end of a control channel. Any thread may send, one receives.

    A worker *waits* until the coordinator takes its messages. The coordinator waits for no worker: messages that a busy
    one does not take are kept in order for `flush`.
    """

    def __init__(self, sock: socket.socket, receives: object, *, waits: bool) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._waits = waits
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(receives)
        self._buffer = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: ToWorker | ToCoordinator) -> None:
        """Send, or keep for `flush`. `receive` notices a peer that is gone."""
        data = msgspec.msgpack.encode(message)
        with self._lock:
            self._unsent += _HEADER.pack(len(data)) + data
            self._write()

    def flush(self) -> None:
        """Send the rest, as far as the other end takes it."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                if not self._waits:
                    return
                self._await(select.POLLOUT, None)
            except OSError:
                self.closed = True
                self._unsent.clear()
            else:
                del self._unsent[:sent]

    def _await(self, event: int, timeout_s: float | None) -> None:
        waiting = select.poll()
        waiting.register(self.socket, event)
        waiting.poll(None if timeout_s is None else 1000 * timeout_s)

    def receive(self, timeout_s: float | None = 0.0) -> Iterator[object]:
        """The messages that have come. Waits *timeout_s* at most (None: without limit) for the first. Sets `closed`."""
        if timeout_s != 0.0 and not self._first_end:  # a reader that took one message may have left others
            self._await(select.POLLIN, timeout_s)
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        else:
            self._buffer += data
            self.closed = self.closed or not data
        while end := self._first_end:
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield self._decoder.decode(body)

    @property
    def _first_end(self) -> int:
        """The end of the first message in the buffer; 0: it is not whole."""
        if len(self._buffer) < _HEADER.size:
            return 0
        end = _HEADER.size + int(_HEADER.unpack_from(self._buffer)[0])
        return end if len(self._buffer) >= end else 0
