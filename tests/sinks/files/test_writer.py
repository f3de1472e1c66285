"""The writer of one subtask: rolling, folders, back-pressure, and what stops it."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any, NamedTuple

import pytest
from flushing import staged
from waiting import until

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.connectors.filestore.store import WaitingFile
from exactlyonce.sinks.files import writer
from exactlyonce.sinks.files.layout import decode_body, decode_staged
from exactlyonce.sinks.writer import FlushedInterval, SinkFailed
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.sink_contract.hooks import ORIGIN


class Sale(NamedTuple):
    shop: int
    cents: int


def files_of(target: Any, committable: StoreCommittable) -> tuple[WaitingFile, ...]:
    return decode_staged((target.root / "staged" / decode_body(committable.body).path).read_bytes())


@pytest.fixture(params=["jsonl", "parquet"])
def either(request, make_target):
    target = make_target(Sale, format=request.param, partition_by=("shop",), roll_bytes=1 << 12)
    target.led()
    return target


def test_an_empty_interval_has_no_committable(target, totals, stage) -> None:
    target.led()
    opened = target.open()
    before = set(threading.enumerate())
    opened.writer.barrier(1)
    assert opened.writer.take_flushed(1) == FlushedInterval()
    assert (set(threading.enumerate()) - before, target.waiting()) == (set(), [])
    assert stage(opened, 2, totals(1)).staged is not None
    assert stage(opened, 3, []) == FlushedInterval()


def test_intervals_are_told_once_and_by_their_checkpoint(target, totals) -> None:
    """Barriers may follow one another before anything is flushed: each interval has the rows before its barrier."""
    target.led()
    opened = target.open(subtask=3)
    for checkpoint in (1, 2, 3):
        opened.writer.write(opened.encoder.encode(totals(*range(checkpoint))))
        opened.writer.barrier(checkpoint)
    found = [staged(opened.writer, checkpoint) for checkpoint in (3, 1, 2)]
    assert [(each.checkpoint, each.records, each.subtask, each.kind) for each in found] == [
        (3, 3, 3, "files"), (1, 1, 3, "files"), (2, 2, 3, "files"),
    ]  # fmt: skip
    assert opened.writer.take_flushed(1) is None
    assert opened.writer.records == 6


def test_a_file_is_rolled_by_its_size(either, stage) -> None:
    opened = either.open()
    for start in range(0, 20_000, 1_000):
        opened.writer.write(opened.encoder.encode([Sale(1, cents) for cents in range(start, start + 1_000)]))
    committable = stage(opened, 1, []).staged.committable
    files = files_of(either, committable)
    assert len(files) > 5
    assert sum(file.rows for file in files) == committable.records == 20_000
    assert all(file.size >= 1 << 12 for file in files[:-1])


def test_each_value_has_its_folder(either, stage) -> None:
    opened = either.open()
    committable = stage(opened, 1, [Sale(shop % 3, shop) for shop in range(30)]).staged.committable
    assert either.committer().commit([committable], 1, ORIGIN)
    folders = sorted({path.parent.name for path in either.published()})
    assert folders == ["shop=0", "shop=1", "shop=2"]
    if either.sink.format == "jsonl":
        assert sorted(line["cents"] for line in either.lines()) == list(range(30))
        assert {tuple(line) for line in either.lines()} == {("cents",)}


def test_open_files_are_bounded(either, stage, monkeypatch) -> None:
    monkeypatch.setattr(writer, "OPEN_MAX", 4)
    monkeypatch.setattr(writer, "HELD_BYTES_MAX", 0)
    opened = either.open()
    records = [Sale(shop, round_) for round_ in range(3) for shop in range(8)]
    for record in records:
        opened.writer.write(opened.encoder.encode([record]))
        assert len(opened.writer._files._open) <= 4
    files = files_of(either, stage(opened, 1, []).staged.committable)
    assert (len(files), sum(file.rows for file in files)) == (24, 24)


class Text(NamedTuple):
    shop: int
    text: str


@pytest.mark.parametrize("crowded", [True, False])
def test_what_is_held_back_is_what_memory_holds(make_target, stage, monkeypatch, crowded: bool) -> None:
    """A few rows that came with many, or a row each in many folders, hold no more than is counted."""
    import pyarrow

    monkeypatch.setattr(writer, "HELD_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(writer, "GROUP_BYTES", 1 << 18)
    target = make_target(Text, format="parquet", partition_by=("shop",))
    target.led()
    opened = target.open()
    files, held = opened.writer._files, 0
    before = pyarrow.total_allocated_bytes()
    for round_ in range(200):
        shops = range(100) if crowded else [0] * 99 + [1]
        files.write(opened.encoder.encode([Text(shop, f"{round_}" if crowded else "x" * 1000) for shop in shops]))
        parts = sum(len(each.contents) for each in files._held.values())
        assert 400 * parts <= files._loose_bytes + files._joined_bytes <= 1 << 20
        held = max(held, pyarrow.total_allocated_bytes() - before)
    assert held < 3 << 20
    _, found = files.cut(1)
    rows = {1: 200, 0: 200 * 99} if not crowded else dict.fromkeys(range(100), 200)
    assert sum(file.rows for file in found) == sum(rows.values())


def test_a_file_is_rolled_by_its_age(make_target, totals, stage) -> None:
    target = make_target(roll_interval="10s")
    target.led()
    opened = target.open()
    for cents in range(3):
        opened.writer.write(opened.encoder.encode(totals(cents)))
        opened.writer.barrier(cents + 1) if cents == 0 else None
    first = staged(opened.writer, 1)
    assert len(files_of(target, first)) == 1
    until(lambda: not opened.writer._backlog_bytes)
    target.clients.clock.advance(10_000)
    opened.writer.write(opened.encoder.encode(totals(3)))
    assert [file.rows for file in files_of(target, stage(opened, 2, []).staged.committable)] == [2, 1]


def test_a_slow_disk_shows_in_full_and_never_in_write(target, totals, monkeypatch) -> None:
    monkeypatch.setattr(writer, "BACKLOG_BYTES_MAX", 1_000)
    target.led()
    opened = target.open()
    disk = threading.Event()
    whole = opened.writer._files.write
    monkeypatch.setattr(opened.writer._files, "write", lambda parts: (disk.wait(), whole(parts)))
    assert opened.writer.room
    while opened.writer.room:
        opened.writer.write(opened.encoder.encode(totals(1, 2, 3)))
    written = opened.writer.records
    opened.writer.barrier(1)
    assert opened.writer.poll() is False
    disk.set()
    until(lambda: opened.writer.room)
    assert staged(opened.writer, 1).records == written


def test_a_disk_that_fails_fails_the_sink(target, totals, stage, monkeypatch) -> None:
    target.led()
    opened = target.open()

    def fail(descriptor) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SinkFailed, match=r"sink 'out' cannot write files: .*error"):
        stage(opened, 1, totals(1))
    assert opened.writer.room
    assert opened.writer.take_flushed(1) is None
    with pytest.raises(SinkFailed):
        opened.writer.write(opened.encoder.encode(totals(1)))


def test_a_defect_in_the_thread_is_raised_as_it_is(target, totals, stage, monkeypatch) -> None:
    target.led()
    opened = target.open()
    monkeypatch.setattr(opened.writer._files, "write", lambda parts: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        stage(opened, 1, totals(1))


def test_a_folder_that_is_gone_fails_the_sink(target, totals, stage) -> None:
    """A writer does not make the target anew, whose disk may not be mounted."""
    target.led()
    opened = target.open()
    target.folder.rename(target.folder.with_name("away"))
    with pytest.raises(SinkFailed, match=r"is not there \(any more\): is its disk mounted"):
        stage(opened, 1, totals(1))
    assert not target.folder.exists()


def test_an_abandoned_writer_ends_its_thread(target, totals, stage) -> None:
    target.led()
    opened = target.open()
    opened.writer.write(opened.encoder.encode(totals(1)))
    opened.writer.abandon()
    opened.writer._thread.join(LIMIT_S)
    assert not opened.writer._thread.is_alive()


def test_at_least_once_publishes_at_the_barrier(make_target, totals, stage) -> None:
    target = make_target(delivery="at_least_once")
    target.committer().check()
    assert stage(target.open(), 1, totals(1, 2)) == FlushedInterval()
    assert target.cents() == [1, 2]
    assert stage(target.open(attempt=2), 1, totals(1, 2)) == FlushedInterval()
    assert target.cents() == [1, 1, 2, 2]


def test_at_least_once_leaves_nothing_behind(make_target, totals, stage) -> None:
    """Files of killed writers go when the next attempt begins; its own, and those of others, stay."""
    target = make_target(delivery="at_least_once", roll_bytes=1 << 10)
    target.committer().check()
    other = target.committer(pipeline="others")
    other.check()
    strangers = [target.root / "staged" / "notes", target.folder / ".exactlyonce/others.out/staged/1-1-0-abcdef"]
    for each in strangers:
        each.mkdir(parents=True)
    for subtask in (0, 1):  # written to the disk, and killed before the barrier
        opened = target.open(subtask=subtask)
        opened.writer.write(opened.encoder.encode(totals(*range(200))))
        opened.writer.poll()
    until(lambda: all(list(target.root.glob(f"staged/1-1-{subtask}-*/*")) for subtask in (0, 1)))
    again = target.open(attempt=2)
    assert target.waiting() == ["notes"]
    stage(again, 1, totals(1))
    assert target.open(attempt=2, subtask=1)
    assert [name[:5] for name in target.waiting()] == ["1-2-0", "notes"]
    assert list(target.root.glob("staged/1-2-0-*/*")) == [], "its list is of no use once its files are published"
    target.open(incarnation=2)
    assert target.waiting() == ["notes"]
    assert all(each.is_dir() for each in strangers)
    assert target.cents() == [1]


def test_a_committable_is_small_however_many_files_it_has(make_target, stage) -> None:
    target = make_target(Sale, partition_by=("shop",))
    target.led()
    committable = stage(target.open(), 1, [Sale(shop, 1) for shop in range(300)]).staged.committable
    assert len(committable.body) < 200
    assert len(files_of(target, committable)) == 300
