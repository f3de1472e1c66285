"""Tables in S3, for a user who lacks a right: the start names what it lacks, and nothing of a commit is lost."""

from __future__ import annotations

import secrets
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from lake_hands import Hands, commit, totals

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks import DeltaSink, IcebergSink
from exactlyonce.sinks.lake.table import RIGHTS
from exactlyonce.testing.servers.s3 import BUCKET

for library in ("pyiceberg", "deltalake"):
    pytest.importorskip(library, reason="LAKES NOT TESTED: they need the extras `iceberg` and `delta`")

pytestmark = pytest.mark.exhaustive
EACH = RIGHTS.replace(" and ", ", ").split(", ")


class IcebergInS3(Hands):
    @property
    def catalog(self) -> dict[str, str]:
        database = f"sqlite:///{self.folder}/catalog.db"
        return {"type": "sql", "uri": database, "s3.region": "us-east-1", **self.options}

    def sink(self) -> IcebergSink[Any]:
        return IcebergSink("shop.totals", catalog=self.catalog, create=True)

    def values(self) -> list[dict[str, Any]]:
        from pyiceberg.catalog import load_catalog

        with closing(load_catalog("default", **self.catalog)) as catalog:
            rows: list[dict[str, Any]] = catalog.load_table("shop.totals").scan().to_arrow().to_pylist()
            return rows


DELTA_OPTIONS = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}


class DeltaInS3(Hands):
    def sink(self) -> DeltaSink[Any]:
        return DeltaSink(self.options["warehouse"], create=True, storage_options=DELTA_OPTIONS)

    def values(self) -> list[dict[str, Any]]:
        from deltalake import DeltaTable

        table = DeltaTable(self.options["warehouse"], storage_options=DELTA_OPTIONS)
        rows: list[dict[str, Any]] = pa.table(table.to_pyarrow_table()).to_pylist()
        return rows


@pytest.mark.parametrize("kind", [IcebergInS3, DeltaInS3])
def test_a_right_that_is_refused(kind: type[Hands], s3: Any, s3_user: Any, tmp_path: Path) -> None:
    lake = kind(tmp_path)
    address = f"{s3.url}/lake-{secrets.token_hex(4)}"
    lake.options = {"warehouse": address, "s3.endpoint": s3.env["AWS_ENDPOINT_URL"]}
    with s3_user(*EACH):
        committer = lake.led()
        staged = lake.staged(totals(1, 2), 1)
    with s3_user(*(other for other in EACH if other != "s3:PutObject")):
        with pytest.raises(StoreError, match=rf"refuses: .*{BUCKET}.* Give this user the right .* in S3 {RIGHTS}\.$"):
            lake.committer().check()
        with suppress(StoreError, StoreUnavailable):
            commit(committer, staged)
    with s3_user(*EACH):
        commit(lake.committer(), staged)
        assert lake.rows() == [("ann", 1), ("ann", 2)]
    lake.end()


@pytest.mark.parametrize("kind", [IcebergInS3, DeltaInS3])
def test_a_bucket_that_is_missing_is_no_outage(kind: type[Hands], s3: Any, tmp_path: Path) -> None:
    """A start would wait for it without end."""
    lake = kind(tmp_path)
    lake.options = {"warehouse": "s3://no-such-bucket/lake", "s3.endpoint": s3.env["AWS_ENDPOINT_URL"]}
    with pytest.raises(StoreError, match=r"refuses: There is no bucket of that name\. Create it, or correct .*\.$"):
        lake.committer().check()
    lake.end()


def test_an_endpoint_without_tls_must_be_allowed(s3: Any) -> None:
    from exactlyonce.sinks.delta.table import TablePlace

    place = TablePlace(f"{s3.url}/lake-{secrets.token_hex(4)}", {"AWS_REGION": "us-east-1"})
    needed = pytest.raises(StoreError, match=r'refuses: .* needs "AWS_ALLOW_HTTP": "true" in storage_options=\.$')
    with needed, place.explained():
        place.find()
