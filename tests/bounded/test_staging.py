"""Staged files, and what is said of a folder that not everybody sees."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from exactlyonce.engines.bounded.ranges import Reading, parts
from exactlyonce.engines.bounded.unit.staging import FrameWriter, StagedFile, read_frames
from exactlyonce.pipeline.errors import ConfigError


def staged(path: Path, *frames: bytes) -> StagedFile:
    writer = FrameWriter(path)
    for frame in frames:
        writer.write(frame, 1, b"<")
    file = writer.close()
    assert file is not None
    return file


def test_frames_come_back(tmp_path: Path) -> None:
    """Frames come back in order, each behind its prefix; without any there is no file."""
    file = staged(tmp_path / "file", b"one", b"", b"three" * 1_000_000)
    assert list(read_frames(file)) == [b"<one", b"<", b"<" + b"three" * 1_000_000]
    assert file.records == 3
    assert FrameWriter(tmp_path / "none").close() is None
    assert not (tmp_path / "none").exists()


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    """A file that is not there, or not whole, is an error that says what the folder must be, and no end of input."""
    file = staged(tmp_path / "file", b"one", b"two")
    for wrong in (msgspec.structs.replace(file, path=str(tmp_path / "other")), msgspec.structs.replace(file, size=99)):
        with pytest.raises(ConfigError, match="Every executor must see the folder of --staging"):
            list(read_frames(wrong))


@pytest.mark.parametrize("records_max", [1, 7, 100, 1_000])
def test_parts_are_the_whole(records_max: int) -> None:
    """Parts follow each other without gap or overlap, and are no larger than they may be, but for rounding."""
    ranges = (Reading("s", "t", 0, 5, 105), Reading("s", "t", 1, 0, 0), Reading("u", "v", 0, 10, 43))
    found = list(parts(ranges, records_max))
    for place, each in enumerate(ranges):
        ends = [each.start, *(part[place].end for part in found)]
        assert [part[place].start for part in found] == ends[:-1]
        assert ends[-1] == each.end
        assert ends == sorted(ends)
    assert max(sum(each.length for each in part) for part in found) <= records_max + len(ranges)
