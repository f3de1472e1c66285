"""The commit of decided output: a short incarnation of a coordinator that finishes the newest checkpoint.

A mere EndTxn would not do. A living coordinator may record a repair for a transaction that the broker has aborted. A
late marker would then make visible what the repair replaced. So the decision log is taken over first; see
docs/design/short-incarnations.md.

Invariants: refused while a coordinator shows signs of life, unless it is taken over, and if one has begun meanwhile.
Only `Leader.finish_decided` ends anything. Nothing is changed if nothing is left to finish, or if the store of a
decided sink is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.ending.waiting import WaitingOutput
from exactlyonce.engines.pipeline_resources import PipelineResources
from exactlyonce.engines.short_incarnation import short_incarnation
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.pipeline.graph import LogicalGraph


def require_decided(waiting: Collection[WaitingOutput], names: Collection[str]) -> None:
    """Raise `ConfigError` unless all of *names* are decided and not known to be finalized."""
    decided = {output.name: output.is_decided for output in waiting}
    for name in names:
        if name not in decided:
            raise ConfigError(f"{name} does not wait. Nothing was committed. `transactions list` shows what waits.")
        if not decided[name]:
            raise ConfigError(
                f"No checkpoint has decided {name}: its input is read again, so that its records would come twice. "
                f"Nothing was committed. Run the pipeline, or `transactions abort`, which ends it."
            )


def unfinished(resources: PipelineResources, graph: LogicalGraph | None) -> Manifest | None:
    """The checkpoint to finish, if there is one; raises if that cannot be done here. Nothing is changed."""
    if resources.topic is None or resources.history is None:
        raise Halt(
            resources.unreadable or f"There is no topic of {resources.pipeline}'s decisions: nothing is decided."
        )
    if resources.is_sink:
        raise ConfigError(
            f"{resources.pipeline} is a sink of Spark: start its query again, which commits first what is decided."
        )
    resources.history.halt_if_damaged()
    manifest = resources.history.unfinalized
    if manifest is not None and manifest.staged and graph is None:
        sinks = ", ".join(sorted({staged.sink for staged in manifest.staged}))
        raise ConfigError(
            f"Checkpoint {manifest.checkpoint} is decided for Kafka and the stores of {sinks} together, and these are "
            f"known by the pipeline's module alone. Name the pipeline as module:pipeline, or run it."
        )
    return manifest


class FinishedCheckpoint(NamedTuple):
    checkpoint: int | None
    """None: nothing was left to finish after the fence."""
    fates: dict[str, str]
    """The fate of each committable, by name."""


def finish(
    config: ClientConfig,
    resources: PipelineResources,
    graph: LogicalGraph | None,
    note: Callable[[str], None],
    *,
    take_over: bool,
) -> FinishedCheckpoint:
    """Finish the decided checkpoint. ConfigError, and nothing is changed, if that was done since *resources* were
    found, or another coordinator does it; *take_over*: one that lived then is fenced."""
    assert resources.history is not None, "see `unfinished`"
    short = short_incarnation(config, resources.history, graph, note, take_over=take_over, require=_require_unfinalized)
    with short as connections:
        manifest = connections.log.history.unfinalized
        checkpoint = manifest.checkpoint if manifest is not None else None
        return FinishedCheckpoint(checkpoint, connections.drive(connections.leader.finish_decided()))


def _require_unfinalized(history: History) -> None:
    if history.unfinalized is None:
        raise ConfigError(
            f"Checkpoint {history.checkpoint_latest} of {history.pipeline} was finalized meanwhile: nothing that is "
            f"decided waits any more. Nothing was changed."
        )
