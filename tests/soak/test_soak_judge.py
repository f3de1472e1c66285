"""The judge of the soak finds what is lost, doubled or wrong in any view, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from soak_judge import END_MS, MUTANTS, VIEWS, Judge, Mutant, Progress

BEGIN_MS = 1_790_000_000_000
Rows = list[tuple[Any, ...]]
ORDERS = [  # (partition, id, user, at, cents)
    (0, 0, "u1", 0, 10), (0, 1, "u2", 13_000, 20), (0, 2, "u1", 12_000, 30), (0, 3, "u1", 8_000, 40),
    (1, 4, "u2", 4_000, 50), (1, 5, "u1", 10_999, 60), (1, 6, "u1", 8_998, 70), (0, 7, "u1", END_MS - BEGIN_MS, 80),
    (1, 8, "u1", END_MS - BEGIN_MS, 90),
]  # fmt: skip
"""Orders 3 and 6 come 5 and 2.001 s after a later one: too late for the join, and 3 for its window."""
PAYMENTS = [  # (partition, id, order, at)
    (0, 0, 0, 3_000), (0, 1, 0, 3_001), (0, 2, 1, 12_000), (0, 3, 1, 14_000), (0, 4, 3, 11_999), (0, 5, 5, 11_500),
    (0, 6, 8, END_MS - BEGIN_MS),
]  # fmt: skip
"""Payment 1 is 3.001 s after its order, and 4, which is late itself, is one of a late order; 5 comes 2.5 s late."""
SEEN: dict[str, Rows] = {
    "windows": [
        ("u1", BEGIN_MS, 2, 80), ("u2", BEGIN_MS, 1, 50), ("u1", BEGIN_MS + 10_000, 2, 90),
        ("u2", BEGIN_MS + 10_000, 1, 20),
    ],
    "totals": [
        (0, "u1", 10), (1, "u2", 20), (4, "u2", 70), (2, "u1", 40), (3, "u1", 80), (5, "u1", 140), (6, "u1", 210),
        (7, "u1", 290), (8, "u1", 380),
    ],
    "lake": [(id, user, BEGIN_MS + at, cents) for _, id, user, at, cents in reversed(ORDERS)],
}  # fmt: skip
ROWS = sorted(SEEN["lake"])
"""Of the lake, by id."""
SEEN |= {"late": [ROWS[3]], "late-left": [ROWS[3], ROWS[6]]}
SEEN["late-right"] = [(id, order, BEGIN_MS + at) for _, id, order, at in PAYMENTS[4:6]]
SEEN["pairs"] = SEEN["pair-rows"] = [(0, 0), (1, 2), (1, 3), (2, None), (4, None), (5, None), (8, 6)]


def judged(
    seen: dict[str, Rows], order_partitions: int = 2, mutant: tuple[str, str, int] = ("", "", 0), *,
    newest: int = 13_000, rows_first: bool = False,
) -> list[str]:  # fmt: skip
    """What the judge says, if the topic of orders began with so many partitions. *mutant*: of a view, at a row.
    *newest*: the latest time that is fed when rows come; *rows_first*: they come before the input is read."""
    judge = Judge(order_partitions, 1)
    name, mutated, at = mutant
    planted = Mutant(name, at)

    def take() -> None:
        for view in VIEWS:
            judge.take(view, planted(view, seen[view]) if view == mutated else seen[view], BEGIN_MS + newest)

    if rows_first:
        take()
    for partition, id, user, at, cents in ORDERS:
        judge.order(partition, id, user, BEGIN_MS + at, cents)
    for partition, id, order, at in PAYMENTS:
        judge.payment(partition, id, order, BEGIN_MS + at)
    if not rows_first:
        take()
    return [" ".join(finding) for finding in judge.verdict().findings]


@pytest.mark.parametrize("rows_first", [False, True])
def test_all_is_there_once(rows_first: bool) -> None:
    """Rows may come before their records are read."""
    assert judged(SEEN, rows_first=rows_first) == []


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", MUTANTS)
def test_any_row_that_is_lost_doubled_or_changed(name: str, view: str, rows_first: bool) -> None:
    for at in range(len(SEEN[view])):
        findings = judged(SEEN, mutant=(name, view, at), rows_first=rows_first)
        assert any(view in finding for finding in findings), (name, view, at)


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("view", ["late", "late-left", "late-right", "pairs", "pair-rows", "lake"])
def test_any_field_that_is_changed(view: str, rows_first: bool) -> None:
    """But that of a record's own id: another record is then lost."""
    row, *rows = SEEN[view]
    for field, value in enumerate(row):
        changed = (*row[:field], "u9" if isinstance(value, str) else value + 1, *row[field + 1 :])
        findings = judged({**SEEN, view: [changed, *rows]}, rows_first=rows_first)
        assert any(f"wrong {view}" in finding or f"lost {view}" in finding for finding in findings), (view, field)


def test_orders_of_a_user_keep_the_order_of_their_partition() -> None:
    """The running total has taken order 3 before order 2: its sums are right."""
    swapped = [(3, "u1", 50) if row[0] == 2 else (2, "u1", 80) if row[0] == 3 else row for row in SEEN["totals"]]
    assert judged({**SEEN, "totals": swapped}) == ["wrong totals order 2 of u1 comes after a later one of partition 0"]


def late(*ids: int, by_join: Sequence[int] = ()) -> dict[str, Rows]:
    """What is seen if these orders, too, are late for their window, and for the join these and those *by_join*."""
    joined = {*ids, *by_join}
    in_windows = [row for row in ROWS if row[0] not in {3, *ids} and row[2] < END_MS]
    windows = {(row[1], row[2] - row[2] % 10_000) for row in in_windows}
    sums = {
        (user, start): [row[3] for row in in_windows if row[1] == user and 0 <= row[2] - start < 10_000]
        for user, start in windows
    }
    return {
        **SEEN, "late": [ROWS[id] for id in sorted({3, *ids})],
        "late-left": [ROWS[id] for id in sorted({3, 6, *joined})],
        "windows": [(*window, len(cents), sum(cents)) for window, cents in sums.items()],
        **{view: [row for row in SEEN[view] if row[0] not in joined] for view in ("pairs", "pair-rows")},
    }  # fmt: skip


@pytest.mark.parametrize("rows_first", [False, True])
def test_a_record_of_an_added_partition_may_be_late_beyond_its_own_partition(rows_first: bool) -> None:
    """Orders 4 and 6, of the window that was over when partition 1 was added; no other one may."""
    assert judged(late(4, 6), order_partitions=1, rows_first=rows_first) == []
    assert judged(late(4, 6)) == [
        "wrong late record 4, which is not late", "wrong late-left record 4, which is not late",
        "wrong late record 6, which is not late",
    ]  # fmt: skip


@pytest.mark.parametrize("rows_first", [False, True])
def test_an_added_partition_begins_at_one_time(rows_first: bool) -> None:
    """Order 4 is late for a window that order 6 is in, and then order 5 for the join alone, before it began."""
    assert judged(late(4), order_partitions=1, rows_first=rows_first) == [
        "wrong late record 4 of partition 1, which was added, is late, though record 6 is not in late",
    ]
    assert judged(late(4, by_join=[5]), order_partitions=1, rows_first=rows_first) == [
        "wrong late-left record 5 of partition 1, which was added, is late, though record 6 is not in late",
    ]
    assert judged(late(4, 6, by_join=[5]), order_partitions=1, rows_first=rows_first) == []


@pytest.mark.parametrize("rows_first", [False, True])
def test_an_added_partition_does_not_begin_after_all_that_is_fed(rows_first: bool) -> None:
    """All of its orders are late, though the first was seen while the newest was less than the disorder later."""
    assert judged(late(4, 5, 6), order_partitions=1, newest=13_000, rows_first=rows_first) == [
        "wrong late record 5 of partition 1, which was added, is late, though no record was so far when that was first"
        " seen",
    ]
    assert judged(late(4, 5, 6), order_partitions=1, newest=22_000, rows_first=rows_first) == []


def test_rows_of_records_that_nobody_gave() -> None:
    assert "wrong an output order 99 was never given" in judged({**SEEN, "late": [ROWS[3], (99, "u1", BEGIN_MS, 1)]})


def test_the_lowest_order_that_is_not_seen() -> None:
    judge = Judge(1, 1)
    for id in (0, 1, 3):
        judge.order(0, id, "u1", BEGIN_MS, 1)
    judge.take("lake", [(0, "u1", BEGIN_MS, 1)], BEGIN_MS)
    assert judge.lowest_missing("lake", 0) == (1, True)
    judge.take("lake", [(1, "u1", BEGIN_MS, 1)], BEGIN_MS)
    assert judge.lowest_missing("lake", 0) == (2, False)


def test_an_input_that_has_a_record_twice_is_no_input() -> None:
    judge = Judge(1, 1)
    judge.order(0, 0, "u1", BEGIN_MS, 1)
    with pytest.raises(AssertionError, match="order 0 is in the input twice"):
        judge.order(0, 0, "u1", BEGIN_MS, 1)


def test_a_view_that_stands_still_after_the_last_fault_has_stalled() -> None:
    """Though the others go on. While nothing is fed, only orders that were read are waited for."""
    judge = Judge(1, 1)
    for id in range(9):
        judge.order(0, id, "u1", BEGIN_MS, 1)
    progress = Progress(judge, stall_s=60, now_s=0)
    for now_s in range(0, 90, 10):
        judge.take("totals", [(now_s // 10, "u1", now_s // 10 + 1)], BEGIN_MS)
        assert progress.look(now_s, is_feeding=False) == ("lake" if now_s > 60 else "")
    progress.fault_ended_s = 85.0
    assert progress.look(145, is_feeding=False) == ""
    assert progress.look(146, is_feeding=False) == "lake"
    assert (progress.longest_stall_s, progress.longest_quiet_s) == (80, 146)
    judge.take("lake", [(id, "u1", BEGIN_MS, 1) for id in range(9)], BEGIN_MS)
    assert progress.look(300, is_feeding=False) == ""
    assert progress.look(361, is_feeding=True) in ("windows", "pairs", "pair-rows")
