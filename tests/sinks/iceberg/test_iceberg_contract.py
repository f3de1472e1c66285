"""A table of Iceberg keeps the contract of a sink whose output the leader commits; see `testing.sink_contract`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pyarrow as pa
import pytest
from contract_part import OF_COMMITS, only
from iceberg_rest import RestCatalog
from orders_contract import InFolder, Order
from table_contract import killed

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks import IcebergSink
from exactlyonce.testing.sink_contract import SinkContract
from exactlyonce.testing.sink_contract.hooks import ORIGIN

pytest.importorskip("pyiceberg", reason="ICEBERG NOT TESTED: it needs the extra `iceberg`")

pytestmark = pytest.mark.exhaustive


class IcebergContract(InFolder):
    """A table of a catalog, by its properties."""

    @pytest.fixture(autouse=True)
    def _closing(self, _folder: None) -> Iterator[None]:
        self.folder.mkdir()
        self._catalogs: list[Any] = []
        yield
        for catalog in self._catalogs:
            catalog.close()

    @property
    def properties(self) -> dict[str, str]:
        raise NotImplementedError

    def sink(self) -> IcebergSink[Order]:
        key = ("number",) if self.keyed else ()
        mode: Any = "upsert" if self.keyed else "append"
        return IcebergSink("shop.orders", catalog=self.properties, mode=mode, key=key, create=True)

    def table(self) -> Any:
        from pyiceberg.catalog import load_catalog

        self._catalogs.append(load_catalog("default", **self.properties))
        return self._catalogs[-1].load_table("shop.orders")

    def read(self) -> list[Order]:
        return [Order(**row) for row in self.table().scan().to_arrow().to_pylist()]

    def clean_up(self) -> None:
        """A second writer's commits, one of which deletes again, and the expiry of all snapshots before them."""
        table = self.table()
        rows = pa.table({"number": [-1], "version": [-1]})
        table.append(rows.cast(table.schema().as_arrow()))
        table.delete("number = -1")
        older = [snapshot.snapshot_id for snapshot in table.snapshots() if snapshot != table.current_snapshot()]
        table.maintenance.expire_snapshots().by_ids(older).commit()
        assert len(table.snapshots()) == 1


class TestOnSQLite(IcebergContract):
    """The catalog lies beside the tables."""

    def test_a_store_that_is_away(self) -> None:
        """A run waits for its disk; a start says that the file of the catalog cannot be opened."""
        leader = self.leader(1)
        staged = self.staged([(0, 0)], 1)
        with self.unavailable():
            for committer in (leader, self.committer()):
                with pytest.raises(StoreUnavailable):
                    committer.commit([staged], 1, ORIGIN)
                with pytest.raises(StoreUnavailable):
                    committer.fence(1, ORIGIN)
                with pytest.raises(StoreError, match="Make or mount the folder"):
                    committer.check()
        assert leader.commit([staged], 1, ORIGIN)

    @property
    def properties(self) -> dict[str, str]:
        return {"type": "sql", "uri": f"sqlite:///{self.folder}/catalog.db", "warehouse": f"file://{self.folder}"}

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        away = self.folder.rename(self.folder.with_name("away"))
        try:
            yield
        finally:
            away.rename(self.folder)


@only(*OF_COMMITS, "test_what_the_store_cleans_up")
class TestUpsertOnSQLite(TestOnSQLite):
    """Rows replace those with their key."""

    keyed = True


@only(*OF_COMMITS)
class TestOnREST(IcebergContract):
    """The catalog is a server."""

    test_secrets_show_nowhere = SinkContract.test_secrets_show_nowhere
    secret = "s3cret-of-the-catalog"

    @pytest.fixture(autouse=True)
    def _server(self, rest: RestCatalog, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.rest = rest
        monkeypatch.setenv("CATALOG_TOKEN", self.secret)
        yield
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchTableError

        with closing(load_catalog("default", type="rest", uri=rest.uri)) as catalog, suppress(NoSuchTableError):
            catalog.drop_table("shop.orders")

    @property
    def properties(self) -> dict[str, str]:
        return {"type": "rest", "uri": self.rest.uri, "token": "env:CATALOG_TOKEN"}

    def unavailable(self) -> Any:
        return killed(self.rest)


@only(*OF_COMMITS)
class TestOnS3(IcebergContract):
    """The warehouse is a bucket, and the catalog a file of SQLite."""

    test_secrets_show_nowhere = SinkContract.test_secrets_show_nowhere
    secret = "secret-canary"

    @pytest.fixture(autouse=True)
    def _bucket(self, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.warehouse = s3, f"{s3.url}/lake-{secrets.token_hex(4)}"
        monkeypatch.setenv("LAKE_KEY", s3.env["AWS_ACCESS_KEY_ID"])
        monkeypatch.setenv("LAKE_SECRET", s3.env["AWS_SECRET_ACCESS_KEY"])
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name)

    def sink(self) -> IcebergSink[Order]:
        secrets = {"s3.access-key-id": "env:LAKE_KEY", "s3.secret-access-key": "env:LAKE_SECRET"}
        return IcebergSink("shop.orders", catalog={**self.properties, **secrets}, create=True)

    @property
    def properties(self) -> dict[str, str]:
        return {
            "type": "sql", "uri": f"sqlite:///{self.folder}/catalog.db", "warehouse": self.warehouse,
            "s3.endpoint": self.server.env["AWS_ENDPOINT_URL"], "s3.region": "us-east-1", "s3.access-key-id": "key",
            "s3.secret-access-key": self.secret,
        }  # fmt: skip

    def unavailable(self) -> Any:
        return self.server.away()
