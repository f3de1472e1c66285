"""Faults that are planted into the output of a cell, or into a test, are found, and what ran well is not."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from zlib import crc32

import pytest
from cells import IN_PARTITIONS, assert_totals
from oracles import Row, assert_order
from row_tests import run_test
from running import orders

FED = orders(240)
COPIES = [tuple(json.loads(value).values()) for _, value in FED]
PARTITIONS: list[list[int]] = [[] for _ in range(IN_PARTITIONS)]
for (key, _), copy in zip(FED, COPIES, strict=True):
    PARTITIONS[crc32(key.encode()) % IN_PARTITIONS].append(copy[0])
Rows = Sequence[Row]


def totals(copies: Rows) -> Rows:
    """The updates of a run that adds *copies* in this order."""
    sums: dict[str, int] = defaultdict(int)
    updates = []
    for number, customer, total in copies:
        sums[customer] += total
        updates.append((number, customer, sums[customer]))
    return updates


def judge(updates: Rows, copies: Rows) -> None:
    assert_totals({"topic": ("totals", updates), "copies": ("copies", copies)}, FED)
    for rows in (updates, copies):
        assert_order(rows, PARTITIONS, "a place")


def test_output_in_the_order_of_the_partitions_is_right() -> None:
    judge(totals(COPIES), COPIES)
    by_partition = sorted(COPIES, key=lambda copy: next(i for i, ids in enumerate(PARTITIONS) if copy[0] in ids))
    assert by_partition != COPIES
    judge(totals(by_partition), by_partition)  # partitions meet in any order


def test_orders_of_a_customer_that_are_added_in_reverse() -> None:
    with pytest.raises(AssertionError, match="comes after a later one of its partition"):
        judge(totals(COPIES[::-1]), COPIES)


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (lambda copies: [(number, "nobody", total) for number, _, total in copies], "missing"),
        (lambda copies: [(number, customer, -1) for number, customer, _ in copies], "missing"),
        (lambda copies: [*copies, copies[0]], "'doubled': .1,"),
        (lambda copies: copies[:-1], "'missing': .1,"),
        (lambda copies: [*copies, (-1, "c1", 1)], "'foreign': .1,"),
        (lambda copies: copies[::-1], "comes after a later one"),
    ],
    ids=["another customer", "another total", "doubled", "missing", "foreign", "reversed"],
)
def test_copies_with_a_fault(plant: Callable[[Rows], Rows], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        judge(totals(COPIES), plant(COPIES))


def test_a_test_that_did_not_run_whole(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--matrix', action='count')")
    test = tmp_path / "test_it.py"
    test.write_text("def test_that_runs(): pass")
    assert run_test(test.name, tmp_path) == 0
    faults = {"skip": "SKIPPED .* no disk can be mounted", "xfail": "XFAIL .* no disk can be mounted"}
    for fault, told in faults.items():
        line = f"def test_a_disk(): pytest.{fault}('no disk can be mounted')"
        test.write_text(f"import pytest\ndef test_that_runs(): pass\n{line}")
        with pytest.raises(AssertionError, match=told):
            run_test(test.name, tmp_path)
