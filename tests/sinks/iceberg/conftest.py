"""A catalog in a folder, its tables, and the writers and committers of a sink, each as in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from flushing import flushed

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.sinks import IcebergSink
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.writer import WriterContext
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.sink_contract.hooks import ORIGIN


class Total(msgspec.Struct):
    customer: str
    cents: int


class Clients:
    clock = SimulatedClock()

    def producers(self, topic: str) -> Any:
        raise AssertionError(topic)


class Lake:
    """A folder with a catalog in SQLite, and a sink "out" of pipeline "totals" that writes to shop.totals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
        self.type: Any = Total
        self.options: dict[str, Any] = {"catalog": self.properties}
        self._to_end: list[Callable[[], None]] = []

    def catalog(self) -> Any:
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("default", **self.properties)
        self._to_end.append(catalog.close)
        return catalog

    def create(self, schema: Any, **options: Any) -> Any:
        catalog = self.catalog()
        catalog.create_namespace_if_not_exists("shop")
        return catalog.create_table("shop.totals", schema, **options)

    def table(self) -> Any:
        return self.catalog().load_table("shop.totals")

    def rows(self) -> list[tuple[Any, ...]]:
        rows = self.table().scan().to_arrow().to_pylist()
        return sorted(tuple(row.values()) for row in rows)

    def sink(self) -> IcebergSink[Any]:
        return IcebergSink("shop.totals", **self.options)

    def committer(self, pipeline: str = "totals") -> Committer:
        context = CommitterContext(pipeline=pipeline, sink="out", type=self.type, blocks=cast(Any, None))
        committer = self.sink().open_committer(context)
        self._to_end.append(committer.close)
        return committer

    def led(self, incarnation: int = 1) -> Committer:
        committer = self.committer()
        committer.check()
        committer.fence(incarnation, ORIGIN)
        return committer

    def staged(
        self, records: Sequence[Any], checkpoint: int, *, previous: int = 0, subtask: int = 0
    ) -> StoreCommittable:
        context = WriterContext(
            pipeline="totals", sink="out", subtask=subtask, incarnation=1, attempt=1, type=self.type, slots=0,
            clients=Clients(), staging=cast(Any, None), prepared=lambda name: None, note=lambda text: None,
        )  # fmt: skip
        opened = self.sink().open_writer(context)
        self._to_end.append(opened.writer.abandon)
        for start in range(0, len(records), 100):
            opened.writer.write(opened.encoder.encode(records[start : start + 100]))
        opened.writer.barrier(checkpoint)
        staged = flushed(opened.writer, checkpoint).staged
        assert staged is not None
        return msgspec.structs.replace(staged.committable, previous=previous)

    def end(self) -> None:
        for end in self._to_end:
            end()


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    (tmp_path / "lake").mkdir()
    lake = Lake(tmp_path / "lake")
    yield lake
    lake.end()


@pytest.fixture
def totals() -> Callable[..., list[Total]]:
    return lambda *cents: [Total("ann", each) for each in cents]
