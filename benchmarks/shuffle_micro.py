"""Figures of the shuffle of bounded work alone, without Kafka, Spark and S3: `python benchmarks/shuffle_micro.py`.

Prints the requests and bytes of a receiver to files in HDFS or S3, by the number of senders, and the processor time of
a pair of sender and receiver on this disk: a receiver takes the records of all senders by time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import closing
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import BinaryIO
from unittest import mock

from exactlyonce.engines.bounded.unit import staging
from exactlyonce.engines.bounded.unit.kept import KEPT
from exactlyonce.engines.bounded.unit.ordering import BatchTime, ChannelLane, take_by_time
from exactlyonce.engines.bounded.unit.outgoing import Sending
from exactlyonce.engines.bounded.unit.staging import FrameWriter, StagedFile, StagedFiles, stage_messages
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates
from exactlyonce.pipeline.keys import canonical_key

STORED = ((32, 3), (64, 3), (128, 3), (512, 3), (2_000, 1), (2_000, 3))
"""Senders, and frames of each for a receiver."""
FRAME_BYTES = 20_000
RECEIVER = 7
LOCAL = ((128, 200), (128, 20), (512, 20))
"""Senders, and records of a pair."""
RECEIVERS = 4
"""The receivers that are measured; the others have no records."""


class Stored:
    """A folder that counts what is asked of it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests = self.fetched = 0

    def put(self, name: str, content: bytes | BinaryIO, aside: str) -> bool:
        """Keep a file."""
        self.files[name] = content if isinstance(content, bytes) else content.read()
        return True

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """A part of a file."""
        part = self.files[name][offset : offset + length]
        self.requests += 1
        self.fetched += len(part)
        return part


def counted(senders: int, frames: int) -> None:
    """Print the requests of a receiver, with those for its unit."""
    stored = Stored()
    with mock.patch.object(staging, "folder_at", return_value=stored):
        files = []
        for sender in range(senders):
            writer = FrameWriter(f"s3://a/b/{sender}", senders)
            for number in range(frames):
                writer.write(RECEIVER, b"x" * FRAME_BYTES, 100, time_ms=1_000 * number + sender)
            files.append(_closed(writer))
        units = stage_messages("s3://a/b/stage", [[], b"".join(file.slot(RECEIVER) for file in files)])
        useful = 0
        with closing(StagedFiles()) as reading:
            for unit in units:
                reading.message(unit)
            lanes = reading.merged([place for file in files if (place := file.range(RECEIVER))])
            for _, read in heapq.merge(*(lane.timed() for lane in lanes), key=itemgetter(0)):
                useful += len(read()) if callable(read) else 0
    print(
        f"{senders:5} senders, {frames} frames each: {stored.requests / senders:.2f} requests a sender, "
        f"{stored.fetched / useful:.3f} of the bytes of frames"
    )


def _closed(writer: FrameWriter) -> StagedFile:
    file = writer.close()
    assert file is not None
    return file


def _batch(records: int, receiver: int, receivers: int) -> Batch:
    keys = [b"%d" % (receiver + receivers * number) for number in range(records)]
    values = [{"customer": f"customer-{number}", "total": number} for number in range(records)]
    return Batch(values, [Coordinates("orders", 0, number) for number in range(records)], [*map(canonical_key, keys)])


def sent(folder: Path, senders: int, records: int) -> Iterator[StagedFile]:
    """The file of each sender, which has *records* for each of some receivers."""
    for sender in range(senders):
        writer = FrameWriter(folder / str(sender), senders)
        sending = Sending("by>totals", sender, 1 << 12, BatchCodec(dict[str, str | int]), writer, BatchTime(sender))
        for receiver in range(RECEIVERS):
            sending._send(receiver, _batch(records, receiver, senders))
        (file,) = sending.close()
        yield file.file


def received(files: Sequence[StagedFile], receiver: int) -> int:
    """The records of a receiver."""
    taken = 0

    def push(batch: Batch) -> None:
        nonlocal taken
        taken += len(batch.records)

    codec = BatchCodec(dict[str, str | int])
    with closing(StagedFiles()) as reading:
        frames = reading.merged([place for file in files if (place := file.range(receiver))])
        lanes = [ChannelLane(f"by>totals:{number}", [own], codec, push) for number, own in enumerate(frames)]
        take_by_time(lanes, {}, TaskOperators("totals", receiver), BatchTime())
    return taken


def timed(senders: int, records: int) -> None:
    """Print the processor time of a pair."""
    with TemporaryDirectory() as folder:
        files = list(sent(Path(folder), senders, records))
        received(files, 0)
        with closing(KEPT), KEPT.collector.collecting_rarely():  # as units do
            began_s = process_time()
            for receiver in range(RECEIVERS):
                assert received(files, receiver) == senders * records
            pair_ms = 1_000 * (process_time() - began_s) / (senders * RECEIVERS)
    print(f"{senders:5} senders, {records} records each: {pair_ms:.3f} ms a pair, with the decoding of its records")


if __name__ == "__main__":
    for case in STORED:
        counted(*case)
    for case in LOCAL:
        timed(*case)
