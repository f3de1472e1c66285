"""The share of the state that a bounded run reads, if the keys of its range lie in one key group.

The local engine makes the state, a bounded run at another parallelism advances it. Its units run in this process, so
that reads of the checkpoint topic can be counted; Spark's tasks run the same units. All reads count: also indexes, and
those of the driver for retention.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import Bench
from cluster import QUIET, WRITER
from figures import Figure
from job import Failed, Job
from orders import encoded, once_each
from spark_backfill import Quiet

from exactlyonce.checkpoint.records.encoding import Block, encode
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockReader
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.stages import in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.pipeline.loading import Loaded, load_reference

GROUPS = 128
MADE_AT, ADVANCED_AT = "2", 3
"""Parallelism."""


@contextmanager
def counted() -> Iterator[list[BlockRef]]:
    """The blocks that this process reads within."""
    read: list[BlockRef] = []
    fetch = BlockReader.fetch

    def counting(self: BlockReader, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        for ref, block in fetch(self, refs):
            read.append(ref)
            yield ref, block

    BlockReader.fetch = counting  # type: ignore[method-assign]  # put back below
    try:
        yield read
    finally:
        BlockReader.fetch = fetch  # type: ignore[method-assign]  # as it was


class LocalTotals:
    """A running total of *keys* keys, computed by the local engine."""

    def __init__(self, bench: Bench, keys: int) -> None:
        self.cluster = bench.cluster
        self.keys = keys
        name = uuid.uuid4().hex[:8]
        self.params = {"name": f"totals-{name}", "source": f"orders-{name}", "sink": f"totals-{name}"}
        self.topics = self.params["source"], self.params["sink"]
        self.cluster.create(*self.topics)
        self.fed = 0

    def grow(self, records: int) -> None:
        """The local engine reads one order for each of *records* customers, the next in turn."""
        self.cluster.feed(self.params["source"], once_each(self.fed, records, self.keys))
        self.fed += records
        with Job(
            *(self.cluster.servers, "totals", "--until", "latest", "--parallelism", MADE_AT),
            interval="10m",
            **self.params,
        ) as job:
            job.finish()

    def advance(self, records: int, group: int) -> Manifest:
        """Read *records* orders of customers in one key group by a bounded run; -> the checkpoint it begins with."""
        customers = [id_ for id_ in range(self.keys) if key_group(canonical_key(f"c{id_:07}"), GROUPS) == group]
        customers = (customers * (1 + records // len(customers)))[:records]
        self.cluster.feed(self.params["source"], encoded(range(self.fed, self.fed + records), customers))
        reference: dict[str, Any] = {
            "module": "benchmarked", "attribute": "totals", "params": self.params, "path": str(Path(__file__).parent)
        }  # fmt: skip
        client = ClientConfig({"bootstrap.servers": self.cluster.servers, **WRITER, **QUIET})
        options, begun = RunOptions(client, parallelism=ADVANCED_AT), Begun()
        with TemporaryDirectory() as folder:
            loaded = Loaded(load_reference(reference), reference)
            done = CatchUp(loaded, options, begun).lead(in_process, Path(folder))
        if (done.records, done.records_out) != (records, records):
            raise Failed(f"{done.records} of {records} orders were read, {done.records_out} totals written")
        return begun.manifest

    def delete(self) -> None:
        """Delete the topics."""
        self.cluster.delete(*self.topics)


class Begun(Quiet):
    """A `WorkListener` that keeps the first checkpoint of a bounded run."""

    manifest: Manifest

    def began(self, manifest: Manifest, offsets: int) -> None:
        self.manifest = manifest


def touched_groups(bench: Bench) -> Iterator[Figure]:
    """The share of an image of all keys; then after ten checkpoints, each with 1 % of the keys changed."""
    state = LocalTotals(bench, bench.size(1_000_000, 100_000))
    state.grow(state.keys)
    yield _read(state, 77, f"state read for 1 of {GROUPS} key groups, {state.keys:,} keys")
    for _ in range(increments := bench.size(10, 2)):
        state.grow(state.keys // 100)
    yield _read(state, 33, f"the same after {increments} checkpoints of 1 %")
    state.delete()


def _read(state: LocalTotals, group: int, name: str) -> Figure:
    with counted() as read:
        manifest = state.advance(1_000, group)
    held = sum(operator.state_bytes for operator in manifest.operators)
    of_index = {ref for operator in manifest.operators for refs in operator.index for ref in refs}
    total, index = sum(ref.size for ref in read), sum(ref.size for ref in read if ref in of_index)
    detail = f"{total:,} bytes of {held:,}, {index:,} of them indexes; the manifest has {len(encode(manifest)):,}"
    return Figure(name, total / held * GROUPS, f"/ {GROUPS}", detail)
