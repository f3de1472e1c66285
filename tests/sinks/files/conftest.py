"""A target of a file sink, its writers and committers as an engine makes them, and a reader that shares no code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from flushing import flushed
from table_rows import Total

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.connectors.filestore import local
from exactlyonce.sinks import FileSink
from exactlyonce.sinks.committer import CommitterContext
from exactlyonce.sinks.files.committer import FilesCommitter
from exactlyonce.sinks.writer import FlushedInterval, Opened, SinkWriter, WriterContext
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.sink_contract.hooks import ORIGIN


class Clients:
    def __init__(self) -> None:
        self.clock = SimulatedClock()

    def producers(self, topic: str, partitioner: str | None) -> Any:
        raise AssertionError(topic)


class Target:
    """A folder, and a sink "out" of pipeline "totals" that writes there."""

    def __init__(self, folder: Path, type_: Any = Total, **options: Any) -> None:
        self.folder = folder
        self.type = type_
        self.sink: FileSink[Any] = FileSink(folder, **{"format": "jsonl", **options})
        self.clients = Clients()
        self.root = Path(folder) / ".exactlyonce" / "totals.out"
        self.opened_writers: list[SinkWriter] = []

    def committer(self, *, pipeline: str = "totals") -> FilesCommitter:
        context = CommitterContext(pipeline=pipeline, sink="out", type=self.type, blocks=cast(Any, None))
        return self.sink.open_committer(context)

    def led(self, incarnation: int = 1, origin: str = ORIGIN) -> FilesCommitter:
        committer = self.committer()
        committer.check()
        committer.fence(incarnation, origin)
        return committer

    def open(self, *, incarnation: int = 1, attempt: int = 1, subtask: int = 0) -> Opened:
        context = WriterContext(
            pipeline="totals", sink="out", subtask=subtask, incarnation=incarnation, attempt=attempt, type=self.type,
            slots=0, clients=self.clients, staging=cast(Any, None), prepared=lambda name: None, note=lambda text: None,
        )  # fmt: skip
        opened = self.sink.open_writer(context)
        self.opened_writers.append(opened.writer)
        return opened

    def staged(self, checkpoint: int, records: Sequence[Any], previous: int = 0, **writer: int) -> StoreCommittable:
        """The rows that a new writer stages of *records*."""
        committable = stage(self.open(**writer), checkpoint, records).staged
        assert committable is not None
        return msgspec.structs.replace(committable.committable, previous=previous)

    def published(self) -> list[Path]:
        found = []
        for place, inner, names in os.walk(self.folder):
            inner[:] = [name for name in inner if not name.startswith((".", "_"))]
            found += [Path(place, name) for name in names if not name.startswith((".", "_"))]
        return sorted(found)

    def lines(self) -> list[Any]:
        return [json.loads(line) for path in self.published() for line in path.read_text().splitlines()]

    def cents(self) -> list[int]:
        return sorted(line["cents"] for line in self.lines())

    def waiting(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("staged/*"))

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.root.glob("ledger/*/*/*/*.json"))]


def stage(opened: Opened, checkpoint: int, records: Sequence[Any]) -> FlushedInterval:
    if records:
        opened.writer.write(opened.encoder.encode(records))
    opened.writer.barrier(checkpoint)
    return flushed(opened.writer, checkpoint)


@pytest.fixture
def make_target(tmp_path: Path) -> Iterator[Callable[..., Target]]:
    """Makes a `Target`; what it has opened is abandoned at the end."""
    made: list[Target] = []

    def make(type_: Any = Total, place: Path = tmp_path, **options: Any) -> Target:
        made.append(Target(place / f"target-{len(made)}", type_, **options))
        return made[-1]

    yield make
    for target in made:
        for writer in target.opened_writers:
            writer.abandon()


@pytest.fixture(params=["renameat2", "link"])
def renaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "link":
        monkeypatch.setattr(local, "_renameat2", lambda old, new: False)


@pytest.fixture
def target(make_target: Callable[..., Target]) -> Target:
    return make_target()


@pytest.fixture
def totals() -> Callable[..., list[Total]]:
    return lambda *cents: [Total("ann", each) for each in cents]


@pytest.fixture(name="stage")
def _stage() -> Callable[..., FlushedInterval]:
    return stage
