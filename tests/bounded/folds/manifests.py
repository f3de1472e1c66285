"""Records of decisions, with what a test does not care about filled in."""

from __future__ import annotations

from functools import partial

from blank_manifest import blank_committable, blank_manifest

from exactlyonce.checkpoint.records.manifest import Committable, Written

manifest = partial(
    blank_manifest, incarnation=3, completed_at_ms=99, fingerprint="f", parallelism=2, block_partitions=4,
    block_end_offsets=(),
)  # fmt: skip
"""Checkpoint 7 of the pipeline `p`."""


def committable(name: str, producer_id: int = 0, checkpoint: int = 7, **written: tuple[int, int]) -> Committable:
    """One of sink `out` subtask 0; `p1=(40, 3)` are three records in partition 1 from offset 40 on."""
    places = tuple(Written("t", int(partition[1:]), *place) for partition, place in written.items())
    return blank_committable(
        transactional_id=name, producer_id=producer_id, epoch=5, cluster_id="", checkpoint=checkpoint, written=places
    )
