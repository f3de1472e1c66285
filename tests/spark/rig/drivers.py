"""Drivers of Spark in processes of their own, which tests kill with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from exactlyonce.testing.cluster import LIMIT_S

HERE = Path(__file__).parent


class Driver:
    """A job of this folder with all its processes: Python, JVM, and the JVM's Python workers."""

    def __init__(self, folder: Path, armed: str, script: str, *arguments: str) -> None:
        """*armed*: failpoints, and what happens there; what was met is noted in *folder*."""
        self.fired = folder / "fired"
        self.fired.mkdir(exist_ok=True)
        self.mark = f"EXACTLYONCE_FAILPOINTS_FIRED={self.fired}"
        command = [sys.executable, script, *arguments]
        environment = {**os.environ, "EXACTLYONCE_FAILPOINTS": armed, **dict([self.mark.split("=", 1)])}
        self.output = (folder / "said").open("a+")
        self.process = subprocess.Popen(command, cwd=HERE, env=environment, stdout=self.output, stderr=self.output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def end(self, code: int = 0) -> None:
        """It ends by itself."""
        assert self.process.wait(LIMIT_S) == code, self.said()

    def kill_at(self, name: str) -> None:
        """SIGKILL for all its processes once one of them stands at the failpoint."""
        deadline = time.monotonic() + LIMIT_S
        while not (self.fired / name).exists():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)  # a file of another process has no event to wait for
        self.kill()

    def kill(self) -> None:
        while processes := list(self._processes()):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)  # those of others have no event to wait for
        self.process.wait(LIMIT_S)

    def _processes(self) -> Iterator[int]:
        """All that have our environment."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if self.mark.encode() in environment.split(b"\0"):
                yield int(folder.name)
