"""A short incarnation of a coordinator: a command that fences, begins, does one thing as a leader, and ends.

Invariants: only the leader's procedures act; a store without a description is asked nothing; no checkpoint expires, for
only a run knows how many are kept. A last look right before the fence spares a run that has begun meanwhile (but see
`last_look`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.commits.stores import StagingSink
from exactlyonce.checkpoint.kept_blocks import BlockRetention
from exactlyonce.checkpoint.leader_config import LeaderConfig
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.succession import last_look
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines import processes
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.connections import Connections
from exactlyonce.engines.external_checks.stores import PipelineStores
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.graph import LogicalGraph

NO_REPLAY = "this command computes nothing again: run the pipeline, which replays the interval."
STORE_TIMEOUT_MS = 60_000
ALL_RETAINED = CheckpointSettings(num_retained=2**31)


@contextmanager
def short_incarnation(
    config: ClientConfig,
    seen: History,
    graph: LogicalGraph | None,
    note: Callable[[str], None],
    *,
    take_over: bool = False,
    require: Callable[[History], None] = lambda history: None,
) -> Iterator[Connections]:
    """The connections of a leader that has begun. It ends after the block, unless that raises.

    ConfigError right before the fence if an incarnation has begun since *seen*, or one lives, unless *take_over*.
    *require* gets the decisions of that moment, and may raise another objection.
    """
    with connected(config, seen.pipeline, graph, note) as connections:
        log = connections.log
        now = connections.drive(last_look(seen.pipeline, log.peek_at_stable, connections.clock))
        require_unchanged(seen, now, take_over=take_over)
        require(now)
        connections.begin()
        yield connections
        connections.drive(log.heartbeat(ended=True))


def require_unchanged(seen: History, now: History, *, take_over: bool) -> None:
    """ConfigError if an incarnation has begun since *seen*, or the newest one lives, unless *take_over*."""
    newest, living = now.newest_incarnation, processes.living(now, SystemClock().now_ms())
    if now.incarnation_latest != seen.incarnation_latest:
        who = f" (process {newest.process} on {newest.host})" if newest is not None else ""
        raise ConfigError(
            f"A new instance of {now.pipeline}{who} has begun since this command has looked. Nothing was changed, and "
            f"it was not fenced. Run this again."
        )
    if living is not None and not take_over:
        raise ConfigError(
            f"{now.pipeline} runs: process {living.process} on {living.host} goes on. Nothing was changed. Run this "
            f"again."
        )


@contextmanager
def connected(
    config: ClientConfig, pipeline: str, graph: LogicalGraph | None, note: Callable[[str], None]
) -> Iterator[Connections]:
    """The connections of a leader that has not begun."""
    with closing(Connections(config, pipeline, note)) as connections:
        topic, history = read_topic(config, pipeline)
        storage = history.storage
        timeout_ms = connections.transactions.max_timeout_ms()
        log = connections.open_log(topic, transaction_timeout_ms=timeout_ms, replay=NO_REPLAY, storage=storage)
        staging: Mapping[str, StagingSink] = {}
        if graph is not None:
            blocks = connections.keep(block_storage(config, topic, storage))
            stores = connections.keep(PipelineStores(graph, blocks))
            stores.check()
            staging = stores.staging
            connections.answers.append(stores)

        def outputs(request: ask.Request) -> Any:
            match request:
                case ask.CreateOutputs():
                    return None  # decided output was written to existing topics
                case ask.KnownOutputs():
                    return log.history.latest.sinks if log.history.latest is not None else ()
            return NotImplemented

        connections.answers.append(outputs)
        leader_config = LeaderConfig(
            pipeline=pipeline, transaction_timeout_ms=timeout_ms, fingerprint="", max_parallelism=1, parallelism=1,
            bounded=True, staging=staging, store_timeout_ms=STORE_TIMEOUT_MS, storage=storage,
        )  # fmt: skip
        settings = msgspec.structs.replace(ALL_RETAINED, storage=storage)
        connections.lead(leader_config, BlockRetention(settings, staging=bool(staging)))
        yield connections
