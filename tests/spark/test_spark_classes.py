"""The archive of the classes of Spark's drivers."""

from __future__ import annotations

from pathlib import Path

import pytest
from spark_classes import SHORT_LIFE, class_archive, options


def test_a_driver_takes_the_archive_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    archive = class_archive()
    assert archive is not None, "tests of Spark need Java"
    assert options() == SHORT_LIFE
    archive.parent.mkdir()
    archive.touch()
    assert options() == f"{SHORT_LIFE} -XX:SharedArchiveFile={archive}"
