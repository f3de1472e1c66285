"""Performs what the protocol's procedures ask for, against a real broker. Called by one thread only.

Invariant: an EndTxn whose answer is unknown is asked again as it was; while no broker answers, that is a pause, not a
failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.decision_log import APPEND_TIMEOUT_MS
from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.manifest import Finalized, Manifest, Repair
from exactlyonce.checkpoint.store.blocks import BlockReader, scan_blocks
from exactlyonce.checkpoint.transactions.broker_answers import EndAnswer
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.copying import copy_transaction
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.transactional_writer import LogRequests
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.blocks import references_or_why
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.pipeline.failpoints import hit

_AFTER_APPEND = {
    Manifest: ("decided", "coordinator-decided"),
    Finalized: ("finalized", "coordinator-finalized"),
    Repair: ("repair recorded", "repair-recorded"),
}

Replay = Callable[[Manifest, Committable, str], Committable | str]
"""Manifest, what of it was lost, and the new transactional id -> the new committable, or why there is none."""


def no_replay(manifest: Manifest, lost: Committable, transactional_id: str) -> str:
    """The answer of a life that replays nothing."""
    return "the run was told to halt instead (--repair halt)."


class Performer:
    """Answers the requests of `checkpoint.requests`."""

    def __init__(
        self,
        config: ClientConfig,
        transactions: Transactions,
        output_log: Log,
        log: LogRequests,
        transaction_timeout_ms: int,
        step: Callable[[str, int], None],
        replay: Replay = no_replay,
    ) -> None:
        self.config = config
        self.transactions = transactions
        self.output_log = output_log
        self.log = log
        self.transaction_timeout_ms = transaction_timeout_ms
        self.step = step
        self.replay = replay

    def __call__(self, request: ask.Request) -> Any:
        match request:
            case ask.DescribeTransactions(ids):
                return self.transactions.describe(ids)
            case ask.DescribeProducers(partitions):
                return self.transactions.producers(partitions)
            case ask.ListTransactions(prefix):
                return self.transactions.list(prefix)
            case ask.EndTransactions(endings, commit):
                return self._end(endings, commit)
            case ask.RewriteMarkers(name, producer_id, partitions, commit):
                with suppress(BrokerUnavailable):  # whether it was done shows in the partitions, which are asked next
                    self.transactions.rewrite_markers(name, producer_id, partitions, commit=commit)
                return None
            case ask.Reached(place):
                return hit(place)
            case ask.Appended(records):
                return self._appended(records)
            case ask.BlockEndOffsets():
                return self._persistently(lambda: self.log(request))
            case ask.ScanBlocks(start_offsets):
                settings, topic = self.config.confluent(), self.log.topic
                return self._persistently(lambda: scan_blocks(settings, topic, start_offsets))
            case ask.FindReferences(manifest):
                reader = BlockReader(self.config.confluent(), self.log.topic)
                return self._persistently(lambda: references_or_why(manifest, reader))
            case ask.Look(committable):
                return self.output_log.fate(committable)
            case ask.CopyTransaction(committable, name):
                copied = copy_transaction(
                    self.config, self.transactions, self.output_log, committable, name, self.transaction_timeout_ms
                )
                hit("repair-copied")
                return copied
            case ask.ReplayTransaction(manifest, lost, name):
                replayed = self.replay(manifest, lost, name)
                hit("repair-replayed")
                return replayed
        return self.log(request)

    def _persistently(self, asked: Callable[[], Any]) -> Any:
        """The answer of *asked*, asked again while the broker is away: for as long as an append is tried."""

        def attempt(_: int) -> ask.Procedure[Any]:
            return asked()
            yield  # never: it makes this a procedure

        clock = SystemClock()
        return ask.drive(ask.retrying(attempt, clock, clock.monotonic_ms() + APPEND_TIMEOUT_MS), self.log)

    def _end(self, endings: tuple[ask.Ending, ...], commit: bool) -> Sequence[EndAnswer]:
        try:
            answers = self.transactions.end_all(endings, commit=commit)
        except BrokerUnavailable:
            return [EndAnswer.BUSY] * len(endings)
        if commit and endings:
            hit("coordinator-committed")
        return answers

    def _appended(self, records: tuple[Manifest | Finalized | Repair, ...]) -> None:
        for record in records:
            name, failpoint = _AFTER_APPEND[type(record)]
            self.step(name, record.checkpoint)
            hit(failpoint)
