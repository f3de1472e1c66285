"""The report of a run of the matrix, as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cells import cells
from rows import PROMISES, ROWS

BEGIN, END = "<!-- crash matrix: begin -->", "<!-- crash matrix: end -->"
PAGE, JSON = "tests/README.md", "docs/crash-matrix.json"

Results = Mapping[str, Mapping[str, Any]]


def lines(results: Results) -> Iterator[str]:
    yield "| promise | cells passed | records verified |"
    yield "| --- | --- | --- |"
    for promise in PROMISES:
        asked = [cell for cell in cells() if cell.sinks in promise.sinks]
        names = [cell.name for cell in asked if not promise.rows or cell.row in promise.rows]
        yield f"| {promise.text} | {' | '.join(_counts(results, names))} |"
    yield ""
    by_row: dict[int, list[str]] = {}
    for cell in cells():
        by_row.setdefault(cell.row, []).append(cell.name)
    yield "| # | crash or fault | what comes of it | cells passed | records verified | tests |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in ROWS:
        names = by_row.get(row.number, [])
        shown = ", ".join(f"`{each}`{_mark(results, each)}" for each in row.tests)
        counts = _counts(results, names) if names else ("", "")
        yield f"| {row.number} | {row.fault} | {row.required} | {' | '.join(counts)} | {shown} |"
    passed, records = _counts(results, [name for names in by_row.values() for name in names])
    yield ""
    yield f"{passed} cells passed; {records} records verified in these."
    yield "One that is missing, or doubled, fails its cell."


def _counts(results: Results, names: list[str]) -> tuple[str, str]:
    passed = [results[name]["records"] for name in names if name in results and results[name]["passed"]]
    return f"{len(passed):,} of {len(names):,}", f"{sum(passed):,}"


def _mark(results: Results, test: str) -> str:
    if test not in results:
        return " (not run)"
    return "" if results[test]["passed"] else " (**failed**)"


def written(root: Path, commit: str) -> list[dict[str, Any]]:
    file = root / JSON
    told: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return list(told["results"]) if told.get("commit") == commit else []


def documented(root: Path, results: Results, commit: str) -> None:
    page = root / PAGE
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([f"{before}{BEGIN}", *lines(results), f"{END}{after}"]))
    told = {"commit": commit, "results": [results[name] for name in sorted(results)]}
    (root / JSON).write_text(json.dumps(told, indent=1) + "\n")
