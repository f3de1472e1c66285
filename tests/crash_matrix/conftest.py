"""Fixtures of the crash matrix: servers that all cells of a process share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("psycopg")
    from matrix_servers import opened

    with opened(tmp_path_factory.mktemp("crash-matrix")) as made:
        yield made
