"""Soaks: seeds are counted by commit, and one that was broken off goes on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from simulate import ANY, Outcome
from soak import BEGIN, CHUNK, END, FIRST, JSON, Soaks, seeds_of


def test_a_soak_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    page = tmp_path / "guarantees.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nbehind\n")
    clean, broken = Outcome(Counter(), [], 1.0), Outcome(Counter(), ["trace\nseed 7: broke\n  replay: make"], 1.0)
    Soaks(tmp_path, "aaa").add(clean)
    Soaks(tmp_path, "aaa").add(broken)
    Soaks(tmp_path, "bbb").add(clean)
    assert Soaks(tmp_path, "bbb").current["chunks"] == 1
    told = json.loads((tmp_path / JSON).read_text())
    assert [(each["commit"], each["chunks"], each["broke"]) for each in told] == [
        ("aaa", 2, ["replay: make"]),
        ("bbb", 1, []),
    ]
    before, *rows, last = page.read_text().splitlines()
    assert (before, last) == ("before", "behind")
    assert rows[3:5] == [f"| aaa | {CHUNK} | {CHUNK} | 1 |", f"| bbb | {CHUNK} | 0 | 0 |"]


def test_chunks_share_no_history() -> None:
    lived = [(seed, luck) for chunk in range(20) for seeds, luck in [seeds_of(chunk)] for seed in seeds]
    assert len(set(lived)) == len(lived) == 20 * CHUNK
    assert {luck for _, luck in lived} == {None, ANY}
    assert min(seed for seed, _ in lived) == FIRST
