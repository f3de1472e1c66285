"""The seam between a file sink and the kind of its target: a folder of this machine, HDFS, or S3.

A place has the hidden folder of one sink, staged files, and published ones. Paths are strings with slashes: those of
the hidden folder are below `Place.root`, those of published files below `Place.target`. Invariants, for each kind: an
existing file is never replaced; a file is whole once it has its name; `NewFile.sync`, `stage_list` and `write_new`
return once all is durable; a published file is the one that was staged. `LocalPlace`, `HdfsPlace` and `S3Place`
implement it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.files.format import ByteFile
from exactlyonce.sinks.files.layout import HIDDEN, WaitingFile, WriterId


class WaitingFileGone(Exception):
    """The staged file in the argument is neither there nor where it is to be published."""


def taken(path: object) -> StoreError:
    """Another file has the name of a waiting one."""
    return StoreError(
        f"{path} exists, and is not the file that is to be published there: another program has created or changed it. "
        f"Nothing was overwritten: move it away, and run again."
    )


def removed_from(target: str) -> str:
    """The `Place.cleaned_by` of a target whose waiting files are files."""
    return (
        f"another program has removed it. Put it back if there is a copy, and keep clean-up programs out of "
        f"{target}/{HIDDEN}."
    )


class NewFile(ByteFile, Protocol):
    """A staged file that is written sequentially, by one thread."""

    size: int

    def sync(self) -> None:
        """Wait until all that was written is durable. Nothing is written after it."""

    def waiting(self, rows: int) -> WaitingFile:
        """The file, which `sync` has made durable. Its `path` is empty if it gets its name at the cut."""


class Place(Protocol):
    """See the module. Errors are as `explained` explains them."""

    target: str
    """For people, as `root`."""
    root: str
    writes_to: str
    """The slow part of a write, in a word."""
    cleaned_by: str
    """The likely remover of a waiting file that is gone, for errors."""
    suspicion: str
    """The likely cause of a hidden folder that is older than it was, as a sentence."""

    def explained(self, *, starting: bool = False) -> AbstractContextManager[None]:
        """Raise errors of the target as `StoreError` or `StoreUnavailable`. *starting*: at the start of a run some are
        permanent that a later retry may overcome."""

    def explanation(self, failure: BaseException) -> str | None:
        """A sentence about an error of the target; None for another one."""

    def give_up(self) -> None:
        """No call waits any longer for a target that is away. Any thread may call it."""

    def check(self) -> None:
        """Create the target, if its parent exists, and write and rename a file in it."""

    def require_there(self) -> None:
        """`StoreUnavailable` if the hidden folder is away with its disk."""

    def problem(self) -> str:
        """Why nothing can be written to the target; empty: nothing is known. Changes nothing."""

    def risk(self) -> str:
        """What may remove waiting files in the target by itself; empty: nothing."""

    # --- the hidden folder

    def make(self, folder: str) -> None:
        """Create a folder."""

    def settle(self, folder: str) -> None:
        """Make the names in *folder* durable, whoever wrote them."""

    def names_in(self, folder: str) -> list[str]:
        """The names in *folder*; none if it is missing."""

    def read(self, path: str) -> bytes | None:
        """The content of a file; None if it is missing."""

    def written_at_ms(self, path: str) -> int | None:
        """The time of a file; None if it is missing."""

    def write_new(self, path: str, content: bytes, temporary: str) -> bool:
        """Create a file with *content*, durable and whole; False if it exists, which is durable then too. *temporary*
        begins the name of what is written first."""

    def remove(self, path: str) -> None:
        """Remove a file; a missing one is no error."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder of files."""

    # --- staged files

    def begin(self, writer: WriterId) -> None:
        """*writer* is about to stage its first file."""

    def new_file(self, writer: WriterId, number: int, folder: str, suffix: str) -> NewFile:
        """A new staged file, which is to be published in *folder* of the target."""

    def stage_list(self, path: str, content: bytes) -> None:
        """Write the list of staged files at *path*, below the staged ones."""

    def drop_staged(self, writers: Sequence[str]) -> None:
        """Remove all that *writers* have staged, and what no writer owns."""

    # --- published files

    def waiting(self, files: Iterable[WaitingFile]) -> list[WaitingFile]:
        """Those of *files* that are still to be published; the others are. Raises if one cannot be, `WaitingFileGone`
        among others; publishes none."""

    def publish(self, files: Sequence[WaitingFile], waiting: Iterable[WaitingFile]) -> None:
        """Publish the *waiting* ones of *files*; then all are durable, whoever published them."""
