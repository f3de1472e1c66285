"""The comparison of a lane, without a broker: by key, by input record, and as a multiset."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from exactlyonce.engines.bounded.unit.comparison import (
    ComparableRows,
    Compared,
    ComparedOutput,
    compare_lane,
    comparisons,
    difference,
)
from exactlyonce.engines.bounded.unit.outgoing import LanesByKey
from exactlyonce.engines.bounded.unit.staging import FrameWriter, OutputBatch, OutputFile
from exactlyonce.pipeline.sink import StoredRow, StoredRows

Rows = Iterable[tuple[StoredRow, int]]
"""Rows, each with the offset of its input record."""
_number = count()


def staged(folder: Path, rows: Rows, lanes: int) -> list[OutputFile]:
    """A file of *rows*, by lane."""
    pairs = list(rows)
    outputs = ComparableRows(StoredRows("t", "", lambda records: [*records])).encode([row for row, _ in pairs])
    origins = [("in", 0, offset) for _, offset in pairs]
    batch = OutputBatch([*outputs.values], None if outputs.keys is None else [*outputs.keys], None, origins)
    writer = FrameWriter(folder / f"outputs-{next(_number)}", lanes)
    places = LanesByKey(lanes, rows=True).places(outputs, origins)
    for lane in sorted(set(places)):
        share = batch.share([number for number, place in enumerate(places) if place == lane])
        writer.write(lane, msgspec.msgpack.encode(share), len(share.values))
    file = writer.close()
    return [] if file is None else [OutputFile("out", 0, file, writer.counts)]


def compared(folder: Path, old: Rows, new: Rows) -> list[Compared]:
    """The comparison of three lanes."""
    lanes = 3
    sides = [staged(folder, side, lanes) for side in (old, new)]
    work = comparisons(str(folder / f"compare-{next(_number)}"), sides, lanes, shown=100, rows=True)
    answers = [compare_lane(msgspec.msgpack.encode(each), "test-0") for each in work]
    return [msgspec.msgpack.decode(answer, type=Compared) for answer in answers]


def differences(done: Iterable[Compared]) -> list[tuple[Any, ...]]:
    return sorted(
        (found.key, found.origin, found.place, found.old and found.old.value, found.new and found.new.value)
        for each in done
        for found in each.differences
    )


def row(key: Any, **content: Any) -> StoredRow:
    return StoredRow(None if key is None else (key,), content or None)


def test_rows_with_a_key_are_compared_in_order(tmp_path: Path) -> None:
    old = [(row("ann", sum=1), 0), (row("bob", sum=1), 1), (row("ann", sum=2), 2), (row("eve", sum=3), 3)]
    new = [(row("ann", sum=1), 0), (row("ann", sum=3), 2), (row("eve", sum=3), 4)]
    done = compared(tmp_path, old, new)
    assert (sum(each.keys for each in done), sum(each.differing for each in done)) == (3, 2)
    assert differences(done) == [
        (b"ann", ("in", 0, 2), 1, b'{"sum":2}', b'{"sum":3}'),
        (b"bob", ("in", 0, 1), 0, b'{"sum":1}', None),
    ]


def test_a_deleted_row_is_an_output(tmp_path: Path) -> None:
    """It differs from none, and from a row."""
    (found,) = differences(compared(tmp_path, [(row("ann"), 0)], []))
    assert found == (b"ann", ("in", 0, 0), 0, None, None)
    (found,) = differences(compared(tmp_path, [(row("ann"), 0)], [(row("ann", a=1), 0)]))
    assert found[2:] == (0, None, b'{"a":1}')
    assert differences(compared(tmp_path, [(row("ann"), 0)], [(row("ann"), 7)])) == []


def test_rows_without_a_key_are_compared_by_their_input_record(tmp_path: Path) -> None:
    """In order, whatever the order of the records among each other; the same row of another record differs."""
    old = [(row(None, n=1), 5), (row(None, n=2), 5), (row(None, n=3), 9)]
    assert differences(compared(tmp_path, old, [old[2], *old[:2]])) == []
    (found,) = differences(compared(tmp_path, old, [old[1], old[0], old[2]]))
    assert found == (None, ("in", 0, 5), 0, b'{"n":1}', b'{"n":2}')
    done = compared(tmp_path, old, [*old[:2], (row(None, n=3), 8)])
    assert sum(each.keys for each in done) == 3
    assert [found[1] for found in differences(done)] == [("in", 0, 8), ("in", 0, 9)]


def test_equal_rows_are_equal_in_any_order_of_their_fields(tmp_path: Path) -> None:
    old = [(StoredRow((1, "a"), {"x": 1, "y": {"b": 2.0, "a": None}}), 0)]
    assert differences(compared(tmp_path, old, [(StoredRow((1, "a"), {"y": {"a": None, "b": 2.0}, "x": 1}), 0)])) == []
    (found,) = differences(compared(tmp_path, old, [(StoredRow((1, "a"), {"x": 1, "y": {"a": float("nan")}}), 0)]))
    assert found[0] == b'[1,"a"]'
    assert found[4] == b'{"x":1,"y":{"a":NaN}}'


def test_differences() -> None:
    one, two, three = (ComparedOutput(value) for value in (b"1", b"2", b"3"))
    moved = ComparedOutput(b"1", origin=("t", 0, 7))
    assert difference(b"k", [one], [moved, two]).place == 1
    assert difference(b"k", [one, two], [two, one]).place == 0
    assert difference(b"k", [one, two], [moved, two, three]).old is None
