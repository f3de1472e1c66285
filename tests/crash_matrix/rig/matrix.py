"""A run of the matrix on real servers, which continues an interrupted one; `make crash-matrix`.

    python tests/campaign.py crash-matrix [--jobs 4] [--only 12/] [--minutes 60] [--since COMMIT] [--write]

Outcomes go into `.crash-matrix/COMMIT.jsonl` as they come, by the commit of the code under test; a file from elsewhere
may be put there. Cells run that have not passed, as they are defined today, on that commit, or since `--since`: one of
each row, then another of each. A cell that failed runs again, and stays failed. Ctrl-C or SIGTERM ends all processes,
and cells that run have no outcome. `--write` puts the evidence into tests/README.md, docs/guarantees.md and
docs/crash-matrix.json, from which other machines continue.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path

from cells import Cell, cells, try_cell
from ending import end_on_signals, no_process_left
from evidence import Evidence, Outcome, product_commit, product_commits_since, read_folder, read_json
from matrix_servers import opened
from report import definitions_of_today, lines, write
from row_tests import ROOT, TESTS, run_test

FOLDER = ROOT / ".crash-matrix"
SEED = 20
"""The seed of the order within a row."""


def outcome_of(name: str, definition: str, commit: str, work: Callable[[], int]) -> Outcome:
    began = time.monotonic()
    try:
        records, failure = work(), ""
    except Exception as error:  # whatever it is, the matrix goes on and shows it
        records, failure = 0, f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - began, 1)
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Outcome(
        name=name, passed=not failure, records=records, seconds=seconds, failure=failure, commit=commit, at=at,
        definition=definition,
    )  # fmt: skip


def each_row_first(wanted: Iterable[Cell]) -> list[Cell]:
    """One of each row, then another of each, so that an interrupted run has shown every row; the same each time."""
    by_row: dict[int, list[Cell]] = defaultdict(list)
    for cell in wanted:
        by_row[cell.row].append(cell)
    for row, of_row in by_row.items():
        random.Random(SEED + row).shuffle(of_row)
    return [cell for cell in chain.from_iterable(zip_longest(*by_row.values())) if cell is not None]


def main() -> int:
    """0 if all that was to be done has passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, help="cells at once (default: 4)")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="PREFIX", help="cells and tests whose name begins so"
    )
    parser.add_argument("--no-tests", action="store_true", help="cells alone, not the tests that show other rows")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long (0: nothing)")
    parser.add_argument("--since", metavar="COMMIT", help="what has passed on this commit, or a later one, is not run")
    parser.add_argument("--write", action="store_true", help="put the evidence into the documentation")
    options = parser.parse_args()
    commit = product_commit(ROOT)
    definitions = definitions_of_today()
    evidence = Evidence(chain(read_json(ROOT), read_folder(FOLDER)), definitions)
    counting = {commit} if options.since is None else product_commits_since(ROOT, options.since)
    deadline = time.monotonic() + options.minutes * 60

    def is_due(name: str) -> bool:
        verdict = evidence.verdict(name)
        return verdict is None or verdict.commit not in counting or not verdict.passed

    def outcome(name: str, work: Callable[[], int]) -> Outcome | None:
        return outcome_of(name, definitions[name][0], commit, work) if time.monotonic() < deadline else None

    wanted = [cell for cell in each_row_first(cells()) if cell.name.startswith(tuple(options.only))]
    tests = [] if options.no_tests else [test for test in TESTS if test.startswith(tuple(options.only))]
    names = [*(cell.name for cell in wanted), *tests]
    due = [cell for cell in wanted if is_due(cell.name)] if options.minutes else []
    end_on_signals()
    try:
        with no_process_left():
            try_cells(due, options.jobs, outcome, evidence)
            for test in filter(is_due, tests):
                tell(evidence, outcome(test, partial(run_test, test)), "a test")
    except KeyboardInterrupt:
        passed = sum(not is_due(name) for name in names)
        print(f"interrupted: {passed} of {len(names)} have passed; the same command goes on", flush=True)
        os._exit(1)  # the threads of cells wait for servers and processes that have ended
    print("\n".join(lines(evidence, ROOT)))
    if options.write:
        write(ROOT, evidence)
    return 0 if not any(map(is_due, names)) else 1


def try_cells(
    due: Sequence[Cell], jobs: int, outcome: Callable[[str, Callable[[], int]], Outcome | None], evidence: Evidence
) -> None:
    """Try the cells, *jobs* at once. An exception does not wait for those that have begun, which lose their servers."""
    if not due:
        return
    with (
        tempfile.TemporaryDirectory(prefix="crash-matrix-", ignore_cleanup_errors=True) as folder,  # they still write
        opened(Path(folder)) as servers,
    ):
        pool = ThreadPoolExecutor(jobs)
        try:
            begun = {pool.submit(outcome, cell.name, partial(try_cell, cell, servers)) for cell in due}
            for done, future in enumerate(as_completed(begun), 1):
                tell(evidence, future.result(), f"{done} of {len(due)}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def tell(evidence: Evidence, outcome: Outcome | None, progress: str) -> None:
    if outcome is None:  # it was too late to begin it
        return
    evidence.add(outcome)
    keep(outcome)
    verdict = evidence.verdict(outcome.name)
    text = verdict.text if verdict and outcome.passed else f"FAILED {outcome.failure[:300]}"
    print(f"{progress}: {outcome.name}: {text} ({outcome.seconds} s)", flush=True)


def keep(outcome: Outcome) -> None:
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{outcome.commit}.jsonl").open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")
