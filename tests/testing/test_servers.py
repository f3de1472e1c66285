"""The servers of stores that users' tests get: the page's example, and what is said where a program is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def run_pytest(folder: Path, test: str, **env: str) -> str:
    """What pytest says of the module *test*, beside nothing else."""
    (folder / "test_stored.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "test_stored.py"], cwd=folder, env={**os.environ, **env},
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.broker
def test_the_example_of_the_page(kafka: Any, tmp_path: Path) -> None:
    """A pipeline into PostgreSQL is killed at three failpoints; one row too many would fail it."""
    pytest.importorskip("psycopg")
    first, *others = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = "\n".join([first, *(block for block in others if "PostgresSink" in block)])
    servers = {"EXACTLYONCE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers}
    assert "2 passed" in run_pytest(tmp_path, code, **servers)
    doubled = code.replace("return [Total(*row) for row in", "return 2 * [Total(*row) for row in")
    said = run_pytest(tmp_path, doubled, **servers)
    assert "rows: doubled: " in said
    assert "1 failed, 1 passed" in said


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    pytest.importorskip("redis")
    test = """
import exactlyonce.testing.servers.postgres as postgres
postgres.INSTALLED = "/nowhere/*"
def test_postgres(postgres_server): ...
def test_redis(request, monkeypatch):
    monkeypatch.setenv("EXACTLYONCE_REQUIRE_STORES", "1")
    request.getfixturevalue("redis_server")
"""
    env = {"PATH": "/nowhere", "EXACTLYONCE_REDIS_SERVER": "no-such-server", "CI": ""}
    said = run_pytest(tmp_path, test, EXACTLYONCE_REQUIRE_STORES="", **env)
    assert "initdb, postgres of postgresql not found on the PATH: install postgresql" in said
    assert "no-such-server of redis-server not found on the PATH: install redis-server" in said
    assert "1 failed, 1 skipped" in said
