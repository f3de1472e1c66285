"""Evidence of the crash matrix: of which commit and definition it is, what a failure counts, and what the docs say."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import evidence as module
import matrix
import pytest
from cells import Cell, cells
from evidence import (
    JSON,
    RELEASES_BEHIND_MAX,
    Evidence,
    Outcome,
    read_folder,
    read_json,
    read_whole,
    releases_behind,
    version_in,
    write_json,
)
from matrix import each_row_first, outcome_of, try_cells
from report import PAGE, PROMISED, definitions_of_today, lines, short_lines, told_in
from rows import ROWS

ROOT = Path(__file__).parents[2]
TODAY = {name: ["today", "renamed"] for name in ("1/a", "2/b", "3/never", "tests/c.py")}


def outcome(
    name: str = "1/a", *, passed: bool = True, commit: str = "aaaa", at: int = 1, definition: str = "today"
) -> Outcome:
    failure = "" if passed else "AssertionError: missing"
    return Outcome(
        name=name, passed=passed, records=7, seconds=1.0, failure=failure, commit=commit, at=f"2026-01-0{at}T00:00:00",
        definition=definition,
    )  # fmt: skip


def test_a_failure_stays_one_on_its_commit_whatever_a_second_run_says() -> None:
    evidence = Evidence([outcome(passed=False), outcome(at=2)], TODAY)
    verdict = evidence.verdict("1/a")
    assert verdict is not None
    assert not verdict.passed
    assert verdict.text == "failed before, then passed: AssertionError: missing"
    evidence.add(outcome(commit="bbbb", at=3))
    assert evidence.passed("1/a")


def test_a_failure_that_is_explained_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPLAINED", {("1/a", "aaaa"): "its reader ended early"})
    evidence = Evidence([outcome(passed=False), outcome(at=2)], TODAY)
    assert evidence.passed("1/a")
    assert not Evidence([outcome(passed=False)], TODAY).passed("1/a")  # it has to pass once
    evidence.add(outcome(passed=False, commit="bbbb", at=3))
    assert not evidence.passed("1/a")  # that was another commit


def test_an_outcome_of_files_that_were_not_committed_does_not_count() -> None:
    assert Evidence([outcome(commit="aaaa-dirty")], TODAY).verdict("1/a") is None


def test_an_outcome_of_another_definition_is_told_and_does_not_count() -> None:
    evidence = Evidence([outcome(definition="weaker"), outcome("2/b", definition="renamed")], TODAY)
    assert not evidence.passed("1/a")
    verdict = evidence.verdict("1/a")
    assert verdict is not None
    assert (verdict.passed_before, verdict.text) == (True, "passed as it was defined before")
    assert evidence.passed("2/b")
    evidence.add(outcome(at=2))
    assert evidence.passed("1/a")


def test_a_failure_stays_one_on_its_commit_whatever_the_definition() -> None:
    assert not Evidence([outcome(passed=False, definition="other"), outcome(at=2)], TODAY).passed("1/a")


def test_outcomes_of_another_machine_are_taken_by_their_file(tmp_path: Path) -> None:
    short = {"name": "1/a", "passed": True, "records": 7, "seconds": 1.0, "failure": ""}
    (tmp_path / "cccc.jsonl").write_text(json.dumps(short) + "\n")
    os.utime(tmp_path / "cccc.jsonl", (86400, 86400))
    (found,) = read_folder(tmp_path)
    assert (found.commit, found.at) == ("cccc", "1970-01-02T00:00:00+00:00")


def test_what_is_written_is_read_again_with_each_failure(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "pyproject.toml").write_text('version = "0.3.1"\n')
    all_outcomes = [outcome(passed=False), outcome(at=2), outcome("2/b", commit="bbbb", at=3), outcome("tests/c.py")]
    write_json(tmp_path, Evidence(all_outcomes, TODAY), ["1/a", "2/b", "3/never"], ["tests/c.py"])
    assert set(read_json(tmp_path)) == set(all_outcomes)
    whole = read_whole(tmp_path)
    del whole["outcomes"]
    assert whole == {
        "commit": "bbbb", "date": "2026-01-03", "version": "0.3.1",
        "cells": 3, "passed": 1, "passed_on_older_commits": 0, "passed_as_defined_before": 0,
    }  # fmt: skip


def test_an_interrupted_run_has_met_every_row() -> None:
    in_order = each_row_first(cells())
    rows = {row.number for row in ROWS if row.ways}
    assert {cell.row for cell in in_order[: len(rows)]} == rows
    assert sorted(cell.name for cell in in_order) == sorted(cell.name for cell in cells())
    assert in_order == each_row_first(cells())


def test_an_interrupted_run_waits_for_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for one that has begun, nor for one that is to come."""
    begun: list[str] = []
    is_over = Event()

    def try_cell(cell: Cell, servers: Any) -> int:
        begun.append(cell.name)
        if cell is not first:
            is_over.wait()
        return 1

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(matrix, "opened", nullcontext)
    monkeypatch.setattr(matrix, "try_cell", try_cell)
    monkeypatch.setattr(matrix, "tell", interrupt)
    first, *others = islice(cells(), 20)
    jobs = 2
    try:
        with pytest.raises(KeyboardInterrupt):
            try_cells([first, *others], jobs, lambda name, work: outcome_of(name, "", "aaaa", work), Evidence([], {}))
    finally:
        is_over.set()
    assert len(begun) <= 1 + jobs


def test_code_under_test_is_at_most_a_release_ahead_of_the_evidence() -> None:
    """Otherwise: make crash-matrix, then make crash-matrix ARGS=--write."""
    version = read_whole(ROOT)["version"]
    now = version_in((ROOT / "pyproject.toml").read_text())
    assert releases_behind(ROOT, version) - releases_behind(ROOT, now) <= RELEASES_BEHIND_MAX


def test_releases_are_counted_by_the_changelog(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.0.0 (unreleased)\n\n## 0.2.1\n\n## 0.2.0\n\n## 0.1.0\n")
    assert [releases_behind(tmp_path, version) for version in ("1.0.0", "0.2.0", "0.1.7")] == [0, 1, 2]


def test_pages_say_what_the_evidence_says() -> None:
    """Otherwise: make crash-matrix ARGS="--minutes 0 --write"."""
    evidence = Evidence(read_json(ROOT), definitions_of_today())
    assert told_in((ROOT / PROMISED).read_text()) == [*short_lines(evidence, ROOT)]
    assert told_in((ROOT / PAGE).read_text()) == [*lines(evidence, ROOT)]
    whole = read_whole(ROOT)
    assert whole["cells"] == len([*cells()])
    told = (ROOT / PROMISED).read_text()
    assert f"commit `{whole['commit']}`, {whole['date']}, version {whole['version']}" in told, JSON
