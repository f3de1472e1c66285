"""The topics that a pipeline reads and writes, as its leader asks for them: each request answered by a look.

Invariant: what is read next always begins where the newest manifest ends; a partition that was added since, at 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.decision_log import APPEND_TIMEOUT_MS
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.surroundings.preflight import (
    Inputs,
    Offsets,
    OutputTopics,
    Seen,
    check_inputs,
    check_operators,
    check_outputs,
    refuse_new_places,
)
from exactlyonce.pipeline.graph import LogicalGraph


class PipelineTopics:
    """Of the pipeline of *graph*. The first look is `look_at_inputs`, `look_at_outputs`; making one asks nothing."""

    def __init__(
        self, topics: Topics, graph: LogicalGraph, parallelism: int, note: Callable[[str], None], *, bounded: bool
    ) -> None:
        self.inputs: Inputs
        self.outputs: OutputTopics
        self.offsets: Offsets = {}
        """Where to read on: Sn of the newest manifest."""
        self.added: Offsets = {}
        """Where the partitions begin that the newest manifest does not have."""
        self._topics, self._graph, self._parallelism, self._note = topics, graph, parallelism, note
        self._bounded = bounded

    def look_at_inputs(self) -> None:
        """Before anything else is asked: TopicError for a missing one."""
        self.inputs = check_inputs(self._topics, self._graph, bounded=self._bounded)

    def look_at_outputs(self) -> None:
        """Likewise: TopicError for a missing one that the sink does not create."""
        self.outputs = check_outputs(self._topics, self._graph)

    def __call__(self, request: ask.Request) -> Any:
        """The answer, or `NotImplemented` if *request* is about something else."""
        match request:
            case ask.StartOffsets():
                return self.inputs.start_offsets()
            case ask.CheckContinuity(manifest):
                check_operators(self._graph, manifest)
                return self.inputs.check_continuity(manifest)
            case ask.LookAtInputs(newest):
                return self._take_note(newest, self._topics.seen_by_each(self.inputs.described, APPEND_TIMEOUT_MS))
            case ask.LookAtTopics(newest):
                names = (*self.inputs.described, *self.outputs.described)
                seen = self._topics.seen_by_each(names, APPEND_TIMEOUT_MS)
                self._take_note(newest, seen)
                return self.outputs.look_again(newest, seen)
            case ask.GoOnFrom(manifest):
                self.offsets, self.added = self.inputs.offsets_from(manifest), self.inputs.added_since(manifest)
                return refuse_new_places(self._graph, self._parallelism, manifest, self.added)
            case ask.CreateOutputs(newest):
                self.outputs.create_missing(newest, self._note)
                return self.outputs.note_times(self._note)
            case ask.KnownOutputs():
                return self.outputs.counted
        return NotImplemented

    def _take_note(self, newest: Manifest, seen: Seen) -> None:
        before = self.inputs.described
        self.inputs.look_again(newest, seen)
        for name, topic in self.inputs.described.items():
            if topic.partitions > before[name].partitions:
                self._note(f"topic {name} has {topic.partitions} partitions now: the new ones are read from offset 0")
