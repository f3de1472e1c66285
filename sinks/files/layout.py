"""The hidden folder of a sink inside its target, with the staged files and the ledger: names, and what is in files.

    <target>/.exactlyonce/<pipeline>.<sink>/
        origin                              the checkpoint topic that the ledger belongs to
        fence/<incarnation>                 no incarnation below commits any more
        ledger/<subtask>/<thousand>/<checkpoint>.json    what was published, one entry for each committable
        staged/<incarnation>-<attempt>-<subtask>-<token>/    one writer's lists of files that are not published yet

Invariant: no two writers share a folder of staged files or a name of a published one, by the token in it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from exactlyonce.connectors.filestore.store import WaitingFile

HIDDEN = ".exactlyonce"
STAGED, TEMPORARY, ORIGIN, FENCE = "staged", "temporary", "origin", "fence"
SHARD = 1_000
"""Checkpoints whose entries share a folder, so that the newest is found among few names."""

_STAGED = re.compile(r"(\d+)-(\d+)-(\d+)-([0-9a-f]+)\Z")
_UPLOADED = re.compile(r"part-(\d+)\.(\d+)-(\d+)-([0-9a-f]+)-\d+\.[a-z]+\Z")


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

    def is_before(self, incarnation: int, attempt: int) -> bool:
        """Whether it is of an older attempt than that one."""
        return (self.incarnation, self.attempt) < (incarnation, attempt)

    def uploaded_name(self, number: int, suffix: str) -> str:
        """The name of a file whose upload begins before its checkpoint is known."""
        return f"part-{self.incarnation:06d}.{self.attempt:03d}-{self.subtask:03d}-{self.token}-{number:06d}.{suffix}"

    @classmethod
    def of_upload(cls, name: str) -> WriterId | None:
        """The writer of an `uploaded_name`; None: it is another program's."""
        match = _UPLOADED.match(name)
        return cls(int(match[1]), int(match[2]), int(match[3]), match[4]) if match else None

    def published_name(self, checkpoint: int, number: int, suffix: str) -> str:
        """The name of a file of the interval that *checkpoint* ends. It sorts by checkpoint, then subtask."""
        return (
            f"part-{checkpoint:010d}-{self.subtask:03d}-{self.incarnation}.{self.attempt}"
            f"-{self.token}-{number:04d}.{suffix}"
        )


def hidden_folder(pipeline: str, sink: str) -> str:
    """The hidden folder of one sink of one pipeline, below its target."""
    return f"{HIDDEN}/{pipeline}.{sink}"


def ledger_folder(origin: str) -> str:
    """The ledger of one checkpoint topic: late writes of another topic's leader go elsewhere."""
    return "ledger/" + origin.replace("/", "_").replace("+", "-")


def shard_folder(origin: str, subtask: int, checkpoint: int) -> str:
    """The folder of a ledger entry."""
    return f"{ledger_folder(origin)}/{subtask}/{checkpoint // SHARD:07d}"


def entry_path(origin: str, subtask: int, checkpoint: int) -> str:
    """The file of a ledger entry."""
    return f"{shard_folder(origin, subtask, checkpoint)}/{checkpoint:010d}.json"


class StagedList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a committable: the file that lists its files. It is short, however many those are."""

    path: str
    """Below the staged files."""
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
