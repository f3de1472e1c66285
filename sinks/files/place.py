"""The target of a file sink: a `FileStore`, with the hidden folder of one sink, its staged files, and published ones.

Paths are strings with slashes: in the hidden folder below `root`, of published files below `target`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from exactlyonce.checkpoint.records.storage_url import is_url, storage_url
from exactlyonce.connectors.filestore.store import NewFile, Retries, Upload, WaitingFile, WaitingFileGone, store_of
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable, StoreError, StoreUnavailable
from exactlyonce.sinks.files.layout import HIDDEN, STAGED, TEMPORARY, StagedList, WriterId, decode_staged

AWAY_TIMEOUT_S = 600.0
"""A writer's time of retries; its checkpoints time out meanwhile, and a later one takes the rows. A leader retries by
itself."""
ORPHAN_AGE_MS = 24 * 60 * 60 * 1000
"""The age at which an upload without an owner is aborted: a process of an older attempt has begun it too late."""


class Place:
    """See the module. Errors are as `explained` explains them."""

    def __init__(self, path: str, inner: str, *, waits: bool) -> None:
        """*inner* is the hidden folder, below *path*. *waits*: requests are repeated while a storage is away; a disk
        is not waited for."""
        path = storage_url(path) if is_url(path) else str(Path(path))
        self.target, self.root = path, f"{path}/{inner}"
        self.store, self._inner = store_of(path, "The folder"), inner
        self._retries = Retries(AWAY_TIMEOUT_S if waits and is_url(path) else 0.0)
        self.writes_to = "storage" if is_url(path) else "disk"

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise errors of the target as `StoreError` or `StoreUnavailable`."""
        try:
            yield
        except StorageUnavailable as error:
            raise StoreUnavailable(str(error)) from error
        except ConfigError as error:
            raise StoreError(str(error)) from error

    def give_up(self) -> None:
        """No call waits any longer for a target that is away. Any thread may call it."""
        self._retries.end()
        self.store.end()

    def check(self) -> None:
        """Create the target, if its parent exists, and write and publish a file in it."""
        self.store.check(self._inner)
        token = secrets.token_hex(8)
        self.store.check_publishing(f"{self._inner}/{TEMPORARY}", f"0-probe-{token}", f"{HIDDEN}-{token}")

    def require_there(self) -> None:
        """`StorageUnavailable` if the hidden folder is away with its disk."""
        self.store.require_there(self._inner)

    # --- the hidden folder

    def settle(self, folder: str) -> None:
        """Make the names in *folder* durable, whoever wrote them."""
        self.store.settle(f"{self._inner}/{folder}")

    def names_in(self, folder: str) -> list[str]:
        """The names in *folder*; none if it is missing."""
        return self._retries(lambda: self.store.names_in(f"{self._inner}/{folder}"))

    def read(self, path: str) -> bytes | None:
        """The content of a file; None if it is missing."""
        return self._retries(lambda: self.store.get(f"{self._inner}/{path}"))

    def written_at_ms(self, path: str) -> int | None:
        """The time of a file; None if it is missing."""
        file = self._retries(lambda: self.store.look(f"{self._inner}/{path}"))
        return None if file is None else file.written_at_ms

    def write_new(self, path: str, content: bytes, temporary: str) -> bool:
        """Create a file with *content*, durable and whole; False if it exists, which is durable then too. *temporary*
        begins the name of what is written first."""
        aside = f"{self._inner}/{TEMPORARY}/{temporary}-{secrets.token_hex(8)}"
        return self._retries(lambda: self.store.put(f"{self._inner}/{path}", content, aside))

    def remove(self, path: str) -> None:
        """Remove a file; a missing one is no error."""
        self._retries(lambda: self.store.remove([f"{self._inner}/{path}"]))

    def remove_folder(self, folder: str) -> None:
        """Remove a folder of files."""
        self._retries(lambda: self.store.remove_all(f"{self._inner}/{folder}"))

    # --- staged files

    @property
    def _staged(self) -> str:
        return f"{self._inner}/{STAGED}"

    def new_file(self, writer: WriterId, number: int, folder: str, suffix: str) -> NewFile:
        """A new staged file, which is to be published in *folder* of the target."""
        name = writer.uploaded_name(number, suffix)
        path = f"{folder}/{name}" if folder else name
        return self.store.create(self._staged, f"{writer}/{number}.{suffix}", path, self._retries)

    def drop_staged(self, writers: Sequence[str]) -> None:
        """Remove all that *writers* have staged, and what no writer owns."""
        owners = set[str]()

        def is_left(upload: Upload) -> bool:
            owner = WriterId.of_upload(upload.name.rpartition("/")[2])
            if owner is None or str(owner) in writers:
                return owner is not None
            if not owners:  # listed after the uploads: one has an owner before it begins
                owners.update(self._owners())
            return str(owner) not in owners and upload.age_ms > ORPHAN_AGE_MS

        self.store.drop_uploads(is_left)
        for writer in writers:
            self.remove_folder(f"{STAGED}/{writer}")

    def _owners(self) -> Iterator[str]:
        """The writers of all sinks in this target."""
        for sink in self.store.names_in(HIDDEN):
            yield from self.store.names_in(f"{HIDDEN}/{sink}/{STAGED}")

    def stage_list(self, path: str, content: bytes) -> None:
        """Write the list of staged files at *path*, below the staged ones."""
        self.write_new(f"{STAGED}/{path}", content, "0-list")

    def listed(self, body: StagedList) -> tuple[WaitingFile, ...]:
        """The files of a committable."""
        path = f"{STAGED}/{body.path}"
        content = self.read(path)
        if content is None:
            raise WaitingFileGone(f"{self.root}/{path}")
        if hashlib.sha256(content).digest() != body.sha256:
            raise StoreError(
                f"{self.root}/{path} is not what was written there: another program, or the disk, has changed it."
            )
        return decode_staged(content)

    def forget(self, body: StagedList) -> None:
        """Remove the list of files that are published."""
        self.remove(f"{STAGED}/{body.path}")

    # --- published files

    def waiting(self, files: Iterable[WaitingFile]) -> list[WaitingFile]:
        """The *files* that are still to be published; the others are. Raises if one cannot be, `WaitingFileGone`
        among others; publishes none."""
        return self.store.waiting(self._staged, files)

    def publish(self, files: Sequence[WaitingFile], waiting: Iterable[WaitingFile]) -> None:
        """Publish the *waiting* ones of *files*; then all are durable, whoever published them."""
        self.store.publish(self._staged, files, waiting)

    def publish_all(self, body: StagedList, files: Sequence[WaitingFile]) -> None:
        """Publish the *files* of *body*, without the ledger."""
        self.publish(files, self.waiting(files))
        self.forget(body)
