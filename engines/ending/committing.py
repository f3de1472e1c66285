"""The end of what is decided: a short incarnation of a coordinator that finishes the newest checkpoint.

Why it is one, and not a mere EndTxn of what a manifest names. To commit what a durable manifest names is right for any
process, at any time, as often as it is asked. But a coordinator that lives may find that the broker has aborted one of
its transactions, and record a repair that stands in for it. Whoever has read the log before that, and then writes
markers that a partition lacks, would make visible what the repair has replaced, beside the repair. So the decision log
is taken over first, which fences every older coordinator: no repair can be recorded behind our reading. One that
begins later fences us, in turn, and does what any incarnation does after a predecessor that was stopped in the
middle: the same lines as here, each of which may be repeated, and be late.

Therefore: refused while a coordinator shows signs of life, which commits what it decided by itself, unless it is to be
taken over; and where another one has begun since that was looked at. Invariant: nothing is ended here but by
`Leader.finish_decided`, and nothing is changed at all where there is nothing to finish, or where a store that takes
part in the decision is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.ending.waiting import WaitingOutput
from exactlyonce.engines.short_incarnation import short_incarnation
from exactlyonce.engines.traces import Traces
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.pipeline.graph import LogicalGraph


def require_decided(waiting: Collection[WaitingOutput], names: Collection[str]) -> None:
    """Raise `ConfigError` unless all of *names* are decided and not known to be finalized."""
    decided = {each.name: each.is_decided for each in waiting}
    for name in names:
        if name not in decided:
            raise ConfigError(f"{name} is none of what waits. Nothing was committed. `transactions list` shows it.")
        if not decided[name]:
            raise ConfigError(
                f"No checkpoint has decided {name}: its input is read again, so that its records would come twice. "
                f"Nothing was committed. Run the pipeline, or `transactions abort`, which ends it."
            )


def unfinished(traces: Traces, graph: LogicalGraph | None) -> Manifest | None:
    """The checkpoint that is to be finished; raises where this cannot be done here. Nothing is changed."""
    if traces.topic is None or traces.history is None:
        raise Halt(traces.unreadable or f"There is no topic of {traces.pipeline}'s decisions: nothing is decided.")
    if traces.is_sink:
        raise ConfigError(
            f"{traces.pipeline} is a sink of Spark: start its query again, which commits first what is decided."
        )
    traces.history.halt_if_damaged()
    manifest = traces.history.unfinalized
    sinks = sorted({each.sink for each in manifest.staged}) if manifest is not None else []
    if sinks and graph is None:
        raise ConfigError(
            f"Checkpoint {manifest.checkpoint if manifest else 0} is decided for Kafka and the stores of "
            f"{', '.join(sinks)} together, and these are known by the pipeline's module alone. Name the pipeline as "
            f"module:pipeline, or run it."
        )
    return manifest


class Finished(NamedTuple):
    """The checkpoint that was finished."""

    checkpoint: int | None
    """None: there was nothing left, once nobody else could finish it."""
    fates: dict[str, str]
    """The fate of each committable, by name."""


def finish(
    config: ClientConfig,
    traces: Traces,
    graph: LogicalGraph | None,
    note: Callable[[str], None],
    *,
    take_over: bool,
) -> Finished:
    """Finish what is decided. ConfigError, and nothing is changed, if that has been done since *traces* were found, or
    somebody else is at it; one that lives, and did so then, is fenced if it is to *take_over*."""
    assert traces.history is not None, "see `unfinished`"
    short = short_incarnation(config, traces.history, graph, note, take_over=take_over, require=_require_unfinalized)
    with short as connections:
        manifest = connections.log.history.unfinalized
        checkpoint = manifest.checkpoint if manifest is not None else None
        return Finished(checkpoint, connections.drive(connections.leader.finish_decided()))


def _require_unfinalized(history: History) -> None:
    if history.unfinalized is None:
        raise ConfigError(
            f"Checkpoint {history.checkpoint_latest} of {history.pipeline} was finalized meanwhile: nothing that is "
            f"decided waits any more. Nothing was changed."
        )
