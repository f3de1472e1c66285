"""A process of this machine that is no more is known to be dead; of any other nobody here knows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from exactlyonce.checkpoint.records.manifest import Incarnation
from exactlyonce.engines import processes
from exactlyonce.engines.processes import is_known_dead, machine


def led_by(process: int, machine: str, host: str = "") -> Incarnation:
    return Incarnation(
        incarnation=1,
        host=host or socket.gethostname(),
        process=process,
        started_at_ms=0,
        heartbeat_ms=0,
        machine=machine,
    )


@pytest.fixture(scope="module")
def ended() -> int:
    """The id of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_process_that_has_ended(ended: int) -> None:
    assert is_known_dead(led_by(ended, machine()))
    assert not is_known_dead(led_by(os.getppid(), machine()))
    assert is_known_dead(led_by(os.getpid(), machine())), "it begins anew, in this process"


def test_a_machine_of_the_same_name(ended: int) -> None:
    """Two containers on one host may share a name, and count their processes by themselves."""
    for other in ("", "another boot, another namespace"):
        assert not is_known_dead(led_by(ended, other))
        assert not is_known_dead(led_by(os.getpid(), other))
    assert not is_known_dead(led_by(ended, machine(), host="a copy of this machine"))


def test_where_a_machine_has_no_such_names(ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_BOOT_ID", tmp_path / "none")
    assert machine() == socket.gethostname()
    assert is_known_dead(led_by(ended, machine()))
