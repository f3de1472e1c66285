"""The local files of one subtask of an operator: a database at work, and databases saved at checkpoints.

    <folder of the operator>/<first key group>-<last>[.<worker>-of-<workers>]/
        work-XXXX/  owner: locked by its process;  db/: the database at work
        saved-<digest of the index>/  a database at a checkpoint, and `marker`

The worker is in the name if each of several workers has all key groups.

Invariants: a database at work belongs to one process, in a new folder, so that none shares one with a zombie. A saved
one never changes: a process that takes it links its files. It is named by the index of its checkpoint, in one renaming
once that index is known, and is taken only to restore exactly this state. It may be deleted at any moment, also while
it is taken, and by a process that is killed over it. So its marker names all of its files, and it is taken whole or not
at all.

One thread saves, names and deletes saved databases, in order: saving waits for a flush. Nothing is written to the
database meanwhile (`wait` comes before any change), so the saved one is the state at the barrier; it is named only
after a successful saving.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

import msgspec

from exactlyonce.pipeline.errors import require
from exactlyonce.state.key_groups import Merging
from exactlyonce.state.rocksdb.memory import Memory
from exactlyonce.state.rocksdb.store import LocalFilesFailed, LocalStore

VERSION = 2
_SHARE = re.compile(r"(\d+)-(\d+)(?:\.\d+-of-(\d+))?", re.ASCII)
"""The folder of a share of the key groups: the first, the last, and the number of workers that have the same."""
SAVING_SHARE = 0.05
"""The share of the time that saving may take, on its own thread."""


class Marker(msgspec.Struct, frozen=True):
    """The contents of a saved database, and what its table knew of them."""

    version: int
    operator: str
    groups: tuple[int, ...]
    max_parallelism: int
    checkpoint: int
    digest: bytes
    schema: Any
    files: dict[str, int]
    """The sizes of all other files."""
    counts: dict[int, int]
    """Keys by key group."""
    entries: dict[int, int]
    """`Merging.entries`."""
    oldest: dict[int, int]
    """`Merging.oldest`."""

    @property
    def bounds(self) -> tuple[int, int]:
        return min(self.groups, default=0), max(self.groups, default=0)

    def same(self, other: Marker) -> bool:
        """Whether both are of the same state."""
        return all(getattr(self, name) == getattr(other, name) for name in _IDENTITY)


_IDENTITY = ("version", "operator", "groups", "max_parallelism", "checkpoint", "digest", "schema")


class LocalFiles:
    """The files of one table. It begins with the saved database of the *wanted* state, if there is one."""

    def __init__(self, folder: Path, wanted: Marker, memory: Memory, worker: str = "") -> None:
        """*worker*: the owner, as `0-of-2`, if several have the same key groups."""
        first, last = wanted.bounds
        self._folder = folder / f"{first}-{last}{'.' if worker else ''}{worker}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._saver = ThreadPoolExecutor(1, "local-files")
        self._saving: Future[None] | None = None
        self._lock = Lock()
        """Held while `_saved` changes."""
        self._saved: dict[int, Path] = {}
        """The databases that this process has saved or taken, by checkpoint."""
        self._distrusted = False
        self._wanted = wanted
        self._begun: dict[int, tuple[Future[None], Path, dict[str, Any]]] = {}
        """Saved databases without a name, by checkpoint: the future, the path, fields of the marker."""
        self._save_at_s = 0.0
        with _locked(self._folder / "lock"):
            self._clean(folder, wanted)
            self._work = Path(tempfile.mkdtemp(prefix="work-", dir=self._folder))
            self._owner = _own(self._work)
        self.marker = self._take(wanted)
        """The marker of the database at first; None: it is empty."""
        try:
            self.store = LocalStore(self._work / "db", memory)
        except LocalFilesFailed:
            if self.marker is None:
                raise
            self.distrust()
            self.marker = None
            shutil.rmtree(self._work / "db", ignore_errors=True)
            self.store = LocalStore(self._work / "db", memory)
        self.store.failed = self.distrust

    def _take(self, wanted: Marker) -> Marker | None:
        saved = self._folder / _name(wanted.digest)
        if not wanted.digest or not (saved / "marker").exists():
            return None
        marker = _read(saved / "marker")
        if marker is None or not marker.same(wanted):
            shutil.rmtree(saved, ignore_errors=True)
            return None
        try:
            self._link(saved, marker.files)
        except OSError:  # a part is gone, or another process is deleting it
            shutil.rmtree(self._work / "db", ignore_errors=True)
            shutil.rmtree(saved, ignore_errors=True)
            return None
        self._saved[wanted.checkpoint] = saved
        return marker

    def _link(self, saved: Path, files: dict[str, int]) -> None:
        """Make the database at work from the *saved* one; OSError unless all *files* are there."""
        database = self._work / "db"
        database.mkdir()
        for name, size in files.items():
            if name.endswith(".sst"):
                os.link(saved / name, database / name)
            else:
                shutil.copyfile(saved / name, database / name)
            if (database / name).stat().st_size != size:
                raise OSError(f"{saved / name} is not whole")

    def _clean(self, folder: Path, wanted: Marker) -> None:
        """Delete all saved states but the wanted one, and databases of dead processes, here and in the folders of other
        shares of the same key groups."""
        for share in folder.iterdir():
            if share == self._folder:
                _delete_left(share, _name(wanted.digest))
            elif _is_superseded(share.name, self._folder.name):
                _delete_left(share)
                _delete_empty(share)

    def save(self, checkpoint: int) -> None:
        """Save the database, now the state of *checkpoint*, unless the last saving is too recent; see `wait`."""
        self.wait()
        if time.monotonic() < self._save_at_s or self.store.no_room():
            return
        path = self._work / f"checkpoint-{checkpoint}"
        self._saving = self._saver.submit(self._save, path)
        self._begun[checkpoint] = self._saving, path, {}

    def _save(self, path: Path) -> None:
        began = time.monotonic()
        self.store.save(path)
        ended = time.monotonic()
        self._save_at_s = ended + (ended - began) / SAVING_SHARE

    def wait(self) -> None:
        """Wait until saving is over, and the database may change. Raises an error of saving."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def describe(self, checkpoint: int, counts: dict[int, int], merging: Merging) -> None:
        """Note the fields of the marker that are known once *checkpoint* is encoded."""
        if checkpoint in self._begun:
            known = {"counts": dict(counts), "entries": dict(merging.entries), "oldest": dict(merging.oldest)}
            self._begun[checkpoint][2].update(known)

    def name(self, checkpoint: int, digest: bytes) -> None:
        """The index of *checkpoint* is known: name the database saved for it, so that it can be found."""
        for older in [begun for begun in self._begun if begun < checkpoint]:
            self._delete(self._begun.pop(older)[1])
        if checkpoint in self._begun and digest:
            saving, path, known = self._begun.pop(checkpoint)
            require(bool(known), "a checkpoint is encoded before its index is known")
            marker = msgspec.structs.replace(self._wanted, checkpoint=checkpoint, digest=digest, **known)
            self._saver.submit(self._name, saving, path, marker)

    def _name(self, saving: Future[None], path: Path, marker: Marker) -> None:
        if saving.exception() is not None:
            return
        with self._lock:
            if self._distrusted:
                return
            with suppress(OSError):  # no room, or another process has saved the same state: then this one is not found
                files = {file.name: file.stat().st_size for file in path.iterdir()}
                marker = msgspec.structs.replace(marker, files=files)
                (path / "marker").write_bytes(msgspec.msgpack.encode(marker))
                target = self._folder / _name(marker.digest)
                path.rename(target)
                self._saved[marker.checkpoint] = target

    def completed(self, checkpoint: int) -> None:
        """No older checkpoint will be restored."""
        with self._lock:
            for older in [saved for saved in self._saved if saved < checkpoint]:
                self._delete(self._saved.pop(older))

    def _delete(self, path: Path) -> None:
        self._saver.submit(shutil.rmtree, path, ignore_errors=True)

    def distrust(self) -> None:
        """Delete all saved databases, since they may be damaged."""
        with self._lock:
            self._distrusted = True
            for checkpoint in [*self._saved]:
                shutil.rmtree(self._saved.pop(checkpoint), ignore_errors=True)

    def close(self) -> None:
        """Delete the database at work; saved ones stay."""
        self._saver.shutdown()
        self.wait()
        self.store.close()
        shutil.rmtree(self._work, ignore_errors=True)
        self._owner.close()


def delete_others(folder: Path, operators: Collection[str]) -> None:
    """Delete the files of operators not in *operators* in a pipeline's *folder*, unless a live process uses them."""
    for other in _within(folder):
        if other.name not in operators:
            for share in _within(other):
                if _SHARE.fullmatch(share.name):
                    with suppress(OSError), _locked(share / "lock"):
                        _delete_left(share)
                        _delete_empty(share)
            with suppress(OSError):  # something is in it
                other.rmdir()


def _is_superseded(share: str, by: str) -> bool:
    """Whether the owner of the share named *by* has some key groups of another *share*, and is not just another worker
    of as many."""
    old, new = _SHARE.fullmatch(share), _SHARE.fullmatch(by)
    if old is None or new is None or int(old[1]) > int(new[2]) or int(old[2]) < int(new[1]):
        return False
    return new[3] is None or old[3] != new[3]


def _delete_left(share: Path, wanted: str = "") -> None:
    """Delete all saved states but the *wanted* one, and databases of dead processes."""
    for path in _within(share):
        saved = path.name.startswith("saved-") and path.name != wanted
        if saved or (path.name.startswith("work-") and not _is_owned(path)):
            shutil.rmtree(path, ignore_errors=True)


def _delete_empty(share: Path) -> None:
    if {path.name for path in _within(share)} <= {"lock"}:
        shutil.rmtree(share, ignore_errors=True)


def _name(digest: bytes) -> str:
    return f"saved-{digest.hex()[:32]}"


def _within(folder: Path) -> list[Path]:
    """The entries of *folder*; empty if another process has deleted it."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(path: Path) -> Marker | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Marker)
    except (msgspec.DecodeError, OSError):
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock under which processes clean the folder, and create one in it before they own it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _own(work: Path) -> TextIO:
    owner = (work / "owner").open("w")
    fcntl.flock(owner, fcntl.LOCK_EX)
    return owner


def _is_owned(work: Path) -> bool:
    """Whether its process is alive."""
    try:
        with (work / "owner").open("w") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
