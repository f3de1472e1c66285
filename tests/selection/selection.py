"""The choice of tests: which run, in which order, in which process. The last line counts those that are left out.

`--sample` runs all tests but the exhaustive ones, of which it runs the cases that their mark names. `--changed` runs
the others: those of files that the change may break, nearest first, and a share of all that goes round with the merges
to main. With `--minutes` the change has half of them, and the share the rest; every other time a share comes in the
opposite order, so that what had no time comes first. `--resume` skips what passed on the same files, in a run that was
broken off. Tests that take a broker or a Spark session have their marks by that.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from functools import cache
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, TypedDict
from zlib import crc32

import pytest
from affected import affected_tests, base_of_the_change, git

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""Every test that was collected, also those that are left out."""
MARKED_BY = {"broker": {"kafka", "own_broker", "stoppable", "container_kafka"}, "spark": {"spark"}}
"""Fixtures by the mark that each test has which takes one of them."""
LEFT_OUT = {
    "exhaustive": "marked exhaustive: make test-all runs them",
    "matrix": "marked exhaustive(matrix=True): make test-matrix runs them",
    "sample": "of the sample: make test runs them",
    "docker": "marked docker: no Docker engine runs, .ci/run starts one",
    "passed": "passed before on the same files: rm -r .pytest_cache/passed forgets that",
    "late": "for which no time was left: make test-all runs them",
}
"""The last line's texts about tests that are left out, by reason."""
SHARES = 8
LONG = {"slow": 10, "broker": 1}
"""The seconds that a test takes, about, by mark."""
LONG_FILES = {
    "tests/sinks/tables/test_table_schedules.py": 25,
    "tests/testing/test_state_contract.py": 20,
    "tests/sinks/iceberg/test_iceberg_sink.py": 10,
    "tests/sinks/lake/test_lake_tables.py": 10,
    "tests/sinks/postgres/test_postgres_contract.py": 10,
    "tests/test_docs.py": 10,
    "tests/test_packaging.py": 10,
    "tests/testing/test_exactly_once.py": 10,
    "tests/testing/test_sink_contract.py": 10,
    "tests/state/rocksdb/test_files.py": 7,
    "tests/state/rocksdb/test_table.py": 7,
    "tests/testing/test_servers.py": 5,
}
"""The seconds that a file takes, about, whose tests have no such mark: the last to begin would end alone."""
ALONE = {f"tests/simulation/test_{part}.py" for part in ("simulation", "mutants", "growth")}
"""Files whose tests share nothing: each goes to whichever process is free."""
LATE = "no time is left"


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption(
        "--sample", action="store_true", help="run only the cases of exhaustive tests that their mark names"
    )
    group.addoption("--matrix", action="store_true", help="run the crash matrix of the stores, too: it takes an hour")
    group.addoption(
        "--changed",
        metavar="REV",
        help="run only what --sample leaves out: tests of what changed since REV ('' for the last merge), and a share",
    )
    group.addoption("--minutes", type=float, help="with --changed: start no test after so long")
    group.addoption("--resume", action="store_true", help="leave out what passed in a run that was broken off")


class Chosen(TypedDict):
    """Findings that are made once and told to the worker processes."""

    distances: dict[str, int] | None
    """The imports between each test file and what changed; None without `--changed`."""
    merges: int
    """How many there are; the share is that of this number."""
    late_s: tuple[float, float]
    """When no test of the change, and of the share, is started any more, by the monotonic clock of the machine."""
    passed: list[str]
    """The tests that passed before on the same files, with `--resume`. All worker processes leave out the same."""


class Selection:
    """A pytest plugin, in the process that sums up as well as in each worker process of xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.left_out: Counter[str] = Counter()
        self._config = config
        self._root = config.rootpath
        self._is_worker = hasattr(config, "workerinput")
        self._passed_file: Path | None = None
        self._chosen: Chosen = config.workerinput["chosen"] if hasattr(config, "workerinput") else self._choose()
        self._distances = self._chosen["distances"]
        self._passed = set(self._chosen["passed"])
        self._calls: set[str] = set()

    def _git(self, *arguments: str) -> str:
        return git(*arguments, root=self._root)

    def _choose(self) -> Chosen:
        base, minutes = self._config.getoption("--changed"), self._config.getoption("--minutes")
        distances, merges, passed = None, 0, list[str]()
        if base is not None:
            if self._git("rev-parse", "--is-shallow-repository") == "true":
                raise pytest.UsageError("--changed asks the whole history what changed: git fetch --unshallow")
            distances = affected_tests(base or base_of_the_change(self._root), self._root)
            merges = int(self._git("rev-list", "--count", "--first-parent", "--merges", "HEAD"))
        if self._config.getoption("--resume"):
            self._passed_file = self._find_passed_file()
            passed = self._passed_file.read_text().splitlines()
        now_s, limit_s = time.monotonic(), inf if minutes is None else minutes * 60
        late_s = (now_s + limit_s / 2, now_s + limit_s)
        return {"distances": distances, "merges": merges, "late_s": late_s, "passed": passed}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            for mark, fixtures in MARKED_BY.items():
                if fixtures & {*getattr(item, "fixturenames", ())}:
                    item.add_marker(mark)
        config.stash[COLLECTED] = list(items)
        reasons = {item: self._why_left_out(item) for item in items}
        self.left_out.update(reason for reason in reasons.values() if reason)
        config.hook.pytest_deselected(items=[item for item in items if reasons[item]])
        items[:] = self._ordered([item for item in items if not reasons[item]])
        if any(item.get_closest_marker("docker") for item in items) and not _docker_is_wanted():
            for item in items:
                if item.get_closest_marker("docker"):
                    item.add_marker(pytest.mark.skip(reason="no Docker engine runs"))
                    self.left_out["docker"] += 1

    def _why_left_out(self, item: pytest.Item) -> str | None:
        marker = item.get_closest_marker("exhaustive")
        case = item.callspec.id if hasattr(item, "callspec") else None
        is_exhaustive = marker is not None and case not in marker.kwargs.get("but", ())
        if marker and is_exhaustive and marker.kwargs.get("matrix") and case not in marker.kwargs.get("in_all", ()):
            return None if self._config.getoption("--matrix") else "matrix"
        if is_exhaustive and self._config.getoption("--sample"):
            return "exhaustive"
        if self._distances is not None and not is_exhaustive:
            return "sample"
        if not self._in_share(item.nodeid) and _file(item) not in (self._distances or {}):
            return "exhaustive"
        return "passed" if item.nodeid in self._passed else None

    def _in_share(self, nodeid: str) -> bool:
        """Whether the test runs whatever has changed."""
        return self._distances is None or crc32(nodeid.encode()) % SHARES == self._chosen["merges"] % SHARES

    def _ordered(self, items: list[pytest.Item]) -> list[pytest.Item]:
        """By distance, then the share; the Spark session's files, then the longest, by marks and `LONG_FILES`."""
        long = Counter(LONG_FILES)
        for item in items:
            long[_file(item)] += sum(LONG.get(mark.name, 0) for mark in item.iter_markers())

        def place(item: pytest.Item) -> tuple[float, bool, int]:
            file = _file(item)
            distance = inf if self._in_share(item.nodeid) else (self._distances or {})[file]
            return distance, not is_on_spark(self._root / file), -long[file]

        ordered = sorted(items, key=place)
        if self._chosen["merges"] // SHARES % 2:
            change = sum(not self._in_share(item.nodeid) for item in items)
            ordered[change:] = ordered[change:][::-1]
        return ordered

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """One process runs a file, and one runs all files that share a Spark session, which takes 20 s to come up."""
        from xdist.scheduler import LoadFileScheduling

        selection = self

        class BySession(LoadFileScheduling):  # type: ignore[misc]  # it ships no types
            def _split_scope(self, nodeid: str) -> str:
                return selection.scope(nodeid)

        return BySession(config, log) if config.getoption("dist") == "loadfile" else None

    def scope(self, nodeid: str) -> str:
        """The name that all tests of one process share."""
        file = nodeid.split("::")[0]
        if file in ALONE:
            return nodeid
        scope = "spark" if is_on_spark(self._root / file) else file
        return scope if self._in_share(nodeid) else f"{scope} of the change"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._chosen["late_s"][self._in_share(item.nodeid)]:
            pytest.skip(LATE)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._is_worker:
            return
        if report.skipped and LATE in str(report.longrepr):
            self.left_out["late"] += 1
        elif report.when == "call" and report.passed:
            self._calls.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self._calls and self._passed_file:
            with self._passed_file.open("a") as file:
                file.write(report.nodeid + "\n")

    def _find_passed_file(self) -> Path:
        """The list of tests that passed on these very files."""
        digest = sha256()
        for name in sorted(self._git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()):
            if (self._root / name).is_file():
                digest.update(name.encode() + (self._root / name).read_bytes())
        file = self._root / ".pytest_cache" / "passed" / digest.hexdigest()[:16]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return file

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["chosen"] = self._chosen

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Only worker processes collect, each of them the same."""
        self.left_out |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._is_worker:
            session.config.workeroutput["left_out"] = dict(self.left_out)  # type: ignore[attr-defined]  # of xdist
        elif self._passed_file and exitstatus == 0:
            self._passed_file.unlink()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts = (f"{self.left_out[reason]} tests {text}" for reason, text in LEFT_OUT.items() if self.left_out[reason])
        terminalreporter.write_line(f"left out: {'; '.join(counts) or 'nothing'}")


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


@cache
def is_on_spark(file: Path) -> bool:
    """Whether a test of the file takes the fixture `spark`."""
    return file.parent.name == "spark" and re.search(r"[( ]spark: (Any|SparkSession)", file.read_text()) is not None


def _docker_is_wanted() -> bool:
    """Whether an engine answers; in CI its tests fail where none does."""
    if os.environ.get("CI") == "true":
        return True
    from docker.client import DockerClient
    from docker.errors import DockerException

    try:
        DockerClient.from_env().ping()
    except DockerException:
        return False
    return True
