"""The MySQL sink keeps the contract of a store on MySQL itself, from the local image MYSQL_IMAGE.

`test_database_images.py` runs it as one test, which is skipped without the image.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from containers import PASSWORD, ContainedMySQL, contained
from table_contract import DSN, OnMySQL

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def mysql() -> Iterator[ContainedMySQL]:
    environment = {"MYSQL_ROOT_PASSWORD": PASSWORD, "MYSQL_ROOT_HOST": "%"}
    with contained(os.environ["MYSQL_IMAGE"], partial(ContainedMySQL, secured=True), **environment) as server:
        yield server


class OnMySQLItself(OnMySQL):
    secret = PASSWORD

    @pytest.fixture(autouse=True)
    def _database(self, mysql: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = mysql
        mysql.empty()
        monkeypatch.setenv(DSN, mysql.dsn)


class TestAppend(OnMySQLItself):
    """Rows are added."""


class TestUpsert(OnMySQLItself):
    """A row replaces the one with its key."""

    mode = "upsert"
    keyed = True
