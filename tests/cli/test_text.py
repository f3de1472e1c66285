"""Figures and tables for people."""

from __future__ import annotations

import doctest

from exactlyonce.cli import arguments, text
from exactlyonce.cli.commands import run


def test_examples() -> None:
    for module in (arguments, run, text):
        result = doctest.testmod(module)
        assert (result.failed, result.attempted > 0) == (0, True)


def test_table_is_aligned() -> None:
    lines = text.table(["id", ">bytes", "state"], [["1", "1,000,000", "a"], ["1000", "5", "bb"]])
    assert lines == ["id        bytes  state", "1     1,000,000  a", "1000          5  bb"]


def test_long_lists_are_wrapped() -> None:
    offsets = " ".join(f"orders[{partition}]=100" for partition in range(20))
    lines = text.labelled("Sn", offsets, 4, 60)
    assert max(map(len, lines)) <= 60
    assert {line[:6] for line in lines} == {"  Sn  ", "      "}
    assert " ".join(line[6:] for line in lines) == offsets
