"""The end of what nobody has decided: a pipeline's transactions in Kafka, and what is prepared in its stores.

Invariants: what a manifest or a repair names is never aborted; nothing is, before the coordinator was fenced and what
is decided was read after that, so that no decision can come in between; nor is anything of an incarnation that the
fence may have missed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from threading import Event
from typing import NamedTuple

from exactlyonce.checkpoint.records.committable import coordinator_id, transaction_prefix
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.transactions.commit import incarnation_latest, sweep
from exactlyonce.checkpoint.transactions.last_look import last_look
from exactlyonce.checkpoint.transactions.settling import settle
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.connections import Connections
from exactlyonce.engines.ending.waiting import (
    BY_NAME,
    StagedOutput,
    WaitingOutput,
    find_transactions,
    open_ids,
    unfinalized_committables,
)
from exactlyonce.engines.surroundings.stores import PipelineStores
from exactlyonce.engines.traces import Traces
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, Halt
from exactlyonce.pipeline.graph import LogicalGraph

SETTLED_TIMEOUT_MS = 30_000
SETTLED_POLL_S = 0.05


class Aborted(NamedTuple):
    """The output that was aborted, and that was left."""

    aborted: list[WaitingOutput]
    left: list[WaitingOutput]
    unasked: dict[str, str]
    """Why a store was not asked, by sink."""


def require_undecided(waiting: Sequence[WaitingOutput], names: Collection[str]) -> None:
    """Raise `ConfigError` unless all of *names* wait, and nobody has decided on them."""
    by_name = {each.name: each for each in waiting}
    for name in names:
        found = by_name.get(name)
        if found is None:
            raise ConfigError(f"{name} is none of what waits. Nothing was aborted. `transactions list` shows it.")
        if found.is_decided:
            raise ConfigError(
                f"Checkpoint {found.decided_in} has decided {name}: it has to become visible, for its input is behind "
                f"the checkpoint and is not read again. Nothing was aborted. Run the pipeline, or "
                f"`transactions commit`."
            )
        if not found.holds:
            raise ConfigError(
                f"{name} holds nobody back: it waits in blocks or files, which the next run drops. Nothing was aborted."
            )


def abort_undecided(
    config: ClientConfig, traces: Traces, names: Collection[str] = (), graph: LogicalGraph | None = None
) -> Aborted:
    """Fence the coordinator, then abort what it has not decided, of that only *names* if there are any.

    What is decided is read once no decision can be on its way. `Halt` where it cannot be read. Only incarnations that
    *traces* know of are ended: the fence came behind all of them. One that has begun since is left in peace, if it is
    seen right before the fence, and nothing is aborted if the log shows it behind; if it begins later still, its
    transactions are not touched.
    """
    newest = _newest(traces)
    topic = find_topic(config.confluent(), traces.pipeline)
    with closing(Connections(config, traces.pipeline)) as connections:
        log, transactions = connections.open_log(topic), connections.transactions
        partitions = [(topic.name, each) for each in range(topic.partitions)]
        _require_no_newer(connections.drive(last_look(traces.pipeline, log.peek_at_stable, connections.clock)), newest)
        connections.drive(settle(coordinator_id(traces.pipeline), partitions))
        history = _settled(connections)
        _require_no_newer(history, newest)
        listed = [each for each in open_ids(transactions, traces.pipeline) if incarnation_latest([each]) <= newest]
        found = find_transactions(transactions, listed, history)
        staged = _in_stores(config, topic, history, newest, graph, names, found)
        decided = {each.name for each in found if each.is_decided} | unfinalized_committables(history).keys()
        if names:
            others = {each.transactional_id for each in transactions.list(transaction_prefix(traces.pipeline))}
            decided |= others - set(names)
        procedure = sweep(
            traces.pipeline, newest + 1, 0, protected=decided, fenced_below=(newest + 1, 0),
            outputs={(place.topic, place.partition) for each in found for place in each.places},
        )  # fmt: skip
        connections.drive(procedure)
    chosen = [each for each in found if not each.is_decided and (not names or each.name in names)]
    left = [each for each in found if each not in chosen]
    return Aborted([*chosen, *staged.waiting], left, staged.unasked)


def _require_no_newer(history: History, newest: int) -> None:
    if history.incarnation_latest > newest:
        raise ConfigError(
            f"A new instance of {history.pipeline} has begun meanwhile. Nothing was aborted: it does that itself. If "
            f"it does not run any more, run this again."
        )


def _newest(traces: Traces) -> int:
    """The newest incarnation that is known; Halt where nobody can say what is decided."""
    if traces.topic is None:
        raise Halt(
            f"The topic of {traces.pipeline}'s decisions is gone, so that nobody can say which of its transactions are "
            f"decided. Restore it, or forget the pipeline by `exactlyonce reset {traces.pipeline}`, which aborts all."
        )
    if traces.history is None:
        raise Halt(traces.unreadable)
    return max(traces.history.incarnation_latest, incarnation_latest(traces.transactions))


def _in_stores(
    config: ClientConfig, topic: TopicInfo, history: History, newest: int, graph: LogicalGraph | None,
    names: Collection[str], found: list[WaitingOutput],
) -> StagedOutput:  # fmt: skip
    """Roll back what is prepared in stores and undecided: nobody can decide on it any more. -> what that was.

    The coordinators that could have are fenced, and a newer one names only what its own workers prepare.
    """
    staged = StagedOutput()
    if graph is None:
        require_undecided(found, names)
        sinks = {sink for each in history.retained for sink, _, _ in each.ledger}
        return StagedOutput(unasked=dict.fromkeys(sorted(sinks), BY_NAME))
    blocks = block_storage(config, topic, history.storage)
    with closing(blocks), closing(PipelineStores(graph, blocks)) as stores:
        staged.look_at(stores)
        waiting = [each for sink in sorted(staged.views) for each in staged.undecided(sink, history)]
        require_undecided([*found, *waiting], names)
        for sink in staged.views:
            chosen = [each.name for each in waiting if each.sink == sink and (not names or each.name in names)]
            done = set(stores.roll_back(sink, chosen, newest, topic.topic_id)) if chosen else set()
            staged.waiting += [each for each in waiting if each.sink == sink and each.name in done]
    return staged


def _settled(connections: Connections) -> History:
    """The decisions, once readers of the log get to its end."""
    log, clock = connections.log, connections.clock
    until_ms = clock.monotonic_ms() + SETTLED_TIMEOUT_MS
    while (history := connections.drive(log.peek())) is None:
        if clock.monotonic_ms() > until_ms:
            raise BrokerUnavailable(
                f"{log.topic.name} cannot be read to its end: somebody has a transaction open in it. Nothing was "
                f"aborted. Run this again in a minute."
            )
        Event().wait(SETTLED_POLL_S)
    history.halt_if_damaged()
    return history
