"""The ends of a unit: what is sent is what it was when it was sent, in frames that are bounded."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exactlyonce import DebeziumCodec
from exactlyonce.connectors.kafka.partitioning import DEFAULT, partitioner
from exactlyonce.engines.bounded.unit.ordering import BatchTime, ChannelLane, take_by_time
from exactlyonce.engines.bounded.unit.outgoing import FRAME_BYTES_MAX, KEYLESS_RUN, ByPartition, Sending, Staging
from exactlyonce.engines.bounded.unit.staging import FrameWriter, StagedFile, StagedFiles, read_lane
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates, records_in
from exactlyonce.engines.runtime.operators import SinkOutput
from exactlyonce.pipeline.changes import Change, Op
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.sinks.kafka.sink import KafkaSink, Outputs

MARGIN = 1 << 16
"""Bytes that keys, coordinates and heads add to a frame."""


class Document(msgspec.Struct):
    number: int
    body: bytes = b""


def sending(folder: Path, receivers: int = 2, type_: Any = Document) -> Sending:
    return Sending("by>totals", 0, 128, BatchCodec(type_), FrameWriter(folder / "sent", receivers), BatchTime(7))


def batch(records: list[Any], first: int = 0, topic: str = "t") -> Batch:
    numbers = range(first, first + len(records))
    return Batch(records, [Coordinates(topic, 0, n) for n in numbers], [canonical_key(n) for n in numbers])


def arrived(
    file: StagedFile, receiver: int = 0, type_: Any = Document
) -> tuple[list[Any], list[tuple[str, int]], list[bytes]]:
    """Records, origins and keys for a receiver, as it takes them."""
    records, origins, keys = list[Any](), list[tuple[str, int]](), list[bytes]()

    def push(taken: Batch) -> None:
        records.extend(taken.records)
        origins.extend((origin.topic() or "", origin.offset() or 0) for origin in taken.origins)
        keys.extend(taken.keys or [])

    place = file.range(receiver)
    with closing(StagedFiles()) as files:
        lane = ChannelLane("by>totals:0", files.merged([] if place is None else [place]), BatchCodec(type_), push)
        take_by_time([lane], {}, TaskOperators("totals", 0), BatchTime())
    return records, origins, keys


def frames_of(file: StagedFile, receiver: int = 0) -> list[bytes]:
    place = file.range(receiver)
    with closing(StagedFiles()) as files:
        return [body for frames in files.merged([] if place is None else [place]) for body in frames.bodies()]


def test_a_record_is_sent_as_it_was(tmp_path: Path) -> None:
    sender, sent = sending(tmp_path), [Document(number) for number in range(300)]
    for first in range(0, 300, 50):
        some = sent[first : first + 50]
        sender.shuffle(batch(some, first, topic=f"t{first % 100}"))
        for record in some:
            record.number = -1
    (file,) = sender.close()
    found = [each for receiver in range(2) for each in zip(*arrived(file.file, receiver), strict=True)]
    assert sorted(record.number for record, _, _ in found) == list(range(300))
    for record, (topic, offset), key in found:
        assert offset == record.number
        assert topic == f"t{offset // 50 * 50 % 100}"
        assert key == canonical_key(record.number)


@pytest.mark.parametrize(("sent", "frames"), [([1] * 5_000, [2_000, 2_000, 1_000]), ([30_000], [2_000] * 15)])
def test_frames_are_bounded_by_records(sent: list[int], frames: list[int], tmp_path: Path) -> None:
    sender, total = sending(tmp_path, receivers=1, type_=int), 0
    for count in sent:
        sender.shuffle(batch(list(range(total, total + count)), total))
        total += count
    (file,) = sender.close()
    assert list(map(records_in, frames_of(file.file))) == frames
    assert arrived(file.file, type_=int)[0] == list(range(total))


def test_frames_are_bounded_by_bytes(tmp_path: Path) -> None:
    sender = sending(tmp_path, receivers=1)
    sizes = [50_000] * 200 + [3 << 20] + [10] * 50
    records = [Document(number, os.urandom(size)) for number, size in enumerate(sizes)]
    sender.shuffle(batch(records[:150]))
    written = sum(head.length for head in sender._writer._waiting[0].heads)
    assert written > 150 * 50_000 - FRAME_BYTES_MAX - MARGIN, "no more than a frame waits"
    sender.shuffle(batch(records[150:], 150))
    (file,) = sender.close()
    lengths = sorted(map(len, frames_of(file.file)))
    assert lengths[-2] < FRAME_BYTES_MAX + MARGIN < lengths[-1]
    assert arrived(file.file)[0] == records


def test_outputs_are_cut_likewise(tmp_path: Path) -> None:
    staging = Staging("out", 0, FrameWriter(tmp_path / "out", 1), None, origins=True)
    values = [b"%d" % number for number in range(5_000)] + [os.urandom(100_000) for _ in range(40)]
    given = batch(values)
    outputs = Outputs(values, given.keys, [[("n", value[:4])] for value in values])
    staging.output = SinkOutput("out", staging.write, KafkaSink[bytes]("out").encoder(bytes))
    staging.output.origins = given.origins
    staging.write(outputs)
    (file,) = staging.close()
    frames = frames_of(file.file)
    found = list(read_lane([file], 0))
    assert max(map(len, frames)) <= FRAME_BYTES_MAX
    assert max(len(each.values) for each in found) <= 2_000
    assert [value for each in found for value in each.values] == values
    assert [key for each in found for key in each.keys or []] == given.keys
    assert [headers[0][1] for each in found for headers in each.headers or []] == [value[:4] for value in values]
    assert [offset for each in found for _, _, offset in each.origins or []] == list(range(len(values)))
    assert file.records == len(values)


def test_a_tombstone_has_the_origin_of_its_delete(tmp_path: Path) -> None:
    """Where a record has two outputs, an audit names the record of both."""
    sink: KafkaSink[Any] = KafkaSink("out", value=DebeziumCodec(Document, "number"))
    ops: list[Op] = ["delete", "truncate", "delete"]
    changes: list[Change[Document]] = [
        Change(op, None if op == "truncate" else 7, None, None, "documents", 1, 2) for op in ops
    ]
    staging = Staging("out", 0, FrameWriter(tmp_path / "out", 1), None, origins=True)
    staging.output = SinkOutput("out", staging.write, sink.encoder(Change[Document]))
    staging.output(batch(changes))
    (file,) = staging.close()
    outputs = list(read_lane([file], 0))
    assert [value is None for each in outputs for value in each.values] == [False, True, False, False, True]
    assert [offset for each in outputs for _, _, offset in each.origins or []] == [0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("keyed", "chosen"),
    [(lambda n: b"%d" % (n % 7), None), (lambda n: None, None), (lambda n: b"k" if n % 3 else None, None),
     (lambda n: b"k", lambda n: n % 2)],
)  # fmt: skip
def test_the_partition_of_an_output_depends_on_no_batch(keyed: Any, chosen: Any, tmp_path: Path) -> None:
    """The sink's choice, the partitioner's by the key, or partitions in turn; a partition keeps their order."""
    count, partitions, subtask, partition_of = 1_700, 3, 2, partitioner(DEFAULT)

    def staged(step: int) -> dict[int, list[tuple[bytes | None, Any]]]:
        distribution = ByPartition(partition_of, partitions, subtask)
        staging = Staging("out", 0, FrameWriter(tmp_path / str(step), partitions), distribution, origins=True)
        staging.output = SinkOutput("out", staging.write, KafkaSink[bytes]("out").encoder(bytes))
        for first in range(0, count, step):
            numbers = range(first, min(first + step, count))
            given = batch(list(numbers), first)
            outputs = Outputs([b"%d" % n for n in numbers], [keyed(n) for n in numbers], None)
            outputs.partitions = chosen and [chosen(n) for n in numbers]
            staging.output.origins = given.origins
            staging.write(outputs)
        (file,) = staging.close()
        found = {}
        for partition in range(partitions):
            batches = list(read_lane([file], partition))
            values = [value for each in batches for value in each.values]
            origins = [offset for each in batches for _, _, offset in each.origins or ()]
            assert [b"%d" % offset for offset in origins] == values
            assert len(values) == file.counts.get(partition, 0)
            assert all(each.partitions is None for each in batches)
            found[partition] = list(zip(values, [key for each in batches for key in each.keys or ()], strict=True))
        return found

    once = staged(count)
    assert staged(1) == staged(37) == once
    place_of = {value: partition for partition, some in once.items() for value, _ in some}
    keyless = 0
    for n in range(count):
        wanted = chosen(n) if chosen else partition_of(keyed(n), partitions)
        if wanted is None:
            wanted, keyless = (subtask + keyless // KEYLESS_RUN) % partitions, keyless + 1
        assert place_of[b"%d" % n] == wanted


def test_a_record_of_another_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"t\[0\] offset 3"):
        sending(tmp_path).shuffle(batch([Document(0), Document(1), Document(2), object()]))
