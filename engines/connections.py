"""The connections of one leader: its clients, its decision log, and the answers to its procedures' requests.

Every leader is opened here: of a run, of bounded work, of a Spark sink, of a command. Invariants: making one connects
to nothing, and `lead` fences nobody; only `lead` fills in the process and cluster of a leader. For one thread at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.leader_config import LeaderConfig, Retention
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.requests import Procedure, R, drive
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import LogRequests
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import Places
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.connectors.trace import Trace
from exactlyonce.engines.performer import NO_REPLAY, Performer, Replay
from exactlyonce.engines.processes import this_process
from exactlyonce.engines.system_clock import SystemClock

TIMEOUT_MS = 30_000
"""The time that a question about transactions waits for a broker that is away."""


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Connections:
    """See the module. `open_log` comes first, then `lead` where there is a leader."""

    log: DecisionLog
    log_requests: LogRequests
    performer: Performer
    leader: Leader

    def __init__(
        self,
        client: ClientConfig,
        pipeline: str,
        note: Callable[[str], None] = lambda text: None,
        *,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        """*note* gets notes for a person."""
        self.client, self.pipeline, self.note = client, pipeline, note
        self.clock = SystemClock()
        self.trace = Trace()
        self.places = Places()
        """The brokers of the sinks' transactions."""
        self.answers: list[Callable[[ask.Request], Any]] = []
        """Asked in this order, before the performer. Each returns `NotImplemented` for requests of others."""
        self._opened = ExitStack()
        self._open_log = ExitStack()
        self.transactions = self.keep(
            Transactions(client, timeout_ms=timeout_ms, observe=self.trace.client(), places=self.places)
        )
        self.output_log = self.keep(Log(client, group=pipeline))
        self.topics = self.keep(Topics(client, observe=self.trace.client()))

    def keep(self, resource: C) -> C:
        """*resource*, which `close` closes."""
        return self._opened.enter_context(closing(resource))

    def open_log(
        self,
        topic: TopicInfo,
        *,
        transaction_timeout_ms: int = 0,
        replay: Replay | str = NO_REPLAY,
        step: Callable[[str, int], None] = lambda step, checkpoint: None,
        storage: str = TOPIC,
    ) -> DecisionLog:
        """Open a decision log in *topic*, in place of the last one, that has fenced nobody; see `Performer`."""
        self._open_log.close()
        self.log = DecisionLog(self.pipeline, topic, self.clock)
        self.log_requests = LogRequests(self.client, topic, observed=self.trace.client)
        self.performer = Performer(
            config=self.client, transactions=self.transactions, output_log=self.output_log, log=self.log_requests,
            transaction_timeout_ms=transaction_timeout_ms, step=step, replay=replay, note=self.note, storage=storage,
            beat=self._beat,
        )  # fmt: skip
        for opened in (self.log_requests, self.performer):
            self._open_log.enter_context(closing(opened))
        return self.log

    def lead(self, config: LeaderConfig, retention: Retention) -> Leader:
        """A leader over the open log that has fenced nobody."""
        host, process, machine = this_process()
        filled = replace(
            config, host=config.host or host, process=process, machine=machine,
            cluster_id=self.transactions.cluster_id(), transaction_version=self.transactions.transaction_version(),
        )  # fmt: skip
        self.leader = Leader(filled, self.log, retention, self.clock, self.note)
        return self.leader

    def begin(self) -> History:
        """Begin an incarnation: see `Leader.begin`."""
        return self._frozen(self.leader.begin())

    def open(self) -> History:
        """Fence every other writer of decisions: see `Leader.open`."""
        return self._frozen(self.leader.open())

    def _frozen(self, opening: Procedure[R]) -> R:
        """The result of *opening*. From then on the log has the partitions of its first manifest."""
        result = self.drive(opening)
        self.log_requests.freeze(self.log.topic)
        return result

    def _beat(self) -> None:
        self.drive(self.leader.beat())

    def drive(self, procedure: Procedure[R]) -> R:
        """The result of *procedure*."""
        return drive(procedure, self._ask)

    def _ask(self, request: ask.Request) -> Any:
        self.trace.next_round()
        return self._answer(request)

    def _answer(self, request: ask.Request) -> Any:
        if isinstance(request, ask.Together):
            return self.performer.together(request.requests, self._answer)
        for answers in self.answers:
            if (answer := answers(request)) is not NotImplemented:
                return answer
        return self.performer(request)

    def close(self) -> None:
        """Close all connections; this ends no incarnation."""
        with self._opened:
            self._open_log.close()
