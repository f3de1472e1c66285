"""A folder of a command's own, below one that many share: for what it stages, and worthless once it has ended.

Invariants: a folder goes with the command that made it; where that was killed, the next command that comes by removes
it; never that of a command which still runs. A command holds a lock on the file `owner` of its folder, which ends with
its process, and beats there. Another command's folder is a leftover when its lock can be taken, and, if it was made on
another machine, whose locks may not be seen here, when it has not beaten for long.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

THIS_MACHINE = Path(tempfile.gettempdir(), f"exactlyonce-{os.getuid()}")
"""Of this user's commands, where no other machine takes part."""
OWNER = "owner"
BEAT_S = 10.0
SILENCE_S = 600.0
"""Of a command on another machine: it is dead then, or was stopped, and finds its files gone when it goes on."""


@contextmanager
def workplace(shared: Path, prefix: str) -> Iterator[Path]:
    """A fresh folder below *shared*, from which leftovers are removed first; it is gone at the end of the block."""
    shared.mkdir(parents=True, exist_ok=True)
    remove_leftovers(shared)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}.", dir=shared))
    ended = threading.Event()
    with (folder / OWNER).open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        owner.write(socket.gethostname())
        owner.flush()
        beating = threading.Thread(target=_beat, args=(folder / OWNER, ended), name="workplace", daemon=True)
        beating.start()
        try:
            yield folder
        finally:
            ended.set()
            beating.join()
            shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(shared: Path) -> None:
    """Remove the folders in *shared* whose commands have ended."""
    for owner in shared.glob(f"*/{OWNER}"):
        try:
            if _is_leftover(owner):
                shutil.rmtree(owner.parent, ignore_errors=True)
        except OSError:  # it has gone meanwhile, or is another user's
            continue


def _is_leftover(owner: Path) -> bool:
    with owner.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        host = file.read()
    if host == socket.gethostname():
        return True
    with tempfile.TemporaryFile(dir=owner.parent.parent) as now:  # by the clock of the folder's own machine
        return os.fstat(now.fileno()).st_mtime - owner.stat().st_mtime > SILENCE_S


def _beat(owner: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        try:
            os.utime(owner)
        except FileNotFoundError:
            return
