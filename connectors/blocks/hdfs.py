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

from exactlyonce.connectors.blocks.folder import STORAGE, StoredFile
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


class HdfsFolder:
    """The folder *inner* below *root*, at the name node or the name service *host*: a `Folder`, and a `Tree`.

    Errors begin with *what*.
    """

    def __init__(self, host: str, root: str, inner: str, what: str = STORAGE) -> None:
        self._host, self._root = host, f"/{root}" if root else ""
        self._path = f"{self._root}/{inner}".rstrip("/")
        self.url = f"hdfs://{host}{self._path}"
        self._named = f"{what} {self.url}"
        self._lock = threading.Lock()
        self._made: Any = None
        self._given_up: list[Future[Any]] = []

    def check(self) -> None:
        def probed(client: Any) -> None:
            client.mkdirs(self._path, create_parent=True)
            _write(client, probe := f"{self._path}/probe-{secrets.token_hex(4)}", b"probe")
            client.delete(probe)

        self._asked(probed)

    def put(self, name: str, content: bytes, aside: str) -> None:
        self.put_new(name, content, aside)

    def put_new(self, name: str, content: bytes, aside: str) -> bool:
        path, temporary = f"{self._path}/{name}", f"{self._path}/{aside}"

        def written(client: Any) -> bool:
            try:
                _write(client, temporary, content)
            except Exception:
                _delete_or_leave(client, temporary)
                raise
            return _rename(client, temporary, path)

        return self._asked(written)

    def put_file(self, name: str, file: BinaryIO, aside: str) -> None:
        file.seek(0)
        new = self.create(aside)
        try:
            while part := file.read(PART_BYTES):
                new.write(part)
            new.close()
            self._asked(lambda client: _rename(client, f"{self._path}/{aside}", f"{self._path}/{name}"))
        except ExactlyOnceError:
            with suppress(ExactlyOnceError):
                self._asked(lambda client: _delete_or_leave(client, f"{self._path}/{aside}"))
            raise

    def create(self, name: str) -> HdfsFile:
        """A new file, which replaces nothing."""
        return HdfsFile(self._asked, self._asked(lambda client: client.create(f"{self._path}/{name}")))

    def rename_new(self, old: str, new: str) -> None:
        """Rename *old*, which replaces nothing. FileExistsError if *new* exists, FileNotFoundError without *old*."""

        def rename(client: Any) -> OSError | None:
            try:
                client.rename(f"{self._path}/{old}", f"{self._path}/{new}")
            except (FileExistsError, FileNotFoundError) as error:
                return error
            return None

        if (error := self._asked(rename)) is not None:
            raise error

    def size(self, name: str) -> int | None:
        """The size of a file; None without one."""
        file = self.look(name)
        return None if file is None else file.size

    def make(self, inner: str) -> None:
        """Create a folder, and all around it."""
        self._asked(lambda client: client.mkdirs(f"{self._path}/{inner}", create_parent=True))

    def children(self, inner: str) -> dict[str, int]:
        def listed(client: Any) -> dict[str, int]:
            try:
                statuses = list(client.list_status(f"{self._path}/{inner}".rstrip("/")))
            except FileNotFoundError:
                return {}
            return {status.path.rpartition("/")[2]: status.modification_time for status in statuses}

        return self._asked(listed)

    def remove_tree(self, inner: str) -> None:
        def remove(client: Any) -> None:
            with suppress(FileNotFoundError):
                client.delete(f"{self._path}/{inner}", recursive=True)

        self._asked(remove)

    def get(self, name: str) -> bytes | None:
        def read(client: Any) -> bytes | None:
            try:
                content: bytes = client.read(f"{self._path}/{name}").read()
            except FileNotFoundError:
                return None
            return content

        return self._asked(read)

    def get_range(self, name: str, offset: int, length: int) -> bytes | None:
        def read(client: Any) -> bytes | None:
            try:
                file = client.read(f"{self._path}/{name}")
            except FileNotFoundError:
                return None
            wanted = min(length, len(file) - offset)
            content: bytes = file.read_range(offset, wanted) if wanted > 0 else b""
            return content

        return self._asked(read)

    def files(self) -> Iterator[StoredFile]:
        def listed(client: Any) -> list[StoredFile]:
            try:
                statuses = list(client.list_status(self._path))
            except FileNotFoundError:
                return []
            files = (status for status in statuses if not status.isdir)
            return [StoredFile(file.path.rpartition("/")[2], file.length, file.modification_time) for file in files]

        yield from self._asked(listed)

    def look(self, name: str) -> StoredFile | None:
        """One file; None: it is not there."""

        def looked(client: Any) -> StoredFile | None:
            try:
                file = client.get_file_info(f"{self._path}/{name}")
            except FileNotFoundError:
                return None
            return StoredFile(name, file.length, file.modification_time)

        return self._asked(looked)

    def remove(self, names: Iterable[str]) -> None:
        def removed(client: Any, name: str) -> None:
            with suppress(FileNotFoundError):
                client.delete(f"{self._path}/{name}")

        for name in names:
            self._asked(partial(removed, name=name))

    def remove_folder(self) -> bool:
        def remove(client: Any) -> bool:
            folder, removed = self._path, False
            with suppress(FileNotFoundError):
                while folder != self._root and not list(client.list_status(folder)):
                    removed = client.delete(folder) or removed
                    folder = folder.rpartition("/")[0]
            return removed

        return self._asked(remove)

    def _client(self) -> Any:
        """Created with the first request: not every process of a pipeline makes one."""
        with self._lock:
            if self._made is None:
                with needing("hdfs", "hdfs-native", f"{self._named}"):
                    import hdfs_native
                self._made = hdfs_native.Client(f"hdfs://{self._host}", CLIENT)
            return self._made

    def _asked(self, ask: Callable[[Any], R]) -> R:
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


class HdfsFile:
    """A file that is written sequentially; each call is a request with a timeout of its own."""

    def __init__(self, ask: Callable[[Callable[[Any], None]], None], file: Any) -> None:
        self._ask, self._file = ask, file

    def write(self, content: bytes) -> None:
        self._ask(lambda client: self._file.write(content))

    def close(self) -> None:
        """Once it returns, the data nodes have all bytes on disk, and the name node knows the end."""

        def close(client: Any) -> None:
            self._file.hsync()
            self._file.close()

        self._ask(close)


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
