"""The seam between a lake sink and a table format, and the folder of what waits beside a table.

    <folder>/<incarnation>-<attempt>-<subtask>-<token>.<interval>.<suffix>          an interval's list of its files
    <folder>/<incarnation>-<attempt>-<subtask>-<token>.<interval>.<number>.<suffix>  a part of the interval

The folder is one sink's. A part of suffix `begun` names data files, which lie elsewhere, and is durable before the
first of them is written; other parts are files of rows themselves.

Invariants: a table's commit compares and sets. It adds all files and the ledger, or nothing, and raises `Conflict` if
another commit of the same ledger came since the table was loaded; then it has changed nothing, and never will. So two
commits of one ledger have an order, and each has read what the one before has written. A committed interval has
nothing in the folder once its checkpoint is finalized, for its commit is asked for again until all of it is removed:
parts first, then the list. So whatever an older attempt has left there was never committed, and its data files are in
no snapshot of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.files.layout import WriterId
from exactlyonce.sinks.ledger import SinkLedger

S3_ON_OBJECTS, S3_ON_BUCKET = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"), ("s3:ListBucket",)
RIGHTS = f"{', '.join(S3_ON_OBJECTS)} and {S3_ON_BUCKET[0]}"
"""The rights that a table in S3 needs."""
_DENIED = re.compile(
    r"permission.?denied|access.?denied|forbidden|(?<![\w/.-])40[13](?![\w/-]|\.\w)|credentials|access.?key",
    re.IGNORECASE,
)
_NO_BUCKET = re.compile("NO_?SUCH_?BUCKET", re.IGNORECASE)
NO_BUCKET = "There is no bucket of that name"
"""In place of what S3 says of it, with ids of its request."""


class Conflict(Exception):
    """Another commit was faster: load the table again, and compare the ledger."""


def is_denied(error: BaseException) -> bool:
    """Whether a file system refuses a request for want of a right, or of credentials.

    >>> is_denied(OSError("AWS Error ACCESS_DENIED during PutObject operation")), is_denied(OSError("No space left"))
    (True, False)
    >>> is_denied(OSError("status: 403.")), is_denied(OSError("/lake/plan-401/totals does not exist"))
    (True, False)
    """
    return isinstance(error, PermissionError) or _DENIED.search(str(error)) is not None


def has_no_bucket(error: BaseException) -> bool:
    """Whether S3 says that the bucket itself is missing; a start would wait for it without end.

    >>> has_no_bucket(OSError("AWS Error NO_SUCH_BUCKET during CreateMultipartUpload operation"))
    True
    """
    return _NO_BUCKET.search(str(error)) is not None


def gone(path: str, remover: str) -> StoreError:
    """A staged file is gone. *remover*: the format's operation that removes such files, and its limit."""
    return StoreError(
        f"{path} was set aside, and is gone: another program has removed it, for instance by {remover} shorter than "
        f"this pipeline was away. Put it back if there is a copy."
    )


def changed(path: str, size: int, size_written: int) -> StoreError:
    """A staged file has another size, in bytes."""
    return StoreError(
        f"{path} was set aside with {size_written:,} bytes, and has {size:,}: a crash of its machine has cut it short, "
        f"or another program has changed it. Put it back if there is a copy."
    )


class LoadedTable(Protocol):
    """A table as it was when it was loaded."""

    @property
    def ledger(self) -> SinkLedger:
        """The ledger of the sink; `SinkLedger()` if there is none."""

    @property
    def growth(self) -> str:
        """What grows with each commit and has become too much, as a predicate of the table; empty: nothing."""

    def commit(self, ledger: SinkLedger, staged: Sequence[bytes], checkpoint: int) -> None:
        """Add what *staged* lists, in its order, and write *ledger*, in one commit.

        *staged* are bodies of committables; *checkpoint* is the newest of them, for people. `StoreError` if a staged
        file is gone, or the table cannot take the rows any more; `StoreUnavailable` if the outcome is unknown.
        """

    def forget(self, staged: Sequence[bytes]) -> None:
        """Remove what waits beside the table of these bodies of committables, all of which are committed."""

    def sweep(self, incarnation: int, attempt: int) -> None:
        """Remove the files of attempts of the sink before that one, none of which was or will be committed."""


class Lake(Protocol):
    """The table of one sink of one pipeline. Made without effect; every call loads the table anew.

    A catalog or file system that does not answer is `StoreUnavailable`; an error that another attempt would meet again
    is `StoreError`. Neither holds a secret. For one thread at a time.
    """

    def check(self) -> None:
        """Raise unless rows of this sink can be written; create the table if the sink says so."""

    def inspect(self) -> None:
        """As `check`, but nothing is created or written."""

    def load(self) -> LoadedTable: ...

    def close(self) -> None:
        """Close connections; the next call connects again."""


class StagedInterval(NamedTuple):
    """The body of a committable, and the rows in its files."""

    body: bytes
    rows: int


class StagedFiles(Protocol):
    """The files of one writer, on the thread that writes them."""

    def require_table(self) -> None:
        """`StoreUnavailable` while the table's disk is not mounted. Nothing is written below its empty mount point."""

    def write(self, rows: Any, /) -> None:
        """Write a `pyarrow.Table` of rows, as one file, or one for each partition. It requires the table."""

    def cut(self, checkpoint: int) -> StagedInterval:
        """End an interval: its files and the list of them are durable. It requires the table."""

    def close(self) -> None:
        """Let go of connections."""


# --- the folder of what waits ----------------------------------------------------------------------------------------

BEGUN = "begun"


def encode_begun(paths: Sequence[str]) -> bytes:
    """The content of a part of suffix `begun`: the data files that may be there."""
    return msgspec.json.encode(paths)


def decode_begun(content: bytes) -> list[str]:
    """The data files; none if a crash has cut *content* short: none of them was written then."""
    try:
        return msgspec.json.decode(content, type=list[str])
    except msgspec.DecodeError:
        return []


class StagedNames:
    """The names in the folder of one writer's intervals."""

    def __init__(self, folder: str, writer: WriterId) -> None:
        self._before = f"{folder}/{writer}"
        self._interval = 1
        self.parts = 0
        """The parts of this interval."""

    def part(self, suffix: str) -> str:
        """The next part of this interval."""
        self.parts += 1
        return f"{self._before}.{self._interval}.{self.parts}.{suffix}"

    def end(self, suffix: str) -> tuple[str, int]:
        """End the interval; -> its list, and the number of its parts."""
        parts, self.parts, self._interval = self.parts, 0, self._interval + 1
        return f"{self._before}.{self._interval - 1}.{suffix}", parts


def parts_of(listing: str, parts: int, suffix: str) -> Iterator[str]:
    """The parts of the interval with this list."""
    stem = listing.rpartition(".")[0]
    return (f"{stem}.{number}.{suffix}" for number in range(1, parts + 1))


def left_over(names: Iterable[str], incarnation: int, attempt: int) -> Iterator[str]:
    """The *names*, in the folder, whose writers are of an older attempt; others are not ours.

    >>> list(left_over(["1-1-0-ab.1.json", "2-1-0-cd.1.json", "2-2-0-ef.1.json", "other"], 2, 2))
    ['1-1-0-ab.1.json', '2-1-0-cd.1.json']
    """
    for name in names:
        writer = WriterId.parsed(name.partition(".")[0])
        if writer is not None and writer.is_before(incarnation, attempt):
            yield name
