"""Drivers of Spark in processes of their own, which tests kill with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from ending import kill_marked, marked
from waiting import until

from exactlyonce.testing.cluster import LIMIT_S

HERE = Path(__file__).parent


class Driver:
    """A Python program with all its processes: Python, JVM, and the JVM's Python workers."""

    def __init__(self, folder: Path, armed: str, *command: str, cwd: Path = HERE) -> None:
        """*armed*: failpoints, and what happens there; what was met is noted in *folder*."""
        self.fired = folder / "fired"
        self.fired.mkdir(exist_ok=True)
        self.mark = f"EXACTLYONCE_FAILPOINTS_FIRED={self.fired}"
        environment = {**os.environ, "EXACTLYONCE_FAILPOINTS": armed, **dict([self.mark.split("=", 1)])}
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        line = [sys.executable, *command]
        with self.stdout.open("w") as out, self.stderr.open("w") as err:
            self.process = subprocess.Popen(line, cwd=cwd, env=environment, stdout=out, stderr=err)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def said(self) -> str:
        return self.stdout.read_text() + self.stderr.read_text()

    def end(self, code: int = 0) -> None:
        assert self.process.wait(LIMIT_S) == code, self.said()

    def await_fired(self, name: str) -> None:
        def goes_on() -> None:
            assert self.process.poll() is None, self.said()

        until((self.fired / name).exists, meanwhile=goes_on, told=self.said, pause_s=0.05)

    def kill(self) -> None:
        kill_marked(self.mark)
        self.process.wait(LIMIT_S)

    def kill_java(self) -> None:
        (java,) = [each for each in marked(self.mark) if Path(f"/proc/{each}/comm").read_text().strip() == "java"]
        os.kill(java, signal.SIGKILL)

    def kill_executor_of_stopped(self) -> None:
        """Kill the executor whose Python process a failpoint has stopped, of a cluster with processes of its own."""
        stopped: list[int] = []

        def seen() -> bool:
            stopped[:] = [process for process in marked(self.mark) if _status(process)[0] == "T"]
            return bool(stopped)

        until(seen, told=self.said, pause_s=0.05)
        _, daemon = _status(stopped[0])
        _, executor = _status(daemon)
        assert "CoarseGrainedExecutorBackend" in Path(f"/proc/{executor}/cmdline").read_text()
        os.kill(executor, signal.SIGKILL)

    def await_all_ended(self) -> None:
        until(lambda: not list(marked(self.mark)), pause_s=0.1)


def _status(process: int) -> tuple[str, int]:
    """State and parent of a process."""
    state, parent, *_ = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return state, int(parent)
