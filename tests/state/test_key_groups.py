"""Key groups and their owners."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.state.key_groups import group_range, subtask_of


@given(st.integers(1, 300), st.data())
def test_ranges_partition_the_groups(max_parallelism: int, data: st.DataObject) -> None:
    parallelism = data.draw(st.integers(1, max_parallelism))
    ranges = [group_range(subtask, parallelism, max_parallelism) for subtask in range(parallelism)]
    assert [group for each in ranges for group in each] == list(range(max_parallelism))
    for subtask, groups in enumerate(ranges):
        assert {subtask_of(group, parallelism, max_parallelism) for group in groups} == {subtask}
