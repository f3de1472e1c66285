"""Records to Parquet files in a folder: staged, published by rename with a ledger, against pyarrow alone.

Both have the records in memory, and convert them to columns; pyarrow alone writes one file that a crash may tear.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import msgspec
from bench import Bench
from figures import Figure
from orders import Order, uniform

from exactlyonce.checkpoint.commits.of_stores import in_order
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.sinks import FileSink
from exactlyonce.sinks.committer import CommitterContext
from exactlyonce.sinks.writer import WriterContext

BATCH = 1_000
ROUNDS = 5


class _Clients:
    """The clients of a sink without transactions: a clock."""

    clock = SystemClock()

    def producers(self, topic: str) -> Any:
        raise AssertionError(topic)


def scenario(bench: Bench) -> Iterator[Figure]:
    """Rows per second, in turns."""
    decode = msgspec.json.Decoder(Order).decode
    records = [decode(value) for _, value in uniform(bench.size(1_000_000, 20_000), 1_000)]
    ratios, ours, theirs = [], [], []
    for write in (_sink, _pyarrow):  # so that imports do not count
        _timed(write, records[:BATCH])
    for number in range(bench.rounds or ROUNDS):
        ours.append(len(records) / _timed(_sink, records))
        theirs.append(len(records) / _timed(_pyarrow, records))
        ratios.append(ours[-1] / theirs[-1])
        bench.say(f"round {number + 1}: {ours[-1]:,.0f} rows/s, pyarrow {theirs[-1]:,.0f}: {ratios[-1]:.2f}")
    detail = f"{median(ours):,.0f} rows/s against {median(theirs):,.0f}, {len(ratios)} rounds"
    yield Figure("records to Parquet files, against pyarrow", median(ratios), "", detail)


def _timed(write: Any, records: Sequence[Order]) -> float:
    with tempfile.TemporaryDirectory(prefix="exactlyonce-bench-") as folder:
        began_s = time.monotonic()
        write(Path(folder), records)
        took_s = time.monotonic() - began_s
        count = _counted(Path(folder))
        assert count == len(records), f"{count} rows of {len(records)} are in the files"
    return took_s


def _counted(folder: Path) -> int:
    import pyarrow.parquet as pq

    published = (path for path in folder.rglob("*.parquet") if ".exactlyonce" not in path.parts)
    return sum(pq.read_metadata(path).num_rows for path in published)


def _sink(folder: Path, records: Sequence[Order]) -> None:
    sink: FileSink[Order] = FileSink(folder, format="parquet")
    committer = sink.open_committer(
        CommitterContext(pipeline="bench", sink="files", type=Order, blocks=cast("Any", None))
    )
    committer.check()
    committer.fence(1, "topic")
    opened = sink.open_writer(
        WriterContext(
            pipeline="bench", sink="files", subtask=0, incarnation=1, attempt=1, type=Order, slots=0,
            clients=_Clients(), staging=cast("Any", None), prepared=print, note=print,
        )
    )  # fmt: skip
    writer = opened.writer
    for first in range(0, len(records), BATCH):
        writer.write(opened.encoder.encode(records[first : first + BATCH]))
        writer.poll()
        while not writer.room:
            writer.poll(0.01)
    writer.barrier(1)
    while (flushed := writer.take_flushed(1)) is None:
        writer.poll(0.01)
    assert flushed.staged is not None
    for committable in in_order([flushed.staged.committable], {}, {}):
        committer.commit([committable], 1, "topic")
    writer.abandon()
    committer.close()


def _pyarrow(folder: Path, records: Sequence[Order]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = Order.__struct_fields__
    columns = {name: [getattr(record, name) for record in records] for name in names}
    pq.write_table(pa.table(columns), folder / "orders.parquet")
