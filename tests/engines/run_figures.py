"""What a run's reporters are told."""

from __future__ import annotations

from typing import Any

from exactlyonce.connectors.source import LogRead, TableRead
from exactlyonce.engines.local.messages import Progress

CHECKPOINT: dict[str, Any] = {
    "event": "checkpoint", "at_ms": 1_700_000_000_500, "checkpoint": 7, "duration_ms": 300, "sync_ms": 1.5,
    "async_ms": 40.0, "bytes": 900, "state_bytes": 5_000, "committables": 2, "records_committed": 50,
    "longest_gap_ms": 12.0, "decided_at_ms": 1_700_000_000_300, "committed_at_ms": 1_700_000_000_400,
}  # fmt: skip

LOG = LogRead(
    name="exactlyonce_shop", lag_ms=2_500, lag_bytes=700, kept_bytes=9_000, safe_bytes=1_000, status="unreserved",
    problem="the server may remove log", tables=[TableRead("customers", 3, 10)],
)  # fmt: skip

PHASES = ("waiting_ms", "aligning_ms", "snapshot_ms", "capture_ms", "flush_ms")


def progress(subtask: int, records_in: int, **others: Any) -> Progress:
    figures: dict[str, Any] = {
        "records_out": 0, "skipped": 0, "longest_gap_ms": 0.0, "open_transactions": 1, "first_record_ms": 0,
        "lags": {"orders": [("orders", 0, 2), ("orders", 1, 7)]}, "going_round": 0,
        "waiting": [], "full": [], "notes": [],
    }  # fmt: skip
    return Progress(subtask=subtask, records_in=records_in, **figures | others)
