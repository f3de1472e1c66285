"""The abort of a pipeline's undecided transactions in Kafka.

Invariants: nothing named by a manifest or a repair is aborted. The coordinator is fenced first, and the decisions are
read after that, so that no decision can come in between. Output of an incarnation that the fence may have missed is
left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from threading import Event
from typing import NamedTuple

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import coordinator_id, transaction_prefix
from exactlyonce.checkpoint.succession import last_look
from exactlyonce.checkpoint.transactions.commit import incarnation_latest, settle, sweep
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.connections import Connections
from exactlyonce.engines.ending.waiting import (
    TRANSACTION,
    WaitingOutput,
    find_transactions,
    open_ids,
    unfinalized_committables,
)
from exactlyonce.engines.pipeline_resources import PipelineResources
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, Halt

SETTLED_TIMEOUT_MS = 30_000
SETTLED_POLL_S = 0.05


class AbortedOutput(NamedTuple):
    aborted: list[WaitingOutput]
    left: list[WaitingOutput]


def require_undecided(waiting: Sequence[WaitingOutput], names: Collection[str]) -> None:
    """Raise `ConfigError` unless all of *names* wait, undecided, and hold somebody back."""
    by_name = {output.name: output for output in waiting}
    for name in names:
        output = by_name.get(name)
        if output is None:
            raise ConfigError(f"{name} does not wait. Nothing was aborted. `transactions list` shows what waits.")
        if output.is_decided:
            raise ConfigError(
                f"Checkpoint {output.decided_in} has decided {name}: it must become visible, for its input is not read "
                f"again. Nothing was aborted. Run the pipeline, or `transactions commit`."
            )
        if output.kind != TRANSACTION:
            raise ConfigError(
                f"{name} holds nobody back: it waits in blocks or files that the next run drops. Nothing was aborted."
            )


def abort_undecided(config: ClientConfig, resources: PipelineResources, names: Collection[str] = ()) -> AbortedOutput:
    """Fence the coordinator, then abort its undecided output, or only *names* if any are given.

    `Halt` where the decisions cannot be read. Only incarnations in *resources* are aborted, for the fence came after
    all of them. One that has begun since is not fenced if it is seen right before the fence. Nothing is aborted if the
    log shows it after the fence. If it begins later still, its transactions are not touched.
    """
    newest = _newest(resources)
    topic = find_topic(config, resources.pipeline)
    with closing(Connections(config, resources.pipeline)) as connections:
        log, transactions = connections.open_log(topic), connections.transactions
        partitions = [(topic.name, partition) for partition in range(topic.partitions)]
        _require_no_newer(
            connections.drive(last_look(resources.pipeline, log.peek_at_stable, connections.clock)), newest
        )
        connections.drive(settle(coordinator_id(resources.pipeline), partitions))
        history = _settled(connections)
        _require_no_newer(history, newest)
        ids = open_ids(transactions, resources.pipeline)
        listed = [transaction for transaction in ids if incarnation_latest([transaction]) <= newest]
        outputs = find_transactions(transactions, listed, history)
        require_undecided(outputs, names)
        protected = {output.name for output in outputs if output.is_decided} | unfinalized_committables(history).keys()
        if names:
            every = {listed.transactional_id for listed in transactions.list(transaction_prefix(resources.pipeline))}
            protected |= every - set(names)
        procedure = sweep(
            resources.pipeline, newest + 1, 0, protected=protected, fenced_below=(newest + 1, 0),
            outputs={(place.topic, place.partition) for output in outputs for place in output.places},
        )  # fmt: skip
        connections.drive(procedure)
    aborted = [output for output in outputs if not output.is_decided and (not names or output.name in names)]
    left = [output for output in outputs if output not in aborted]
    return AbortedOutput(aborted, left)


def _require_no_newer(history: History, newest: int) -> None:
    if history.incarnation_latest > newest:
        raise ConfigError(
            f"A new instance of {history.pipeline} has begun meanwhile. Nothing was aborted: it does that itself. If "
            f"it does not run any more, run this again."
        )


def _newest(resources: PipelineResources) -> int:
    """The newest known incarnation; Halt if the decisions are not known."""
    if resources.topic is None:
        raise Halt(
            f"The topic of {resources.pipeline}'s decisions is gone, so it is not known which of its transactions are "
            f"decided. Restore it, or forget the pipeline by `exactlyonce reset {resources.pipeline}`, which aborts "
            f"all."
        )
    if resources.history is None:
        raise Halt(resources.unreadable)
    return max(resources.history.incarnation_latest, incarnation_latest(resources.transactions))


def _settled(connections: Connections) -> History:
    """The decisions, once the log can be read to its end."""
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
