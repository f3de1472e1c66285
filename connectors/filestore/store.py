"""`FileStore`: a place with files, whose names have slashes between folders.

Invariants, for each kind: a file is whole and durable once it has its name; no call replaces an existing file, and a
published file is the one that was staged. Every call blocks, for tens of seconds at most, tries once, and may be made
by any thread. It raises `StorageUnavailable` if a retry may help, also for a full disk, and `ConfigError` if not; both
name the place, and no secret. What was asked for may still happen after an error. Credentials come from the
environment: a URL holds none, and is shown as it is.
"""

from __future__ import annotations

import errno
import hashlib
import io
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import msgspec

from exactlyonce.checkpoint.records.storage_url import is_url, parts_of, storage_url
from exactlyonce.pipeline.errors import ConfigError, InvariantViolation, StorageUnavailable, StoreError
from exactlyonce.pipeline.retries import OF_STORE, retried

T = TypeVar("T")
R = TypeVar("R")

STORAGE, CHECKPOINT_STORAGE, STAGING = "The storage", "The checkpoint storage", "The staging folder"
"""The first words of a store's errors: the others for the ones of `--checkpoint-storage` and `--staging`."""
AWAY_TIMEOUT_S = 30.0
"""The time of retries: a server may restart, or refuse one request of a thousand."""
RANGE_BYTES = 4 << 20
"""A file is read in such ranges."""
_COMPARED_BYTES = 8 << 20


class StoredFile(NamedTuple):
    """A file, as a listing shows it."""

    name: str
    """Its path below the store's folder."""
    size: int
    written_at_ms: int
    """In ms since 1970, by the store's clock."""
    tag: str = ""
    """Changes with the content, where the store knows more than the time."""

    @property
    def version(self) -> str:
        """Changes with the content; without spaces. It begins with the size and a "-"."""
        return f"{self.size}-{self.tag or self.written_at_ms}".replace(" ", "")


class WaitingFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that waits to be published; size and digest prove that it is the one that was written."""

    staged: str
    """Its path now, below the staged files; in S3 there is no such file, and its upload has this as metadata."""
    path: str
    """Its path once published."""
    rows: int
    size: int
    sha256: bytes
    upload: str = ""
    """The id of its upload, in S3."""
    parts: tuple[str, ...] = ()
    """The ETag of each part of the upload."""


class WaitingFileGone(Exception):
    """The staged file in the argument is neither there nor where it is to be published."""


class Upload(NamedTuple):
    """A multipart upload that is under way."""

    name: str
    """The name of its file."""
    id: str
    age_ms: int
    """By the store's clock."""


class Retries:
    """Repeats a request for *away_timeout_s* while it raises `StorageUnavailable`; not after `end`."""

    def __init__(self, away_timeout_s: float) -> None:
        self._away_timeout_s, self._ended = away_timeout_s, Event()

    def __call__(self, ask: Callable[[], R]) -> R:
        deadline_s = time.monotonic() + self._away_timeout_s
        return retried(ask, StorageUnavailable, OF_STORE, deadline_s, clock=time.monotonic, sleep=self._ended.wait)

    def end(self) -> None:
        """No call waits any longer. Any thread may call it."""
        self._ended.set()


class FileStore(ABC):
    """See the module. It is made without effect; a client connects with the first request."""

    url: str
    """For people."""
    removers = (
        "another program has removed it. Put it back if there is a copy, and keep clean-up programs out of the hidden "
        "folder in"
    )
    """The likely remover of a waiting file that is gone, and the remedy; a folder follows."""
    _at_once = 8
    """Requests of one call."""

    @abstractmethod
    def check(self, folder: str = "") -> None:
        """Raise unless files can be put into *folder*. Creates folders, and leaves no file."""

    @abstractmethod
    def put(self, name: str, content: bytes | BinaryIO, aside: str) -> bool:
        """Put a file; once it returns, its content is durable. False: the file exists, and stays as it is.

        The folder of *name* is created if it is missing, but not the store's own. An open file is read in parts, from
        its beginning. A part of it may stay under *aside*, which nobody else uses.
        """

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """The content; None without such a file."""

    @abstractmethod
    def get_range(self, name: str, offset: int, length: int) -> bytes | None:
        """*length* bytes of the content from *offset*, at least one; fewer where it ends. None without such a file."""

    @abstractmethod
    def look(self, name: str) -> StoredFile | None:
        """One file; None: it is not there."""

    @abstractmethod
    def files(self) -> Iterator[StoredFile]:
        """Every file; none if the store's folder was never created. In S3 also those in folders below."""

    def visible(self) -> Iterator[StoredFile]:
        """Every file that is meant for readers: no part of its path is hidden. In HDFS none in folders below."""
        return (file for file in self.files() if not any(map(is_hidden, file.name.split("/"))))

    @abstractmethod
    def names_in(self, folder: str) -> list[str]:
        """The names of the files and folders in *folder*; none if it is missing."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files; a missing one is no error."""

    @abstractmethod
    def remove_all(self, folder: str) -> None:
        """Remove *folder* with its files; a missing one is no error."""

    @abstractmethod
    def remove_folder(self) -> bool:
        """Remove the store's empty folder, where folders are more than parts of names; whether there was one."""

    def open(self, file: StoredFile) -> BinaryIO:
        """Its bytes, from the first on; they can be sought in. FileNotFoundError if it is not there any more."""
        return cast("BinaryIO", io.BufferedReader(RangeStream(self, file), RANGE_BYTES))

    # --- a disk that may not be mounted

    def require_there(self, folder: str) -> None:  # noqa: B027 - only a folder of this machine can be unmounted
        """`StorageUnavailable` if *folder* is away with its disk."""

    def settle(self, folder: str) -> None:  # noqa: B027 - a name that is listed is durable, but for one on a disk
        """Make the names in *folder* durable, whoever wrote them."""

    def doubts(self) -> tuple[str, str]:
        """Why nothing can be written here, and what may remove waiting files; empty where nothing is known. Changes
        nothing."""
        return "", ""

    # --- files that wait to be published: written by one process, published by any, once

    @abstractmethod
    def check_publishing(self, at: str, staged: str, path: str) -> None:
        """Raise unless files can be staged, and published, under names like those for `create`. Leaves nothing."""

    @abstractmethod
    def create(self, at: str, staged: str, path: str, retries: Retries) -> NewFile:
        """A new file that waits below the folder *at* under the name *staged*, or as an upload to *path*."""

    def waiting(self, at: str, files: Iterable[WaitingFile]) -> list[WaitingFile]:
        """The *files* that are still to be published; the others are.

        Raises if one cannot be, `WaitingFileGone` or `StoreError` among others; publishes none.
        """
        files = list(files)
        return [file for file, waits in zip(files, self._each(partial(self._waits, at), files), strict=True) if waits]

    @abstractmethod
    def publish(self, at: str, files: Sequence[WaitingFile], waiting: Iterable[WaitingFile]) -> None:
        """Publish the *waiting* ones of *files*; then all are durable, whoever published them."""

    @abstractmethod
    def _waits(self, at: str, file: WaitingFile) -> bool: ...

    @abstractmethod
    def _is_published(self, file: WaitingFile) -> bool | None:
        """Whether the file of its name is *file*; None: there is none."""

    @abstractmethod
    def _waiting_name(self, at: str, file: WaitingFile) -> str:
        """The waiting file, for people."""

    def _require_published(self, at: str, file: WaitingFile) -> None:
        """Raise `WaitingFileGone` if it is not published, `StoreError` if another file has its name."""
        same = self._is_published(file)
        if same is None:
            raise WaitingFileGone(self._waiting_name(at, file))
        if not same:
            raise StoreError(
                f"{self.url}/{file.path} exists, and is not the file that is to be published there: another program "
                f"has created or changed it. Nothing was overwritten: move it away, and run again."
            )

    def drop_uploads(self, is_left: Callable[[Upload], bool]) -> None:  # noqa: B027 - only S3 has uploads
        """Abort the uploads under way that are left over, which *is_left* is asked once all are listed."""

    def end(self) -> None:  # noqa: B027 - only uploads have threads
        """Let threads of new files end. Any thread may call it."""

    def _each(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """The results for *items*, of which several are asked for at once."""
        if len(items) < 2 or self._at_once == 1:
            return list(map(function, items))
        with ThreadPoolExecutor(self._at_once) as pool:
            return list(pool.map(function, items))


class RenamingStore(FileStore):
    """A `FileStore` whose waiting files are files, which are published by a rename that replaces nothing."""

    @abstractmethod
    def rename_new(self, old: str, new: str) -> bool:
        """Rename a file, in one step; False: *new* exists, or *old* does not."""

    @abstractmethod
    def make(self, folder: str) -> None:
        """Create *folder*, and all between the store's own and it."""

    def check_publishing(self, at: str, staged: str, path: str) -> None:
        new = self.create(at, staged, path, Retries(0.0))
        new.sync()
        new.close()
        self.rename_new(f"{at}/{staged}", path)
        self.remove([path])

    def publish(self, at: str, files: Sequence[WaitingFile], waiting: Iterable[WaitingFile]) -> None:
        folders = {file.path.rpartition("/")[0] for file in files}
        for folder in folders:
            self.make(folder)
        self._each(partial(self._rename, at), list(waiting))
        for folder in folders:
            self.settle(folder)

    def _rename(self, at: str, file: WaitingFile) -> None:
        if not self.rename_new(f"{at}/{file.staged}", file.path):
            self._require_published(at, file)

    def _waits(self, at: str, file: WaitingFile) -> bool:
        """Look at the old name first: another process may rename it between two looks."""
        staged = self.look(f"{at}/{file.staged}")
        if staged is None:
            self._require_published(at, file)
            return False
        if self.look(file.path) is not None:
            self._require_published(at, file)
            self.remove([f"{at}/{file.staged}"])  # a rename in two steps died before the second
            return False
        if staged.size != file.size:
            raise StoreError(
                f"{self._waiting_name(at, file)} has {staged.size:,} bytes, and {file.size:,} were written: another "
                f"program, or the disk, has changed it."
            )
        return True

    def _is_published(self, file: WaitingFile) -> bool | None:
        found = self.look(file.path)
        return None if found is None else found.size == file.size and self._sha256(file) == file.sha256

    def _sha256(self, file: WaitingFile) -> bytes:
        digest = hashlib.sha256()
        for start in range(0, file.size, _COMPARED_BYTES):
            digest.update(self.get_range(file.path, start, _COMPARED_BYTES) or b"")
        return digest.digest()

    def _waiting_name(self, at: str, file: WaitingFile) -> str:
        return f"{self.url}/{at}/{file.staged}"


class NewFile(ABC):
    """A staged file that is written sequentially, by one thread, in parts of *part_bytes*; 0: as it is written."""

    def __init__(self, staged: str, part_bytes: int = 0) -> None:
        self._staged, self._part_bytes = staged, part_bytes
        self._rest = bytearray()
        self._sha256 = hashlib.sha256()
        self.size = 0
        self.closed = False

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._sha256.update(view)
        self.size += len(view)
        if not self._part_bytes:
            self._put(view)
            return len(view)
        self._rest += view
        while len(self._rest) >= self._part_bytes:
            part = bytes(memoryview(self._rest)[: self._part_bytes])
            del self._rest[: self._part_bytes]
            self._put(part)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:  # noqa: B027 - there is nothing to do
        """Parts are put when they are whole."""

    def _last(self) -> bytes:
        """The part that is not put yet."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest

    @abstractmethod
    def _put(self, part: bytes | memoryview) -> None: ...

    @abstractmethod
    def sync(self) -> None:
        """Wait until all that was written is durable. Nothing is written after it."""

    def close(self) -> None:
        self.closed = True

    def waiting(self, rows: int) -> WaitingFile:
        """The file, which `sync` has made durable. Its `path` is empty if it gets its name later."""
        return WaitingFile(staged=self._staged, path="", rows=rows, size=self.size, sha256=self._sha256.digest())


class RangeStream(io.RawIOBase):
    """The bytes of *file*. Each is asked for once, and the next range in a thread, while the one before is read."""

    def __init__(self, store: FileStore, file: StoredFile) -> None:
        super().__init__()
        self._store, self._file = store, file
        self._at = 0
        self._thread = ThreadPoolExecutor(1, "ranges")
        self._ahead: tuple[int, int, Future[bytes | None]] | None = None
        """The begin and the length of the range that is on its way."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._file.size - self._at)
        if length <= 0:
            return 0
        if self._ahead is not None and self._ahead[:2] == (self._at, length):
            content = self._ahead[2].result()
        else:
            content = self._store.get_range(self._file.name, self._at, length)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "it is gone", self._file.name)
        buffer[: len(content)] = content
        self._at += len(content)
        self._ask_ahead(min(len(buffer), self._file.size - self._at))
        return len(content)

    def _ask_ahead(self, length: int) -> None:
        self._ahead = None
        if length > 0:
            asked = self._thread.submit(self._store.get_range, self._file.name, self._at, length)
            self._ahead = self._at, length, asked

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().close()


def is_hidden(part: str) -> bool:
    """Whether readers leave a file or folder named *part* out: it may not be whole yet.

    >>> is_hidden("_temporary"), is_hidden("orders.csv")
    (True, False)
    """
    return part.startswith((".", "_"))


# --- by URL -----------------------------------------------------------------------------------------------------------


def store_at(url: str, inner: str, what: str = STORAGE, *, makes_root: bool = False) -> FileStore:
    """The folder *inner* below *url*, from `storage_url`; its errors begin with *what*. Nothing is connected yet.

    A local *url* must exist, lest a disk that is not mounted be taken for an empty one; or *makes_root* creates it.
    """
    scheme, host, path = parts_of(url)
    match scheme:  # each imported for itself: a process opens few kinds
        case "file":
            from exactlyonce.connectors.filestore.local import LocalStore

            return LocalStore(Path("/", path), inner, what, makes_root=makes_root)
        case "s3":
            from exactlyonce.connectors.filestore.s3 import S3Store

            return S3Store(host, f"{path}/{inner}".strip("/"), what)
        case "hdfs":
            from exactlyonce.connectors.filestore.hdfs import HdfsStore

            return HdfsStore(host, path, inner, what)
    raise InvariantViolation(f"no storage for {url}")


def store_of(path: str, what: str) -> FileStore:
    """The folder *path*, which has no `path_problems`. The parent of a folder of this machine must exist."""
    if is_url(path):
        return store_at(storage_url(path), "", what)
    from exactlyonce.connectors.filestore.local import LocalStore

    return LocalStore(Path(path).parent, Path(path).name, what)


def path_problems(path: str) -> Iterator[str]:
    """The problems of a source's or a sink's folder; no URL is shown, for it may hold a password.

    >>> list(path_problems("/data/orders")), list(path_problems("gs://lake/orders"))
    ([], ['path: gs:// has no files here: give a path from / on, s3://bucket/prefix or hdfs://host:port/folder'])
    """
    scheme = path.partition("://")[0].lower()
    if is_url(path) and scheme in ("s3", "hdfs"):
        try:
            storage_url(path, "path")
        except ConfigError as error:
            yield str(error).rstrip(".")
    elif is_url(path):
        yield f"path: {scheme}:// has no files here: give a path from / on, s3://bucket/prefix or hdfs://host:port/folder"
    elif not path.startswith("/"):
        yield f"{path!r} must be the folder's path from / on: workers may run in another folder than this process"
    elif "\x00" in path:
        yield f"{path!r} has a NUL in it, which no path can have"
    elif Path(path) == Path("/"):
        yield "the root of the file system cannot be the folder: name one in it"
