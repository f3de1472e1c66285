"""The messages between a driver and its units, in msgpack: without the user's code, and without pickle.

They have the client configuration, in which secrets may be references, so they are never shown.
"""

from __future__ import annotations

import msgspec

from exactlyonce.checkpoint.events import Ack
from exactlyonce.checkpoint.records.manifest import LATE_BELOW_LATEST, Precommit
from exactlyonce.engines.bounded.unit.staging import OutputFile, SentFile, StagedRange
from exactlyonce.engines.plan import TaskSpec
from exactlyonce.engines.runtime.source_decoder import Skipped


class Reading(msgspec.Struct, frozen=True):
    """Offsets [start, end) of one partition or other split, as a source reads it."""

    source: str
    topic: str
    topic_id: str
    """See `SourceOffset.topic_id`."""
    partition: int
    start: int
    end: int
    to_end: bool = False
    """Whether it ends with its split, if that comes before *end*, which is a guess then."""

    @property
    def length(self) -> int:
        """The number of offsets; there may be fewer records, because of control markers and aborted records, or of a
        guess."""
        return self.end - self.start


class StagedState(msgspec.Struct, frozen=True):
    """The state of work beside a pipeline, which it carries from one chunk to the next in its own staging."""

    files: str
    """The beginning of the locations of its blocks."""
    checkpoint: int
    """The pipeline's checkpoint from which the work goes on: the blocks of later ones are here."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """The common part of a stage's units. It is staged."""

    spec: TaskSpec
    fingerprint: str
    checkpoint: int
    """The checkpoint of the units' new state."""
    write_state: bool
    origins: bool
    """Whether output files have the origin of each record."""
    files: str
    """The beginning of the locations of its files; see `workplace`."""
    outputs: str = ""
    """That of files of outputs, which outlive the others; empty: the same."""
    state: StagedState | None = None
    """None: state is read from, and written to, the storage of the pipeline."""
    without_output: bool = False
    """Whether sinks write nothing, except for dead letters."""
    by_partition: bool
    """Whether units distribute outputs over the partitions of their topics; else the client does."""
    lanes: int = 0
    """If not 0, outputs are distributed by key over so many lanes instead, to be compared, rows of stores, too."""
    store_rows: bool = False
    """Whether the records of sinks of stores are staged, too, where no state is written."""
    rules: int = LATE_BELOW_LATEST
    """See `Manifest.rules`."""
    sent: tuple[SentFile, ...] = ()
    """The files of the stages before, without bounds: see `Unit.slots`."""


class Unit(msgspec.Struct, frozen=True):
    """One subtask of one task, or a split of it, over exactly the named inputs: the own part of a unit."""

    task: str
    subtask: int
    readings: tuple[Reading, ...]
    """The ranges of this subtask's partitions, of all sources of the task, even empty ones."""
    order: tuple[bytes, ...] | None
    """Order logs to follow; None: by time."""
    left: dict[str, int]
    """By channel, the number of sent records that were in flight at the end: they are not taken."""
    split: int | None = None
    """Its number among the splits of its only partition; None: it reads all of its ranges."""
    slots: bytes = b""
    """Its slot in each file of `Stage.sent`, joined: with P senders and receivers, bounds are P times as large."""


UNIT, PARTITION, LANE = "unit", "partition", "lane"


class WorkPlace(msgspec.Struct, frozen=True):
    """A piece of work by its places in a staged file."""

    type: str
    """`UNIT`, `PARTITION` or `LANE`."""
    client: dict[str, str]
    parts: tuple[StagedRange, ...]
    """The messages: a `Stage` and a `Unit`, an `AuditedOutput` and a `ClaimedPartition`, or a `LaneAudit`."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    ack: Ack
    sent: tuple[SentFile, ...]
    outputs: tuple[OutputFile, ...]
    records: int
    """Messages read from topics."""
    skipped: tuple[Skipped, ...]
    """Skipped messages, by partition."""
    began_ms: int
    ended_ms: int
    label: str
    notes: tuple[str, ...] = ()
    in_turn: bool = False
    """Whether outputs went to partitions in turn, which depend on all outputs before."""

    @property
    def skipped_count(self) -> int:
        return sum(partition.count for partition in self.skipped)

    @property
    def staged_bytes(self) -> int:
        """The size of its staged files."""
        return sum(file.file.size for file in self.sent) + sum(file.file.size for file in self.outputs)


class Publication(msgspec.Struct, frozen=True, kw_only=True, tag="publication"):
    """The outputs of a sink in some partitions, to be written in one transaction and left open."""

    client: dict[str, str]
    pipeline: str
    sink: str
    publisher: int
    """Its number among the publications of the sink, which its transactional id has as the subtask."""
    partitions: tuple[int, ...]
    topic: str
    checkpoint: int
    incarnation: int
    attempt: int
    transaction_timeout_ms: int
    outputs: StagedRange
    """A message with the `OutputFile` of each subtask, in order."""


class Published(msgspec.Struct, frozen=True):
    """A flushed publication, whose transaction waits for the decision."""

    precommit: Precommit
    began_ms: int
    ended_ms: int
    label: str


class UnitFailure(msgspec.Struct, frozen=True, tag="failure"):
    """Work that a retry would not fix: the name of an error of `pipeline.errors`, its text and facts."""

    error: str
    text: str
    facts: dict[str, str | int] = {}
    users_traceback: str = ""
    """The traceback of a user's function, if it raised."""


def tries_before(attempt_label: str) -> int:
    """The number of earlier attempts of the same work, with which the label ends.

    >>> tries_before("inline-12-0")
    0
    """
    return int(attempt_label.rpartition("-")[2])
