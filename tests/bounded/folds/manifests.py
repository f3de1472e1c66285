"""Records of decisions, with what a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from exactlyonce.checkpoint.records.committable import Committable, Written
from exactlyonce.checkpoint.records.manifest import Manifest


def manifest(**fields: Any) -> Manifest:
    """Checkpoint 7 of the pipeline `p`."""
    filled: dict[str, Any] = {
        "pipeline": "p", "checkpoint": 7, "incarnation": 3, "attempt": 0, "kind": "checkpoint", "base": 6,
        "previous": 6, "triggered_at_ms": 0, "completed_at_ms": 99, "fingerprint": "f", "max_parallelism": 128,
        "parallelism": 2, "block_partitions": 4, "block_end_offsets": (), "written_bytes": 0, "offsets": (),
        "operators": (), "order_logs": (), "committables": (), "sinks": (),
    }  # fmt: skip
    return Manifest(**filled | fields)


def committable(name: str, producer_id: int = 0, checkpoint: int = 7, **written: tuple[int, int]) -> Committable:
    """One of sink `out` subtask 0; `p1=(40, 3)` are three records in partition 1 from offset 40 on."""
    places = tuple(Written("t", int(partition[1:]), *place) for partition, place in written.items())
    return Committable(
        transactional_id=name, producer_id=producer_id, epoch=5, transaction_version=2, cluster_id="", sink="out",
        subtask=0, checkpoint=checkpoint, written=places,
    )  # fmt: skip
