"""A table of Delta keeps the contract of a sink whose output the leader commits; see `testing.sink_contract`."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks import DeltaSink
from exactlyonce.testing.sink_contract import SinkContract
from exactlyonce.testing.sink_contract.hooks import ORIGIN

pytest.importorskip("deltalake", reason="DELTA NOT TESTED: it needs the extra `delta`")
from deltalake import DeltaTable, write_deltalake

pytestmark = pytest.mark.exhaustive


class Order(msgspec.Struct):
    number: int
    version: int


class TestDeltaSink(SinkContract):
    type = Order
    processes = False  # delta-rs has threads, which no forked process has
    test_a_store_that_is_away: Any = None  # its check says that there is no table: test_delta_sink.py
    test_secrets_show_nowhere: Any = None  # there are none

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "lake" / "orders"
        self.folder.parent.mkdir()

    def sink(self) -> DeltaSink[Order]:
        key = ("number",) if self.keyed else ()
        return DeltaSink(self.folder, mode="upsert" if self.keyed else "append", key=key, create=True)

    def record(self, number: int, version: int = 0) -> Order:
        return Order(number, version)

    def read(self) -> list[Order]:
        return [Order(**row) for row in pa.table(DeltaTable(self.folder).to_pyarrow_table()).to_pylist()]

    def backup(self) -> Callable[[], None]:
        copy = self.folder.with_name("backup")
        shutil.copytree(self.folder, copy)

        def restore() -> None:
            shutil.rmtree(self.folder)
            shutil.copytree(copy, self.folder)

        return restore

    def clean_up(self) -> None:
        """A second writer's commits, one of which deletes again; then the log before a checkpoint of it is removed."""
        table = DeltaTable(self.folder)
        rows = pa.table({"number": [-1], "version": [-1]}).cast(pa.schema(table.schema().to_arrow()))
        write_deltalake(table, rows, mode="append")
        table.delete("number = -1")
        table.vacuum(0, dry_run=False, enforce_retention_duration=False)
        table.create_checkpoint()
        for entry in (self.folder / "_delta_log").glob("*.json"):
            if int(entry.stem) < table.version():
                entry.unlink()


class TestDeltaUpsert(TestDeltaSink):
    """Rows replace those with their key."""

    keyed = True


class TestOnS3(TestDeltaSink):
    """A bucket, whose puts compare: a commit is a file that must not exist."""

    test_a_store_that_was_restored: Any = None  # the rules are those of a folder
    secret = "secret-canary"

    @pytest.fixture(autouse=True)
    def _bucket(self, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.path = s3, f"{s3.url}/lake-{secrets.token_hex(4)}/orders"
        monkeypatch.setenv("LAKE_KEY", s3.env["AWS_ACCESS_KEY_ID"])
        monkeypatch.setenv("LAKE_SECRET", s3.env["AWS_SECRET_ACCESS_KEY"])
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name)
        self.options = {
            "AWS_ENDPOINT_URL": s3.env["AWS_ENDPOINT_URL"], "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "env:LAKE_KEY", "AWS_SECRET_ACCESS_KEY": "env:LAKE_SECRET",
        }  # fmt: skip

    def sink(self) -> DeltaSink[Order]:
        return DeltaSink(self.path, create=True, storage_options=self.options)

    def table(self) -> DeltaTable:
        secrets = {
            name: os.environ[value.removeprefix("env:")] for name, value in self.options.items() if "env:" in value
        }
        return DeltaTable(self.path, storage_options={**self.options, **secrets})

    def read(self) -> list[Order]:
        return [Order(**row) for row in pa.table(self.table().to_pyarrow_table()).to_pylist()]

    def clean_up(self) -> None:
        table = self.table()
        rows = pa.table({"number": [-1], "version": [-1]}).cast(pa.schema(table.schema().to_arrow()))
        write_deltalake(table, rows, mode="append")
        table.delete("number = -1")
        table.create_checkpoint()

    def test_a_store_that_is_away(self) -> None:
        leader = self.leader(1)
        staged = self.staged([(0, 0)], 1)
        with self.server.away():
            for committer in (leader, self.committer()):
                with pytest.raises(StoreUnavailable):
                    committer.commit([staged], 1, ORIGIN)
        assert leader.commit([staged], 1, ORIGIN)
        assert self.read() == [Order(0, 0)]

    test_secrets_show_nowhere = SinkContract.test_secrets_show_nowhere

    def unavailable(self) -> Any:
        return self.server.away()
