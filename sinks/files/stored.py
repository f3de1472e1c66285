"""The `Place` in HDFS and in S3, through the seam of `connectors.blocks`.

HDFS: files wait below `staged/`, and are published by a rename that replaces nothing.
S3: a file is a multipart upload under its last name, which readers do not see. Its parts are durable at the barrier;
the request that completes it publishes it, from any process, and replaces nothing. Invariant: before the first upload
of a writer its folder below `staged/` has a file, so that an upload without one has no owner.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import BoundedSemaphore, Event
from typing import Any, TypeVar

from exactlyonce.connectors.blocks.folder import Tree
from exactlyonce.connectors.blocks.hdfs import PART_BYTES as HDFS_PART_BYTES
from exactlyonce.connectors.blocks.hdfs import HdfsFile, HdfsFolder
from exactlyonce.connectors.blocks.s3 import S3Folder
from exactlyonce.connectors.blocks.storage import persistently
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable, StoreError, StoreUnavailable
from exactlyonce.sinks.files.layout import HIDDEN, STAGED, TEMPORARY, WaitingFile, WriterId
from exactlyonce.sinks.files.place import NewFile, WaitingFileGone, removed_from, taken

T = TypeVar("T")
R = TypeVar("R")

FOLDER = "The folder"
"""The first words of the errors of a target."""
AWAY_TIMEOUT_S = 600.0
"""A writer's time of retries; its checkpoints time out meanwhile, and a later one takes the rows. A leader retries by
itself."""
CALLS_AT_ONCE = 8
PART_BYTES = 8 << 20
"""Of an upload; S3 wants 5 MiB at least."""
PARTS_AT_ONCE = 4
"""The parts of a writer's uploads that are on their way, and in memory."""
ORPHAN_AGE_MS = 24 * 60 * 60 * 1000
"""The age at which an upload without an owner is aborted: a process of an older attempt has begun it too late."""
TOKEN = "exactlyonce"
"""The metadata that proves whose upload a file was."""
_READ_BYTES = 8 << 20
_NAME = re.compile(r"part-(\d+)\.(\d+)-(\d+)-([0-9a-f]+)-\d+\.[a-z]+\Z")


class _StoredPlace(ABC):
    writes_to = "storage"

    def __init__(self, url: str, inner: str, root: Tree, *, waits: bool) -> None:
        self.target, self.root = url, f"{url}/{inner}"
        self._root, self._timeout_s = root, AWAY_TIMEOUT_S if waits else 0.0
        self._ended = Event()
        self.suspicion = "it was put back from a backup, or another one is in its place."

    @contextmanager
    def explained(self, *, starting: bool = False) -> Iterator[None]:
        try:
            yield
        except StorageUnavailable as error:
            raise StoreUnavailable(str(error)) from error
        except ConfigError as error:
            raise StoreError(str(error)) from error

    def explanation(self, failure: BaseException) -> str | None:
        return str(failure) if isinstance(failure, StorageUnavailable | ConfigError) else None

    def give_up(self) -> None:
        self._ended.set()

    def require_there(self) -> None:  # noqa: B027 - there is nothing to do
        """The ledger tells whether it is the right folder: nothing is mounted."""

    def problem(self) -> str:
        return ""

    def tried(self, ask: Callable[[], R]) -> R:
        """The answer; a writer's request is repeated while the target is away."""
        return persistently(ask, self._timeout_s, self._ended)

    # --- the hidden folder

    def settle(self, folder: str) -> None:  # noqa: B027 - there is nothing to do
        """A name that is listed is durable."""

    def names_in(self, folder: str) -> list[str]:
        return list(self.tried(lambda: self._root.children(folder)))

    def read(self, path: str) -> bytes | None:
        return self.tried(lambda: self._root.get(path))

    def written_at_ms(self, path: str) -> int | None:
        folder, _, name = path.rpartition("/")
        return self.tried(lambda: self._root.children(folder)).get(name)

    def write_new(self, path: str, content: bytes, temporary: str) -> bool:
        self.make(path.rpartition("/")[0])
        return self.tried(lambda: self._root.put_new(path, content, f"{TEMPORARY}/{temporary}-{secrets.token_hex(8)}"))

    def remove(self, path: str) -> None:
        self.tried(lambda: self._root.remove([path]))

    def remove_folder(self, folder: str) -> None:
        self.tried(lambda: self._root.remove_tree(folder))

    def stage_list(self, path: str, content: bytes) -> None:
        self.write_new(f"{STAGED}/{path}", content, "0-list")

    # --- published files

    def waiting(self, files: Iterable[WaitingFile]) -> list[WaitingFile]:
        files = list(files)
        return [file for file, waits in zip(files, _mapped(self._waits, files), strict=True) if waits]

    def _require_published(self, file: WaitingFile) -> None:
        """Raise `WaitingFileGone` if it is not published, `StoreError` if another file has its name."""
        same = self._is_published(file)
        if same is None:
            raise WaitingFileGone(self._named(file))
        if not same:
            raise taken(f"{self.target}/{file.path}")

    @abstractmethod
    def make(self, folder: str) -> None: ...

    @abstractmethod
    def _waits(self, file: WaitingFile) -> bool: ...

    @abstractmethod
    def _is_published(self, file: WaitingFile) -> bool | None:
        """Whether the file of its name is *file*; None: there is none."""

    @abstractmethod
    def _named(self, file: WaitingFile) -> str:
        """The waiting file, for people."""


class HdfsPlace(_StoredPlace):
    def __init__(self, host: str, path: str, inner: str, *, waits: bool) -> None:
        self._files = HdfsFolder(host, "", path, FOLDER)
        self._folder = HdfsFolder(host, "", f"{path}/{inner}", FOLDER)
        super().__init__(self._files.url, inner, self._folder, waits=waits)
        self.cleaned_by = removed_from(self.target)

    def check(self) -> None:
        self._folder.check()

    def risk(self) -> str:
        return ""

    def make(self, folder: str) -> None:
        self.tried(lambda: self._folder.make(folder))

    def begin(self, writer: WriterId) -> None:
        self.make(f"{STAGED}/{writer}")

    def new_file(self, writer: WriterId, number: int, folder: str, suffix: str) -> NewFile:
        name = f"{writer}/{number}.{suffix}"
        return _HdfsStaged(self._folder.create(f"{STAGED}/{name}"), name)  # not tried again: it may have been created

    def drop_staged(self, writers: Sequence[str]) -> None:
        for writer in writers:
            self.remove_folder(f"{STAGED}/{writer}")

    def publish(self, files: Sequence[WaitingFile], waiting: Iterable[WaitingFile]) -> None:
        for folder in {file.path.rpartition("/")[0] for file in files}:
            self._files.make(folder)
        _mapped(self._rename, list(waiting))

    def _rename(self, file: WaitingFile) -> None:
        try:
            self._files.rename_new(self._staged(file), file.path)
        except (FileExistsError, FileNotFoundError):
            self._require_published(file)

    def _waits(self, file: WaitingFile) -> bool:
        size = self._files.size(self._staged(file))
        if size is None or self._files.size(file.path) is not None:
            self._require_published(file)
            return False
        if size != file.size:
            raise StoreError(
                f"{self._named(file)} has {size:,} bytes, and {file.size:,} were written: another program has changed "
                f"it."
            )
        return True

    def _is_published(self, file: WaitingFile) -> bool | None:
        size = self._files.size(file.path)
        return None if size is None else size == file.size and self._sha256(file) == file.sha256

    def _sha256(self, file: WaitingFile) -> bytes:
        digest = hashlib.sha256()
        for start in range(0, file.size, _READ_BYTES):
            digest.update(self._files.get_range(file.path, start, _READ_BYTES) or b"")
        return digest.digest()

    def _staged(self, file: WaitingFile) -> str:
        return f"{self.root.removeprefix(self.target + '/')}/{STAGED}/{file.staged}"

    def _named(self, file: WaitingFile) -> str:
        return f"{self.root}/{STAGED}/{file.staged}"


class _HashedStream:
    """What is written, in parts of about the same size, and its SHA-256."""

    closed = False

    def __init__(self, part_bytes: int, put: Callable[[bytes], None]) -> None:
        self._part_bytes, self._put = part_bytes, put
        self._rest = bytearray()
        self.size, self._sha256 = 0, hashlib.sha256()

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._sha256.update(view)
        self.size += len(view)
        self._rest += view
        while len(self._rest) >= self._part_bytes:
            part = bytes(memoryview(self._rest)[: self._part_bytes])
            del self._rest[: self._part_bytes]
            self._put(part)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Parts are put when they are whole."""

    def _last(self) -> bytes:
        """The part that is not put yet."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest

    def close(self) -> None:
        self.closed = True


class _HdfsStaged(_HashedStream):
    def __init__(self, file: HdfsFile, name: str) -> None:
        super().__init__(HDFS_PART_BYTES, file.write)
        self._file, self._name = file, name

    def sync(self) -> None:
        if rest := self._last():
            self._file.write(rest)
        self._file.close()

    def waiting(self, rows: int) -> WaitingFile:
        return WaitingFile(staged=self._name, path="", rows=rows, size=self.size, sha256=self._sha256.digest())


class S3Place(_StoredPlace):
    def __init__(self, bucket: str, prefix: str, inner: str, *, waits: bool) -> None:
        self._files = S3Folder(bucket, prefix, FOLDER)
        self._folder = S3Folder(bucket, f"{prefix}/{inner}" if prefix else inner, FOLDER)
        super().__init__(self._files.url, inner, self._folder, waits=waits)
        self.cleaned_by = (
            f"another program or a lifecycle rule of the bucket has removed or aborted it. Keep these away from "
            f"{self.target}; `exactlyonce doctor` tells of such a rule."
        )
        self._parts = ThreadPoolExecutor(PARTS_AT_ONCE, "parts")
        self._room = BoundedSemaphore(PARTS_AT_ONCE)

    def give_up(self) -> None:
        super().give_up()
        self._parts.shutdown(wait=False)

    def check(self) -> None:
        self._folder.check()
        upload = self._folder.begin_upload("probe", {})
        self._folder.has_upload("probe", upload)
        self._folder.abort_upload("probe", upload)
        next(self._files.uploads(), None)

    def risk(self) -> str:
        try:
            days = self._files.uploads_last_days()
        except ConfigError as error:  # the right to see the rules is one of its own
            return f"whether a lifecycle rule of the bucket aborts uploads cannot be seen: {str(error).rstrip('.')}"
        if days is None:
            return ""
        return (
            f"a lifecycle rule of the bucket aborts uploads in {self.target} after {days} days, and output that was "
            f"decided waits as uploads until it is committed"
        )

    def make(self, folder: str) -> None:
        """There are only keys, and no folders."""

    def begin(self, writer: WriterId) -> None:
        self.write_new(f"{STAGED}/{writer}/writer", b"", "")

    def new_file(self, writer: WriterId, number: int, folder: str, suffix: str) -> NewFile:
        name = f"part-{writer.incarnation:06d}.{writer.attempt:03d}-{writer.subtask:03d}-{writer.token}-{number:06d}"
        path = f"{folder}/{name}.{suffix}" if folder else f"{name}.{suffix}"
        return _Uploaded(self, path, f"{writer}/{number}.{suffix}")

    def begin_upload(self, path: str, token: str) -> str:
        return self.tried(lambda: self._files.begin_upload(path, {TOKEN: token}))

    def put_part(self, path: str, upload: str, number: int, part: bytes) -> Future[str]:
        """The part's ETag, in the future. Waits while too many parts are on their way."""

        def put() -> str:
            try:
                return self.tried(lambda: self._files.upload_part(path, upload, number, part))
            finally:
                self._room.release()

        self._room.acquire()
        return self._parts.submit(put)

    def drop_staged(self, writers: Sequence[str]) -> None:
        uploads = [(upload, owner) for upload in self._files.uploads() if (owner := _owner(upload.name)) is not None]
        owners = self._owners() if uploads else set()  # listed later: an upload has an owner before it begins
        for upload, owner in uploads:
            if owner in writers or (owner not in owners and upload.age_ms > ORPHAN_AGE_MS):
                self._files.abort_upload(upload.name, upload.id)
        for writer in writers:
            self.remove_folder(f"{STAGED}/{writer}")

    def _owners(self) -> set[str]:
        """The writers of all sinks in this target."""
        sinks = self._files.children(HIDDEN)
        return {writer for sink in sinks for writer in self._files.children(f"{HIDDEN}/{sink}/{STAGED}")}

    def publish(self, files: Sequence[WaitingFile], waiting: Iterable[WaitingFile]) -> None:
        _mapped(self._complete, list(waiting))

    def _complete(self, file: WaitingFile) -> None:
        if not self._files.complete_upload(file.path, file.upload, file.parts):
            self._require_published(file)

    def _waits(self, file: WaitingFile) -> bool:
        if self._files.has_upload(file.path, file.upload):
            return True
        self._require_published(file)
        return False

    def _is_published(self, file: WaitingFile) -> bool | None:
        stored = self._files.stored(file.path)
        return None if stored is None else (stored.size, stored.metadata.get(TOKEN)) == (file.size, file.staged)

    def _named(self, file: WaitingFile) -> str:
        return f"The upload of {self.target}/{file.path}"


class _Uploaded(_HashedStream):
    """A file that is uploaded while it is written."""

    def __init__(self, place: S3Place, path: str, token: str) -> None:
        super().__init__(PART_BYTES, self._upload)
        self._place, self._path, self._token = place, path, token
        self._id = ""
        self._etags: list[Future[str]] = []

    def _upload(self, part: bytes) -> None:
        if not self._id:
            self._id = self._place.begin_upload(self._path, self._token)
        for etag in self._etags:
            if etag.done():
                etag.result()  # raises what has failed
        self._etags.append(self._place.put_part(self._path, self._id, len(self._etags) + 1, part))

    def sync(self) -> None:
        if (rest := self._last()) or not self._etags:
            self._upload(rest)
        for etag in self._etags:
            etag.result()

    def waiting(self, rows: int) -> WaitingFile:
        return WaitingFile(
            staged=self._token, path=self._path, rows=rows, size=self.size, sha256=self._sha256.digest(),
            upload=self._id, parts=tuple(etag.result() for etag in self._etags),
        )  # fmt: skip


def _owner(name: str) -> str | None:
    """The writer of an upload, as its folder is named; None: it is another program's."""
    match = _NAME.match(name.rpartition("/")[2])
    return None if match is None else str(WriterId(int(match[1]), int(match[2]), int(match[3]), match[4]))


def _mapped(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results for *items*, of which several are asked for at once."""
    if len(items) < 2:
        return list(map(function, items))
    with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
        return list(pool.map(function, items))
