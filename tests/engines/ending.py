"""The end of a campaign, and of all processes that it has started."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def end_on_signals() -> None:
    """Have SIGTERM raise KeyboardInterrupt, and SIGINT, too, which a shell's background job ignores."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


@contextmanager
def no_process_left() -> Iterator[None]:
    """Kill in the end what was started within, by any thread, and all that this has started."""
    variable = f"STARTED_WITHIN_{uuid.uuid4().hex}"
    os.environ[variable] = "1"
    try:
        yield
    finally:
        del os.environ[variable]
        kill_marked(f"{variable}=1")


def marked(mark: str) -> Iterator[int]:
    """Processes that were started with the variable *mark*, "NAME=VALUE": they have passed it on to theirs."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environment.split(b"\0"):
            yield int(folder.name)


def kill_marked(mark: str) -> None:
    """Returns once none is left."""
    while processes := [*marked(mark)]:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)  # the ends of others' processes have no event to wait for
