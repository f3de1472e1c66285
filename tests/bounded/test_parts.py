"""Parts of bounded work without a broker: staged files, ranges, stop offsets, readers in turn, and loops."""

from __future__ import annotations

import os
import resource
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from bounded import Silent
from manifests import committable, manifest

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.advance import first_part, rest, stop_offsets
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.replay_repair import ReplayRepair
from exactlyonce.engines.bounded.stages import in_process
from exactlyonce.engines.bounded.unit import ordering, staging
from exactlyonce.engines.bounded.unit.messages import Reading, tries_before
from exactlyonce.engines.bounded.unit.ordering import ReaderInTurn
from exactlyonce.engines.bounded.unit.staging import FrameWriter, StagedFile, StagedFiles, StagedRange
from exactlyonce.engines.external_checks.input_topics import InputTopics
from exactlyonce.engines.external_checks.preflight import Inputs
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.runtime.watermarks import Watermark
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, InvariantViolation
from exactlyonce.pipeline.loading import Loaded, load


def staged(path: Path, *frames: bytes) -> StagedFile:
    """A file with frames for receivers 2 and 0, in turn."""
    writer = FrameWriter(path, receivers=3)
    for number, frame in enumerate(frames):
        writer.write(0 if number % 2 else 2, frame, 1, number)
    file = writer.close({0: [7], 2: [8, 9]})
    assert file is not None
    return file


def taken(file: StagedFile, receiver: int) -> list[bytes]:
    place = file.range(receiver)
    with closing(StagedFiles()) as files:
        return [body for frames in files.merged([] if place is None else [place]) for body in frames.bodies()]


def place_of(file: StagedFile, receiver: int) -> StagedRange:
    place = file.range(receiver)
    assert place is not None
    return place


@pytest.mark.parametrize("waiting_max", [0, 2, 1 << 30])
def test_frames_come_back(waiting_max: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a file whose frames have waited in a temporary file, all or some."""
    monkeypatch.setattr(staging, "GATHERED_BYTES_MAX", waiting_max)
    file = staged(tmp_path / "file", b"one", b"", b"three" * 1_000_000, b"4")
    assert [taken(file, receiver) for receiver in range(3)] == [[b"", b"4"], [], [b"one", b"three" * 1_000_000]]
    assert file.size == (tmp_path / "file").stat().st_size
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
    with closing(StagedFiles()) as files:
        (frames,) = files.merged([place_of(file, 2)])
        assert (frames.entry.records, frames.entry.groups) == (2, (8, 9))
        read = [(time_ms, item()) for time_ms, item in frames.timed() if not isinstance(item, Watermark)]
        assert read == [(0, b"one"), (2, b"three" * 1_000_000)]
    assert FrameWriter(tmp_path / "none", 1).close() is None
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 100, 1 << 20])
def test_ranges_are_read_in_pieces(piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that are merged, or one after the other; each byte is read once, and no file stays open."""
    monkeypatch.setattr(staging, "PIECE_BYTES_MIN", piece_bytes)
    monkeypatch.setattr(staging, "PIECE_BYTES_MAX", piece_bytes)
    monkeypatch.setattr(staging, "REQUESTS_AT_ONCE", 3)
    files_open = len(os.listdir("/proc/self/fd"))
    bodies = [[b"%d" % number, b"more" * number, b"", b"end"] for number in range(10)]
    written = []
    for number, frames in enumerate(bodies):
        writer = FrameWriter(tmp_path / str(number), receivers=3)
        for time_ms, body in enumerate(frames):
            writer.write(2, body, 1, time_ms)
            writer.write(0, b"other", 1, time_ms)
        written.append(writer.close())
    places = [place_of(file, 2) for file in written if file is not None]
    read: list[tuple[str, int, int]] = []
    reading = staging._read

    def noted(location: str, start: int, end: int, retries: Any) -> bytes:
        read.append((location, start, end))
        return reading(location, start, end, retries)

    monkeypatch.setattr(staging, "_read", noted)
    with closing(StagedFiles()) as files:
        lanes = [frames.bodies() for frames in files.merged(places)]
        assert [list(column) for column in zip(*lanes, strict=True)] == [list(c) for c in zip(*bodies, strict=True)]
        assert len(os.listdir("/proc/self/fd")) <= files_open + 1
        merged = sorted(read)
        for place in places:
            pieces = [(start, end) for location, start, end in merged if location == place.location]
            bounds = [place.start, *(end for _, end in pieces)]
            assert [start for start, _ in pieces] == bounds[:-1]
            assert bounds[-1] == place.end
        read.clear()
        assert [list(frames.bodies()) for frames in files.in_turn(places)] == bodies
        assert sorted(read) == merged


def test_a_file_that_cannot_be_read_whole(tmp_path: Path) -> None:
    """A folder that is not shared, and a file that is cut, damaged or gone, before and while it is read."""
    file = staged(tmp_path / "file", b"one", b"two", b"three")
    whole = Path(file.location).read_bytes()
    gone = msgspec.structs.replace(file, location=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"No such file.*Every executor must see the folder of --staging"):
        taken(gone, 0)
    with pytest.raises(InvariantViolation, match="every receiver has a range"):
        file.range(3)
    place = place_of(file, 2)
    elsewhere = [msgspec.structs.replace(place, end=place.end - 1), msgspec.structs.replace(place, start=1)]
    with closing(StagedFiles()) as files:
        for wrong in elsewhere:
            with pytest.raises(ConfigError, match="it is damaged"):
                list(files.merged([wrong])[0].bodies())
    for damaged in (whole[:-1], whole[:-1] + b"?", whole[: len(whole) // 2], b""):
        Path(file.location).write_bytes(damaged)
        with pytest.raises(ConfigError, match="cannot be read whole"):
            taken(file, 2)
    for number in range(len(whole)):  # a bit of a byte is wrong
        Path(file.location).write_bytes(bytes([*whole[:number], whole[number] ^ 1, *whole[number + 1 :]]))
        receiver = 2 if number >= place.start else 0
        with pytest.raises(ConfigError, match="cannot be read whole"):
            taken(file, receiver)
    older = whole[: place.start] + b"eostage1" + whole[place.start + 8 :]
    Path(file.location).write_bytes(older)
    with pytest.raises(ConfigError, match="or another version of exactlyonce has written it"):
        taken(file, 2)
    Path(file.location).write_bytes(whole)
    with closing(StagedFiles()) as files:
        (frames,) = files.merged([place])
        os.truncate(file.location, place.start + 4)
        with pytest.raises(ConfigError, match=r"cannot be read whole: it ends at \d+"):
            list(frames.bodies())


def test_a_staging_folder_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the disk where frames wait."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot be written: File too large.*with room for the input"):
            staged(tmp_path / "file", bytes(4 << 20))
        monkeypatch.setattr(staging, "GATHERED_BYTES_MAX", 1 << 10)
        with pytest.raises(ConfigError, match=r"cannot be kept in .* File too large.*let TMPDIR name another"):
            staged(tmp_path / "other", bytes(4 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def at(reading: Reading, offset: int, *, ended: bool = False) -> SourceOffset:
    return SourceOffset(reading.source, reading.topic, "i", reading.partition, offset, ended=ended)


@pytest.mark.parametrize("splits_max", [1, 2, 100])
@pytest.mark.parametrize("records_max", [1, 7, 100, 1_000])
def test_splits_are_read_to_their_ends(records_max: int, splits_max: int) -> None:
    """Whatever was guessed of their lengths, and beside a topic; one that has ended is not touched again."""
    lengths = {0: 0, 1: 400, 2: 10, 3: 55}
    splits = [Reading("f", "file:/x", "i", split, 0, 50, to_end=True) for split in lengths]
    left: tuple[Reading, ...] = (*splits, Reading("t", "t", "i", 0, 10, 43))
    read, parts = dict.fromkeys(lengths, 0), 0
    while any(each.length for each in left):
        part, reached = first_part(left, records_max, splits_max), []
        assert sum(each.to_end and each.length > 0 for each in part) <= splits_max
        for each in part:
            end = min(each.end, lengths[each.partition]) if each.to_end else each.end
            if each.to_end:
                read[each.partition] += end - each.start
            reached.append(at(each, end, ended=each.to_end and each.end > 0 and end == lengths[each.partition]))
        left, parts = rest(left, part, reached), parts + 1
        assert parts < 1_000
    assert read == lengths


@pytest.mark.parametrize("records_max", [1, 7, 100, 1_000])
def test_parts_are_the_whole(records_max: int) -> None:
    ranges = (Reading("s", "t", "i", 0, 5, 105), Reading("s", "t", "i", 1, 0, 0), Reading("u", "v", "i", 0, 10, 43))
    found: list[tuple[Reading, ...]] = []
    left: tuple[Reading, ...] = ranges
    while any(each.length for each in left):
        found.append(first_part(left, records_max))
        left = rest(left, found[-1], [at(each, each.end) for each in found[-1]])
    for place, each in enumerate(ranges):
        ends = [each.start, *(part[place].end for part in found)]
        assert [part[place].start for part in found] == ends[:-1]
        assert ends[-1] == each.end
        assert ends == sorted(ends)
    assert max(sum(each.length for each in part) for part in found) <= records_max + len(ranges)


def inputs(ends: dict[int, int]) -> Inputs:
    def end_offsets(topic: str, *, committed: bool) -> dict[int, int]:
        return ends

    topics = InputTopics(cast(Any, SimpleNamespace(end_offsets=end_offsets)))
    source = SimpleNamespace(topic="t", place="t", client=None)
    return cast(Inputs, SimpleNamespace(sources={"s": source}, topics=topics, others={}, patterns=set()))


def test_a_partition_that_appears_meanwhile() -> None:
    seen = inputs({0: 10, 1: 20, 2: 5})
    starts = {"s": {0: SourceOffset("s", "t", "i", 0, 3), 1: SourceOffset("s", "t", "i", 1, 4)}}
    assert stop_offsets("latest", seen, starts) == {"s": {0: 10, 1: 20}}
    assert stop_offsets({"t": {0: 7, 1: -1}}, seen, starts) == {"s": {0: 7, 1: 20}}
    with pytest.raises(ConfigError, match="Every partition of t needs an end: 0, 1;"):
        stop_offsets({"t": {0: 7, 1: -1, 2: 5}}, seen, starts)
    with pytest.raises(ConfigError, match="No source reads tt, so it needs no end"):
        stop_offsets({"t": {0: 7, 1: -1}, "tt": {0: 7}}, seen, starts)


class Numbers:
    """A `SplitReader` of numbers up to *end*, which knows who is open."""

    def __init__(self, start: SourceOffset, end: int, is_open: set[Numbers]) -> None:
        self._start, self._end, self._open = start, end, is_open
        self._open.add(self)

    def read(self, records_max: int) -> list[Any]:
        at = self._start.offset
        found = list(range(at, min(at + records_max, self._end)))
        self._start = msgspec.structs.replace(self._start, offset=at + len(found))
        return found

    def position(self) -> SourceOffset:
        return self._start

    def close(self) -> None:
        self._open.discard(self)


def test_few_readers_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "OPEN_READERS_MAX", 2)
    is_open, staying = set[Numbers](), set[ReaderInTurn]()
    ends = [10 + number for number in range(10)]
    readers = [
        ReaderInTurn(SourceOffset("s", "t", "", number, 0), partial(Numbers, end=end, is_open=is_open), staying)
        for number, end in enumerate(ends)
    ]
    assert not is_open
    found: dict[int, list[int]] = {number: [] for number in range(10)}
    unfinished = list(found)
    while unfinished:
        for number in list(unfinished):
            records = readers[number].read(3)
            found[number] += records
            if not records:
                unfinished.remove(number)
            assert len(is_open) <= 2
        assert len(is_open) == min(2, len(unfinished))
    assert [found[number] for number in found] == [list(range(end)) for end in ends]
    assert [each.position().offset for each in readers] == ends
    assert readers[0].read(3) == []
    for each in readers:
        each.close()
    assert not is_open


NOBODY = ClientConfig({"bootstrap.servers": "127.0.0.1:1"})


@pytest.fixture
def retry(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """A pipeline with a loop, in which no stage comes first."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return load("retry:pipeline", {})


def test_loops_are_refused(retry: Loaded, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loop 'retry'.*`exactlyonce run`"):
        CatchUp(retry, RunOptions(NOBODY), Silent()).lead(in_process, tmp_path)


def test_a_loop_is_not_replayed(retry: Loaded, tmp_path: Path) -> None:
    graph = retry.pipeline.build()
    same = {"pipeline": "retry", "fingerprint": graph.fingerprint(), "max_parallelism": graph.max_parallelism}
    lost = committable("eo:retry:charged:0:1.0:0", checkpoint=2)
    decided = manifest(checkpoint=2, base=1, previous=1, committables=(lost,), **same)
    history = History("retry")
    history.manifests.update({1: manifest(checkpoint=1, base=0, previous=0, **same), 2: decided})
    repair = ReplayRepair(retry, NOBODY, 60_000, lambda: history, lambda text: None, lambda stack: in_process, tmp_path)
    reason = repair(decided, lost, "eo:retry:charged:0:2.0:0")
    repair.close()
    assert isinstance(reason, str)
    assert "loop 'retry'" in reason
    assert "in a cycle none comes first" in reason


def test_a_unit_in_this_process_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times in all, like a task of Spark; an error that a retry would meet again comes as an answer at once."""
    labels: list[str] = []

    def run(work: bytes, label: str) -> bytes:
        labels.append(label)
        error = msgspec.msgpack.decode(work)
        raise {"unit": BrokerUnavailable("it restarts"), "publication": ConfigError("no such setting")}[error["type"]]

    monkeypatch.setattr("exactlyonce.engines.bounded.stages._KINDS", {"unit": run, "publication": run})
    for kind, tries in (("unit", 4), ("publication", 1)):
        labels.clear()
        with pytest.raises((BrokerUnavailable, ConfigError)):
            in_process("orders: checkpoint 1, stage in", [msgspec.msgpack.encode({"type": kind})])
        assert [tries_before(label) for label in labels] == [*range(tries)]
        assert len({*labels}) == tries
