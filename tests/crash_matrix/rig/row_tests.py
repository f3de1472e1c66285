"""The tests that show rows, and the run of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rows import ROWS

ROOT = Path(__file__).parents[3]
TESTS = sorted({test for row in ROWS for test in row.tests})


def run_test(test: str, root: Path = ROOT) -> int:
    """Run all of *test*, in *root*: what is skipped, or may fail, shows nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-rsx", "--tb=line", "--show-capture=no", "--matrix", test]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:]
    not_run = [line for line in ended.stdout.splitlines() if line.startswith(("SKIPPED", "XFAIL"))]
    assert not not_run, "\n".join(not_run)
    return 0
