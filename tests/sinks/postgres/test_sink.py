"""The description of a PostgreSQL table as a sink opens nothing, and shows no secret."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.sinks import PostgresSink


class Total(msgspec.Struct):
    customer: str
    cents: int | None


def made(table: str = "totals", **arguments: Any) -> PostgresSink[Any]:
    return PostgresSink(table, **{"dsn": "env:DSN", **arguments})


def test_a_description_without_problems() -> None:
    for sink in (made(), made("shop.totals"), made("a.b", schema="c.d"), made(mode="upsert", key=("customer",))):
        assert list(sink.problems(Total)) == []
        assert list(sink.problems(UNKNOWN)) == []
    assert made("shop.totals").place == ("shop", "totals")
    assert made().place == (None, "totals")
    assert made("a.b", schema="c.d").place == ("c.d", "a.b")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"table": ""}, 'must be "table" or "schema.table"'), ({"table": "a.b.c"}, "a name with dots needs schema="),
        ({"table": "x" * 64}, "longer than the 63 bytes"), ({"table": "ü" * 32}, "longer than the 63 bytes"),
        ({"table": 5}, "must be text"),
        ({"dsn": ""}, "dsn= is not set"), ({"dsn": "postgresql://u:secret@h/d"}, "has a password written out"),
        ({"dsn": "host=h password = secret"}, "has a password written out"),
        ({"dsn": "postgresql://u:se/secret@h/d"}, "has a password written out"),
        ({"answer_timeout": "soon"}, "answer_timeout is 'soon': write a number with a unit"),
        ({"answer_timeout": "0s"}, "answer_timeout='0s' must be longer than 0, and 24h at most"),
        ({"answer_timeout": "600h"}, "answer_timeout='600h' must be longer than 0, and 24h at most"),
        ({"commit": "prepared"}, "must be 'write_ahead', as it is by itself: rows wait in the checkpoint topic"),
        ({"mode": "merge"}, "mode='merge' must be one of"),
        ({"mode": "upsert"}, "needs the columns by which"),
        ({"key": ("customer",)}, "set mode='upsert', which updates the row that has the key, or leave key= out"),
        ({"mode": "upsert", "key": ("cents",)}, "its type admits None"),
        ({"key": ["customer"]}, 'must be a column, or several: key="customer"'),
        ({"create": 1}, "must be True or False"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_sentence(arguments: dict[str, Any], text: str) -> None:
    problems = list(made(**arguments).problems(Total))
    assert [text in problem for problem in problems] == [True], problems
    assert "secret" not in problems[0]


def test_neither_repr_nor_description_tells_where_the_database_is() -> None:
    sink = made(dsn="postgresql://u:secret@h/d", mode="upsert", key=("customer",))
    assert "secret" not in repr(sink) + str(sink.describe(Total))
    assert sink.describe(Total) | {"row": 0} == {
        "sink": "postgres", "table": "totals", "mode": "upsert", "key": ["customer"], "row": 0
    }  # fmt: skip
    assert sink.describe(Total)["row"]["fields"] == [["customer", "str"], ["cents", {"union": ["int", "null"]}]]
