"""The writers and committers of a lake sink "out" of pipeline "totals", each as in its own process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest
from flushing import flushed
from table_rows import Total
from waiting import until

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.sinks import DeltaSink, IcebergSink
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.lake.sink import LakeCommitter
from exactlyonce.sinks.writer import Opened, WriterContext
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.sink_contract.hooks import ORIGIN

NOBODY = 65534


TOTALS = pa.schema([pa.field("customer", pa.string(), nullable=False), pa.field("cents", pa.int64(), nullable=False)])
MODES: dict[str, dict[str, Any]] = {"append": {}, "upsert": {"mode": "upsert", "key": ("customer",)}}


def totals(*cents: int) -> list[Total]:
    return [Total("ann", each) for each in cents]


class Clients:
    clock = SimulatedClock()

    def producers(self, topic: str, partitioner: str | None) -> Any:
        raise AssertionError(topic)


class Hands:
    """A table below *folder*, the sink that writes to it, and another program's hands at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.type: Any = Total
        self.options: dict[str, Any] = {}
        self.notes: list[str] = []
        self.to_end: list[Callable[[], None]] = []

    def sink(self) -> Any:
        raise NotImplementedError

    def create(self, schema: Any, **options: Any) -> Any:
        raise NotImplementedError

    def create_by_customer(self) -> None:
        """A table of `TOTALS` that is partitioned by customer."""
        raise NotImplementedError

    def values(self) -> list[dict[str, Any]]:
        """The rows of the table, in any order."""
        raise NotImplementedError

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(tuple(row.values()) for row in self.values())

    def commits(self) -> int:
        """The number of commits to the table."""
        raise NotImplementedError

    def live(self) -> set[Path]:
        """The data files of the table."""
        raise NotImplementedError

    def append(self, *rows: Total) -> None:
        """Another program appends *rows*."""
        raise NotImplementedError

    def expire(self) -> None:
        """Another program removes what the present table does not need."""
        raise NotImplementedError

    def client(self) -> tuple[type, str, Exception]:
        """The method by which a commit is sent, and the error of one whose answer is lost."""
        raise NotImplementedError

    def committer(self, pipeline: str = "totals") -> LakeCommitter:
        context = CommitterContext(pipeline=pipeline, sink="out", type=self.type, blocks=cast(Any, None))
        committer: LakeCommitter = self.sink().open_committer(context)
        self.to_end.append(committer.close)
        return committer

    def led(self, incarnation: int = 1) -> LakeCommitter:
        committer = self.committer()
        committer.check()
        committer.fence(incarnation, ORIGIN)
        return committer

    def opened(self, subtask: int = 0) -> Opened:
        context = WriterContext(
            pipeline="totals", sink="out", subtask=subtask, incarnation=1, attempt=1, type=self.type, slots=0,
            clients=Clients(), staging=cast(Any, None), prepared=lambda name: None, note=self.notes.append,
        )  # fmt: skip
        opened: Opened = self.sink().open_writer(context)
        self.to_end.append(opened.writer.abandon)
        return opened

    def staged(
        self, records: Sequence[Any], checkpoint: int, *, previous: int = 0, subtask: int = 0
    ) -> StoreCommittable:
        opened = self.opened(subtask)
        for start in range(0, len(records), 100):
            opened.writer.write(opened.encoder.encode(records[start : start + 100]))
        opened.writer.barrier(checkpoint)
        return self.flushed(opened, checkpoint, previous)

    def flushed(self, opened: Opened, checkpoint: int, previous: int = 0) -> StoreCommittable:
        staged = flushed(opened.writer, checkpoint).staged
        assert staged is not None
        return msgspec.structs.replace(staged.committable, previous=previous)

    def staged_files(self) -> list[Path]:
        """All files that writers have staged, and not removed."""
        files = sorted(files_below(self.folder))
        return [file for file in files if "totals.out" in str(file.relative_to(self.folder))]

    def staged_while_away(self, records: Sequence[Any], checkpoint: int, mount: Path) -> StoreCommittable:
        """Records whose barrier comes while *mount* is empty: nothing is written there, and the barrier waits."""
        opened = self.opened()
        away = mount.rename(mount.with_name("away"))
        mount.mkdir()
        opened.writer.write(opened.encoder.encode(records))
        opened.writer.barrier(checkpoint)
        until(lambda: self.notes)
        assert "mounted?" in self.notes[0]
        opened.writer.poll()
        assert opened.writer.take_flushed(checkpoint) is None
        mount.rmdir()
        away.rename(mount)
        return self.flushed(opened, checkpoint)

    def end(self) -> None:
        for end in self.to_end:
            end()


class Lake(Hands):
    """A catalog of Iceberg in SQLite, with table shop.totals."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        pytest.importorskip("pyiceberg", reason="ICEBERG NOT TESTED: it needs the extra `iceberg`")
        folder.mkdir()
        self.properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
        self.options = {"catalog": self.properties}

    def catalog(self) -> Any:
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("default", **self.properties)
        self.to_end.append(catalog.close)
        return catalog

    def create(self, schema: Any, **options: Any) -> Any:
        catalog = self.catalog()
        catalog.create_namespace_if_not_exists("shop")
        return catalog.create_table("shop.totals", schema, **options)

    def create_by_customer(self) -> None:
        with self.create(TOTALS).update_spec() as spec:
            spec.add_identity("customer")

    def table(self) -> Any:
        return self.catalog().load_table("shop.totals")

    def sink(self) -> IcebergSink[Any]:
        return IcebergSink("shop.totals", **self.options)

    def values(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.table().scan().to_arrow().to_pylist()
        return rows

    def commits(self) -> int:
        return len(self.table().snapshots())

    def live(self) -> set[Path]:
        paths = [planned.file.file_path for planned in self.table().scan().plan_files()]
        return {self.folder / path.partition(f"{self.folder}/")[2] for path in paths}

    def append(self, *rows: Total) -> None:
        schema = self.table().schema().as_arrow()
        self.table().append(pa.Table.from_pylist([msgspec.structs.asdict(row) for row in rows], schema))

    def expire(self) -> None:
        table = self.table()
        older = [snapshot.snapshot_id for snapshot in table.snapshots() if snapshot != table.current_snapshot()]
        table.maintenance.expire_snapshots().by_ids(older).commit()

    def client(self) -> tuple[type, str, Exception]:
        from pyiceberg.catalog.sql import SqlCatalog
        from sqlalchemy.exc import OperationalError

        return SqlCatalog, "commit_table", OperationalError("COMMIT", {}, Exception("server closed the connection"))


class RestLake(Lake):
    """A REST catalog at *uri*, which the sink reaches through a gateway at *gateway*."""

    def __init__(self, folder: Path, uri: str, gateway: str) -> None:
        super().__init__(folder)
        self.properties = {"type": "rest", "uri": uri}
        self.options = {"catalog": {"type": "rest", "uri": gateway}}

    def end(self) -> None:
        self.catalog().drop_table("shop.totals")
        super().end()


class DeltaLake(Hands):
    """A table of Delta in *folder*."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        pytest.importorskip("deltalake", reason="DELTA NOT TESTED: it needs the extra `delta`")

    def sink(self) -> DeltaSink[Any]:
        return DeltaSink(self.folder, **self.options)

    def create(self, schema: Any, **options: Any) -> None:
        from deltalake import DeltaTable

        DeltaTable.create(self.folder, schema, **options)

    def create_by_customer(self) -> None:
        self.create(TOTALS, partition_by=["customer"])

    def handle(self) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.folder)

    def values(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pa.table(self.handle().to_pyarrow_table()).to_pylist()
        return rows

    def commits(self) -> int:
        return int(self.handle().version())

    def live(self) -> set[Path]:
        return set(map(Path, self.handle().file_uris()))

    def append(self, *rows: Total) -> None:
        from deltalake import write_deltalake

        table = pa.Table.from_pylist([msgspec.structs.asdict(row) for row in rows], TOTALS)
        write_deltalake(self.handle(), table, mode="append")

    def expire(self) -> None:
        self.handle().create_checkpoint()
        self.handle().vacuum(0, dry_run=False, enforce_retention_duration=False)

    def client(self) -> tuple[type, str, Exception]:
        from deltalake import DeltaTable

        name = "merge" if self.options.get("mode") == "upsert" else "create_write_transaction"
        return DeltaTable, name, OSError("server closed the connection")


class StoredDelta(DeltaLake):
    """A table of Delta in the bucket of *server*, which the sink reaches through a gateway at *gateway*."""

    def __init__(self, folder: Path, server: Any, gateway: str) -> None:
        super().__init__(folder)
        self.url = f"{server.url}/{secrets.token_hex(8)}/totals"
        self._stored = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
        self.options = {"storage_options": {**self._stored, "AWS_ENDPOINT_URL": gateway}}

    def sink(self) -> DeltaSink[Any]:
        return DeltaSink(self.url, **self.options)

    def create(self, schema: Any, **options: Any) -> None:
        from deltalake import DeltaTable

        DeltaTable.create(self.url, schema, storage_options=self._stored, **options)

    def handle(self) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.url, storage_options=self._stored)


LAKES: dict[str, type[Hands]] = {"iceberg": Lake, "delta": DeltaLake}


@contextmanager
def lake_in(folder: Path, kind: str) -> Iterator[Hands]:
    """The hands at an empty lake in *folder*."""
    hands = LAKES[kind](folder)
    yield hands
    hands.end()


def commit(committer: Committer, *committables: StoreCommittable) -> bool:
    return committer.commit(list(committables), 1, ORIGIN)


@contextmanager
def before_a_commit(lake: Hands, act: Callable[[], object]) -> Iterator[None]:
    """The next commit meets *act* on its way."""
    owner, name, _ = lake.client()
    send = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:

        def acting(*request: Any, **options: Any) -> Any:
            patch.undo()
            act()
            return send(*request, **options)

        patch.setattr(owner, name, acting)
        yield
    assert getattr(owner, name) is send, "the commit has met it"


@contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """This process may not look into *folder* meanwhile: root becomes another user, whose folder it is not."""
    mode = folder.stat().st_mode
    folder.chmod(0o700 if os.geteuid() == 0 else 0)
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(uid)
        folder.chmod(mode)


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}
