"""The messages between a driver and its units, in msgpack: nothing of the user's code, and no pickle.

The client configuration, whose secrets may be references, is part of what is sent; nothing here is ever shown.
"""

from __future__ import annotations

import msgspec

from exactlyonce.checkpoint.events import Ack
from exactlyonce.checkpoint.records.committable import Precommit
from exactlyonce.checkpoint.records.manifest import Manifest, RecordPlace
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.engines.bounded.ranges import Reading
from exactlyonce.engines.bounded.unit.staging import ChannelFile, OutputFile
from exactlyonce.engines.runtime.source_decoder import Skipped


class Unit(msgspec.Struct, frozen=True, tag="unit"):
    """One subtask of one task, over exactly what is named here."""

    reference: dict[str, object]
    """How the pipeline is imported; see `pipeline.loading`."""
    fingerprint: str
    client: dict[str, str]
    task: str
    subtask: int
    parallelism: int
    checkpoint: int
    """That the unit's state is for."""
    base: Manifest
    """The state that it begins with."""
    incarnation: int
    attempt: int
    topic: TopicInfo
    """The checkpoint topic."""
    topic_ids: dict[str, str]
    """By input topic."""
    readings: tuple[Reading, ...]
    """Of all sources of the task, every partition that belongs to this subtask, empty ranges as well."""
    channels: tuple[ChannelFile, ...]
    """What the stages before have sent to this subtask."""
    order: tuple[bytes, ...] | None
    """Order logs to follow; None: by time."""
    write_state: bool
    origins: bool
    """Whether output files say where each record stems from."""
    folder: str
    """Where files are staged."""
    storage: str = ""
    """Where blocks are kept; see `Manifest.storage`."""
    drops_fields: bool = False
    """`VersionedState.drops_fields`, of all states."""
    skips: tuple[RecordPlace, ...] = ()
    """The records of the inputs to leave out."""
    incremental: bool = True
    """`CheckpointSettings.incremental`."""
    left: dict[str, int] = msgspec.field(default_factory=dict)
    """By channel, how many of the records that are sent were on their way at the end: they are not taken."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a unit has done."""

    ack: Ack
    channels: tuple[ChannelFile, ...]
    outputs: tuple[OutputFile, ...]
    records: int
    """Messages read from topics."""
    skipped: tuple[Skipped, ...]
    """Of those, skipped, by partition."""
    began_ms: int
    ended_ms: int
    label: str
    notes: tuple[str, ...] = ()
    """What a person should know."""

    @property
    def skipped_count(self) -> int:
        """How many were skipped."""
        return sum(each.count for each in self.skipped)


class Publication(msgspec.Struct, frozen=True, kw_only=True, tag="publication"):
    """The outputs of one subtask of a sink, to be written in one transaction and left open."""

    client: dict[str, str]
    pipeline: str
    sink: str
    subtask: int
    topic: str
    checkpoint: int
    incarnation: int
    attempt: int
    transaction_timeout_ms: int
    files: tuple[OutputFile, ...]


class Published(msgspec.Struct, frozen=True):
    """A publication is flushed: its transaction waits for the decision."""

    precommit: Precommit
    began_ms: int
    ended_ms: int
    label: str


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Work that no further attempt would do better: the name of an error of `pipeline.errors`, its text and facts."""

    error: str
    text: str
    facts: dict[str, str | int] = {}


def tries_before(attempt_label: str) -> int:
    """How many attempts of the same work there were before: what the label ends with.

    >>> tries_before("inline-12-0")
    0
    """
    return int(attempt_label.rpartition("-")[2])
