"""Tests of the selection, on suites of three tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from affected import git
from selection import LEFT_OUT, is_on_spark

pytest_plugins = ["pytester"]

CONFTEST = """
from selection import Selection, add_options

def pytest_addoption(parser):
    add_options(parser)

def pytest_configure(config):
    config.pluginmanager.register(Selection(config))
    for mark in ("exhaustive", "docker"):
        config.addinivalue_line("markers", mark)
"""
SUITE = """
import pytest

def test_plain():
    pass

@pytest.mark.exhaustive(but=["one"])
@pytest.mark.parametrize("case", ["one", "two", "three"])
def test_sampled(case):
    pass

@pytest.mark.exhaustive(matrix=True, in_all=["one"])
@pytest.mark.parametrize("case", ["one", "two"])
def test_matrix(case):
    pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("CI_BASE", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parent}\naddopts = -p no:cacheprovider")
    return pytester


def commit(suite: pytest.Pytester) -> None:
    if not (suite.path / ".git").exists():
        git("init", "-q", root=suite.path)
        (suite.path / ".gitignore").write_text("__pycache__\n.pytest_cache\n")
    git("add", "-A", root=suite.path)
    git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x", root=suite.path)


def said(count: int, reason: str) -> str:
    return f"{count} tests {LEFT_OUT[reason]}"


@pytest.mark.parametrize(
    ("options", "passed", "left_out"),
    [
        ("--sample", 2, f"{said(3, 'exhaustive')}; {said(1, 'matrix')}"),
        ("", 5, said(1, "matrix")),
        ("--matrix", 6, "nothing"),
        ("--sample -k plain", 1, f"{said(3, 'exhaustive')}; {said(1, 'matrix')}"),
        ("--sample -n 2 --dist loadfile", 2, f"{said(3, 'exhaustive')}; {said(1, 'matrix')}"),
    ],
)
def test_marked_cases_are_left_out(suite: pytest.Pytester, options: str, passed: int, left_out: str) -> None:
    suite.makepyfile(SUITE)
    result = suite.runpytest(*options.split())
    result.assert_outcomes(passed=passed, deselected=result.parseoutcomes().get("deselected", 0))
    assert f"left out: {left_out}" in result.outlines


def test_without_an_engine_containers_are_skipped_but_not_in_ci(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite.makepyfile("import pytest\n@pytest.mark.docker\ndef test_it():\n    assert False")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    monkeypatch.setenv("CI", "")
    assert f"left out: {said(1, 'docker')}" in suite.runpytest().outlines
    monkeypatch.setenv("CI", "true")
    suite.runpytest().assert_outcomes(failed=1)


def test_a_broken_off_run_goes_on_where_it_was(suite: pytest.Pytester) -> None:
    """What passed is run again once a file has changed, and after a run that ended well."""
    suite.makepyfile(test_a="def test_a(): pass", test_b="import os\ndef test_b(): assert 'FIXED' in os.environ")
    commit(suite)
    suite.runpytest("--resume").assert_outcomes(passed=1, failed=1)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FIXED", "1")
        suite.makepyfile(test_b="import os\ndef test_b(): assert 'FIXED' in os.environ  # another text")
        suite.runpytest("--resume").assert_outcomes(passed=2)
        suite.runpytest("--resume").assert_outcomes(passed=2)
    suite.runpytest("--resume").assert_outcomes(passed=1, failed=1)
    again = suite.runpytest("--resume", "-n", "2", "--dist", "loadfile")
    again.assert_outcomes(failed=1)
    assert f"left out: {said(1, 'passed')}" in again.outlines


CASES = """
import pytest, {module}

@pytest.mark.exhaustive
@pytest.mark.parametrize("n", range(40))
def test_it(n):
    pass
"""


def test_a_share_of_all_and_everything_that_changed(suite: pytest.Pytester) -> None:
    """Eight merges run each case once; those of what changed run at once, but none after its minutes."""
    suite.makepyfile(changing="", steady="", test_changing=CASES.format(module="changing"))
    suite.makepyfile(test_steady=CASES.format(module="steady") + "\ndef test_sampled(): pass\n")
    commit(suite)
    ran = []
    for _ in range(8):
        result = suite.runpytest("--changed", "HEAD", "-v", "-k", "test_steady")
        ran += [line.split()[0] for line in result.outlines if "PASSED" in line]
        git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x", "--allow-empty", root=suite.path)
    assert sorted(ran) == sorted(f"test_steady.py::test_it[{n}]" for n in range(40))

    suite.makepyfile(changing="changed = True")
    whole = suite.runpytest("--changed", "HEAD", "-v")
    order = [line.split("::")[0] for line in whole.outlines if "PASSED" in line]
    assert order.count("test_changing.py") == 40
    assert 0 < order.count("test_steady.py") < 40
    assert "test_steady.py" not in order[-20:], "the share comes first"
    late = suite.runpytest("--changed", "HEAD", "--minutes", "0.0000001")
    assert said(late.parseoutcomes()["skipped"], "late") in late.outlines[-2] + late.outlines[-3]
    assert late.parseoutcomes()["passed"] < whole.parseoutcomes()["passed"]


def test_every_sample_exists(collected_tests: list[pytest.Item]) -> None:
    """Each case that a mark names is one of its test's cases."""
    cases: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in collected_tests:
        marker = item.get_closest_marker("exhaustive")
        if marker is not None and hasattr(item, "callspec"):
            test = item.nodeid.split("[")[0]
            cases.setdefault(test, set()).add(item.callspec.id)
            named[test] = {*marker.kwargs.get("but", ()), *marker.kwargs.get("in_all", ())}
    assert {test: missing for test in cases if (missing := named[test] - cases[test])} == {}


def test_files_on_spark_are_those_that_take_the_fixture(collected_tests: list[pytest.Item]) -> None:
    files = {item.path for item in collected_tests if "spark" in getattr(item, "fixturenames", ())}
    assert {file for file in files if not is_on_spark(file)} == set()
