"""Readers in turn: everything is read once and in order, and few are open."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.engines.bounded.unit import turns
from exactlyonce.engines.bounded.unit.turns import ReaderInTurn


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
    """Of ten ranges that are read in turns two stay open, others only while they are read; each is handed out whole,
    stands at its end, and those that had no room get it once others are finished."""
    monkeypatch.setattr(turns, "OPEN_READERS_MAX", 2)
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
