"""A sample of the crash matrix, and that each of its rows is shown by something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cells import Cell, cells, live
from rows import ROWS

from exactlyonce.pipeline.failpoints import NAMES

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.broker

SAMPLE = (
    "2/worker-barrier/kill/diamond/both/2/unaligned",
    "5/unaligned-overtaken/kill/diamond/kafka/2/unaligned",
    "4/unaligned-captured/kill/cycle/both/2/aligned",
    "10/the decision/answer lost/chain/kafka/1/aligned",
    "10/the decision/late/chain/both/2/aligned",
    "12/coordinator-decided/stop/chain/both/2/unaligned",
    "13/store-committing/kill/diamond/both/1/aligned",
    "14/a commit/request lost/chain/kafka/2/aligned",
    "15/a late commit/late/diamond/kafka/1/aligned",
    "21/store-entering/raise/chain/postgres/1/aligned",
    "7/worker-flushed/stop/diamond/postgres/2/aligned",
)
BY_NAME = {cell.name: cell for cell in cells()}


@pytest.mark.slow
@pytest.mark.exhaustive(but=[SAMPLE[2], SAMPLE[6]])
@pytest.mark.parametrize("name", SAMPLE)
def test_a_cell(name: str, place: Any) -> None:
    """What was fed is counted once, whatever the process that crashed or the request that was lost."""
    assert live(BY_NAME[name], place) > 0


def test_every_row_is_shown() -> None:
    """By cells, by tests that there are, or it says why not; and no two are alike."""
    assert [row.number for row in ROWS] == list(range(1, 45))
    for row in ROWS:
        assert row.ways or row.tests or row.missing, row
        for each in row.tests:
            file, _, test = each.partition("::")
            assert f"def {test}" in (TESTS.parent / file).read_text(), each
    assert len(BY_NAME) == len(list(cells()))


def test_every_failpoint_of_a_run_is_in_a_row() -> None:
    """Those of repairs, of savepoints, of deletions and of bounded work have tests of their own."""
    crossed = {cell.fault for cell in BY_NAME.values()}
    elsewhere = ("repair-", "unit-", "publication-", "advance-", "savepoint-", "erasing-")
    assert {name for name in NAMES if not name.startswith(elsewhere)} <= crossed


def test_a_cell_is_written_as_it_is_named() -> None:
    """So that one can be asked for again."""
    assert Cell(2, "worker-barrier", "kill", "diamond", "both", 2, "unaligned").name == SAMPLE[0]
