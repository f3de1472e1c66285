"""Files in HDFS, by hdfs-native, without Java.

It reads `core-site.xml` and `hdfs-site.xml` in `HADOOP_CONF_DIR`, also for name services; the user is that of Kerberos
or of `HADOOP_USER_NAME`. Invariant: a file gets its name by a rename that replaces nothing, once the data nodes have
its bytes on disk and the name node its end.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, TypeVar

from exactlyonce.connectors.filestore.store import STORAGE, NewFile, RenamingStore, Retries, StoredFile
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, StorageUnavailable
from exactlyonce.pipeline.extras import needing

R = TypeVar("R")

CLIENT = {
    "dfs.client.failover.max.attempts": "2",
    "dfs.client.failover.sleep.base.millis": "100",
    "dfs.client.failover.sleep.max.millis": "500",
    "dfs.client.socket-timeout": "20000",
}
"""A request is tried on each name node; the caller retries, not the library, which would take minutes."""
SILENT_S = 60.0
"""The timeout of a request: the library waits without end for a silent name node. The next request makes a new
connection."""
GIVEN_UP_MAX = 64
"""The most requests given up and not ended: each keeps a thread and four descriptors. With so many, further requests
fail at once, until the system ends their connections or the name node answers."""

PART_BYTES = 8 << 20
"""An open file is written in such parts, each a request with a timeout of its own."""

_RPC_ERROR = re.compile(r'RPCError\("[^"]*", "(.*?)(?:\\n|"\)|\Z)', re.DOTALL)
_FULL = ("QuotaExceededException", "No space left")
_REFUSED = ("AccessControlException", "Permission denied", "AuthenticationFailed")


class HdfsStore(RenamingStore):
    """The folder *inner* below *root*, at the name node or the name service *host*. Errors begin with *what*."""

    def __init__(self, host: str, root: str, inner: str, what: str = STORAGE) -> None:
        self._host, self._root = host, f"/{root}" if root else ""
        self._path = f"{self._root}/{inner}".rstrip("/")
        self.url = f"hdfs://{host}{self._path}"
        self._named = f"{what} {self.url}"
        self._lock = threading.Lock()
        self._made: Any = None
        self._given_up: list[Future[Any]] = []

    def check(self, folder: str = "") -> None:
        path = f"{self._path}/{folder}".rstrip("/")

        def probed(client: Any) -> None:
            client.mkdirs(path, create_parent=True)
            _write(client, probe := f"{path}/probe-{secrets.token_hex(4)}", b"probe")
            client.delete(probe)

        self.asked(probed)

    def put(self, name: str, content: bytes | BinaryIO, aside: str) -> bool:
        path, temporary = f"{self._path}/{name}", f"{self._path}/{aside}"
        if "/" in name:
            self.make(name.rpartition("/")[0])
        if not isinstance(content, bytes):
            return self._put_in_parts(path, content, temporary)

        def written(client: Any) -> bool:
            try:
                _write(client, temporary, content)
            except Exception:
                _delete_or_leave(client, temporary)
                raise
            return _rename(client, temporary, path)

        return self.asked(written)

    def _put_in_parts(self, path: str, file: BinaryIO, temporary: str) -> bool:
        file.seek(0)
        new = _HdfsNewFile(self, "", temporary)
        try:
            while part := file.read(PART_BYTES):
                new.write(part)
            new.sync()
            return self.asked(lambda client: _rename(client, temporary, path))
        except ExactlyOnceError:
            with suppress(ExactlyOnceError):
                self.asked(lambda client: _delete_or_leave(client, temporary))
            raise

    def names_in(self, folder: str) -> list[str]:
        def listed(client: Any) -> list[str]:
            try:
                statuses = list(client.list_status(f"{self._path}/{folder}".rstrip("/")))
            except FileNotFoundError:
                return []
            return [status.path.rpartition("/")[2] for status in statuses]

        return self.asked(listed)

    def get(self, name: str) -> bytes | None:
        def read(client: Any) -> bytes | None:
            try:
                content: bytes = client.read(f"{self._path}/{name}").read()
            except FileNotFoundError:
                return None
            return content

        return self.asked(read)

    def get_range(self, name: str, offset: int, length: int) -> bytes | None:
        def read(client: Any) -> bytes | None:
            try:
                file = client.read(f"{self._path}/{name}")
            except FileNotFoundError:
                return None
            wanted = min(length, len(file) - offset)
            content: bytes = file.read_range(offset, wanted) if wanted > 0 else b""
            return content

        return self.asked(read)

    def files(self) -> Iterator[StoredFile]:
        def listed(client: Any) -> list[StoredFile]:
            try:
                statuses = list(client.list_status(self._path or "/"))
            except FileNotFoundError:
                return []
            files = (status for status in statuses if not status.isdir)
            return [_stored(file.path.rpartition("/")[2], file) for file in files]

        yield from self.asked(listed)

    def look(self, name: str) -> StoredFile | None:
        def looked(client: Any) -> StoredFile | None:
            try:
                file = client.get_file_info(f"{self._path}/{name}")
            except FileNotFoundError:
                return None
            return _stored(name, file)

        return self.asked(looked)

    def remove(self, names: Iterable[str]) -> None:
        def removed(client: Any, name: str) -> None:
            with suppress(FileNotFoundError):
                client.delete(f"{self._path}/{name}")

        for name in names:
            self.asked(partial(removed, name=name))

    def remove_all(self, folder: str) -> None:
        def remove(client: Any) -> None:
            with suppress(FileNotFoundError):
                client.delete(f"{self._path}/{folder}", recursive=True)

        self.asked(remove)

    def remove_folder(self) -> bool:
        def remove(client: Any) -> bool:
            folder, removed = self._path, False
            with suppress(FileNotFoundError):
                while folder != self._root and not list(client.list_status(folder)):
                    removed = client.delete(folder) or removed
                    folder = folder.rpartition("/")[0]
            return removed

        return self.asked(remove)

    # --- files that wait to be published

    def make(self, folder: str) -> None:
        self.asked(lambda client: client.mkdirs(f"{self._path}/{folder}".rstrip("/"), create_parent=True))

    def create(self, at: str, staged: str, path: str, retries: Retries) -> NewFile:
        return _HdfsNewFile(self, staged, f"{self._path}/{at}/{staged}")  # not tried again: it may have been created

    def rename_new(self, old: str, new: str) -> bool:
        def rename(client: Any) -> bool:
            try:
                client.rename(f"{self._path}/{old}", f"{self._path}/{new}")
            except (FileExistsError, FileNotFoundError):
                return False
            return True

        return self.asked(rename)

    # --- requests

    def _client(self) -> Any:
        """Created with the first request: not every process of a pipeline makes one."""
        with self._lock:
            if self._made is None:
                with needing("hdfs", "hdfs-native", f"{self._named}"):
                    import hdfs_native
                self._made = hdfs_native.Client(f"hdfs://{self._host}", CLIENT)
            return self._made

    def asked(self, ask: Callable[[Any], R]) -> R:
        """The answer to a request, for which the client is asked in a thread of its own."""
        client, answer = None, Future[R]()
        with self._lock:
            self._given_up = [request for request in self._given_up if not request.done()]
            if len(self._given_up) >= GIVEN_UP_MAX:
                raise StorageUnavailable(f"{self._named} does not answer {GIVEN_UP_MAX} requests.")
        try:
            client = self._client()
            threading.Thread(target=_answer, args=(answer, partial(ask, client)), name="hdfs", daemon=True).start()
            return answer.result(SILENT_S)
        except ConfigError:
            raise
        except TooLate as error:
            with self._lock:
                self._given_up.append(answer)
                if self._made is client:
                    self._made = None
            raise StorageUnavailable(f"{self._named} has not answered for {SILENT_S:.0f} s.") from error
        except Exception as error:  # the library raises many classes
            reason = _said(error)
            if isinstance(error, PermissionError) or any(refusal in str(error) for refusal in _REFUSED):
                raise ConfigError(f"{self._named} refuses: {reason}") from error
            if any(full in str(error) for full in _FULL):
                raise StorageUnavailable(f"{self._named} is full: make room there. It says: {reason}") from error
            raise StorageUnavailable(f"{self._named} does not answer: {reason}") from error


class _HdfsNewFile(NewFile):
    """Each part is a request with a timeout of its own. The file replaces nothing."""

    def __init__(self, store: HdfsStore, staged: str, path: str) -> None:
        super().__init__(staged, PART_BYTES)
        self._store, self._file = store, store.asked(lambda client: client.create(path))

    def _put(self, part: bytes | memoryview) -> None:
        self._store.asked(lambda client: self._file.write(part))

    def sync(self) -> None:
        """Once it returns, the data nodes have all bytes on disk, and the name node knows the end."""
        if rest := self._last():
            self._put(rest)

        def close(client: Any) -> None:
            self._file.hsync()
            self._file.close()

        self._store.asked(close)


def _stored(name: str, status: Any) -> StoredFile:
    return StoredFile(name, status.length, status.modification_time)


def _write(client: Any, path: str, content: bytes) -> None:
    """Write a new file; the data nodes have its bytes on disk, and the name node its end."""
    with client.create(path) as file:  # it replaces nothing
        file.write(content)
        file.hsync()


def _rename(client: Any, temporary: str, path: str) -> bool:
    """False: the file exists; an earlier attempt may have put it, and lost its answer."""
    try:
        with suppress(FileExistsError):
            client.rename(temporary, path)
            return True
    except Exception:
        _delete_or_leave(client, temporary)
        raise
    client.delete(temporary)
    return False


def _delete_or_leave(client: Any, path: str) -> None:
    """Delete a temporary file; one that stays is an orphan."""
    with suppress(Exception):
        client.delete(path)


def _answer(answer: Future[R], ask: Callable[[], R]) -> None:
    """Resolve *answer* with the result or the exception of *ask*."""
    try:
        answer.set_result(ask())
    except BaseException as error:
        answer.set_exception(error)


def _said(error: Exception) -> str:
    """The first line of the message of the name node or the library."""
    text = str(error)
    match = _RPC_ERROR.match(text)
    return (match[1] if match else text).partition("\n")[0].replace('\\"', '"')[:300]
