"""The common part of all tests: which are left out, the files of the repository, the image of the container tests.

Invariant: what is left out is counted, and said at the end.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from pathspec import GitIgnoreSpec

from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.testing.cluster import OwnCluster

ROOT = Path(__file__).parents[1]
Rows = list[dict[str, str]]
LEFT_OUT = pytest.StashKey[tuple[int, int, int]]()
"""How many tests that are marked exhaustive, how many of the matrix, and how many that need a Docker engine."""
THREADS = pytest.StashKey[int]()
"""How many this process had when it was last rid of clients."""
COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""Every test that was collected, also what is left out."""
LEFT_OUT_KEY = "left_out"
LONG = {"slow": 10, "broker": 1}
"""What a mark says of how long a test takes, about."""
THREADS_LEFT_MAX = 40
"""More of them than there were before are clients that nobody has any more, but for a cycle of references."""
EXAMPLES, EXAMPLES_OF_A_SAMPLE = 100, 30
"""How many hypothesis draws for a test that does not say it."""
ALONE = {f"tests/simulation/test_{part}.py" for part in ("simulation", "mutants", "growth")}
"""Files whose tests go to whichever process is free."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", action="store_true", help="of tests that are marked exhaustive run those that their mark names"
    )
    parser.addoption("--matrix", action="store_true", help="run the crash matrix of the stores, too: it takes an hour")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is to be left out, and begin with the longest: no process is to end long after the others.

    Where no Docker engine runs its tests are skipped, but never in CI: there .ci/run starts one.
    """
    config.stash[COLLECTED] = list(items)
    beyond = [item for item in items if _is_beyond_the_sample(item)]
    matrix = [] if config.getoption("--matrix") else [item for item in beyond if _is_of_the_matrix(item)]
    sampled = [item for item in beyond if item not in matrix] if config.getoption("--sample") else []
    left_out = {*matrix, *sampled}
    items[:] = _longest_first([item for item in items if item not in left_out])
    config.hook.pytest_deselected(items=[*matrix, *sampled])
    without_docker = [item for item in items if item.get_closest_marker("docker")]
    if without_docker and (os.environ.get("CI") == "true" or _docker_answers()):
        without_docker = []
    for item in without_docker:
        item.add_marker(pytest.mark.skip(reason="no Docker engine runs"))
    config.stash[LEFT_OUT] = (len(sampled), len(matrix), len(without_docker))


def _longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files in which the most is marked as long come first, and before them those that share a Spark session."""
    marked: Counter[str] = Counter()
    for item in items:
        marked[_file(item)] += sum(LONG[mark.name] for mark in item.iter_markers() if mark.name in LONG)
    order = {file: (not is_on_spark(file), -marks) for file, marks in marked.items()}
    return sorted(items, key=lambda item: order[_file(item)])


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


def _is_beyond_the_sample(item: pytest.Item) -> bool:
    """Whether `make test` leaves it out."""
    marker = item.get_closest_marker("exhaustive")
    return marker is not None and _case(item) not in marker.kwargs.get("but", ())


def _case(item: pytest.Item) -> str | None:
    return str(item.callspec.id) if hasattr(item, "callspec") else None


def _is_of_the_matrix(item: pytest.Item) -> bool:
    """Whether only `make test-matrix` runs it."""
    marker = item.get_closest_marker("exhaustive")
    if marker is None or not marker.kwargs.get("matrix"):
        return False
    return _case(item) not in marker.kwargs.get("in_all", ())


@cache
def is_on_spark(nodeid: str) -> bool:
    """Whether a test of its file takes the fixture `spark`."""
    file = ROOT / nodeid.split("::")[0]
    return file.parent.name == "spark" and re.search(r"[( ]spark: (Any|SparkSession)", file.read_text()) is not None


class WorkersOfXdist:
    """Which tests go into one process; and only its worker processes collect: they tell the one that sums up."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Those of a file, and those of all files that share a Spark session, which takes twenty seconds to come up;
        simulations share nothing."""
        from xdist.scheduler import LoadFileScheduling

        class BySession(LoadFileScheduling):  # type: ignore[misc]  # it ships no types
            def _split_scope(self, nodeid: str) -> str:
                if nodeid.split("::")[0] in ALONE:
                    return nodeid
                return "spark" if is_on_spark(nodeid) else str(super()._split_scope(nodeid))

        return BySession(config, log) if config.getoption("dist") == "loadfile" else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if LEFT_OUT_KEY in getattr(node, "workeroutput", {}):
            node.config.stash[LEFT_OUT] = tuple(node.workeroutput[LEFT_OUT_KEY])


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(WorkersOfXdist())
    examples = EXAMPLES_OF_A_SAMPLE if config.getoption("--sample") else EXAMPLES
    settings.register_profile("of any machine", deadline=None, max_examples=examples)  # 200 ms are not long everywhere
    settings.load_profile("of any machine")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Let go of clients that commands have left behind within this process, which would soon have a thousand threads.
    Python comes to that seldom where it has much to look through."""
    threads = Path("/proc/self/task")
    if not threads.exists():
        return
    before = item.config.stash.get(THREADS, 0)
    if len(os.listdir(threads)) > before + THREADS_LEFT_MAX:
        gc.collect()
        item.config.stash[THREADS] = len(os.listdir(threads))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[LEFT_OUT_KEY] = session.config.stash.get(LEFT_OUT, (0, 0, 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    beyond, matrix, without_docker = config.stash.get(LEFT_OUT, (0, 0, 0))
    counted = {
        "exhaustive: make test-all runs them": beyond,
        "exhaustive(matrix=True): make test-matrix runs them": matrix,
        "docker: no Docker engine runs, .ci/run starts one": without_docker,
    }
    said = "; ".join(f"{count} tests marked {what}" for what, count in counted.items() if count)
    terminalreporter.write_line(f"left out: {said or 'nothing'}")


@pytest.fixture(scope="session")
def collected_tests(pytestconfig: pytest.Config) -> list[pytest.Item]:
    """Every test that was collected, also those that are left out."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture(scope="session")
def repository() -> list[Path]:
    """Every file of the repository, relative to its root: all that .gitignore does not name."""
    ignored = GitIgnoreSpec.from_lines([".git", *(ROOT / ".gitignore").read_text().splitlines()])

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            is_folder = path.is_dir() and not path.is_symlink()
            place = path.relative_to(ROOT)
            if not ignored.match_file(f"{place}/" if is_folder else place):
                yield from walk(path) if is_folder else [place]

    return list(walk(ROOT))


@pytest.fixture(scope="session")
def table() -> Callable[..., Rows]:
    """`table("docs/settings.md", "setting", "values")`: the rows of all tables with this header, by column."""

    def rows(page: str, *header: str) -> Rows:
        found: Rows = []
        inside = False
        for line in (ROOT / page).read_text().splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if inside and cells and not set(line) <= set("|- "):
                found.append(dict(zip(header, cells, strict=True)))
            inside = cells == list(header) or (inside and bool(cells))
        assert found, f"{page} has no table {header}"
        return found

    return rows


@pytest.fixture(scope="session")
def _second_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EmbeddedBroker]]:
    """One, on a folder of its own."""
    brokers = [EmbeddedBroker(tmp_path_factory.mktemp("second-broker"), port=0, lifetime="process")]
    yield brokers
    brokers[-1].kill()


@pytest.fixture
def stoppable(_second_broker: list[EmbeddedBroker]) -> OwnCluster:
    """A broker that tests stop, kill and start again: one for all of them in a process, which each finds running."""
    broker = _second_broker[-1]
    if not broker.status().running:  # somebody may have its port by now
        broker = EmbeddedBroker(broker.data_dir, port=0, lifetime="process")
        _second_broker.append(broker)
        broker.start()
    return OwnCluster(broker)


@pytest.fixture(scope="session")
def kafka_image() -> str:
    """The image of docker/kafka, freshly made from this tree."""
    tag = "exactlyonce-kafka:tests"
    made = subprocess.run(
        [sys.executable, ROOT / "docker" / "build.py", "kafka", "--tag", tag], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return tag


def _docker_answers() -> bool:
    from docker.client import DockerClient
    from docker.errors import DockerException

    try:
        DockerClient.from_env().ping()
    except DockerException:
        return False
    return True
