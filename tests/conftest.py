"""The common part of all tests: their selection, one broker, the repository's files, the image of the containers."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from bytecode import Bytecode
from hypothesis import HealthCheck, settings
from pathspec import GitIgnoreSpec
from selection import COLLECTED, Selection, add_options

from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.engines.local import worker
from exactlyonce.engines.processes import UnitCollector
from exactlyonce.testing.cluster import KafkaCluster, OwnCluster

ROOT = Path(__file__).parents[1]
Rows = list[dict[str, str]]
THREADS = pytest.StashKey[int]()
"""How many this process had when it was last rid of clients."""
THREADS_LEFT_MAX = 40
"""More of them than there were before are clients that only a cycle of references keeps."""
MEMORY_MIN_BYTES = 2**31
"""A broker of all tests writes a tenth of that; a container has less."""
EXAMPLES, EXAMPLES_OF_A_SAMPLE = 100, 10
"""How many hypothesis draws for a test that does not say it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Selection(config))
    config.pluginmanager.register(Bytecode(config))
    config.pluginmanager.register(OneBroker())
    gc.disable()  # a tenth of collecting: none of it is garbage
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has none, nor have its commands
    examples = EXAMPLES_OF_A_SAMPLE if config.getoption("--sample") else EXAMPLES
    settings.register_profile(
        "of any machine", max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("of any machine")


@pytest.fixture(scope="session", autouse=True)
def _no_collection_of_all_tests() -> Iterator[None]:
    """A run or a unit in this process does not begin with a walk over all that collecting the tests has made."""
    gc.collect()
    gc.freeze()
    gc.enable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitCollector, "collecting_rarely", lambda collector: nullcontext())
        patch.setattr(worker, "collecting_rarely", nullcontext)
        yield


class OneBroker:
    """The embedded broker of all worker processes of xdist: one warm Java machine in place of four."""

    _folder: TemporaryDirectory[str] | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        if node.config.getoption("--kafka") == "container" or os.environ.get("EXACTLYONCE_BOOTSTRAP_SERVERS"):
            return
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="kafka-of-tests-", dir=_in_memory())
            self._broker = EmbeddedBroker(Path(self._folder.name), port=0, lifetime="process")
            self._broker.start()
        node.workerinput["kafka"] = self._broker.status().bootstrap_servers

    def pytest_unconfigure(self) -> None:
        if self._folder is not None:
            self._broker.kill()
            self._folder.cleanup()


def _in_memory() -> str | None:
    """Where it takes no time to sync a file, as a broker does for each partition; None: not on this machine."""
    memory = "/dev/shm"
    return memory if Path(memory).is_dir() and shutil.disk_usage(memory).free > MEMORY_MIN_BYTES else None


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> KafkaCluster:
    """The cluster of all worker processes where there are several, else that of the plugin."""
    servers = getattr(request.config, "workerinput", {}).get("kafka")
    cluster: KafkaCluster = KafkaCluster(servers) if servers else request.getfixturevalue("kafka")
    return cluster


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Drop clients that commands have left behind in this process, which would soon have a thousand threads."""
    threads = Path("/proc/self/task")
    if not threads.exists():
        return
    before = item.config.stash.get(THREADS, 0)
    if len(os.listdir(threads)) > before + THREADS_LEFT_MAX:
        gc.collect()
        item.config.stash[THREADS] = len(os.listdir(threads))


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
def store_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The servers of all stores, started once for all tests of a process."""
    for driver in ("psycopg", "pymysql", "redis", "pyarrow", "duckdb"):
        pytest.importorskip(driver)
    from servers import Servers

    servers = Servers(tmp_path_factory.mktemp("redis"))
    yield servers
    servers.remove()


@pytest.fixture
def run(kafka: KafkaCluster) -> Iterator[Callable[..., Any]]:
    """`run("pipelines:linear", "--param", ...)` starts `exactlyonce run` in a process, killed with the test."""
    from running import runs_of

    with runs_of(kafka) as start:
        yield start


@pytest.fixture
def failpoint(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """`failpoint("worker-frozen")` is the environment that arms it; the file in tmp_path/fired shows that it fired."""
    fired = tmp_path / "fired"
    fired.mkdir(exist_ok=True)

    def arm(name: str, action: str = "kill", nth: int = 1) -> dict[str, str]:
        return {"EXACTLYONCE_FAILPOINTS": f"{name}={action}@{nth}", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}

    return arm


def _storage_server(kind: str, folder: Path) -> Any:
    from hdfs_server import HdfsServer

    from exactlyonce.testing.servers.s3 import S3Server

    return S3Server() if kind == "s3" else HdfsServer(folder)


@pytest.fixture(params=["s3", "hdfs"])
def block_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of a test's own, where blocks may lie outside of the topic."""
    with closing(_storage_server(request.param, tmp_path_factory.mktemp("blocks"))) as server:
        yield server


@pytest.fixture(scope="session")
def _fewer_descriptions() -> Iterator[None]:
    import botocore.session

    with pytest.MonkeyPatch.context() as patch:
        # Each folder has a client of its own, which would read the descriptions of all AWS anew.
        patch.setattr(botocore.session, "create_loader", cache(botocore.session.create_loader))
        yield


@pytest.fixture
def s3(_fewer_descriptions: None, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server with S3's protocol, started once for all tests of a process, whose client this process is."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def s3_user(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractContextManager[None]]:
    """`with s3_user("s3:PutObject"):` lets this process into `s3` as a user with that right alone."""

    @contextmanager
    def let_in(*actions: str) -> Iterator[None]:
        with s3.granting(*actions) as env, monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            yield

    return let_in


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KB; the test is skipped where this user cannot mount one."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    place = tmp_path / "disk"
    place.mkdir()
    if sys.platform != "linux" or libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, b"size=256k"):
        pytest.skip("this user cannot mount a small disk")
    yield place
    libc.umount2(os.fsencode(place), 2)


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Hadoop's HDFS, started once; the tests are skipped, loudly, where it cannot be had."""
    with closing(_storage_server("hdfs", tmp_path_factory.mktemp("hdfs"))) as server:
        yield server


@pytest.fixture(scope="session")
def registry(registry_server: Any) -> Any:
    """A schema registry, started once for all tests of a process; a test that stops it starts it again."""
    pytest.importorskip("authlib", reason="SCHEMA REGISTRY NOT TESTED: its client needs the extra `registry`")
    return registry_server


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
def image() -> Callable[[str], str]:
    """`image("postgres")`: the image of that server, freshly made from this tree."""

    def made(server: str) -> str:
        tag = f"exactlyonce-{server}:tests"
        command = [sys.executable, str(ROOT / "docker" / "build.py"), server, "--tag", tag]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return tag

    return made


@pytest.fixture(scope="session")
def kafka_image(image: Callable[[str], str]) -> str:
    """The image that the plugin's fixtures start in a container."""
    return image("kafka")


@pytest.fixture(scope="session")
def database_server(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """`database_server("postgres")`, or "mariadb" or "redis", which is started when it is first asked for."""
    return lambda name: request.getfixturevalue(f"{name}_server")


@pytest.fixture(params=["postgres", "mariadb"])
def shop(
    request: pytest.FixtureRequest, database_server: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """An empty database, to which the variable SHOP_DSN leads."""
    from shop import Server

    server = Server(request.param, database_server(request.param), monkeypatch)
    yield server
    server.close()


@pytest.fixture
def installed(tmp_path: Path) -> Callable[[str, str, str], Path]:
    """`installed("shop_sqlite", code, entry_points)` is a folder with a package of others, 1.2, as pip leaves one."""

    def install(name: str, code: str, entry_points: str) -> Path:
        packages = tmp_path / "packages"
        info = packages / f"{name}-1.2.dist-info"
        info.mkdir(parents=True)
        (packages / f"{name}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(entry_points)
        return packages

    return install


@pytest.fixture
def shop_sqlite(installed: Callable[[str, str, str], Path]) -> Path:
    """The sink and the source of the documentation, as a package of others."""
    pages = [ROOT / "docs" / f"writing-a-{kind}.md" for kind in ("sink", "source")]
    code = [re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)[0] for page in pages]
    sinks, sources = "sqlite = shop_sqlite:SqliteSink", "journal = shop_sqlite:JournalSource"
    entry_points = f"[exactlyonce.sinks]\n{sinks}\n[exactlyonce.sources]\n{sources}\n"
    return installed("shop_sqlite", "\n\n".join(code), entry_points)
