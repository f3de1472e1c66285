"""A run of the matrix on real servers, which continues an interrupted one; `make crash-matrix`.

    python tests/crash_matrix/run.py [--jobs 4] [--only 12/] [--write]

Results go into `.crash-matrix/COMMIT.jsonl` as they come, by the commit that last changed what cells run. Failed cells
run again. `--write` puts them into tests/README.md and docs/crash-matrix.json, from which other machines continue.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from cells import cells, try_cell
from matrix_servers import opened
from report import documented, lines, written
from rows import ROWS

ROOT = Path(__file__).parents[3]
RUN_BY_CELLS = (
    *("checkpoint", "cli", "connectors", "engines", "pipeline", "sinks", "state", "testing"),
    "tests/crash_matrix/rig",
    *(f"tests/engines/{each}.py" for each in ("kafka_proxy", "running", "unreferenced", "waiting")),
)
"""The pipelines of cells."""

Result = dict[str, Any]


class Results:
    def __init__(self, file: Path, known: Iterable[Result]) -> None:
        self._file = file
        file.parent.mkdir(exist_ok=True)
        lines = file.read_text().splitlines() if file.exists() else []
        self.found: dict[str, Result] = {each["name"]: each for each in (*known, *map(json.loads, lines))}

    def passed(self, name: str) -> bool:
        return name in self.found and bool(self.found[name]["passed"])

    def add(self, result: Result) -> None:
        self.found[result["name"]] = result
        with self._file.open("a") as file:
            file.write(json.dumps(result) + "\n")


def result_of(name: str, work: Callable[[], int]) -> Result:
    began = time.monotonic()
    try:
        records, failure = work(), ""
    except Exception as error:  # whatever it is, the matrix goes on and shows it
        records, failure = 0, f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - began, 1)
    return {"name": name, "passed": not failure, "records": records, "seconds": seconds, "failure": failure}


def run_test(test: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "--show-capture=no", "--matrix", test]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:]
    return 0


def commit() -> str:
    """The last commit that changed what cells run, with "-dirty" if such files have changed since."""
    last, changed = _git("log", "-1", "--format=%h"), _git("status", "--porcelain")
    return (last or "unknown") + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    told = subprocess.run(["git", *arguments, "--", *RUN_BY_CELLS], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip()


def main() -> int:
    """0 if all that was to be done has passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, help="cells at once (default: 4)")
    parser.add_argument("--only", default="", metavar="PREFIX", help="cells and tests whose name begins so")
    parser.add_argument("--no-tests", action="store_true", help="cells alone, not the tests that show other rows")
    parser.add_argument("--write", action="store_true", help="put the result into the documentation")
    options = parser.parse_args()
    if options.write and commit().endswith("dirty"):
        parser.error("what --write documents is of a commit: commit what was changed, and run it again")
    results = Results(ROOT / ".crash-matrix" / f"{commit()}.jsonl", written(ROOT, commit()))
    wanted = [cell for cell in cells() if cell.name.startswith(options.only)]
    tests = sorted({test for row in ROWS for test in row.tests if test.startswith(options.only)})
    tests = [] if options.no_tests else tests
    due = [cell for cell in wanted if not results.passed(cell.name)]
    with (
        tempfile.TemporaryDirectory(prefix="crash-matrix-") as folder,
        opened(Path(folder)) as servers,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        begun = {pool.submit(result_of, cell.name, partial(try_cell, cell, servers)) for cell in due}
        for done, future in enumerate(as_completed(begun), 1):
            tell(results, future.result(), f"{done} of {len(due)}")
    for test in tests:
        if not results.passed(test):
            tell(results, result_of(test, partial(run_test, test)), "a test")
    print("\n".join(lines(results.found)))
    if options.write:
        documented(ROOT, results.found, commit())
    names = [*(cell.name for cell in wanted), *tests]
    return 0 if all(results.passed(name) for name in names) else 1


def tell(results: Results, result: Result, progress: str) -> None:
    results.add(result)
    verdict = "passed" if result["passed"] else f"FAILED {result['failure'][:300]}"
    print(f"{progress}: {result['name']}: {verdict} ({result['seconds']} s)", flush=True)
