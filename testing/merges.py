"""`assert_merges`: the functions of a fold, tried on records in many parts and orders.

Invariant: a part has one record or more, and accumulators are made anew for each try, as the engine merges copies. So a
fold passes if its result depends on the records of a window alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")

PARTS = 3
PART_MAX = 4
"""The most records of a part: a few show a mistake, and can be read."""
_NEW = object()


def assert_merges(
    new: Callable[[], S],
    add: Callable[[S, T], S],
    merge: Callable[[S, S], S],
    records: Iterable[T],
    *,
    result: Callable[[S], object] | None = None,
    draws: int = 300,
    seed: int = 0,
) -> None:
    """Assert that *merge* is associative and commutative, and agrees with *add*: the functions of a `fold`.

    *records* are three or more, as different as they come. *result* gives what is compared of an accumulator; None: the
    accumulator itself, by ``==``. *draws* is the number of tries; *seed* decides on their parts and orders.

    Raises AssertionError, which shows the parts and two results of them; `ValueError` for fewer than three records; the
    error of a function.

    >>> assert_merges(int, lambda total, n: total + n, lambda one, other: one + other, [3, 5, 8])
    >>> assert_merges(list, lambda ns, n: [*ns, n], lambda one, other: one + other, [3, 5, 8], result=sorted)
    >>> assert_merges(int, lambda total, n: total + n, max, [3, 5, 8])
    Traceback (most recent call last):
        ...
    AssertionError: merge disagrees with add:
      merge(a, b) gives 8
      add of the records of a, then b gives 13
      a = [5]
      b = [8]
    Results would depend on the run (seed=0). Fix the functions; or give result=, if both results mean the same.
    """
    given = list(records)
    if len(given) < PARTS:
        raise ValueError(f"records are {len(given)}, and are split into {PARTS} parts: give more")
    rng, fold = Random(seed), _Fold(new, add, merge, result or (lambda state: state), seed)
    for draw in range(draws):
        size = 1 + draw * PART_MAX // draws  # small parts first: they are easier to read
        drawn = rng.sample(given, min(len(given), size * PARTS))
        ends = sorted(rng.sample(range(1, len(drawn)), 2))
        fold.check(drawn[: ends[0]], drawn[ends[0] : ends[1]], drawn[ends[1] :])


@dataclass(frozen=True)
class _Fold:
    """The functions of a fold."""

    new: Callable[[], Any]
    add: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any]
    result: Callable[[Any], object]
    seed: int

    def check(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> None:
        """Compare results that are equal for a right fold."""
        of, merge = self._of, self._merged
        self._equal(
            "new, add or merge gives another result the second time", {"a": a, "b": b},
            ("merge(a, b)", lambda: merge(of(a), of(b))), ("merge(a, b), again,", lambda: merge(of(a), of(b))),
        )  # fmt: skip
        self._equal(
            "merge is not commutative", {"a": a, "b": b},
            ("merge(a, b)", lambda: merge(of(a), of(b))), ("merge(b, a)", lambda: merge(of(b), of(a))),
        )  # fmt: skip
        self._equal(
            "merge is not associative", {"a": a, "b": b, "c": c},
            ("merge(merge(a, b), c)", lambda: merge(merge(of(a), of(b)), of(c))),
            ("merge(a, merge(b, c))", lambda: merge(of(a), merge(of(b), of(c)))),
        )  # fmt: skip
        self._equal(
            "merge disagrees with add", {"a": a, "b": b},
            ("merge(a, b)", lambda: merge(of(a), of(b))), ("add of the records of a, then b", lambda: of([*a, *b])),
        )  # fmt: skip
        self._equal(
            "add disagrees with merge", {"a": a, "b": b, "c": c},
            ("merge(a, b), then add of the records of c,", lambda: of(c, merge(of(a), of(b)))),
            ("add of all", lambda: of([*a, *b, *c])),
        )  # fmt: skip

    def _equal(
        self, problem: str, parts: Mapping[str, Sequence[Any]],
        one: tuple[str, Callable[[], Any]], other: tuple[str, Callable[[], Any]],
    ) -> None:  # fmt: skip
        """Require two equal results, each named as it is made."""
        results = [deepcopy(self.result(fold())) for _, fold in (one, other)]
        if results[0] != results[1]:
            lines = [f"{name} gives {result!r}" for (name, _), result in zip((one, other), results, strict=True)]
            lines += [f"{name} = {list(part)!r}" for name, part in parts.items()]
            raise AssertionError(
                "\n  ".join([f"{problem}:", *lines]) + f"\nResults would depend on the run (seed={self.seed}). Fix the "
                "functions; or give result=, if both results mean the same."
            )

    def _of(self, part: Sequence[Any], state: Any = _NEW) -> Any:
        """The accumulator of a part; or *state*, with the records of the part."""
        state = self.new() if state is _NEW else state
        records = deepcopy(part)
        for record in records:
            state = _given("add", self.add(state, record))
            state = deepcopy(state) if state is record else state  # as the engine does: others have the record, too
        if part == deepcopy(part) and records != part:
            raise AssertionError(
                f"add changes a record:\n  before {list(part)!r}\n  after  {list(records)!r}\nOther windows and "
                "operators have it, too. Let add keep a copy, or what it needs of the record."
            )
        return state

    def _merged(self, one: Any, other: Any) -> Any:
        return _given("merge", self.merge(one, other))


def _given(function: str, state: Any) -> Any:
    if state is None:
        raise AssertionError(f"{function} returned None: let it return the accumulator")
    return state
