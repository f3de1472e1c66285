"""A sample of the crash matrix, and that each of its rows is shown by something."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cells import Cell, cells, try_cell
from crossing import SHAPES, SINKS
from report import SUBJECTS
from rows import ALIGNED, MODES, PROMISES, ROWS, UNALIGNED, Crash
from running import DESCRIPTORS, Run

from exactlyonce.pipeline.failpoints import NAMES

TESTS = Path(__file__).parents[1]
PAGE = "tests/README.md"
pytestmark = pytest.mark.broker

SAMPLE = (
    "2/worker-barrier/kill/diamond/both/2/unaligned",
    "4/unaligned-captured/kill/cycle/both/2/aligned",
    "10/the decision/late/chain/both/2/aligned",
    "12/coordinator-decided/stop/chain/both/2/unaligned",
    "15/a late commit/late/diamond/kafka/1/aligned",
    "13/store-committed/raise/chain/postgres/1/aligned",
    "50/timed-firing/kill/sessions/kafka/2/unaligned",
    "52/store-committed/kill/chain/delta/1/aligned",
    "55/advance-published/kill/windows/kafka/2/driver",
)
FIRST_OF_OWN_PIPELINES = 49
"""The first row, from 0, with pipelines of its own."""
BY_NAME = {cell.name: cell for cell in cells()}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAMPLE)
def test_a_cell(name: str, servers: Any) -> None:
    assert try_cell(BY_NAME[name], servers) > 0


def test_a_run_may_open_no_more_than_from_a_shell() -> None:
    """A client that is not freed shows within some checkpoints."""
    run = Run("127.0.0.1:1", "nobody")
    try:
        assert resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE)[0] == DESCRIPTORS
    finally:
        run.wait()


def is_there(shown: str) -> bool:
    file, _, test = shown.partition("::")
    return f"def {test}" in (TESTS.parent / file).read_text()


def test_promises_are_counted_by_their_rows(table: Callable[..., list[dict[str, str]]]) -> None:
    shown = {row["promise"]: row["what shows it"] for row in table(PAGE, "promise", "what shows it")}
    assert [*shown] == [row["promise"] for row in table("docs/guarantees.md", "promise", "what it rests on")]
    with_cells = {row.number for row in ROWS if row.ways}
    for promise in PROMISES:
        rows = re.search(r"rows ([\d, and]+)", shown[promise.text])
        assert numbers(rows[1] if rows else "") & with_cells == set(promise.rows)


def test_what_a_row_is_shown_by_as_well_is_there(table: Callable[..., list[dict[str, str]]]) -> None:
    found = table(PAGE, "row", "shown as well by")
    assert {int(each["row"]) for each in found} <= {row.number for row in ROWS}
    named = [name for each in found for name in re.findall(r"`(tests/[^`]+)`", each["shown as well by"])]
    assert named
    assert [each for each in named if not is_there(each)] == []


def test_every_row_is_shown() -> None:
    assert [row.number for row in ROWS] == list(range(1, 57))
    for row in ROWS:
        assert row.ways or row.tests, row
        for each in row.tests:
            assert is_there(each), each
    assert len(BY_NAME) == len(list(cells()))


def test_every_failpoint_of_a_run_is_in_a_row() -> None:
    """Failpoints of repairs, deletions, `enrich` and HTTP have own tests."""
    crossed = {cell.fault for cell in BY_NAME.values()}
    elsewhere = ("repair-", "savepoint-removing", "erasing-", "enrich-", "request-")
    assert {name for name in NAMES if not name.startswith(elsewhere)} <= crossed


def numbers(cell: str) -> set[int]:
    return {int(each) for each in re.findall(r"\d+", cell)}


def test_what_is_left_out_is_listed_with_the_reason(table: Callable[..., list[dict[str, str]]]) -> None:
    without = table(PAGE, "rows", "why no process is killed in them")
    listed = sorted(number for row in without for number in numbers(row["rows"]))
    assert listed == [row.number for row in ROWS if not row.ways]
    left_out: dict[str, set[int]] = {}
    for row in ROWS[:FIRST_OF_OWN_PIPELINES]:
        for way in row.ways:
            missing = {
                "killed, stopped, raising": not isinstance(way, Crash), "chain, diamond": set(way.shapes) == {"cycle"},
                "PostgreSQL alone": "postgres" not in way.sinks, "Kafka alone": "kafka" not in way.sinks,
                "barriers that wait": ALIGNED not in way.modes,
            }  # fmt: skip
            for choice, is_missing in missing.items():
                left_out.setdefault(choice, set()).update({row.number} if is_missing else ())
            assert set(way.shapes) in ({"cycle"}, set(SHAPES))
            assert {*way.sinks, "kafka", "postgres"} == set(SINKS)
            assert {*way.modes, ALIGNED} == set(MODES)
    rows = {row["not crossed"]: row["rows"] for row in table(PAGE, "not crossed", "rows", "why")}
    assert rows.pop("barriers that overtake, with one worker") == "all"
    assert not [cell for cell in BY_NAME.values() if (cell.parallelism, cell.mode) == (1, UNALIGNED)]
    assert {choice: numbers(cell) for choice, cell in rows.items()} == left_out


def test_later_rows_name_their_pipelines(table: Callable[..., list[dict[str, str]]]) -> None:
    listed = {
        int(row["row"]): (row["pipelines"], row["sinks"]) for row in table(PAGE, "row", "pipelines", "sinks", "runs")
    }
    later = [row for row in ROWS[FIRST_OF_OWN_PIPELINES:] if row.ways]
    assert [*listed] == [row.number for row in later] == [number for rows in SUBJECTS.values() for number in rows]
    for row in later:
        shapes = dict.fromkeys(shape for way in row.ways for shape in way.shapes)
        sinks = dict.fromkeys(sink for way in row.ways for sink in way.sinks)
        assert listed[row.number] == (", ".join(shapes), ", ".join(sinks))


def test_a_cell_is_written_as_it_is_named() -> None:
    assert Cell(2, "worker-barrier", "kill", "diamond", "both", 2, "unaligned").name == SAMPLE[0]
