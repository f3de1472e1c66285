"""Tests of the bytecode that is made ahead of the worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from bytecode import compile_all

pytest_plugins = ["pytester"]


def test_pytest_takes_what_was_compiled(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import compiles nothing again, and asserts are rewritten; a file that is no Python stops nothing."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    tests = pytester.mkdir("tests")
    (tests / "conftest.py").write_text("")
    (tests / "helper.py").write_text("VALUE = 1\n")
    (tests / "test_one.py").write_text("from helper import VALUE\n\ndef test_one():\n    assert VALUE == 2\n")
    (tests / "test_broken.py").write_text("def\n")

    def compiled() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tests.rglob("*.pyc")}

    compile_all(pytester.parseconfigure())
    before = compiled()
    assert {path.name.split(".")[0] for path in before} == {"conftest", "helper", "test_one"}
    pytester.runpytest_inprocess("tests/test_one.py").stdout.fnmatch_lines(["E*assert 1 == 2"])
    assert compiled() == before
