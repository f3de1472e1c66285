"""Tests of the tool that repeats tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from flaky import main

OFTEN_RED = """
import os
from pathlib import Path
import pytest

@pytest.fixture
def ends_red():
    yield
    assert False

@pytest.mark.parametrize("case", ["a case"])
def test_often_red(case, request):
    file = Path(__file__).with_suffix(".count")
    file.write_text(file.read_text() + "x" if file.exists() else "x")
    if len(file.read_text()) % 3 == 0:
        request.getfixturevalue("ends_red")
        assert False
"""


@pytest.mark.exhaustive
def test_a_test_that_fails_by_chance_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_it.py").write_text(OFTEN_RED)
    (tmp_path / "pytest.ini").touch()
    options = ["--jobs", "1", "--", *(f"-pno:{name}" for name in ("exactlyonce", "hypothesispytest", "xdist"))]
    assert main([str(tmp_path / "test_it.py"), "--times", "3", "--load", "1", *options]) == 1
    *_, named, last = capsys.readouterr().out.splitlines()
    assert named.startswith("1 of 3 runs: ")
    assert named.endswith("test_it.py::test_often_red[a case]")
    (_, folder) = last.split("; their output is in ")
    assert len(list(Path(folder).iterdir())) == 1
    assert main([f"{tmp_path}/test_it.py::test_often_red[a case]", "--times", "1", "--load", "0", *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 of 1 runs failed"
