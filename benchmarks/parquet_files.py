"""Records to Parquet files in a folder or in S3: staged, published with a ledger, against pyarrow alone.

Both have the records in memory, and convert them to columns; pyarrow alone writes one file that a crash may tear.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from statistics import median
from typing import Any, NamedTuple, cast

import msgspec
import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq
from bench import Bench
from figures import Figure
from orders import Order, uniform

from exactlyonce.checkpoint.commits.stores import in_order
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.sinks import FileSink
from exactlyonce.sinks.committer import CommitterContext
from exactlyonce.sinks.writer import WriterContext

BATCH = 1_000
ROUNDS = 5
BUCKET = "bench"
_SERVE = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


class _Clients:
    """The clients of a sink without transactions: a clock."""

    clock = SystemClock()

    def producers(self, topic: str, partitioner: str | None) -> Any:
        raise AssertionError(topic)


def scenario(bench: Bench) -> Iterator[Figure]:
    """Rows per second into a folder, in turns."""

    @contextmanager
    def fresh() -> Iterator[_Target]:
        with tempfile.TemporaryDirectory(prefix="exactlyonce-bench-") as folder:
            yield _Target(folder, fs.SubTreeFileSystem(folder, fs.LocalFileSystem()))

    yield from _compared(bench, "records to Parquet files, against pyarrow", fresh)


def to_s3(bench: Bench) -> Iterator[Figure]:
    """Rows per second into a store with S3's protocol on this machine, in turns."""
    with _s3() as store:
        numbers = count()

        @contextmanager
        def fresh() -> Iterator[_Target]:
            prefix = f"{BUCKET}/orders-{next(numbers)}"
            yield _Target(f"s3://{prefix}", fs.SubTreeFileSystem(prefix, store))

        yield from _compared(bench, "records to Parquet files in S3 (moto), against pyarrow", fresh)


class _Target(NamedTuple):
    url: str
    """As the sink names it."""
    files: Any
    """As pyarrow does."""


@contextmanager
def _s3() -> Iterator[Any]:
    """The store, as a file system of pyarrow's; its address and keys are in the environment meanwhile."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        address = f"127.0.0.1:{process.stdout.readline().strip()}"
        own = {
            "AWS_ENDPOINT_URL": f"http://{address}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        os.environ.update(own)
        store = fs.S3FileSystem(
            access_key="key", secret_key="secret", endpoint_override=address, scheme="http", region="us-east-1",
            allow_bucket_creation=True,
        )  # fmt: skip
        store.create_dir(BUCKET)
        yield store
    finally:
        process.kill()
        process.wait()


def _compared(bench: Bench, name: str, fresh: Callable[[], AbstractContextManager[_Target]]) -> Iterator[Figure]:
    decode = msgspec.json.Decoder(Order).decode
    records = [decode(value) for _, value in uniform(bench.size(1_000_000, 20_000), 1_000)]
    ratios, ours, theirs = [], [], []
    for write in (_sink, _pyarrow):  # so that imports do not count
        _timed(write, fresh, records[:BATCH])
    for number in range(bench.rounds or ROUNDS):
        ours.append(len(records) / _timed(_sink, fresh, records))
        theirs.append(len(records) / _timed(_pyarrow, fresh, records))
        ratios.append(ours[-1] / theirs[-1])
        bench.say(f"round {number + 1}: {ours[-1]:,.0f} rows/s, pyarrow {theirs[-1]:,.0f}: {ratios[-1]:.2f}")
    detail = f"{median(ours):,.0f} rows/s against {median(theirs):,.0f}, {len(ratios)} rounds"
    yield Figure(name, median(ratios), "", detail)


def _timed(write: Any, fresh: Callable[[], AbstractContextManager[_Target]], records: Sequence[Order]) -> float:
    with fresh() as target:
        began_s = time.monotonic()
        write(target, records)
        took_s = time.monotonic() - began_s
        counted = _counted(target.files)
        assert counted == len(records), f"{counted} rows of {len(records)} are in the files"
    return took_s


def _counted(files: Any) -> int:
    listed = files.get_file_info(fs.FileSelector("", recursive=True))
    published = (each.path for each in listed if each.extension == "parquet" and ".exactlyonce" not in each.path)
    return sum(pq.read_metadata(path, filesystem=files).num_rows for path in published)


def _sink(target: _Target, records: Sequence[Order]) -> None:
    committed(FileSink(target.url, format="parquet"), records)


def committed(sink: Any, records: Sequence[Order]) -> None:
    """Write *records* by a sink whose output the leader commits, and commit them as one checkpoint."""
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


def _pyarrow(target: _Target, records: Sequence[Order]) -> None:
    pq.write_table(as_table(records), "orders.parquet", filesystem=target.files)


def as_table(records: Sequence[Order]) -> Any:
    """*records* as columns."""
    return pa.table({name: [getattr(record, name) for record in records] for name in Order.__struct_fields__})
