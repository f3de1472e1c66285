"""The hidden folder of a sink inside its target, with the staged files and the ledger.

    <target>/.exactlyonce/<pipeline>.<sink>/
        origin                              the checkpoint topic that the ledger belongs to
        fence/<incarnation>                 no incarnation below commits any more
        ledger/<subtask>/<thousand>/<checkpoint>.json    what was published, one entry for each committable
        staged/<incarnation>-<attempt>-<subtask>-<token>/    files of one writer that are not published yet
        temporary/                          files of the ledger that are being written

Invariant: no two writers share a folder of staged files or a name of a published one, by the token in it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

HIDDEN = ".exactlyonce"
SHARD = 1_000
"""Checkpoints whose entries share a folder, so that the newest is found among few names."""

_STAGED = re.compile(r"(\d+)-(\d+)-(\d+)-([0-9a-f]+)\Z")


class WriterId(NamedTuple):
    """One writer of one attempt; its text is the name of its folder."""

    incarnation: int
    attempt: int
    subtask: int
    token: str

    def __str__(self) -> str:
        return f"{self.incarnation}-{self.attempt}-{self.subtask}-{self.token}"

    @classmethod
    def parsed(cls, name: str) -> WriterId | None:
        """The writer of the folder *name*; None if no writer has made it."""
        match = _STAGED.match(name)
        return cls(int(match[1]), int(match[2]), int(match[3]), match[4]) if match else None

    def published_name(self, checkpoint: int, number: int, suffix: str) -> str:
        """The name of a file of the interval that *checkpoint* ends. It sorts by checkpoint, then subtask."""
        return (
            f"part-{checkpoint:010d}-{self.subtask:03d}-{self.incarnation}.{self.attempt}"
            f"-{self.token}-{number:04d}.{suffix}"
        )


class SinkFolder(msgspec.Struct, frozen=True):
    """The folders of one sink of one pipeline in a target."""

    target: Path
    pipeline: str
    sink: str

    @property
    def root(self) -> Path:
        """The sink's hidden folder."""
        return self.target / HIDDEN / f"{self.pipeline}.{self.sink}"

    @property
    def staged(self) -> Path:
        """The folders of the writers."""
        return self.root / "staged"

    @property
    def temporary(self) -> Path:
        """The folder for files of the ledger before they get their names."""
        return self.root / "temporary"

    @property
    def origin(self) -> Path:
        """The id of the checkpoint topic."""
        return self.root / "origin"

    @property
    def fence(self) -> Path:
        """The incarnations."""
        return self.root / "fence"

    def ledger(self, origin: str) -> Path:
        """The ledger of one checkpoint topic: late writes of another topic's leader go elsewhere."""
        return self.root / "ledger" / origin.replace("/", "_").replace("+", "-")

    def entry(self, origin: str, subtask: int, checkpoint: int) -> Path:
        """The file of a ledger entry."""
        return self.ledger(origin) / str(subtask) / f"{checkpoint // SHARD:07d}" / f"{checkpoint:010d}.json"


class WaitingFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that waits to be published; size and digest prove that it is the one that was written."""

    staged: str
    """Its path now, below `SinkFolder.staged`."""
    path: str
    """Its path once published, below the target."""
    rows: int
    size: int
    sha256: bytes


class StagedList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a committable: the file that lists its files. It is short, however many those are."""

    path: str
    """Below `SinkFolder.staged`."""
    sha256: bytes


class PublishedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file in a `LedgerFile`."""

    path: str
    rows: int
    size: int
    sha256: str


class LedgerFile(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of a ledger entry, also for readers who want whole checkpoints."""

    pipeline: str
    sink: str
    subtask: int
    checkpoint: int
    incarnation: int
    """The coordinator's that has published the files."""
    rows: int
    files: tuple[PublishedFile, ...]


KIND = "files"
encode_staged = msgspec.msgpack.Encoder().encode
decode_staged = msgspec.msgpack.Decoder(tuple[WaitingFile, ...]).decode
decode_body = msgspec.msgpack.Decoder(StagedList).decode
encode_entry = msgspec.json.Encoder().encode
