"""The cutting of ranges. No session, no broker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.engines.spark.source.ranges import Range, shares, split

SIZES = st.lists(st.integers(0, 10_000) | st.integers(0, 3), max_size=8)


def ranges(sizes: list[int]) -> list[Range]:
    return [Range("orders", "id", partition, 7, 7 + size) for partition, size in enumerate(sizes)]


@given(SIZES, st.integers(1, 100))
def test_split(sizes: list[int], partitions_min: int) -> None:
    """The parts are the ranges in order, without gap or overlap, none of them empty, and as many as were asked for."""
    whole = [each for each in ranges(sizes) if each.size]
    parts = split(whole, partitions_min)
    assert len(parts) >= min(partitions_min, sum(sizes))
    assert all(each.size for each in parts)
    assert [(each.partition, n) for each in parts for n in range(each.start, each.end)] == [
        (each.partition, n) for each in whole for n in range(each.start, each.end)
    ]


@given(SIZES, st.integers(1, 10_000))
def test_shares(sizes: list[int], offsets_max: int) -> None:
    """A batch has as many offsets as the limit allows, and some of every partition if there are enough for that."""
    cut = shares(ranges(sizes), offsets_max)
    assert sum(each.size for each in cut) == min(offsets_max, sum(sizes))
    assert all(
        part.start == whole.start and part.end <= whole.end for part, whole in zip(cut, ranges(sizes), strict=True)
    )
    waiting = [place for place, size in enumerate(sizes) if size]
    assert len(waiting) > offsets_max or all(cut[place].size for place in waiting)


def test_shares_without_a_limit() -> None:
    """Without a limit all is read."""
    assert shares(ranges([5, 0, 9]), None) == ranges([5, 0, 9])
