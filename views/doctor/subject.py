"""The pipeline that is examined: its traces in the cluster, its graph where its module was named, and what it reads
and writes by both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.ending.waiting import StagedOutput, WaitingOutput
from exactlyonce.engines.traces import Traces
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.names import checkpoint_topic


@dataclass(kw_only=True)
class Subject:
    """See the module. Nothing is asked by making one."""

    config: ClientConfig
    traces: Traces
    graph: LogicalGraph | None
    settings: CheckpointSettings
    """As the run has them, as far as they were given."""
    now_ms: int
    waiting: list[WaitingOutput] | None
    """Output that waits in Kafka; None: the brokers have not told."""
    staged: StagedOutput
    """Output that waits for stores, and what they show."""

    @property
    def name(self) -> str:
        """The pipeline's."""
        return self.traces.pipeline

    @property
    def named(self) -> str:
        """As it is named in a command that is to know its stores as well."""
        return self.name if self.graph is None or not self.staged.views else "MODULE:PIPELINE"

    @property
    def sign_of_life(self) -> str:
        """Why it may be running; empty: it does not run."""
        return self.traces.sign_of_life(self.now_ms)

    @property
    def history(self) -> History | None:
        """Its decisions when the examination began."""
        return self.traces.history

    @cached_property
    def history_now(self) -> History | None:
        """As it is now that stores and blocks have been looked at: a running pipeline goes on."""
        return read_history(self.config.confluent(), self.name) if self.traces.topic and self.history else None

    @property
    def newest(self) -> Manifest | None:
        """The newest checkpoint of `history`."""
        return self.history.latest if self.history else None

    @property
    def checkpoint_topic(self) -> str:
        """Whether or not it is there."""
        return checkpoint_topic(self.name)

    @cached_property
    def inputs(self) -> list[str]:
        """The topics that it reads."""
        sources = self.graph.sources if self.graph is not None else ()
        of_graph = (each.source.topic for each in sources if each.source is not None)
        return sorted({*self.traces.inputs(), *(topic for topic in of_graph if topic is not None)})

    @cached_property
    def outputs(self) -> list[str]:
        """The topics that it writes."""
        sinks = self.graph.sinks if self.graph is not None else ()
        of_graph = (each.sink.topic for each in sinks if each.sink is not None)
        return sorted({*self.traces.outputs(), *(topic for topic in of_graph if topic is not None)})

    @property
    def topics(self) -> list[str]:
        """All, with that of its checkpoints."""
        own = [self.checkpoint_topic] if self.traces.topic else []
        return [*self.inputs, *self.outputs, *own]
