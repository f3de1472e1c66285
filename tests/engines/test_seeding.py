"""Rows that become state: what each row has to be, and that a savepoint has all of them, by key group."""

from __future__ import annotations

import datetime as dt
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import pytest

from exactlyonce import Count, KafkaSink, KafkaSource, Pipeline, Tumbling
from exactlyonce.engines.savepoints import seeding
from exactlyonce.engines.savepoints.contents import decoded
from exactlyonce.engines.savepoints.exported import ExportedSavepoint, export
from exactlyonce.engines.savepoints.seeding import RowType, SeededOperator, SeededSavepoint, Unfit
from exactlyonce.errors import ConfigError, RecordError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.keys import key_groups


class Line(msgspec.Struct):
    amount: float
    day: dt.date | None = None


class Total(msgspec.Struct):
    sum: int
    lines: list[Line] = []


class Order(msgspec.Struct):
    customer: str
    total: int
    at: int = 0


class Place(NamedTuple):
    country: str
    number: int


def customer(order: Order) -> str:
    return order.customer


def place(order: Order) -> Place:
    return Place(order.customer, order.total)


def add(total: Total | None, order: Order) -> tuple[Total, int]:
    return Total(order.total), order.total


def count(seen: int | None, order: Order) -> tuple[int, int]:
    return (seen or 0) + 1, 0


def graph(key: Any = customer, **options: Any) -> LogicalGraph:
    pipeline = Pipeline("totals")
    orders = pipeline.source("orders", KafkaSource("orders", value=Order, time="at")).key_by(key)
    orders.stateful_map("totals", add, **options).sink("out", KafkaSink("totals"))
    orders.stateful_map("counts", count).sink("counted", KafkaSink("counted"))
    orders.window(Tumbling("1m")).aggregate("windows", Count()).sink("windowed", KafkaSink("windowed"))
    return pipeline.build()


def row_type(**options: Any) -> RowType:
    return RowType(graph(**options).node("totals"))


STATE = Total(7, [Line(0.5, dt.date(2026, 11, 1))])
SAME: list[Any] = [
    ("ann", STATE),
    ("ann", {"sum": 7, "lines": [{"amount": 0.5, "day": dt.date(2026, 11, 1)}]}),
    {"key": "ann", "state": {"sum": 7, "lines": [{"amount": 0.5, "day": "2026-11-01"}]}},
    {"key": "ann", "sum": 7, "lines": [Line(0.5, dt.date(2026, 11, 1))]},
    b'{"key":"ann","state":{"sum":7,"lines":[{"amount":0.5,"day":"2026-11-01"}]}}\n',
    b'{"sum":7,"lines":[{"amount":0.5,"day":"2026-11-01"}],"key":"ann"}',
    b'{"operator":"totals","checkpoint":3,"key_group":1,"version":1,"key":"ann",'
    b'"state":{"sum":7,"lines":[{"amount":0.5,"day":"2026-11-01"}]}}',
]  # fmt: skip


def test_forms_of_a_row() -> None:
    """Values, plain values, columns and JSON, whole or beside the key, give the same key and state."""
    assert {row_type().read(row) for row in SAME} == {row_type().read(SAME[0])}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (("ann", Total(cast(Any, "7"))), r"state of key 'ann': Expected `int`, got `str` - at `\$.sum`"),
        (("ann", {"sum": "7"}), r"state of key 'ann': Expected `int`, got `str` - at `\$.sum`"),
        (b'{"key":"ann","sum":7,"lines":[{"amount":"x"}]}', r"Expected `float`, got `str` - at `\$.lines\[0\].amount`"),
        (b'{"key":"ann","sum":7,"lines":[{"amount":1,"dey":2}]}', r"no field for `\$.lines\[0\].dey`, which would be"),
        ({"key": "ann", "sum": 7, "more": 1}, r"the type has no field for `\$.more`"),
        ({"key": "ann", "state": {"sum": 7}, "sum": 7}, "it has 'sum': the state is one of these columns, or all"),
        ({"sum": 7}, "the row: it has no 'key', only 'sum'"),
        ({"key": "ann", "state": {"sum": 7}, "version": 2}, "its state is of version 2, and state_version .* is 1"),
        ((7, STATE), "key: Expected `str`, got `int`"),
        ((None, STATE), "key: Expected `str`, got `null`"),
        (("ann", None), "state of key 'ann': Expected `object`, got `null`"),
        (("ann",), r"the row: it is \('ann',\): give \(key, state\), or columns by name"),
        (b"[1]", "the row: Expected `object`, got `array`"),
    ],
)
def test_a_row_that_does_not_fit(row: Any, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        row_type().read(row)


def test_keys_of_other_types() -> None:
    """A key of several values is a list in JSON; of an unknown type each is taken as it is, but for null."""
    typed, unknown = row_type(key=place), row_type(key=lambda order: order.customer)
    assert typed.read(b'{"key":["de",7],"sum":1}') == typed.read((Place("de", 7), {"sum": 1}))
    assert decoded(unknown.read((7, {"sum": 1}))[0]) == 7
    with pytest.raises(Unfit, match="key: it is null: no record has such a key"):
        unknown.read((None, {"sum": 1}))


def test_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'windows' keeps its state by time \(.*1m\), and a row .*begin its so"):
        RowType(graph().node("windows"))


def seeded(rows: Iterable[Any], folder: Path) -> SeededOperator:
    operator = SeededOperator(row_type(), folder, 128)
    operator.take(rows)
    return operator


def test_a_savepoint_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export has every row once, by key group across its files, whatever came to the disk in between."""
    monkeypatch.setattr(seeding, "WAITING_ROWS", 100)
    operator = seeded(((f"c{number}", Total(number)) for number in range(1_010)), tmp_path)
    url = export(SeededSavepoint(graph(), [operator], "cluster", (), None), f"file://{tmp_path}")
    exported = ExportedSavepoint.at(url)
    entries = [*exported.entries("totals")]
    assert [entry.group for entry in entries] == sorted(key_groups([entry.key for entry in entries], 128))
    found = {decoded(entry.key): decoded(entry.state)["sum"] for entry in entries}
    assert (operator.count, len(entries), found) == (1_010, 1_010, {f"c{number}": number for number in range(1_010)})
    assert (exported.saved.operators[0].keys, exported.damage()) == ("str", [])


def test_a_base(tmp_path: Path) -> None:
    """A savepoint of rows has the operators that they replace, and all others of its base."""
    both = [SeededOperator(RowType(graph().node(id)), tmp_path, 128) for id in ("totals", "counts")]
    given: list[list[Any]] = [[("ann", STATE)], [("ann", 1), ("bob", 2)]]
    for operator, rows in zip(both, given, strict=True):
        operator.take(rows)
    base = SeededSavepoint(graph(), both, "cluster", (), None)
    (tmp_path / "again").mkdir()
    again = SeededOperator(RowType(graph().node("counts")), tmp_path / "again", 128)
    again.take([("ann", 7)])
    savepoint = SeededSavepoint(graph(), [again], "cluster", (), base)
    assert [saved.operator for saved in savepoint.saved.operators] == ["counts", "totals"]
    states = {id: [decoded(entry.state) for entry in savepoint.entries(id)] for id in ("counts", "totals")}
    assert (states["counts"], [state["sum"] for state in states["totals"]]) == ([7], [7])


@pytest.mark.parametrize("waiting", [2, 100])
def test_a_key_that_comes_twice(waiting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "WAITING_ROWS", waiting)
    rows = [(f"c{number % 9}", Total(number)) for number in range(10)]
    with pytest.raises(RecordError, match=r"Rows 1 and 10 for operator 'totals': both have key 'c0'. Nothing was wri"):
        seeded(rows, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_million_rows(tmp_path: Path) -> None:
    """Memory does not grow with the rows, whose keys and states have some 40 MB."""
    (tmp_path / "first").mkdir()
    seeded(((f"c{number}", Total(number)) for number in range(100_000)), tmp_path / "first")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    operator = seeded((b'{"key":"customer %d","sum":%d}' % (n, n) for n in range(1_000_000)), tmp_path)
    export(SeededSavepoint(graph(), [operator], "cluster", (), None), f"file://{tmp_path}")
    assert (operator.count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10) == (1_000_000, True)
