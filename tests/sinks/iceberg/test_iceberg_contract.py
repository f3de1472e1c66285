"""A table of Iceberg keeps the contract of a sink whose output the leader commits; see `testing.sink_contract`."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pytest
from iceberg_rest import RestCatalog
from table_contract import killed

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks import IcebergSink
from exactlyonce.testing.sink_contract import SinkContract
from exactlyonce.testing.sink_contract.hooks import ORIGIN

pytest.importorskip("pyiceberg", reason="ICEBERG NOT TESTED: it needs the extra `iceberg`")

pytestmark = pytest.mark.exhaustive


class Order(msgspec.Struct):
    number: int
    version: int


class IcebergContract(SinkContract):
    """A table of a catalog, by its properties."""

    type = Order

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "lake"
        self.folder.mkdir()
        self._catalogs: list[Any] = []

    @pytest.fixture(autouse=True)
    def _closing(self) -> Iterator[None]:
        yield
        for catalog in self._catalogs:
            catalog.close()

    @property
    def properties(self) -> dict[str, str]:
        raise NotImplementedError

    def sink(self) -> IcebergSink[Order]:
        key = ("number",) if self.keyed else ()
        mode = "upsert" if self.keyed else "append"
        return IcebergSink("shop.orders", catalog=self.properties, mode=mode, key=key, create=True)

    def record(self, number: int, version: int = 0) -> Order:
        return Order(number, version)

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

    test_secrets_show_nowhere: Any = None  # there are none

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

    def backup(self) -> Callable[[], None]:
        copy = self.folder.with_name("backup")
        shutil.copytree(self.folder, copy)

        def restore() -> None:
            shutil.rmtree(self.folder)
            shutil.copytree(copy, self.folder)

        return restore


class TestUpsertOnSQLite(TestOnSQLite):
    """Rows replace those with their key."""

    keyed = True


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestCatalog]:
    """Iceberg's own server of the REST catalog."""
    catalog = RestCatalog(tmp_path_factory.mktemp("rest"))
    yield catalog
    catalog.kill()


class TestOnREST(IcebergContract):
    """The catalog is a server."""

    test_a_store_that_was_restored: Any = None  # the rules are those of the other catalog
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


class TestOnS3(IcebergContract):
    """The warehouse is a bucket, and the catalog a file of SQLite."""

    test_a_store_that_was_restored: Any = None  # the rules are those of a folder
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


class TestOnPostgres(IcebergContract):
    """The catalog is a database of PostgreSQL."""

    test_a_store_that_was_restored: Any = None  # the rules are those of the other catalog

    @pytest.fixture(autouse=True)
    def _server(self, database_server: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
        from exactlyonce.testing.servers.postgres import OWNER, PASSWORD

        self.server, self.secret = database_server("postgres"), quote(PASSWORD, safe="")
        self.server.execute("DROP DATABASE IF EXISTS lake WITH (FORCE)")
        self.server.execute("CREATE DATABASE lake")
        self.uri = f"postgresql+psycopg://{OWNER}:{self.secret}@127.0.0.1:{self.server.port}/lake"
        monkeypatch.setenv("CATALOG_URI", self.uri)

    def sink(self) -> IcebergSink[Order]:
        properties = {**self.properties, "uri": "env:CATALOG_URI"}
        return IcebergSink("shop.orders", catalog=properties, create=True)

    @property
    def properties(self) -> dict[str, str]:
        return {"type": "sql", "uri": self.uri, "warehouse": f"file://{self.folder}"}

    def unavailable(self) -> Any:
        return killed(self.server)
