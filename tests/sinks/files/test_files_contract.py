"""Files in a folder, S3 and HDFS keep the contract of a sink whose output the leader commits."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from contract_part import OF_COMMITS, only
from hdfs_server import HdfsServer
from orders_contract import InFolder, Order, OrdersContract

from exactlyonce.sinks import FileSink
from exactlyonce.testing.servers.s3 import S3Server


class TestFileSink(InFolder):
    """The sink of JSON lines, which any reader reads; what the formats differ in is no matter of commits."""

    test_a_store_that_is_away: Any = None  # whatever the system says of a disk: test_disk.py
    test_what_the_store_cleans_up: Any = None  # nothing by itself

    def sink(self) -> FileSink[Order]:
        return FileSink(self.folder, format="jsonl")

    def read(self) -> list[Order]:
        lines = [line for path in self.folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        return [Order(**json.loads(line)) for line in lines]


# --- in S3 (moto) and HDFS (MiniDFSCluster) ---------------------------------------------------------------------------


class OnStorage(OrdersContract):
    url: str
    test_what_the_store_cleans_up: Any = None  # a lifecycle rule of S3: test_stored.py

    def sink(self) -> FileSink[Order]:
        return FileSink(self.url, format="jsonl")

    def contents(self) -> dict[str, bytes]:
        """All files below the target, by name."""
        raise NotImplementedError

    def read(self) -> list[Order]:
        shown = {name: content for name, content in self.contents().items() if not name.startswith(".")}
        return [Order(**json.loads(line)) for name in sorted(shown) for line in shown[name].splitlines()]


@pytest.mark.slow
@pytest.mark.exhaustive
class TestS3(OnStorage):
    secret = "secret-canary"
    server: S3Server

    @pytest.fixture(autouse=True)
    def _target(self, s3: S3Server) -> None:
        self.server, self.prefix = s3, f"orders-{uuid.uuid4().hex}"
        self.url = f"{s3.url}/{self.prefix}"

    def contents(self) -> dict[str, bytes]:
        start = f"{self.prefix}/"
        keys = [key for key in self.server.listed(start) if key.startswith(start)]
        return {key.removeprefix(start): self.server.get(key) for key in keys}

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        with self.server.away():
            yield

    def backup(self) -> Callable[[], None]:
        kept = self.contents()

        def restore() -> None:
            for name in self.contents():
                self.server.delete(f"{self.prefix}/{name}")
            for name, content in kept.items():
                self.server.put(f"{self.prefix}/{name}", content)

        return restore


@pytest.mark.slow
@pytest.mark.exhaustive
@only(*OF_COMMITS)
class TestHdfs(OnStorage):
    server: HdfsServer

    test_secrets_show_nowhere: Any = None  # there are none

    @pytest.fixture(autouse=True)
    def _target(self, hdfs: HdfsServer, monkeypatch: pytest.MonkeyPatch) -> None:
        import hdfs_native

        for name, value in hdfs.env.items():
            monkeypatch.setenv(name, value)
        self.server, self.path = hdfs, f"/orders-{uuid.uuid4().hex}"
        self.url = f"{hdfs.url}{self.path}"
        self.client = hdfs_native.Client(hdfs.url)

    def contents(self) -> dict[str, bytes]:
        statuses = self.client.list_status(self.path, recursive=True)
        files = [status.path.removeprefix(f"{self.path}/") for status in statuses if not status.isdir]
        return {name: self.client.read(f"{self.path}/{name}").read() for name in files}

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        with self.server.away():
            yield
