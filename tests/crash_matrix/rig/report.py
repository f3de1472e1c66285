"""The report of the evidence, as Markdown, in tests/README.md and docs/guarantees.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from cells import cells
from definitions import definition_of_tests, definitions_of
from evidence import Evidence, Verdict, version_at, write_json
from row_tests import TESTS
from rows import PROMISES, ROWS

BEGIN, END = "<!-- crash matrix: begin -->", "<!-- crash matrix: end -->"
PAGE, PROMISED = Path("tests/README.md"), Path("docs/guarantees.md")
CELLS = [cell.name for cell in cells()]
SUBJECTS = {
    "windows, sessions, joins and timers": (50, 51), "tables of Iceberg and Delta": (52,),
    "runs from a savepoint": (53,), "standbys": (54,), "backfills": (55,), "Spark's streaming sink": (56,),
}  # fmt: skip
"""Those of the rows with pipelines of their own."""


def definitions_of_today() -> dict[str, list[str]]:
    """The definitions that count, by the name of each cell and test."""
    of_cells = {cell.name: definitions_of(cell) for cell in cells()}
    return of_cells | {test: [definition_of_tests()] for test in TESTS}


def lines(evidence: Evidence, root: Path) -> Iterator[str]:
    yield "| promise | cells passed | passed before | records verified |"
    yield "| --- | --- | --- | --- |"
    for promise in PROMISES:
        asked = [cell for cell in cells() if cell.sinks in promise.sinks]
        names = [cell.name for cell in asked if not promise.rows or cell.row in promise.rows]
        part = f" (in cells: {promise.of_cells})" if promise.of_cells else ""
        yield f"| {promise.text}{part} | {' | '.join(_counts(evidence, names))} |"
    yield ""
    by_row: dict[int, list[str]] = {}
    for cell in cells():
        by_row.setdefault(cell.row, []).append(cell.name)
    yield "| # | crash or fault | what comes of it | cells passed | passed before | records verified | tests |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in ROWS:
        names = by_row.get(row.number, [])
        shown = ", ".join(f"`{each}`{_mark(evidence, each)}" for each in row.tests)
        counts = _counts(evidence, names) if names else ("", "", "")
        yield f"| {row.number} | {row.fault} | {row.required} | {' | '.join(counts)} | {shown} |"
    yield ""
    yield verdict_of_the_whole(evidence, root)
    for name, verdict in evidence.verdicts(CELLS).items():
        if verdict.failures:
            yield f"- `{name}` on `{verdict.commit}`: {verdict.text}"


def verdict_of_the_whole(evidence: Evidence, root: Path) -> str:
    """`1,800 of 2,086 cells have passed as they are defined today: 1,700 on ... The newest outcome is of commit X`."""
    passed, _, records = _counts(evidence, CELLS)
    newest = evidence.newest(CELLS)
    if newest is None:
        return f"{passed} cells have passed."
    verdicts = evidence.verdicts(CELLS).values()
    today = [verdict for verdict in verdicts if verdict.passed]
    before = [verdict for verdict in verdicts if verdict.passed_before]
    version = version_at(root, newest.commit)
    failed = len(verdicts) - len(today) - len(before)
    return (
        f"{passed} cells have passed as they are defined today{_by_commit(today)}. {len(before):,} others have passed "
        f"as they were defined before{_by_commit(before)}. {failed:,} have failed, and {len(CELLS) - len(verdicts):,} "
        f"were never run. The newest outcome is of commit `{newest.commit}`, {newest.at[:10]}, version {version}. "
        f"{records} records verified."
    )


def short_lines(evidence: Evidence, root: Path) -> Iterator[str]:
    yield verdict_of_the_whole(evidence, root)
    for subject, rows in SUBJECTS.items():
        passed, before, _ = _counts(evidence, [cell.name for cell in cells() if cell.row in rows])
        yield f"- {subject}: {passed} as they are defined today, {before} as they were defined before"


def _by_commit(verdicts: Iterable[Verdict]) -> str:
    """How many are of each commit, the newest first."""

    def commit(verdict: Verdict) -> str:
        return verdict.commit

    by_commit = [(name, [*group]) for name, group in groupby(sorted(verdicts, key=commit), key=commit)]
    by_commit.sort(key=lambda item: max(verdict.outcomes[-1].at for verdict in item[1]), reverse=True)
    texts = [f"{len(group):,} on `{name}`" for name, group in by_commit]
    return f": {', '.join(texts)}" if texts else ""


def _counts(evidence: Evidence, names: list[str]) -> tuple[str, str, str]:
    """How many of the *names* passed as they are defined today, or before alone, and the records verified today."""
    verdicts = evidence.verdicts(names).values()
    passed = [verdict.records for verdict in verdicts if verdict.passed]
    before = sum(verdict.passed_before for verdict in verdicts)
    return f"{len(passed):,} of {len(names):,}", f"{before:,}", f"{sum(passed):,}"


def _mark(evidence: Evidence, test: str) -> str:
    verdict = evidence.verdict(test)
    if verdict is None:
        return " (not run)"
    if verdict.passed_before:
        return " (by an earlier rule)"
    return "" if verdict.passed else f" (**{verdict.text}**)"


def write(root: Path, evidence: Evidence) -> None:
    """Put the evidence into docs/crash-matrix.json, and what it says into both pages."""
    write_json(root, evidence, CELLS, TESTS)
    for page, shown in ((PAGE, lines(evidence, root)), (PROMISED, short_lines(evidence, root))):
        file = root / page
        before, _, rest = file.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        file.write_text("\n".join([f"{before}{BEGIN}", *shown, f"{END}{after}"]))


def told_in(page: str) -> list[str]:
    """The lines of a *page* between the marks."""
    return page.partition(BEGIN)[2].partition(END)[0].strip("\n").split("\n")
