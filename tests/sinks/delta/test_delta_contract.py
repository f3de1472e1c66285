"""A table of Delta keeps the contract of a sink whose output the leader commits; see `testing.sink_contract`."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from contract_part import OF_COMMITS, only
from orders_contract import InFolder, Order

from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks import DeltaSink
from exactlyonce.testing.sink_contract import SinkContract
from exactlyonce.testing.sink_contract.hooks import ORIGIN

pytest.importorskip("deltalake", reason="DELTA NOT TESTED: it needs the extra `delta`")
from deltalake import DeltaTable, write_deltalake

pytestmark = pytest.mark.exhaustive


class TestDeltaSink(InFolder):
    processes = False  # delta-rs has threads, which no forked process has
    test_a_store_that_is_away: Any = None  # its check says that there is no table: test_delta_sink.py

    def sink(self) -> DeltaSink[Order]:
        key = ("number",) if self.keyed else ()
        return DeltaSink(self.folder, mode="upsert" if self.keyed else "append", key=key, create=True)

    def read(self) -> list[Order]:
        return [Order(**row) for row in pa.table(DeltaTable(self.folder).to_pyarrow_table()).to_pylist()]

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


@only(*OF_COMMITS, "test_what_the_store_cleans_up")
class TestDeltaUpsert(TestDeltaSink):
    """Rows replace those with their key."""

    keyed = True


@only(*OF_COMMITS)
class TestOnS3(TestDeltaSink):
    """A bucket, whose puts compare: a commit is a file that must not exist."""

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
