"""The tests that `make test` leaves out are run by `make test-all`; both say what they have left out."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from exactlyonce.testing.cluster import LIMIT_S

ROOT = Path(__file__).parents[1]
MATRIX = "tests/engines/test_kill_matrix.py"


def collected(*options: str) -> list[str]:
    """The lines of a pytest that only collects, where no Docker engine answers."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "CI": "", "DOCKER_HOST": "unix:///nowhere", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_sample_runs_the_cases_that_the_mark_names() -> None:
    """Of a matrix of kills a sample keeps the named cases, and says how many it leaves out."""
    lines = collected("--sample", MATRIX)
    cases = [line.split("::")[1] for line in lines if "::" in line]
    assert cases == [
        "test_linear[coordinator-decided]",
        "test_diamond[coordinator-committed]",
    ]
    whole = [line for line in collected(MATRIX) if "::" in line]
    assert f"left out: {len(whole) - 2} tests marked exhaustive: make test-all runs them" in lines


@pytest.mark.exhaustive
def test_the_matrix_of_stores_has_an_hour_of_its_own() -> None:
    """What only `make test-matrix` runs is counted apart, also where nothing else is left out."""
    (said,) = [line for line in collected("tests/stores") if line.startswith("left out: ")]
    assert re.fullmatch(r"left out: \d+ tests marked exhaustive\(matrix=True\): make test-matrix runs them", said)
    assert "left out: nothing" in collected("--matrix", "tests/stores")


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", ["0", "2"])
def test_what_is_left_out_is_said_at_the_end(processes: str) -> None:
    """However many processes collect, the end says once what was left out, and for want of what."""
    options = ("-n", processes, "--dist", "loadfile", "-k", "nothing_is_called_so")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, "--sample", MATRIX, "tests/docker"]
    environment = {**os.environ, "CI": "", "DOCKER_HOST": "unix:///nowhere", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    said = re.findall(r"^left out: .*", done.stdout, re.MULTILINE)
    assert len(said) == 1, done.stdout + done.stderr
    exhaustive = r"\d+ tests marked exhaustive: make test-all runs them"
    docker = r"\d+ tests marked docker: no Docker engine runs, \.ci/run starts one"
    assert re.fullmatch(f"left out: {exhaustive}; {docker}", said[0])


def test_nothing_is_left_out_of_everything() -> None:
    """Without a sample nothing is left out, and the end says so."""
    assert "left out: nothing" in collected("tests/state/test_key_groups.py")


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
    """What goes into the process of the Spark session is every file with a test that takes the session."""
    files = {item.location[0] for item in collected_tests if "spark" in getattr(item, "fixturenames", ())}
    known = runpy.run_path(str(ROOT / "tests" / "conftest.py"))["is_on_spark"]
    assert {file for file in files if not known(file)} == set()
