"""Fixtures of the tests of several stores together: the servers, which all tests of a process share, and a pipeline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def servers(store_servers: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """All of them run; processes know where, and find the pipelines. A test that kills one starts it again."""
    for name, address in store_servers.addresses().items():
        monkeypatch.setenv(name, address)
    path = [str(HERE / "rig"), str(HERE.parent / "engines"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    return store_servers


@pytest.fixture
def job(servers: Any, kafka: Any, topic_name: str, run: Any, tmp_path: Path) -> Any:
    """The pipeline that writes to all stores; it has not run yet, and nothing was fed."""
    from jobs import Job

    return Job(servers, kafka, topic_name, run, tmp_path)
