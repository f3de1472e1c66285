"""The seam between blocks as files and a file system: one flat folder, in which each name is written once.

Every call blocks, for tens of seconds at most, tries once, and may be made by any thread. It raises
`StorageUnavailable` if a retry may help, also for a full disk, and `ConfigError` if not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

STORAGE, CHECKPOINT_STORAGE = "The storage", "The checkpoint storage"
"""The first words of a folder's errors: the second for the one of `--checkpoint-storage`."""


class StoredFile(NamedTuple):
    """A file, as a listing shows it."""

    name: str
    size: int
    written_at_ms: int


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
