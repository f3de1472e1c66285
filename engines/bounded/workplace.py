"""A command's own folder for staged files, below a shared one; worthless once the command has ended.

Invariants: a command removes its folder, and those of killed commands, but never that of a running one. Removed folders
have our name and an owner file with the magic text. A running command holds a lock on its owner file and touches it. A
folder is a leftover if its lock is free. Locks of another machine, or of a file system without locks, cannot be seen:
there it must also have been silent for long.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

THIS_MACHINE = Path(tempfile.gettempdir(), f"exactlyonce-{os.getuid()}")
"""The shared folder of this user's commands on one machine."""
PREFIX = "exactlyonce-"
OWNER = ".exactlyonce-owner"
MAGIC = b"a folder of exactlyonce, removed once its command has ended"
"""The owner file's first line; the second is the host whose processes see its lock, empty without locks."""
BEAT_S = 10.0
SILENCE_S = 600.0
"""A command whose lock cannot be seen counts as dead after so long; a paused one finds its files gone."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_OWNER_BYTES = 1024


@contextmanager
def workplace(shared: Path, prefix: str) -> Iterator[Path]:
    """A fresh folder below *shared*, removed at the end of the block. Leftovers in *shared* are removed first."""
    shared.mkdir(parents=True, exist_ok=True)
    remove_leftovers(shared)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{prefix}.", dir=shared))
    ended = threading.Event()
    with (folder / OWNER).open("wb") as owner:
        host = socket.gethostname() if _lock(owner.fileno(), fcntl.LOCK_EX) else ""
        owner.write(MAGIC + b"\n" + host.encode())  # after the lock: an owner file without the text is nobody's
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
    """Remove the folders of commands that have ended from *shared*; links are not followed."""
    with os.scandir(shared) as entries:
        folders = [
            Path(entry) for entry in entries if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False)
        ]
    for folder in folders:
        try:
            if _is_leftover(folder / OWNER):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it has gone meanwhile, has no owner file, or is another user's
            continue


def _is_leftover(owner: Path) -> bool:
    # opened for writing: a lock on NFS needs it
    with open(os.open(owner, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return False
        try:
            locked = _lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        magic, _, host = file.read(_OWNER_BYTES).partition(b"\n")
        beat = os.fstat(file.fileno()).st_mtime
    if magic != MAGIC:
        return False
    if locked and host == socket.gethostname().encode():
        return True
    with tempfile.TemporaryFile(dir=owner.parent.parent) as now:  # by the clock of the folder's own machine
        return os.fstat(now.fileno()).st_mtime - beat > SILENCE_S


def _lock(file: int, how: int) -> bool:
    """Whether *file* is locked now; not so on a file system that has no locks."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _beat(owner: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        try:
            os.utime(owner)
        except FileNotFoundError:
            return
        except OSError:  # of a shared folder that cannot be reached for a moment
            continue
