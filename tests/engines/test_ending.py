"""No process of a campaign is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ending import no_process_left
from waiting import until

STARTER = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
"""It starts a process, says its pid, and waits."""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("is_orphaned", [False, True])
def test_what_was_started_within_has_ended_with_all_that_it_has_started(is_orphaned: bool) -> None:
    """Though its parent has died before."""
    before = subprocess.Popen(["sleep", "600"])
    try:
        with no_process_left():
            starter = subprocess.Popen(
                [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert starter.stdout is not None
            started = int(starter.stdout.readline())
            if is_orphaned:
                starter.kill()
                starter.wait()
            assert is_alive(started)
        until(lambda: not is_alive(starter.pid) and not is_alive(started))
        assert is_alive(before.pid)
    finally:
        before.kill()
        before.wait()
        starter.communicate()
