"""Tests of the selection, on suites of three tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from affected import ROOT, git
from selection import ALONE, LEFT_OUT, LONG_FILES, is_on_spark

pytest_plugins = ["pytester"]

CONFTEST = """
import selection
from selection import Selection, add_options

def pytest_addoption(parser):
    add_options(parser)

def pytest_configure(config):
    config.pluginmanager.register(Selection(config))
    for mark in ("exhaustive", "docker"):
        config.addinivalue_line("markers", mark)
"""
AS_SOMEBODY = ("-c", "user.name=x", "-c", "user.email=x@x")
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
    git(*AS_SOMEBODY, "commit", "-qm", "x", root=suite.path)


def merge(suite: pytest.Pytester) -> None:
    """A merge commit that changes nothing."""
    parents = ["HEAD"]
    for _ in range(2):
        arguments = [word for parent in parents for word in ("-p", parent)]
        parents.append(git(*AS_SOMEBODY, "commit-tree", "-m", "x", "HEAD^{tree}", *arguments, root=suite.path))
    git("update-ref", "HEAD", parents[-1], root=suite.path)


def said(count: int, reason: str) -> str:
    return f"{count} tests {LEFT_OUT[reason]}"


@pytest.mark.parametrize(
    ("options", "passed", "left_out"),
    [
        ("--sample", 2, f"{said(3, 'exhaustive')}; {said(1, 'matrix')}"),
        ("", 5, said(1, "matrix")),
        ("--matrix", 6, "nothing"),
        ("--sample -k plain", 1, f"{said(3, 'exhaustive')}; {said(1, 'matrix')}"),
        pytest.param(
            "--sample -n 2 --dist loadfile",
            2,
            f"{said(3, 'exhaustive')}; {said(1, 'matrix')}",
            marks=pytest.mark.exhaustive,
        ),
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


@pytest.mark.exhaustive
def test_a_broken_off_run_goes_on_where_it_was(suite: pytest.Pytester) -> None:
    """Passed tests run again once a file has changed, and after a run that ended well; skipped ones always do."""
    suite.makepyfile(test_a="def test_a(): pass", test_b="import os\ndef test_b(): assert 'FIXED' in os.environ")
    suite.makepyfile(test_c="import pytest\ndef test_c(): pytest.skip('not here')")
    commit(suite)
    suite.runpytest("--resume").assert_outcomes(passed=1, failed=1, skipped=1)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FIXED", "1")
        suite.makepyfile(test_b="import os\ndef test_b(): assert 'FIXED' in os.environ  # another text")
        suite.runpytest("--resume").assert_outcomes(passed=2, skipped=1)
        suite.runpytest("--resume").assert_outcomes(passed=2, skipped=1)
    suite.runpytest("--resume").assert_outcomes(passed=1, failed=1, skipped=1)
    again = suite.runpytest("--resume", "-n", "2", "--dist", "loadfile")
    again.assert_outcomes(failed=1, skipped=1)
    assert f"left out: {said(1, 'passed')}" in again.outlines


CASES = """
import pytest, selection, {module}

@pytest.mark.exhaustive
@pytest.mark.parametrize("n", range(20))
def test_it(n):
    selection.time.monotonic.now_s += 60
"""
CLOCK = """
class Clock:
    now_s = 0
    def __call__(self):
        return self.now_s

selection.SHARES = 4
selection.time = type("time", (), dict(monotonic=Clock()))
"""


def test_a_share_of_all_and_what_changed(suite: pytest.Pytester) -> None:
    """The change has half of the minutes; in two rounds of merges each case had its turn, and its time."""
    suite.makeconftest(CONFTEST + CLOCK)
    suite.makepyfile(changing="", steady="", test_changing=CASES.format(module="changing"))
    suite.makepyfile(test_steady=CASES.format(module="steady") + "\ndef test_sampled(): pass\n")
    commit(suite)

    def after_a_merge(*options: str) -> list[str]:
        merge(suite)
        return ran(*options)

    def ran(*options: str) -> list[str]:
        result = suite.runpytest("--changed", "HEAD", "-v", *options)
        assert ("passed" in result.parseoutcomes()) != any(" FAILED" in line for line in result.outlines)
        return [line.split()[0] for line in result.outlines if "PASSED" in line]

    rounds = [[after_a_merge("--minutes", "7") for _ in range(4)] for _ in range(2)]
    shares = [[*map(set, shares)] for shares in zip(*rounds, strict=True)]
    assert set().union(*(first | second for first, second in shares)) == {
        f"test_{name}.py::test_it[{n}]" for name in ("changing", "steady") for n in range(20)
    }
    assert any(first < first | second for first, second in shares), "what had no time has it in the next round"
    assert max(map(len, rounds[0])) == 8

    suite.makepyfile(changing="changed = True")
    both = ran("--minutes", "7")
    assert {test.split("::")[0] for test in both[:4]} == {"test_changing.py"}
    assert both[4:] == rounds[1][-1][:4]
    assert [test.split("::")[0] for test in ran()].count("test_changing.py") == 20
    late = suite.runpytest("--changed", "HEAD", "--minutes", "0.5")
    assert said(late.parseoutcomes()["skipped"], "late") in "\n".join(late.outlines)


def test_a_history_that_is_cut_off_is_refused(suite: pytest.Pytester) -> None:
    """It has neither the change nor the merges."""
    suite.makepyfile("def test_it(): pass")
    commit(suite)
    merge(suite)
    git("clone", "-q", "--depth", "1", suite.path.as_uri(), "cut", root=suite.path)
    result = suite.runpytest("--changed=", "--rootdir=cut", "cut")
    assert result.ret is pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("*git fetch --unshallow")


def test_every_mark_is_meant(collected_tests: list[pytest.Item]) -> None:
    """Each case that a mark names is one of its test's, in a list; only a matrix has cases `in_all`."""
    cases: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in collected_tests:
        for marker in item.iter_markers("exhaustive"):
            test, lists = item.nodeid.split("[")[0], {**marker.kwargs}
            is_matrix = lists.pop("matrix", False)
            assert set(lists) <= ({"but", "in_all"} if is_matrix else {"but"}), (test, marker)
            assert not marker.args, (test, marker)
            assert all(isinstance(each, list) for each in lists.values()), (test, marker)
            cases.setdefault(test, set()).add(item.callspec.id if hasattr(item, "callspec") else "")
            named.setdefault(test, set()).update(*lists.values())
    assert {test: missing for test in cases if (missing := named[test] - cases[test])} == {}


def test_the_matrix_is_where_make_looks_for_it(collected_tests: list[pytest.Item]) -> None:
    (line,) = re.findall(r"--matrix (?:.*\\\n)*.*", (ROOT / "Makefile").read_text())
    places = tuple(word for word in line.split() if word.startswith("tests/"))
    marked = {item.nodeid for item in collected_tests for marker in item.iter_markers("exhaustive")
              if marker.kwargs.get("matrix")}  # fmt: skip
    assert [test for test in marked if not test.startswith(places)] == []


def test_files_that_are_named_are_there() -> None:
    assert [file for file in (*ALONE, *LONG_FILES) if not (ROOT / file).is_file()] == []


def test_every_file_of_tests_is_collected() -> None:
    ours = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    with_tests = [path for path in ours if re.search(r"^(class Test|def test_)", path.read_text(), re.MULTILINE)]
    assert [path.name for path in with_tests] == ["mysql_itself.py"]


def test_files_on_spark_are_those_that_take_the_fixture(collected_tests: list[pytest.Item]) -> None:
    files = {item.path for item in collected_tests if "spark" in getattr(item, "fixturenames", ())}
    assert {file for file in files if not is_on_spark(file)} == set()


def test_a_test_is_marked_by_its_fixtures(suite: pytest.Pytester) -> None:
    """Also by one that another fixture takes; so `-m "not broker"` starts no broker."""
    suite.makepyfile(
        """
        import pytest

        @pytest.fixture
        def kafka():
            raise AssertionError

        @pytest.fixture
        def topic(kafka):
            pass

        def test_with(topic):
            pass

        def test_without():
            pass
        """
    )
    suite.makeini(f"[pytest]\npythonpath = {Path(__file__).parent}\nmarkers = broker")
    suite.runpytest("-m", "not broker").assert_outcomes(passed=1, deselected=1)
