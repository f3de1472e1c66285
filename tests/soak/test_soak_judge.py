"""The judge of the soak finds what is lost, doubled or wrong in any view, and nothing else."""

from __future__ import annotations

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
    "late": [(3,)],
    "late-left": [(3,), (6,)],
    "late-right": [(4,), (5,)],
    "totals": [
        (0, "u1", 10), (1, "u2", 20), (4, "u2", 70), (2, "u1", 40), (3, "u1", 80), (5, "u1", 140), (6, "u1", 210),
        (7, "u1", 290), (8, "u1", 380),
    ],
    "lake": [(id, user, BEGIN_MS + at, cents) for _, id, user, at, cents in reversed(ORDERS)],
}  # fmt: skip
SEEN["pairs"] = SEEN["pair-rows"] = [(0, 0), (1, 2), (1, 3), (2, None), (4, None), (5, None), (8, 6)]


def judged(seen: dict[str, Rows], order_partitions: int = 2, mutant: tuple[str, str, int] = ("", "", 0)) -> list[str]:
    """What the judge says, if the topic of orders began with so many partitions. *mutant*: of a view, at a row."""
    judge = Judge(order_partitions, 1)
    for partition, id, user, at, cents in ORDERS:
        judge.order(partition, id, user, BEGIN_MS + at, cents)
    for partition, id, order, at in PAYMENTS:
        judge.payment(partition, id, order, BEGIN_MS + at)
    name, mutated, at = mutant
    planted = Mutant(name, at)
    for view in VIEWS:
        judge.take(view, planted(view, seen[view]) if view == mutated else seen[view])
    return [" ".join(finding) for finding in judge.verdict().findings]


def test_all_is_there_once() -> None:
    assert judged(SEEN) == []


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", MUTANTS)
def test_any_row_that_is_lost_doubled_or_changed(name: str, view: str) -> None:
    for at in range(len(SEEN[view])):
        assert any(view in finding for finding in judged(SEEN, mutant=(name, view, at))), (name, view, at)


def test_only_a_record_of_an_added_partition_may_be_late_beyond_its_own_partition() -> None:
    """Order 4 then counts in no window, and in no pair."""
    late = {
        **SEEN, "late": [(3,), (4,)], "late-left": [(3,), (4,), (6,)],
        "windows": [row for row in SEEN["windows"] if row[:2] != ("u2", BEGIN_MS)],
    }  # fmt: skip
    late["pairs"] = late["pair-rows"] = [row for row in SEEN["pairs"] if row[0] != 4]
    assert judged(late, order_partitions=1) == []
    assert judged(late) == [
        "wrong late record 4, which is not late", "wrong late-left record 4, which is not late",
    ]  # fmt: skip


def test_rows_of_records_that_nobody_gave() -> None:
    assert "wrong an output order 99 was never given" in judged({**SEEN, "late": [(3,), (99,)]})


def test_rows_may_come_before_their_orders_are_read() -> None:
    judge = Judge(2, 1)
    for view in VIEWS:
        judge.take(view, SEEN[view])
    for partition, id, user, at, cents in ORDERS:
        judge.order(partition, id, user, BEGIN_MS + at, cents)
    for partition, id, order, at in PAYMENTS:
        judge.payment(partition, id, order, BEGIN_MS + at)
    assert judge.verdict().findings == []


def test_the_lowest_order_that_is_not_seen() -> None:
    judge = Judge(1, 1)
    for id in (0, 1, 3):
        judge.order(0, id, "u1", BEGIN_MS, 1)
    judge.take("lake", [(0, "u1", BEGIN_MS, 1)])
    assert judge.lowest_missing("lake", 0) == (1, True)
    judge.take("lake", [(1, "u1", BEGIN_MS, 1)])
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
        judge.take("totals", [(now_s // 10, "u1", now_s // 10 + 1)])
        assert progress.look(now_s, is_feeding=False) == ("lake" if now_s > 60 else "")
    progress.fault_ended_s = 85.0
    assert progress.look(145, is_feeding=False) == ""
    assert progress.look(146, is_feeding=False) == "lake"
    assert (progress.longest_stall_s, progress.longest_quiet_s) == (80, 146)
    judge.take("lake", [(id, "u1", BEGIN_MS, 1) for id in range(9)])
    assert progress.look(300, is_feeding=False) == ""
    assert progress.look(361, is_feeding=True) in ("windows", "pairs", "pair-rows")
