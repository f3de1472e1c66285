"""The end of what is decided: a life of a coordinator that finishes the newest checkpoint, and ends.

Why it is one, and not a mere EndTxn of what a manifest names. To commit what a durable manifest names is right for any
process, at any time, as often as it is asked. But a coordinator that lives may find that the broker has aborted one of
its transactions, and record a repair that stands in for it. Whoever has read the log before that, and then writes
markers that a partition lacks, would make visible what the repair has replaced, beside the repair. So the decision log
is taken over first, which fences every older coordinator: no repair can be recorded behind our reading. One that
begins later fences us, in turn, and does what any incarnation does after a predecessor that was stopped in the
middle: the same lines as here, each of which may be repeated, and be late.

Therefore: refused while a coordinator shows signs of life, which commits what it decided by itself, unless it is to be
taken over. Invariant: nothing is ended here but by `Leader.finish_decided`, and nothing is changed at all where there
is nothing to finish, or where a store that takes part in the decision is not known.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.led import Led
from exactlyonce.checkpoint.orphans import KnownBlocks
from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.checkpoint.store.topic import find_topic
from exactlyonce.cli.traces import Traces
from exactlyonce.cli.waiting import WaitingOutput
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.log_requests import LogRequests
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.performer import Performer
from exactlyonce.engines.surroundings.stores import PipelineStores
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.pipeline.graph import LogicalGraph

STORE_TIMEOUT_MS = 60_000
ALL_RETAINED = CheckpointSettings(num_retained=2**31)
"""How many checkpoints are kept is the next run's to know: none expires here."""


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


def finish(
    config: ClientConfig, traces: Traces, graph: LogicalGraph | None, note: Callable[[str], None]
) -> dict[str, str]:
    """Finish what is decided: the fate of each committable, by name."""
    with leading(config, traces.pipeline, graph, note) as (leader, perform, requests):
        ask.drive(leader.begin(), perform)
        requests.freeze(leader.log.topic)
        fates = ask.drive(leader.finish_decided(), perform)
        ask.drive(leader.log.heartbeat(ended=True), perform)
    return fates


@contextmanager
def leading(
    config: ClientConfig, pipeline: str, graph: LogicalGraph | None, note: Callable[[str], None]
) -> Iterator[tuple[Leader, Callable[[ask.Request], Any], LogRequests]]:
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
            config, transactions, output_log, requests, timeout_ms, lambda step, checkpoint: None, _no_replay, note,
            storage, beat=lambda: ask.drive(leader.beat(), perform),
        )  # fmt: skip
        stack.callback(performer.close)
        led = Led(
            pipeline=pipeline, host=socket.gethostname(), process=os.getpid(), cluster_id=transactions.cluster_id(),
            transaction_version=transactions.transaction_version(), transaction_timeout_ms=timeout_ms,
            fingerprint="", max_parallelism=1, parallelism=1,
            staging=stores.digests if stores is not None else {}, store_timeout_ms=STORE_TIMEOUT_MS,
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


def to_stderr(text: str) -> None:
    """What a person should know while it is under way."""
    print(text, file=sys.stderr, flush=True)
