"""Bounds that are small here, so that few records in little time meet what takes many, or long, elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from local_files import SMALL

from exactlyonce.checkpoint import coordinator as core
from exactlyonce.checkpoint import decision_log, leader
from exactlyonce.checkpoint.commits import stores as store_commits
from exactlyonce.checkpoint.transactions import commit, transactional_writer
from exactlyonce.engines.local import job, task
from exactlyonce.engines.runtime import cut, in_flight
from exactlyonce.pipeline.retries import Pauses
from exactlyonce.sinks.kafka import writer
from exactlyonce.sinks.write_ahead import writer as write_ahead

BOUNDS = (
    (commit, "MARKERS_LOST_AFTER_MS", 200),
    (decision_log, "STABLE_TIMEOUT_MS", 400),
    (transactional_writer, "MARKERS_TIMEOUT_MS", 400),
    (leader, "WATCH_INTERVAL_MS", 2_000),
    (writer, "WAITING_MIN", 4),
    (cut, "BLOCKS_PENDING_MAX", 2),
    (in_flight, "PIECE_BYTES", 400),
    (in_flight, "NAMED_MAX", 2),
    (in_flight, "LISTED_MAX", 3),
    (task, "ROUND_RECORDS_MAX", 6),
    (core, "HOLD_AFTER_MS", 100),
    (leader, "UPKEEP_INTERVAL_S", 1.0),
    (job, "UPKEEP_INTERVAL_S", 2.0),
    (job, "MAILBOX_INTERVAL_MS", 3),
    (store_commits, "OF_STORE", Pauses(50, 400)),
    (write_ahead, "CHUNK_SIZE", 500),
    (write_ahead, "BLOCKS_PENDING_MAX", 4),
    (write_ahead, "NAMED_MAX", 2),
    (write_ahead, "LISTED_MAX", 3),
    *SMALL,
)
"""Bounds that are met here by few records and in little time, too."""


@contextmanager
def bounds() -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, value in BOUNDS:
            stack.enter_context(patch.object(module, name, value))
        yield
