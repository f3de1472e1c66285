"""Faults planted into a recorded history, each of which the checker has to find; they change the lines read from EDN.

A line's value is a tuple of micro-operations, `("send", key, (offset, value))` or `("poll", {key: ((offset, value),
...)})`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import inf
from typing import Any

Lines = list[dict[str, Any]]
Pair = tuple[Any, Any]
USERS = 16
"""The user of a record is its id modulo this."""


def _sends(lines: Lines, outcome: str = "ok") -> list[tuple[dict[str, Any], int, Pair]]:
    """(line, key, (offset, value)) of each send with that *outcome*."""
    return [
        (line, micro[1], micro[2])
        for line in lines if line["type"] == outcome and line["f"] in ("send", "txn")
        for micro in line["value"] if micro[0] == "send"
    ]  # fmt: skip


def _change_polls(lines: Lines, change: Callable[[int, tuple[Pair, ...]], tuple[Pair, ...]]) -> None:
    """Put what *change* makes of a key and its (offset, value) in the place of what was polled."""
    for line in lines:
        if line["f"] in ("poll", "txn") and line["type"] != "invoke":
            line["value"] = tuple(
                ("poll", {key: change(key, pairs) for key, pairs in micro[1].items()}) if micro[0] == "poll" else micro
                for micro in line["value"]
            )


def _change_sends(lines: Lines, key: int, pairs: dict[Pair, Pair]) -> None:
    for line in lines:
        if line["f"] in ("send", "txn") and line["type"] != "invoke":
            line["value"] = tuple(
                ("send", key, pairs.get(micro[2], micro[2])) if micro[:2] == ("send", key) else micro
                for micro in line["value"]
            )


def _middle(lines: Lines, below: float = inf) -> tuple[int, list[Pair]]:
    """A key of an output, the greatest one *below*, and its (offset, value) by offset."""
    key = max(key for _, key, _ in _sends(lines) if key < below)
    return key, sorted(pair for _, sent_to, pair in _sends(lines) if sent_to == key)


def lose(lines: Lines) -> None:
    """Nobody polls a record of an output."""
    key, pairs = _middle(lines)
    lost = pairs[len(pairs) // 2]
    _change_polls(lines, lambda at, polled: tuple(pair for pair in polled if (at, pair) != (key, lost)))


def double(lines: Lines) -> None:
    """A record of an output comes again at the end of its partition."""
    key, pairs = _middle(lines)
    last, again = pairs[-1], (pairs[-1][0] + 1_000, pairs[len(pairs) // 2][1])
    _change_polls(lines, lambda at, polled: (*polled, again) if at == key and last in polled else polled)


def reorder(lines: Lines) -> None:
    """Two records of a user change places in an output, for everybody."""
    key, pairs = _middle(lines)
    user_of = {pair: pair[1][0] % USERS for pair in pairs}
    first, second = next(
        (first, second) for first, second in combinations(pairs, 2) if user_of[first] == user_of[second]
    )  # fmt: skip
    swapped = {first: (first[0], second[1]), second: (second[0], first[1])}
    _change_polls(lines, lambda at, polled: tuple(swapped.get(p, p) if at == key else p for p in polled))
    _change_sends(lines, key, swapped)


def scatter(lines: Lines) -> None:
    """Records of two users change places between two partitions of an output, for everybody."""
    key, pairs = _middle(lines)
    other, others = _middle(lines, key)
    first, second = pairs[len(pairs) // 2], others[len(others) // 2]
    places = {(key, first): (first[0], second[1]), (other, second): (second[0], first[1])}
    _change_polls(lines, lambda at, polled: tuple(places.get((at, pair), pair) for pair in polled))
    for at, pair in places:
        _change_sends(lines, at, {pair: places[at, pair]})


def abort_read(lines: Lines) -> None:
    """A transaction of a feeder whose records were polled has failed."""
    polled = {
        pair for line in lines if line["f"] == "poll" and line["type"] == "ok"
        for micro in line["value"] for pairs in micro[1].values() for pair in pairs
    }  # fmt: skip
    line = next(
        line for line, _, pair in _sends(lines)
        if pair in polled and line["f"] == "txn" and "rebalance-log" not in line
    )  # fmt: skip
    line["type"] = "fail"


def skip(lines: Lines) -> None:
    """One poller is not given a record that others are."""
    is_done = False

    def without(key: int, pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
        nonlocal is_done
        if is_done or len(pairs) < 3:
            return pairs
        is_done = True
        return (*pairs[:1], *pairs[2:])

    _change_polls([line for line in lines if line["f"] == "poll"], without)


def cycle(lines: Lines) -> None:
    """A transaction polls the output of what it sent itself, as if the pipeline read uncommitted records."""
    outputs = {
        (pair[1][0] if isinstance(pair[1], tuple) else pair[1]): (key, pair)
        for line, key, pair in _sends(lines) if "rebalance-log" in line
    }  # fmt: skip
    line, (key, pair) = next(
        (line, outputs[pair[1]]) for line, _, pair in _sends(lines)
        if line["f"] == "txn" and "rebalance-log" not in line and pair[1] in outputs
    )  # fmt: skip
    line["value"] = (*line["value"], ("poll", {key: (pair,)}))


def number(lines: Lines) -> None:
    """The pipeline's state has counted a record twice."""
    key, pairs = _middle(lines)
    wrong = pairs[len(pairs) // 2]
    changed = {wrong: (wrong[0], (wrong[1][0], wrong[1][1] + 1))}
    _change_polls(lines, lambda at, polled: tuple(changed.get(p, p) if at == key else p for p in polled))
    _change_sends(lines, key, changed)


def diverge(lines: Lines) -> None:
    """One poller is given another value at an offset."""
    key, pairs = _middle(lines)
    wrong = pairs[len(pairs) // 2]
    line = next(
        line for line in lines
        if line["f"] == "poll" and line["type"] == "ok" and wrong in line["value"][0][1].get(key, ())
    )  # fmt: skip
    _change_polls([line], lambda at, polled: tuple((p[0], (p[1][0], 0)) if p == wrong else p for p in polled))


MUTANTS: dict[str, Callable[[Lines], None]] = {
    "lose": lose, "double": double, "reorder": reorder, "scatter": scatter, "abort-read": abort_read, "skip": skip,
    "cycle": cycle, "number": number, "diverge": diverge,
}  # fmt: skip
FOUND_AS = {
    "lose": "lost-write", "double": "output-duplicate", "reorder": "output-reordered", "scatter": "output-scattered",
    "abort-read": "G1a", "skip": "int-poll-skip", "cycle": "G1c", "number": "output-number",
    "diverge": "inconsistent-offsets",
}  # fmt: skip
"""An anomaly that the checker finds, of each mutant."""
