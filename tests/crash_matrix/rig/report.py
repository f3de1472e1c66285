"""The report of the evidence, as Markdown, in tests/README.md and docs/guarantees.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cells import cells
from evidence import Evidence, version_at, write_json
from rows import PROMISES, ROWS

BEGIN, END = "<!-- crash matrix: begin -->", "<!-- crash matrix: end -->"
PAGE, PROMISED = Path("tests/README.md"), Path("docs/guarantees.md")
CELLS = [cell.name for cell in cells()]
TESTS = sorted({test for row in ROWS for test in row.tests})


def lines(evidence: Evidence, root: Path) -> Iterator[str]:
    yield "| promise | cells passed | records verified |"
    yield "| --- | --- | --- |"
    for promise in PROMISES:
        asked = [cell for cell in cells() if cell.sinks in promise.sinks]
        names = [cell.name for cell in asked if not promise.rows or cell.row in promise.rows]
        yield f"| {promise.text} | {' | '.join(_counts(evidence, names))} |"
    yield ""
    by_row: dict[int, list[str]] = {}
    for cell in cells():
        by_row.setdefault(cell.row, []).append(cell.name)
    yield "| # | crash or fault | what comes of it | cells passed | records verified | tests |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in ROWS:
        names = by_row.get(row.number, [])
        shown = ", ".join(f"`{each}`{_mark(evidence, each)}" for each in row.tests)
        counts = _counts(evidence, names) if names else ("", "")
        yield f"| {row.number} | {row.fault} | {row.required} | {' | '.join(counts)} | {shown} |"
    yield ""
    yield verdict_of_the_whole(evidence, root)
    for name, verdict in evidence.verdicts(CELLS).items():
        if verdict.failures:
            yield f"- `{name}` on `{verdict.commit}`: {verdict.text}"


def verdict_of_the_whole(evidence: Evidence, root: Path) -> str:
    """`1,800 of 1,809 cells passed: 1,700 on commit X of DATE, version V, and 100 on older commits.`"""
    passed, records = _counts(evidence, CELLS)
    newest = evidence.newest(CELLS)
    if newest is None:
        return f"{passed} cells passed."
    verdicts = [verdict for verdict in evidence.verdicts(CELLS).values() if verdict.passed]
    older = sum(verdict.commit != newest.commit for verdict in verdicts)
    version = version_at(root, newest.commit)
    on_newest = f"{len(verdicts) - older:,} on commit `{newest.commit}`, {newest.at[:10]}, version {version}"
    return f"{passed} cells passed: {on_newest}, and {older:,} on older commits. {records} records verified."


def _counts(evidence: Evidence, names: list[str]) -> tuple[str, str]:
    passed = [verdict.records for verdict in evidence.verdicts(names).values() if verdict.passed]
    return f"{len(passed):,} of {len(names):,}", f"{sum(passed):,}"


def _mark(evidence: Evidence, test: str) -> str:
    verdict = evidence.verdict(test)
    if verdict is None:
        return " (not run)"
    return "" if verdict.passed else f" (**{verdict.text}**)"


def write(root: Path, evidence: Evidence) -> None:
    """Put the evidence into docs/crash-matrix.json, and what it says into both pages."""
    write_json(root, evidence, CELLS, TESTS)
    for page, shown in ((PAGE, lines(evidence, root)), (PROMISED, iter([verdict_of_the_whole(evidence, root)]))):
        file = root / page
        before, _, rest = file.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        file.write_text("\n".join([f"{before}{BEGIN}", *shown, f"{END}{after}"]))


def told_in(page: str) -> list[str]:
    """The lines of a *page* between the marks."""
    return page.partition(BEGIN)[2].partition(END)[0].strip("\n").split("\n")
