"""Fixtures of storages outside of the topic: servers, started once for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest


def started(kind: str, folder: Path) -> Any:
    from hdfs_server import HdfsServer
    from s3_server import S3Server

    return S3Server() if kind == "s3" else HdfsServer(folder)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with closing(started("s3", tmp_path_factory.getbasetemp())) as server:
        yield server


@pytest.fixture
def s3(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, and this process is its client."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Hadoop's HDFS; the tests are skipped, loudly, where it cannot be had."""
    with closing(started("hdfs", tmp_path_factory.mktemp("hdfs"))) as server:
        yield server
