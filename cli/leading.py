"""A short incarnation of a coordinator: a command that fences, begins, does one thing as a leader does it, and ends.

Invariants: what it does is done by the leader's own procedures and nothing else; a store whose description is not known
is asked nothing; no checkpoint expires here, for how many are kept is the next run's to know; it looks once more right
before it fences, so that no run which began since the command has looked is ended for it (but see `last_look`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.led import Led
from exactlyonce.checkpoint.orphans import KnownBlocks
from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.transactions.last_look import last_look
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import LogRequests
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.performer import Performer
from exactlyonce.engines.processes import machine
from exactlyonce.engines.surroundings.stores import PipelineStores
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.graph import LogicalGraph

STORE_TIMEOUT_MS = 60_000
ALL_RETAINED = CheckpointSettings(num_retained=2**31)

Perform = Callable[[ask.Request], Any]


@contextmanager
def short_incarnation(
    config: ClientConfig,
    seen: History,
    graph: LogicalGraph | None,
    note: Callable[[str], None],
    *,
    take_over: bool = False,
    require: Callable[[History], None] = lambda history: None,
) -> Iterator[tuple[Leader, Perform]]:
    """A leader that has begun, and what answers its requests; behind the block, unless that raises, it has ended.

    Right before the fence ConfigError if an incarnation has begun since *seen*, or, unless it is to *take_over*, one
    lives; *require*, which is given the decisions as they are then, may raise what else stands in the way.
    """
    with leading(config, seen.pipeline, graph, note) as (leader, perform, requests):
        now = ask.drive(last_look(seen.pipeline, leader.log.peek_at_stable, SystemClock()), perform)
        require_unchanged(seen, now, take_over=take_over)
        require(now)
        ask.drive(leader.begin(), perform)
        requests.freeze(leader.log.topic)
        yield leader, perform
        ask.drive(leader.log.heartbeat(ended=True), perform)


def require_unchanged(seen: History, now: History, *, take_over: bool) -> None:
    """ConfigError if an incarnation has begun since *seen*, or, unless it is to *take_over*, the newest one lives."""
    newest, living = now.newest_incarnation, now.living(SystemClock().now_ms())
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
def leading(
    config: ClientConfig, pipeline: str, graph: LogicalGraph | None, note: Callable[[str], None]
) -> Iterator[tuple[Leader, Perform, LogRequests]]:
    """A leader that has not begun, what answers its requests, and the part of that which knows the topic."""
    with ExitStack() as stack:
        transactions = stack.enter_context(closing(Transactions(config)))
        output_log = stack.enter_context(closing(Log(config, group=pipeline)))
        topic = find_topic(config.confluent(), pipeline)
        storage = read_history(config.confluent(), pipeline).storage
        requests = stack.enter_context(closing(LogRequests(config, topic)))
        blocks = stack.enter_context(closing(block_storage(config, topic, storage)))
        stores = stack.enter_context(closing(PipelineStores(graph, blocks))) if graph is not None else None
        if stores is not None:
            stores.check()
        timeout_ms = transactions.max_timeout_ms()
        performer = Performer(
            config, transactions, output_log, requests, timeout_ms, replay=_no_replay, note=note, storage=storage,
            beat=lambda: ask.drive(leader.beat(), perform),
        )  # fmt: skip
        stack.callback(performer.close)
        led = Led(
            pipeline=pipeline, host=socket.gethostname(), process=os.getpid(), machine=machine(),
            cluster_id=transactions.cluster_id(), transaction_version=transactions.transaction_version(),
            transaction_timeout_ms=timeout_ms,
            fingerprint="", max_parallelism=1, parallelism=1, bounded=True,
            staging=stores.staging if stores is not None else {}, store_timeout_ms=STORE_TIMEOUT_MS,
            storage=storage,
        )  # fmt: skip
        clock = SystemClock()
        log = DecisionLog(pipeline, topic, clock)
        settings = msgspec.structs.replace(ALL_RETAINED, storage=storage)
        leader = Leader(led, log, KnownBlocks(settings, staging=bool(led.staging)), clock, note)

        def perform(request: ask.Request) -> Any:
            match request:
                case ask.CreateOutputs():
                    return None  # what is finished was written to topics that there are
                case ask.KnownOutputs():
                    return log.history.latest.sinks if log.history.latest is not None else ()
                case ask.Together(several):
                    return performer.together(several, perform)
            answer = stores(request) if stores is not None else NotImplemented
            return performer(request) if answer is NotImplemented else answer

        yield leader, perform, requests


def _no_replay(manifest: Manifest, lost: Committable, transactional_id: str) -> str:
    return "this command computes nothing again: run the pipeline, which replays the interval."
