"""Requests of a receiver to stored files, counted without a storage: a range of each sender, fetched once."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from operator import itemgetter
from typing import BinaryIO

import msgspec
import pytest

from exactlyonce.engines.bounded.unit import staging
from exactlyonce.engines.bounded.unit.staging import (
    FrameWriter,
    StagedFile,
    StagedFiles,
    StagedRange,
    ranges_in,
    stage_messages,
)
from exactlyonce.pipeline.errors import StorageUnavailable

RECEIVER = 7
PREFIX = "s3://counted/staging/"


class Counted:
    """A stored folder that counts what is asked of it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.ranges: list[tuple[str, int, int]] = []
        self.away = threading.Event()

    def put(self, name: str, content: bytes | BinaryIO, aside: str) -> bool:
        assert aside.startswith(f"{name}.aside-")
        if not isinstance(content, bytes):
            content.seek(0)
            content = content.read()
        self.files[name] = content
        return True

    def get_range(self, name: str, offset: int, length: int) -> bytes | None:
        if self.away.is_set():
            raise StorageUnavailable("it is away")
        self.ranges.append((name, offset, length))
        return self.files[name][offset : offset + length]

    @property
    def fetched(self) -> int:
        """The bytes so far."""
        return sum(length for _, _, length in self.ranges)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(staging, "folder_at", lambda url: counted)
    return counted


def sent_by(senders: int, frames: int, frame_bytes: int) -> list[StagedFile]:
    """A file of each sender with as many receivers, of which a few have frames."""
    files = []
    for sender in range(senders):
        writer = FrameWriter(f"{PREFIX}channel-{sender}", senders)
        for number in range(frames):
            for receiver in (RECEIVER - 1, RECEIVER, senders - 1):
                size = frame_bytes if receiver == RECEIVER else 10
                writer.write(receiver, b"x" * size, 100, time_ms=number * 1_000 + sender)
        file = writer.close({RECEIVER: range(3)})
        assert file is not None
        files.append(file)
    return files


def received(storage: Counted, files: Sequence[StagedFile], reading: StagedFiles) -> Iterator[bytes]:
    """The frames by time, as a unit takes them: it knows its place in the file of its stage."""
    slots = [b"".join(file.slot(receiver) for file in files) for receiver in range(RECEIVER + 1)]
    units = stage_messages(f"{PREFIX}stage-1", slots)
    own: bytes = msgspec.msgpack.decode(reading.message(units[RECEIVER]))
    places = [place for place in ranges_in((file.location for file in files), own) if place is not None]
    assert len(places) == len(files)
    for _, item in heapq.merge(*(frames.timed() for frames in reading.merged(places)), key=itemgetter(0)):
        assert callable(item)
        yield item()


@pytest.mark.parametrize(("senders", "frames"), [(32, 3), (128, 3), (2_000, 1), (2_000, 3)])
def test_a_receiver_asks_each_sender_once(senders: int, frames: int, storage: Counted) -> None:
    files = sent_by(senders, frames, 20_000)
    with closing(StagedFiles()) as reading:
        useful = sum(map(len, received(storage, files, reading)))
    assert useful == senders * frames * 20_000
    assert len(storage.ranges) == senders + 1, "the last one is for its unit"
    assert storage.fetched < 1.01 * useful


def test_what_is_merged_fits_into_memory(storage: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that do not are fetched in pieces, of which each sender has two at most, and the frame in hand."""
    senders, piece = 40, 100_000  # a range of two pieces is one request
    monkeypatch.setattr(staging, "MERGED_BYTES", 2 * senders * piece)
    files = sent_by(senders, 50, 20_000)
    useful = held = 0
    with closing(StagedFiles()) as reading:
        for frame in received(storage, files, reading):
            useful += len(frame)
            held = max(held, storage.fetched - useful)
    assert useful == senders * 50 * 20_000
    assert held <= senders * (2 * piece + 20_000)
    assert len(storage.ranges) == 11 * senders + 1
    assert storage.fetched < 1.01 * useful
    storage.ranges.clear()
    with closing(StagedFiles()) as reading:
        assert sum(map(len, received(storage, sent_by(senders, 9, 20_000), reading))) == senders * 180_000
    assert len(storage.ranges) == senders + 1


def test_outputs_are_asked_for_ahead(storage: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of those that are taken one after the other."""
    monkeypatch.setattr(staging, "REQUESTS_AT_ONCE", 4)
    places = [place for file in sent_by(20, 1, 20_000) if (place := file.range(RECEIVER)) is not None]
    with closing(StagedFiles()) as reading:
        for number, frames in enumerate(reading.in_turn(places), 1):
            assert [len(body) for body in frames.bodies()] == [20_000]
            assert number <= len(storage.ranges) <= number + 4
    assert sorted(storage.ranges) == sorted(map(_asked, places))


def _asked(place: StagedRange) -> tuple[str, int, int]:
    return place.location.removeprefix(PREFIX), place.start, place.end - place.start


def test_an_error_is_raised_where_the_frames_are_taken(storage: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "AWAY_TIMEOUT_S", 0.0)
    files = sent_by(20, 10, 20_000)
    with closing(StagedFiles()) as reading:
        taking = received(storage, files, reading)
        assert len(next(taking)) == 20_000
        storage.away.set()
        places = [place for file in files if (place := file.range(RECEIVER)) is not None]
        (frames, *_) = reading.merged(places)
        with pytest.raises(StorageUnavailable, match="it is away"):
            list(frames.bodies())
    left = [thread for thread in threading.enumerate() if thread.name.startswith("staged")]
    assert not left, "no thread outlives the reading"
