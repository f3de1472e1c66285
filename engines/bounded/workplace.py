"""A command's own place for staged files, below a shared one; worthless once the command has ended.

Invariants: a command removes its own files and the files of killed commands, never the files of a running one.

In a folder of this machine, or a mounted one, it is a folder of its own: with our name, and an owner file with the
magic text. A running command holds a lock on its owner file and touches it. A folder is a leftover if its lock is free.
Locks of another machine, or of a file system without locks, cannot be seen: there it must also have been silent for
long. In HDFS and S3, which have no locks, it is the beginning of the names of its files in one folder of ours. A
running command puts a file there now and then. They are leftovers if the newest of them is old, by the storage's clock.

The free room also says how much input is computed at once: a chunk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import count
from pathlib import Path

from exactlyonce.checkpoint.records.storage_url import is_url
from exactlyonce.engines.bounded.unit.staging import folder_at, put, staging_at
from exactlyonce.engines.options import CHUNK_RECORDS
from exactlyonce.engines.processes import machine
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError
from exactlyonce.pipeline.sizes import shown_bytes

THIS_MACHINE = Path(tempfile.gettempdir(), f"exactlyonce-{os.getuid()}")
"""The shared folder of this user's commands on one machine."""
PREFIX = "exactlyonce-"
OWNER = ".exactlyonce-owner"
MAGIC = b"a folder of exactlyonce, removed once its command has ended"
"""The owner file's first line; the second is the machine whose processes see its lock, empty without locks."""
BEAT_S = 10.0
SILENCE_S = 600.0
"""A command without a visible lock counts as dead after so long; a paused one finds its files gone."""
STAGED = "exactlyonce-staging"
"""The folder of ours in HDFS or S3."""
UNIT_RECORDS = 1_000_000
"""The records of a chunk for each unit of a stage."""
UNIT_RECORDS_FIRST = 100_000
"""Those of the first chunk, which nothing is measured for."""
PRESUMED_BYTES, PRESUMED_MS = 1_000, 0.01
"""A record of the first chunk stages no more, and takes a publication no longer, as a rule."""
CHUNK_RECORDS_MIN = 100_000
"""The size of a chunk that is tried even if it may not fit into the staging room."""
_OURS = re.compile(r"[A-Za-z0-9_-]+\.[0-9a-f]{16}\.")
"""The beginning of the names of a command's files there."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_OWNER_BYTES = 1024


def usable_staging(staging: str | Path) -> str:
    """*staging* in its one spelling, as of `staging_at`; ConfigError unless files can be put there, if it is a URL."""
    at = staging_at(staging)
    if is_url(at):
        folder_at(f"{at}/{STAGED}").check()
    return at


def free_bytes(staging: str | Path) -> int | None:
    """The free room in *staging*, also before it exists; None for a storage that does not tell it."""
    at = staging_at(staging)
    if is_url(at):
        return None
    return shutil.disk_usage(next(folder for folder in (Path(at), *Path(at).parents) if folder.exists())).free


def require_room(staging: str | Path, needed_bytes: float, what: str, remedy: str) -> None:
    """Raise ConfigError if *staging* has less free room than *what*, in the plural, needs; a storage that does not tell
    its room has enough."""
    free = free_bytes(staging)
    if free is not None and free < needed_bytes:
        raise ConfigError(
            f"The staging folder {staging_at(staging)} has {shown_bytes(free)} free, and {what} need some "
            f"{shown_bytes(round(needed_bytes))} more there. Nothing was written elsewhere. Give --staging a folder "
            f"with more room, or a place in HDFS or S3; or {remedy}."
        )


def first_chunk_records(
    parallelism: int, partitions: int | None, *, free_bytes: int | None, timeout_ms: int | None
) -> int:
    """The records of the first chunk: `UNIT_RECORDS_FIRST` for each unit, so that units have some work, and
    CHUNK_RECORDS at least; as many as presumably fit, see `chunk_records`.

    *partitions* are those of the output topic with the fewest, which bound its publishers; None: there is no output.
    *timeout_ms* None: nothing is published.

    >>> [first_chunk_records(units, 200, free_bytes=None, timeout_ms=900_000) for units in (2, 400, 2_000)]
    [5000000, 40000000, 200000000]
    >>> [first_chunk_records(2_000, 1, free_bytes=free, timeout_ms=900_000) for free in (None, 20_000_000_000)]
    [22500000, 10000000]
    """
    publishers = parallelism if partitions is None else min(parallelism, partitions)
    presumed = chunk_records(
        parallelism,
        offset_bytes=PRESUMED_BYTES,
        free_bytes=free_bytes,
        offset_ms=PRESUMED_MS / publishers if timeout_ms is not None else 0.0,
        timeout_ms=timeout_ms or 0,
    )
    return max(CHUNK_RECORDS, min(UNIT_RECORDS_FIRST * parallelism, presumed))


def chunk_records(
    parallelism: int, *, offset_bytes: float, free_bytes: int | None, offset_ms: float = 0.0, timeout_ms: int = 0
) -> int:
    """The most records of the next chunk, of which each has staged *offset_bytes* so far, and taken *offset_ms*.

    They are `UNIT_RECORDS` for each unit, CHUNK_RECORDS at least, but no more than half of the free room takes, if it
    is known, nor than the longest publication writes in a quarter of *timeout_ms*, which ends its transaction. Neither
    makes a chunk smaller than CHUNK_RECORDS_MIN.

    >>> tebibyte = 1 << 40
    >>> [chunk_records(units, offset_bytes=100.0, free_bytes=tebibyte) for units in (128, 2)]
    [128000000, 5000000]
    >>> [chunk_records(128, offset_bytes=100.0, free_bytes=free) for free in (2_000_000_000, 0)]
    [10000000, 100000]
    >>> chunk_records(128, offset_bytes=100.0, free_bytes=tebibyte, offset_ms=0.002, timeout_ms=60_000)
    7500000
    """
    most = max(CHUNK_RECORDS, UNIT_RECORDS * parallelism)
    if offset_bytes and free_bytes is not None:
        most = min(most, max(CHUNK_RECORDS_MIN, int(free_bytes / 2 / offset_bytes)))
    if offset_ms:
        most = min(most, max(CHUNK_RECORDS_MIN, int(timeout_ms / 4 / offset_ms)))
    return most


@contextmanager
def workplace(shared: str | Path, prefix: str) -> Iterator[str]:
    """A fresh place below *shared*: the beginning of the locations of its files, which are removed after the block.

    Leftovers in *shared* are removed first.
    """
    at = staging_at(shared)
    with _stored_workplace(f"{at}/{STAGED}", prefix) if is_url(at) else _own_folder(Path(at), prefix) as files:
        yield files


@contextmanager
def _own_folder(shared: Path, prefix: str) -> Iterator[str]:
    with _usable(shared):
        shared.mkdir(parents=True, exist_ok=True)
        remove_leftovers(shared)
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{prefix}.", dir=shared))
    try:
        with _usable(shared):
            owner = _owner_file(folder)

        def touch() -> None:
            with suppress(OSError):  # of a shared folder that cannot be reached for a moment
                os.utime(folder / OWNER)

        with owner, _beating(touch):
            yield f"{folder}/"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _owner_file(folder: Path) -> FileIO:
    """The owner file of *folder*, new, open and locked, if its file system has locks."""
    owner = (folder / OWNER).open("wb", buffering=0)
    try:
        seen_by = _this_machine() if _lock(owner.fileno(), fcntl.LOCK_EX) else b""
        owner.write(MAGIC + b"\n" + seen_by)  # after the lock: an owner file without the text is nobody's
    except BaseException:
        owner.close()
        raise
    return owner


@contextmanager
def _usable(shared: Path) -> Iterator[None]:
    """Explain an error of the staging folder *shared*."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"The staging folder {shared} cannot be used: {error.strerror or error}. Give --staging a folder in which "
            f"this command may write, with room for the input of a chunk, and run the command again: nothing of this "
            f"checkpoint is visible, and nothing is lost."
        ) from None


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
        magic, _, seen_by = file.read(_OWNER_BYTES).partition(b"\n")
        beat = os.fstat(file.fileno()).st_mtime
    if magic != MAGIC:
        return False
    if locked and seen_by == _this_machine():
        return True
    with tempfile.TemporaryFile(dir=owner.parent.parent) as now:  # by the clock of the folder's own machine
        return os.fstat(now.fileno()).st_mtime - beat > SILENCE_S


def _this_machine() -> bytes:
    """Its name, which others may have, too, and its boot."""
    return f"{socket.gethostname()} {machine()}".encode()


def _lock(file: int, how: int) -> bool:
    """Whether *file* is locked now; not so on a file system that has no locks."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


@contextmanager
def _beating(beat: Callable[[], None]) -> Iterator[None]:
    """Show every `BEAT_S` that this command is alive: *beat* is called on another thread."""
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(BEAT_S):
            beat()

    thread = threading.Thread(target=go_on, name="workplace", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _stored_workplace(url: str, prefix: str) -> Iterator[str]:
    own = f"{prefix}.{secrets.token_hex(8)}."
    beats = (f"{own}beat-{number}" for number in count())
    put(f"{url}/{(newest := next(beats))}", MAGIC)
    remove_stored_leftovers(url, newest)

    def put_newer() -> None:
        nonlocal newest
        with suppress(ExactlyOnceError):  # the storage cannot be reached for a moment
            put(f"{url}/{(newer := next(beats))}", MAGIC)
            folder_at(url).remove([newest])
            newest = newer

    try:
        with _beating(put_newer):
            yield f"{url}/{own}"
    finally:
        with suppress(ExactlyOnceError):  # the next command removes what is left
            folder = folder_at(url)
            folder.remove([file.name for file in folder.files() if file.name.startswith(own)])


def remove_stored_leftovers(url: str, beat: str) -> None:
    """Remove the files of commands that have ended from the folder *url*; the file *beat* was put a moment ago."""
    folder, newest_ms, names = folder_at(url), defaultdict[str, int](int), defaultdict[str, list[str]](list)
    now_ms = 0
    for file in folder.files():
        if ours := _OURS.match(file.name):
            names[ours[0]].append(file.name)
            newest_ms[ours[0]] = max(newest_ms[ours[0]], file.written_at_ms)
        if file.name == beat:
            now_ms = file.written_at_ms
    for command, files in names.items():
        if now_ms - newest_ms[command] > SILENCE_S * 1000 and not beat.startswith(command):
            folder.remove(files)
