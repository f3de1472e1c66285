"""The seam between blocks as files and a file system: one flat folder, in which each name is written once.

Every call blocks, for tens of seconds at most, tries once, and may be made by any thread. It raises
`StorageUnavailable` if a retry may help, also for a full disk, and `ConfigError` if not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple, Protocol

STORAGE, CHECKPOINT_STORAGE = "The storage", "The checkpoint storage"
"""The first words of a folder's errors: the second for the one of `--checkpoint-storage`."""


class StoredFile(NamedTuple):
    """A file, as a listing shows it."""

    name: str
    size: int
    written_at_ms: int
    tag: str = ""
    """Changes with the content, where the store has such a tag."""


class Folder(Protocol):
    """The files of one pipeline, or of one exported savepoint."""

    @property
    def url(self) -> str:
        """Its URL for people, without secrets."""

    def check(self) -> None:
        """Raise unless files can be put here. Creates folders, and leaves no file."""

    def put(self, name: str, content: bytes, aside: str) -> None:
        """Once it returns, *content* is durable under *name*, which nobody else writes. If it raises, the file may
        still appear, also later; a part of it may stay under *aside*, which nobody else uses."""

    def get(self, name: str) -> bytes | None:
        """The content; None without such a file."""

    def files(self) -> Iterator[StoredFile]:
        """Every file; none if the folder was never created."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; a missing one is no error."""

    def remove_folder(self) -> bool:
        """Remove the empty folder, where folders are more than parts of names; whether there was one."""


class FolderOfLargeFiles(Folder, Protocol):
    """The files may be larger than memory."""

    def put_file(self, name: str, file: BinaryIO, aside: str) -> None:
        """As `put`, with the content of an open file, which is read in parts. It takes as long as the content does."""

    def get_range(self, name: str, offset: int, length: int) -> bytes | None:
        """*length* bytes of the content from *offset*, at least one; fewer where it ends. None without such a file."""


class Tree(Protocol):
    """Files in folders, whose names have slashes: `FileSink`'s, in HDFS or S3. Errors as in `Folder`."""

    url: str

    def check(self) -> None:
        """See `Folder`."""

    def get(self, name: str) -> bytes | None:
        """See `Folder`."""

    def put_new(self, name: str, content: bytes, aside: str) -> bool:
        """As `Folder.put`; False: the file exists, and stays as it is. If it raises, the file may appear later."""

    def children(self, inner: str) -> dict[str, int]:
        """The names in the folder *inner*, with the time of a file in ms since 1970; none if it is missing."""

    def remove(self, names: Iterable[str]) -> None:
        """See `Folder`."""

    def remove_tree(self, inner: str) -> None:
        """Remove the folder *inner* with all in it; a missing one is no error."""
