"""The sinks of tables keep the contract of a store on servers in containers, by testcontainers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from containers import PASSWORD, ContainedMySQL, ContainedPostgres, contained, pulled
from table_contract import DSN, OnMySQL, OnPostgres

from exactlyonce.testing.cluster import LIMIT_S

pytestmark = pytest.mark.docker

MYSQL = "mysql:8.4"
Image = Callable[[str], str]


@pytest.fixture(scope="module")
def postgres(image: Image) -> Iterator[ContainedPostgres]:
    with contained(image("postgres"), ContainedPostgres) as server:
        yield server


@pytest.fixture(scope="module")
def mariadb(image: Image) -> Iterator[ContainedMySQL]:
    with contained(image("mariadb"), ContainedMySQL) as server:
        yield server


class TestPostgres(OnPostgres):
    secret = PASSWORD

    @pytest.fixture(autouse=True)
    def _database(self, postgres: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = postgres
        postgres.empty()
        monkeypatch.setenv(DSN, postgres.dsn)


class TestMariaDB(OnMySQL):
    mode = "upsert"
    keyed = True
    secret = PASSWORD

    @pytest.fixture(autouse=True)
    def _database(self, mariadb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = mariadb
        mariadb.empty()
        monkeypatch.setenv(DSN, mariadb.dsn)


def test_mysql_itself() -> None:
    """MySQL needs a pulled image, for no package of Debian's has it: skipped if there is none."""
    image = pulled(MYSQL)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(Path(__file__).parent / "mysql_itself.py")], capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "MYSQL_IMAGE": image, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
