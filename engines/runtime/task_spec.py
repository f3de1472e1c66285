"""`TaskSpec`: what each process that runs subtasks of a pipeline is told, whatever its engine."""

from __future__ import annotations

import msgspec

from exactlyonce.checkpoint.records.manifest import Manifest, RecordPlace, TopicInfo


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of a pipeline from one checkpoint on. It has no settings of the client: these may be secrets."""

    reference: dict[str, object]
    """How the pipeline is imported; see `pipeline.loading`."""
    parallelism: int
    incarnation: int
    attempt: int
    manifest: Manifest
    """The checkpoint of the state that they begin with."""
    topic: TopicInfo
    """The checkpoint topic."""
    storage: str = ""
    """The storage of blocks; see `Manifest.storage`."""
    drops_fields: bool = False
    """`VersionedState.drops_fields`, of all states."""
    skips: tuple[RecordPlace, ...] = ()
    """The input records to leave out."""
    incremental: bool = True
    """`CheckpointSettings.incremental`."""
    output_partitions: dict[str, int] = msgspec.field(default_factory=dict)
    """The number of partitions of each sink's topic, by sink."""
    partitioners: dict[str, str] = msgspec.field(default_factory=dict)
    """The partitioner of each of these sinks."""
