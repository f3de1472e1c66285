"""The example of tables that are read while they grow prints what its page shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[3]


def test_the_example(kafka: Any) -> None:
    for library in ("pyiceberg", "deltalake", "duckdb_ext"):
        pytest.importorskip(library, reason="LAKES NOT TESTED: they need the extras `iceberg` and `delta`, and DuckDB")
    example = [
        sys.executable,
        str(ROOT / "examples" / "growing_lake.py"),
        "--bootstrap-servers",
        kafka.bootstrap_servers,
    ]
    done = subprocess.run(example, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"```text\n{done.stdout}```" in (ROOT / "docs" / "sinks" / "iceberg.md").read_text()
