"""A catalog in a folder, its tables, and the writers and committers of a sink, each as in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lake_hands import Hands, lake_in


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Hands]:
    with lake_in(tmp_path / "lake", "iceberg") as hands:
        yield hands
