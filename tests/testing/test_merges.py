"""`assert_merges` passes right folds, and shows how a wrong one depends on the run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from exactlyonce.testing import assert_merges


@dataclass
class Total:
    n: int


def plus(total: int, n: int) -> int:
    return total + n


def counted(counts: Counter[int], n: int) -> Counter[int]:
    counts[n] += 1
    return counts


def united(one: Counter[int], other: Counter[int]) -> Counter[int]:
    one.update(other)  # the engine merges copies
    other.clear()
    return one


@pytest.mark.parametrize(
    ("new", "add", "merge", "result"),
    [
        (int, plus, plus, None),
        (Counter, counted, united, None),
        (list, lambda ns, n: [*ns, n], lambda one, other: one + other, sorted),
        (lambda: 0, max, max, None),
    ],
    ids=["sum", "counts in place", "a list in any order", "max"],
)
def test_a_right_fold_passes(new: Any, add: Any, merge: Any, result: Any) -> None:
    assert_merges(new, add, merge, [3, 5, 8, 5, 13], result=result)


SHARED = Counter[int]()
CALLS = count()


def kept(one: Counter[int], other: Counter[int]) -> Counter[int]:
    SHARED.update(one + other)
    return SHARED


@pytest.mark.parametrize(
    ("new", "add", "merge", "problem"),
    [
        (list, lambda ns, n: [*ns, n], plus, "^merge is not commutative:\n  merge.a, b. gives"),
        (float, plus, lambda one, other: (one + other) / 2, "merge is not associative:\n  merge.merge.a, b., c. gives"),
        (int, plus, max, "merge disagrees with add"),
        (int, lambda total, n: total + n if total < 20 else total + 1, plus, "merge disagrees with add|add disagrees"),
        (Counter, counted, kept, "another result the second time"),
        (int, lambda total, n: total + next(CALLS), plus, "another result the second time"),
        (Counter, counted, lambda one, other: one.update(other), "^merge returned None: let it return the accumulator"),
        (list, lambda ns, n: ns.append(n), plus, "^add returned None: let it return the accumulator"),
    ],
    ids=["order", "mean of means", "max of sums", "add", "a global", "a counter", "None", "None of add"],
)  # fmt: skip
def test_a_wrong_fold_is_shown_with_its_parts(new: Any, add: Any, merge: Any, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        assert_merges(new, add, merge, [3, 5, 8, 5, 13, 21])


def test_an_add_that_changes_a_record_is_found() -> None:
    def collected(totals: list[Total], total: Total) -> list[Total]:
        if not totals:
            return [total]
        totals[0].n += total.n
        return totals

    def merged(one: list[Total], other: list[Total]) -> list[Total]:
        return collected(one, *other)

    with pytest.raises(AssertionError, match=r"^add changes a record:\n  before \[Total\(n="):
        assert_merges(list, collected, merged, [Total(3), Total(5), Total(8)])


def test_a_record_may_be_the_first_accumulator() -> None:
    def summed(sum: Total, total: Total) -> Total:
        if not sum.n:
            return total
        sum.n += total.n
        return sum

    assert_merges(lambda: Total(0), summed, summed, [Total(3), Total(5), Total(8)])


def test_a_counterexample_is_small_and_follows_from_the_seed() -> None:
    def shown(seed: int) -> str:
        with pytest.raises(AssertionError) as raised:
            assert_merges(int, plus, max, range(1, 100), seed=seed)
        return str(raised.value)

    assert shown(1) == shown(1) != shown(2)
    assert "seed=2" in shown(2)
    assert len(shown(1).split("[", 1)[1].split("]", 1)[0].split(",")) == 1


def test_too_few_records_are_refused() -> None:
    with pytest.raises(ValueError, match="records are 2, and are split into 3 parts: give more"):
        assert_merges(int, plus, plus, [1, 2])
