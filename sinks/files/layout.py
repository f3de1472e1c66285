"""The hidden folder of a sink inside its target: where files wait, and where the ledger is.

    <target>/.exactlyonce/<pipeline>.<sink>/
        origin                              the checkpoint topic that the ledger belongs to
        fence/<incarnation>                 no incarnation below commits any more
        ledger/<subtask>/<thousand>/<checkpoint>.json    what was published, one entry for each committable
        staged/<incarnation>-<attempt>-<subtask>-<token>/    files of one writer that are not published yet
        temporary/                          files of the ledger that are being written

Invariant: no two writers share a folder of staged files or a name of a published one: the token is theirs alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

HIDDEN = ".exactlyonce"
SHARD = 1_000
"""Checkpoints whose entries share a folder, so that the newest is found by looking at few names."""

_STAGED = re.compile(r"(\d+)-(\d+)-(\d+)-([0-9a-f]+)\Z")


class WriterId(NamedTuple):
    """One writer of one attempt; the text of it is the name of its folder."""

    incarnation: int
    attempt: int
    subtask: int
    token: str

    def __str__(self) -> str:
        return f"{self.incarnation}-{self.attempt}-{self.subtask}-{self.token}"

    @classmethod
    def parsed(cls, name: str) -> WriterId | None:
        """Of a folder; None if no writer has made it."""
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
        """All that is hidden."""
        return self.target / HIDDEN / f"{self.pipeline}.{self.sink}"

    @property
    def staged(self) -> Path:
        """The folders of the writers."""
        return self.root / "staged"

    @property
    def temporary(self) -> Path:
        """Where files of the ledger are written before they get their names."""
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
        """The entries, by subtask, of the checkpoint topic of that id: what a leader of another one writes, however
        late, says nothing here."""
        return self.root / "ledger" / origin.replace("/", "_").replace("+", "-")

    def entry(self, origin: str, subtask: int, checkpoint: int) -> Path:
        """The entry of a committable."""
        return self.ledger(origin) / str(subtask) / f"{checkpoint // SHARD:07d}" / f"{checkpoint:010d}.json"


class WaitingFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that waits to be published, and proof that it is the one that was written."""

    staged: str
    """Where it waits, from `SinkFolder.staged` on."""
    path: str
    """Where it is published, from the target on."""
    rows: int
    size: int
    sha256: bytes


class StagedList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a committable: the file that lists its files. It is short, however many those are."""

    path: str
    """From `SinkFolder.staged` on."""
    sha256: bytes


class PublishedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of an entry."""

    path: str
    rows: int
    size: int
    sha256: str


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger says of a committable: JSON, for readers who want whole checkpoints too."""

    pipeline: str
    sink: str
    subtask: int
    checkpoint: int
    incarnation: int
    """Of the coordinator that has published it."""
    rows: int
    files: tuple[PublishedFile, ...]


KIND = "files"
encode_staged = msgspec.msgpack.Encoder().encode
decode_staged = msgspec.msgpack.Decoder(tuple[WaitingFile, ...]).decode
decode_body = msgspec.msgpack.Decoder(StagedList).decode
encode_entry = msgspec.json.Encoder().encode
