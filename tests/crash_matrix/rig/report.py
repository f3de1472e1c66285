"""The report of a run of the matrix, as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cells import cells
from rows import ROWS

BEGIN, END = "<!-- crash matrix: begin -->", "<!-- crash matrix: end -->"

Results = Mapping[str, Mapping[str, Any]]


def lines(results: Results) -> Iterator[str]:
    """A table with a line for each row, and its sum."""
    by_row: dict[int, list[str]] = {}
    for cell in cells():
        by_row.setdefault(cell.row, []).append(cell.name)
    yield "| # | crash or fault | what comes of it | cells passed | records verified | tests |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in ROWS:
        names = by_row.get(row.number, [])
        passed = [name for name in names if name in results and results[name]["passed"]]
        records = sum(results[name]["records"] for name in passed)
        shown = ", ".join(f"`{each}`{_mark(results, each)}" for each in row.tests)
        counts = (f"{len(passed)} of {len(names)}", f"{records:,}") if names else ("", "")
        yield f"| {row.number} | {row.fault} | {row.required} | {' | '.join(counts)} | {shown} |"
    total = [name for names in by_row.values() for name in names]
    passed = [name for name in total if name in results and results[name]["passed"]]
    records = sum(results[name]["records"] for name in passed)
    yield ""
    yield f"{len(passed)} of {len(total)} cells passed; {records:,} records verified in these."
    yield "One that is missing, or doubled, fails its cell."


def _mark(results: Results, test: str) -> str:
    if test not in results:
        return " (not run)"
    return "" if results[test]["passed"] else " (**failed**)"


def documented(docs: Path, results: Results, commit: str) -> None:
    """Put it into the page of guarantees, and all results beside it."""
    page = docs / "guarantees.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([f"{before}{BEGIN}", *lines(results), f"{END}{after}"]))
    told = {"commit": commit, "results": [results[name] for name in sorted(results)]}
    (docs / "crash-matrix.json").write_text(json.dumps(told, indent=1) + "\n")
