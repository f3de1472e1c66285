"""The same tests many times, side by side and beside a load: which of them fail by chance?

    make flaky ARGS="tests/engines/test_loops.py --times 20"         # two at a time, beside four busy processes
    make flaky ARGS="--times 5 --jobs 1 --load 8 -- -n 4 --dist loadfile --sample"       # all tests; options of pytest

Exits with 1 if any run failed. The output of each failed run is kept in a folder, which the last line names.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))\n"


def one_run(number: int, arguments: list[str], folder: Path) -> Path | None:
    """The file of the output, if the run failed."""
    log = folder / f"run-{number}.log"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
    print(f"run {number}: {_last_line(log)}", flush=True)
    if status:
        return log
    log.unlink()
    return None


def failed_tests(output: str) -> set[str]:
    """The tests that pytest's closing lines name; one may have failed, and its fixtures' end as well."""
    summary = output.rpartition("= short test summary info =")[2]
    return set(re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", summary, re.MULTILINE))


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else "no output"


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], prog="flaky.py")
    parser.add_argument("tests", nargs="*", help="files or tests, as pytest takes them; all where there are none")
    parser.add_argument("--times", type=int, default=20, help="how many runs")
    parser.add_argument("--jobs", type=int, default=2, help="how many runs at a time")
    parser.add_argument("--load", type=int, default=4, help="how many busy processes beside them")
    options = parser.parse_args(arguments[:end])
    folder = Path(tempfile.mkdtemp(prefix="flaky-"))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(options.load)]
    executor = ThreadPoolExecutor(options.jobs)
    try:
        tests = [*options.tests, *arguments[end + 1 :]]
        runs = [executor.submit(one_run, number, tests, folder) for number in range(1, options.times + 1)]
        failed = [log for run in as_completed(runs) if (log := run.result())]
    finally:
        executor.shutdown(cancel_futures=True)  # Ctrl-C ends the runs that have begun, and no other begins
        for process in busy:
            process.kill()
            process.wait()
    tests_failed = Counter(test for log in failed for test in failed_tests(log.read_text(errors="replace")))
    for test, count in tests_failed.most_common():
        print(f"{count} of {options.times} runs: {test}")
    print(f"{len(failed)} of {options.times} runs failed" + (f"; their output is in {folder}" if failed else ""))
    if not failed:
        folder.rmdir()
    return bool(failed)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
