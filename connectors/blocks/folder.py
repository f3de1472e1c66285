"""The seam between blocks as files and what keeps files: one flat folder, whose names come to be once.

Every call waits, a few ten seconds at most, tries what it is asked once, and may be made by any thread. It raises
`StorageUnavailable` where asking again may help, a full disk among them, and `ConfigError` where it would not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

STORAGE, CHECKPOINT_STORAGE = "The storage", "The checkpoint storage"
"""What a folder is for, as its errors begin: the second where `--checkpoint-storage` has named it."""


class StoredFile(NamedTuple):
    """A file, as a listing shows it."""

    name: str
    size: int
    written_at_ms: int


class Folder(Protocol):
    """The files of one pipeline, or of one exported savepoint."""

    @property
    def url(self) -> str:
        """Where it is, for people: no secret is in it."""

    def check(self) -> None:
        """Raise unless files can be put here. It makes what has to be there, and leaves no file."""

    def put(self, name: str, content: bytes, aside: str) -> None:
        """Once it returns, *content* is durable and whole under *name*, where nobody else writes. If it raises, the
        file may come to be all the same, also later; *aside*, which nobody else uses, may be left with a part of it."""

    def get(self, name: str) -> bytes | None:
        """The content; None: there is no such file."""

    def files(self) -> Iterator[StoredFile]:
        """Every file; none where the folder was never made."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are gone already are no error."""

    def remove_folder(self) -> bool:
        """Remove what is left of the folder, once no file is in it, where folders are more than parts of names; whether
        anything was left."""
