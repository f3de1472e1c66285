"""Definitions of cells: each change of what a cell runs or asks gives it another one, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cells as cells_module
import definitions
import pytest
from cells import cells
from definitions import code_of, definitions_of, rig_digest
from rows import ROWS, AtFailpoint, Crash, Request

WEAKER: dict[str, Callable[[Any], Any]] = {
    "another hit": lambda way: replace(way, nth=way.nth + 97) if isinstance(way, AtFailpoint) else way,
    "no crowd": lambda way: replace(way, crowd=way.crowd + 1) if isinstance(way, Crash) else way,
    "slow": lambda way: replace(way, slow=not way.slow) if isinstance(way, Crash) else way,
    "another text": lambda way: replace(way, holding="") if isinstance(way, Request) else way,
}


@pytest.mark.parametrize("change", WEAKER.values(), ids=WEAKER)
def test_another_way_is_another_definition(change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = {cell: definitions_of(cell) for cell in cells()}
    rows = tuple(replace(row, ways=tuple(map(change, row.ways))) for row in ROWS)
    ways = {cell: cell.way for cell in before}
    monkeypatch.setattr(cells_module, "ROWS", rows)
    assert [*cells()] == [*before]
    changed = {cell for cell, way in ways.items() if cell.way != way}
    assert changed
    assert {cell for cell in before if definitions_of(cell) != before[cell]} == changed


def test_a_sink_more_leaves_the_definitions_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(cells())
    before = definitions_of(cell)
    rows = tuple(replace(row, ways=tuple(replace(way, sinks=(*way.sinks, "more")) for way in row.ways)) for row in ROWS)
    monkeypatch.setattr(cells_module, "ROWS", rows)
    assert definitions_of(cell) == before


@pytest.mark.parametrize(
    ("file", "line", "other"),
    [
        ("cells.py", "FEED = 300", "FEED = 1"),
        ("cells.py", '"--checkpoint-timeout", "5s"', '"--checkpoint-timeout", "5h"'),
        ("oracles.py", "assert place > after,", "assert place != after,"),
        ("folds.py", "DISORDER_MS - 1", "DISORDER_MS"),
        ("plain_consumer.py", "read_committed", "read_uncommitted"),
    ],
)
def test_other_input_settings_and_judges_are_another_definition(
    file: str, line: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place,) = [place for place, of_rig in enumerate(definitions.FILES) if of_rig.name == file]
    source = definitions.FILES[place].read_text()
    assert line in source
    try:
        before = rig_digest()
        for text, is_same in ((source.replace(line, other), False), (f"# A comment.\n\n{source}", True)):
            (tmp_path / file).write_text(text)
            files = (*definitions.FILES[:place], tmp_path / file, *definitions.FILES[place + 1 :])
            with monkeypatch.context() as patch:
                patch.setattr(definitions, "FILES", files)
                rig_digest.cache_clear()
                assert (rig_digest() == before) is is_same
    finally:
        rig_digest.cache_clear()


def test_an_earlier_rig_that_did_the_same_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(cells())
    today, *_ = definitions_of(cell)
    monkeypatch.setattr(definitions, "SAME_RIGS", {"1234abcd": "a class has another name"})
    assert definitions_of(cell) == [today, today.split("-")[0] + "-1234abcd"]


def test_comments_docstrings_and_layout_are_no_code() -> None:
    source = "A = 1\n\ndef f(a):\n    return [a, None, 0]\n"
    same = '"""A."""\nA = 1\n"""One."""\ndef f(a):\n    """F."""\n    return [\n        a, None, 0,  # more\n    ]\n'
    assert code_of(source) == code_of(same)
    assert code_of(source) != code_of(source.replace("0", "1"))
