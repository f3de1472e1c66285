"""The findings of an examination: each fault with its owner and its remedy, and the checks that could not be made.

Invariants: a check that was not made, or not whole, is among `unchecked` with the reason; silence means that it was
made and found nothing. A failed check is reported; the others still run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.source import ReadsTopic
from exactlyonce.engines.external_checks.preflight import by_kind
from exactlyonce.engines.pending_output import StagedOutput, WaitingOutput
from exactlyonce.engines.pipeline_resources import PipelineResources
from exactlyonce.pipeline.errors import BrokerRefused, Halt, UserError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.names import checkpoint_topic

PROBLEM, NOTE = "problem", "note"
"""A note needs no action: it goes away by itself, or with the next run."""
CAUSES = ("rights", "settings", "stores", "inputs", "blocks", "decisions", "readers")
"""Kinds of checks: each can be the cause of what a later one finds. A kind that is not here comes first."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One fault, or a note."""

    about: str
    """The kind of check, in a word."""
    what: str
    """The fault, as a sentence without its full stop."""
    whose: str = ""
    """The owner of the fault or of the transaction; empty: plain from `what`."""
    do: str
    """The remedy."""
    run: tuple[str, ...] = ()
    """Commands for the remedy."""
    level: str = PROBLEM


class Unchecked(NamedTuple):
    """A check that was not made, or not whole."""

    what: str
    why: str
    failed: bool = False
    """A request for it had no answer, or was refused."""


@dataclass
class Findings:
    diagnoses: list[Diagnosis] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    """The checks that were made."""

    @property
    def in_order(self) -> list[Diagnosis]:
        """Problems before notes, and what may be a cause before its effects."""

        def rank(diagnosis: Diagnosis) -> tuple[bool, int]:
            kind = diagnosis.about
            return diagnosis.level == NOTE, CAUSES.index(kind) if kind in CAUSES else -1

        return sorted(self.diagnoses, key=rank)

    @property
    def problems(self) -> int:
        """The number of problems."""
        return sum(diagnosis.level == PROBLEM for diagnosis in self.diagnoses)

    @property
    def failed(self) -> int:
        """The number of failed checks."""
        return sum(unchecked.failed for unchecked in self.unchecked)

    def add(
        self, about: str, what: str, *, do: str, run: Iterable[str] = (), whose: str = "", level: str = PROBLEM
    ) -> None:
        self.diagnoses.append(Diagnosis(about=about, what=what, whose=whose, do=do, run=tuple(run), level=level))

    def not_checked(self, what: str, why: str, *, failed: bool = False) -> None:
        self.unchecked.append(Unchecked(what, why, failed))

    @contextmanager
    def checking(self, what: str) -> Iterator[None]:
        """Check *what*; an error means that it is not checked."""
        try:
            yield
        except (UserError, BrokerRefused, Halt) as error:
            self.not_checked(what, str(error), failed=True)
        else:
            self.checked.append(what)


@dataclass(kw_only=True)
class Subject:
    config: ClientConfig
    resources: PipelineResources
    graph: LogicalGraph | None
    settings: CheckpointSettings
    now_ms: int
    waiting: list[WaitingOutput] | None
    """Output that waits in Kafka; None: the brokers have not told."""
    staged: StagedOutput
    """Output that waits for stores, and the views of these."""

    @property
    def name(self) -> str:
        return self.resources.pipeline

    @property
    def named(self) -> str:
        """Its name in a command that must know its stores as well."""
        return self.name if self.graph is None or not self.staged.views else "MODULE:PIPELINE"

    @property
    def sign_of_life(self) -> str:
        """Why it may be running; empty: it does not run."""
        return self.resources.sign_of_life(self.now_ms)

    @property
    def history(self) -> History | None:
        """Its decisions when the examination began."""
        return self.resources.history

    @cached_property
    def history_now(self) -> History | None:
        """Its decisions now, after stores and blocks were looked at: a running pipeline goes on."""
        return read_history(self.config, self.name) if self.resources.topic and self.history else None

    @property
    def newest(self) -> Manifest | None:
        return self.history.latest if self.history else None

    @property
    def checkpoint_topic(self) -> str:
        """The name of the topic, which may be missing."""
        return checkpoint_topic(self.name)

    @cached_property
    def inputs(self) -> list[str]:
        sources = self.graph.sources if self.graph is not None else ()
        of_graph = {node.source.place for node in sources if node.source is not None and node.source.topic}
        return sorted({*self.resources.inputs(), *of_graph} - self.read_elsewhere.keys())

    @cached_property
    def read_elsewhere(self) -> dict[str, ReadsTopic]:
        """The sources that read topics of other clusters, by place; only a graph tells how to reach them."""
        sources = by_kind(self.graph)[0].values() if self.graph is not None else ()
        return {source.place: source for source in sources if source.client is not None}

    @property
    def start_groups(self) -> list[str]:
        """The consumer groups of this cluster at whose offsets the first run will begin; none once there is a
        checkpoint."""
        nodes = self.graph.sources if self.graph is not None and self.newest is None else ()
        sources = [node.source for node in nodes if node.source and node.source.place not in self.read_elsewhere]
        return sorted({source.start_group for source in sources if source.start_group})

    @cached_property
    def outputs(self) -> list[str]:
        sinks = self.graph.sinks if self.graph is not None else ()
        of_graph = (node.sink.topic for node in sinks if node.sink is not None)
        return sorted({*self.resources.outputs(), *(topic for topic in of_graph if topic is not None)})

    @property
    def topics(self) -> list[str]:
        """All topics, the topic of its checkpoints, too."""
        own = [self.checkpoint_topic] if self.resources.topic else []
        return [*self.inputs, *self.outputs, *own]
