"""Fixtures of the crash matrix: servers that all cells of a process share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
sys.path[:0] = map(str, (HERE / "rig", TESTS / "engines", TESTS / "sinks" / "postgres" / "rig"))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("psycopg")
    from matrix_servers import opened

    with opened(tmp_path_factory.mktemp("crash-matrix")) as made:
        yield made
