"""Checkpoint 7 of a pipeline and a transaction of it, in which a test fills in what it cares about."""

from __future__ import annotations

from functools import partial

from exactlyonce.checkpoint.records.manifest import Committable, Manifest

blank_manifest = partial(
    Manifest, pipeline="p", checkpoint=7, incarnation=1, attempt=0, kind="checkpoint", base=6, previous=6,
    triggered_at_ms=0, completed_at_ms=0, fingerprint="", max_parallelism=128, parallelism=1, block_partitions=5,
    block_end_offsets=(0,) * 5, written_bytes=0, offsets=(), operators=(), order_logs=(), committables=(), sinks=(),
)  # fmt: skip
blank_committable = partial(
    Committable, transactional_id="a", producer_id=7, epoch=3, transaction_version=2, cluster_id="cluster", sink="out",
    subtask=0, checkpoint=7, written=(),
)  # fmt: skip
