"""The embedded broker: a real Kafka in KRaft mode, on the loopback interface, as a child process.

A broker inherits the lock of its data folder and holds it until it ends: two brokers never share a folder. A process is
only signalled after its command line has shown that it is the broker of this folder. Nothing here prints: `progress` is
called with a line for each slow step.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exactlyonce.connectors.embedded.jars import KAFKA_VERSION, class_archive, kafka_jars
from exactlyonce.connectors.embedded.programs import dying_with_parent, find_java
from exactlyonce.connectors.embedded.progress import Progress
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError

HOST = "127.0.0.1"
PORT_DEFAULT = 9092
START_LIMIT_S = 300.0
STOP_LIMIT_S = 120.0

Lifetime = Literal["detached", "process"]
"""A detached broker outlives its starter; the kernel kills the other kind together with the thread that started it."""

SMALL_BROKER = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "broker.session.timeout.ms": "3000",  # after a crash the next process waits this long for its registration
    "broker.heartbeat.interval.ms": "500",
    "auto.create.topics.enable": "false",  # a misspelt topic is an error, not an empty topic
    "log.retention.hours": "-1",  # records carry the time of their events: those of 2013 would be deleted at once
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.dedupe.buffer.size": str(16 << 20),  # the default takes 128 MB of the heap
}
_JVM_OPTIONS = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError"]
LOG4J = """\
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c{1}: %m%n
"""
_LINES_OF_LOG = 15
_PRIVATE_UMASK = 0o077
"""Records, settings and their passwords are the owner's alone."""
_offsets = itertools.count(os.getpid() * 7_919)
"""The offsets of free ports: processes that start together begin far apart."""
_reservations: list[socket.socket] = []


@dataclass(frozen=True)
class BrokerStatus:
    running: bool
    pid: int | None
    port: int | None
    bootstrap_servers: str | None
    version: str
    data_dir: Path


class EmbeddedBroker:
    """The broker of one data folder; any process may start it, stop it or ask for its status.

    ```python
    broker = EmbeddedBroker(Path("/tmp/a-broker"), port=0)
    broker.start(print)
    assert broker.status().running
    broker.stop()
    ```
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        port: int = PORT_DEFAULT,
        settings: Mapping[str, str] | None = None,
        lifetime: Lifetime = "detached",
    ) -> None:
        """*port* 0 takes a free one at the first start. *settings* are Kafka's; they win over the broker's own."""
        self.data_dir = (data_dir or default_data_dir()).resolve()  # its broker is known by this path
        self.settings = dict(settings or {})
        self._port = port
        self._lifetime = lifetime
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The address of the running broker. Raises `BrokerUnavailable` when none runs."""
        address = self.status().bootstrap_servers
        if address is None:
            raise BrokerUnavailable(f"No embedded broker runs on {self.data_dir}. Start it: exactlyonce broker start")
        return address

    def start(self, progress: Progress = lambda line: None) -> None:
        """Start the broker and return once it answers; download it first if necessary.

        Raises `ConfigError` if a broker already runs on this folder, the folder cannot be written, the port is taken,
        Java is missing or a setting is wrong, and `BrokerUnavailable` if the download or the start fails.
        """
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            if self._properties.exists() or not any(self.data_dir.iterdir()):
                self.data_dir.chmod(0o700)
            (self.data_dir / "lock").touch(mode=0o600)
        except OSError as error:
            raise ConfigError(
                f"The embedded broker cannot keep its data in {self.data_dir}: {error.strerror}. Choose another folder "
                f"(--data-dir)."
            ) from None
        with self._locked() as lock_fd:
            port = self._port or free_port()
            if not _is_free(port):
                raise ConfigError(
                    f"Another program has port {port} of {HOST}. Choose another port (--port, 0 takes a free one), or, "
                    "if that is a Kafka broker, use it: pass --bootstrap-servers."
                )
            java = find_java()
            jars = kafka_jars(progress)
            command = [str(java), *self._java_options(java, jars)]
            self._configure(command, port)
            progress(f"Starting Kafka {KAFKA_VERSION} on {HOST}:{port}.")
            self._launch([*command, "kafka.Kafka", str(self._properties)], port, lock_fd)
        self._port = port
        progress(f"Kafka {KAFKA_VERSION} answers on {HOST}:{port}; its data is in {self.data_dir}.")

    def stop(self) -> None:
        """Shut the broker down, by force after two minutes. Nothing happens if none runs."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the broker, as a crash would, for tests of faults. Nothing happens if none runs."""
        self._end(signal.SIGKILL)

    def restart(self, progress: Progress = lambda line: None) -> None:
        """Stop, then start on the same data and the same port."""
        self._port = self.status().port or self._port
        self.stop()
        self.start(progress)

    def status(self) -> BrokerStatus:
        """Whether the broker runs, and where. A broker that is still starting counts as running."""
        pid, port = self._recorded()
        running = self._is_ours(pid)
        return BrokerStatus(
            running=running,
            pid=pid if running else None,
            port=port if running else None,
            bootstrap_servers=f"{HOST}:{port}" if running else None,
            version=KAFKA_VERSION,
            data_dir=self.data_dir,
        )

    @property
    def log_path(self) -> Path:
        """The warnings and errors of the broker."""
        return self.data_dir / "broker.log"

    @property
    def _properties(self) -> Path:
        return self.data_dir / "server.properties"

    @property
    def _record(self) -> Path:
        return self.data_dir / "broker.json"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The lock of the data folder, as a descriptor that the broker inherits."""
        with open(self.data_dir / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                status = self.status()
                who = f"on {status.bootstrap_servers} (process {status.pid})" if status.running else "just starting"
                raise ConfigError(
                    f"An embedded broker already runs on {self.data_dir}, {who}. Use it, stop it (exactlyonce broker "
                    "stop), or choose another folder (--data-dir)."
                ) from None
            yield lock.fileno()

    def _java_options(self, java: Path, jars: Path) -> list[str]:
        log4j, scratch = self.data_dir / "log4j2.properties", self.data_dir / "tmp"
        shutil.rmtree(scratch, ignore_errors=True)  # a killed broker leaves its unpacked native libraries there
        scratch.mkdir(mode=0o700)
        places = [f"-Dlog4j2.configurationFile={log4j}", f"-Djava.io.tmpdir={scratch}"]
        archive = class_archive(java, jars)
        archived = [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []
        return [*_JVM_OPTIONS, *archived, *places, "-cp", f"{jars}/*"]

    def _configure(self, command: list[str], port: int) -> None:
        """Write the settings and, the first time, give the folder its cluster id."""
        logs = self.data_dir / "topics"
        controller_port = free_port(other_than=port)
        settings = {
            **SMALL_BROKER,
            "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
            "controller.quorum.voters": f"1@{HOST}:{controller_port}",
            "log.dirs": str(logs),
            **self.settings,
        }
        _write_privately(self._properties, "".join(f"{name}={value}\n" for name, value in settings.items()))
        _write_privately(self.data_dir / "log4j2.properties", LOG4J)
        if (logs / "meta.properties").exists():  # the last file that formatting writes
            return
        shutil.rmtree(logs, ignore_errors=True)
        cluster_id = "E" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]  # never begins like an option
        tool = [*command, "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self._properties)]
        formatted = subprocess.run(tool, stdin=subprocess.DEVNULL, capture_output=True, text=True, umask=_PRIVATE_UMASK)
        if formatted.returncode:
            output = formatted.stdout + formatted.stderr
            _refuse_settings(output)
            raise BrokerUnavailable(
                f"The folder {self.data_dir} could not be prepared for the broker:\n{_tail(output)}"
            )

    def _launch(self, command: list[str], port: int, lock_fd: int) -> None:
        """Start the process with the lock, and wait until it answers; kill it if it does not."""
        if self._lifetime == "process":
            command = dying_with_parent(command)
        with open(self.log_path, "ab", opener=_private) as log:
            log_start = log.tell()
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock_fd], start_new_session=True,
                umask=_PRIVATE_UMASK,
            )  # fmt: skip
        try:
            self._remember(self._child.pid, port)
            self._await_answer(self._child.pid, f"{HOST}:{port}", log_start)
        except BaseException:
            self._child.kill()
            self._child.wait()
            raise

    def _await_answer(self, pid: int, bootstrap_servers: str, log_start: int) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not answers(bootstrap_servers, timeout_s=1):
            if _ended_within(pid, 0.05) or time.monotonic() > deadline:
                what = "ended while it started" if _ended_within(pid, 0) else f"did not answer in {START_LIMIT_S:.0f} s"
                with open(self.log_path, "rb") as log:
                    log.seek(log_start)
                    output = log.read().decode(errors="replace")
                _refuse_settings(output)
                raise BrokerUnavailable(
                    f"The embedded broker {what}. If neither its settings nor the disk are the reason, move "
                    f"{self.data_dir} away and start again. The end of {self.log_path}:\n{_tail(output)}"
                )

    def _end(self, how: signal.Signals) -> None:
        pid, _ = self._recorded()
        if pid is not None and self._is_ours(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
                if not _ended_within(pid, STOP_LIMIT_S):
                    os.kill(pid, signal.SIGKILL)
                    _ended_within(pid, STOP_LIMIT_S)
        if self._child is not None and self._child.pid == pid:
            self._child.wait()

    def _remember(self, pid: int, port: int) -> None:
        draft = self._record.with_suffix(".new")
        _write_privately(draft, json.dumps({"pid": pid, "port": port}))
        draft.rename(self._record)

    def _recorded(self) -> tuple[int | None, int | None]:
        """Process id and port of the last broker started here, alive or not."""
        try:
            record = json.loads(self._record.read_text())
            return int(record["pid"]), int(record["port"])
        except (FileNotFoundError, ValueError, KeyError):
            return None, None

    def _is_ours(self, pid: int | None) -> bool:
        """Whether the process is this folder's broker, and not a later one with the same number."""
        try:
            return os.fsencode(self._properties) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False


def _refuse_settings(output: str) -> None:
    """Raise `ConfigError` if Kafka's *output* names a wrong setting."""
    if match := re.search(r"ConfigException: (.*)", output):
        raise ConfigError(f"Kafka refuses its settings: {match[1]}. Correct the --set options.")


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_LINES_OF_LOG:])


def default_data_dir() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "exactlyonce" / "broker"


def answers(bootstrap_servers: str, timeout_s: float) -> bool:
    """Whether a broker there answers a request for metadata."""
    from confluent_kafka import KafkaException

    from exactlyonce.connectors.confluent import make_producer

    if not _accepts(bootstrap_servers, timeout_s):  # librdkafka backs off after a refusal, and logs it
        return False
    client = make_producer({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    try:
        return bool(client.list_topics(timeout=timeout_s).brokers)
    except KafkaException:
        return False


def free_port(other_than: int = 0) -> int:
    """A free port of the loopback interface that no other living process has got from here.

    It lies below the kernel's client ports: a client that retries while the broker is down could get the broker's own
    port, connect to itself and keep the broker from coming back.
    """
    for offset in _offsets:
        port = 10_000 + offset % 20_000
        if port != other_than and _is_free(port) and _reserve(port):
            return port
    raise AssertionError("unreachable")


def _accepts(bootstrap_servers: str, timeout_s: float) -> bool:
    host, _, port = bootstrap_servers.split(",")[0].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError:
        return False
    return True


def _reserve(port: int) -> bool:
    """Reserve *port* for this process until it ends, also while its server is down; whether no other has it."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0exactlyonce-port-{port}")  # the kernel's own name, without a file
    except OSError:
        reservation.close()
        return False
    _reservations.append(reservation)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the broker does
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _ended_within(pid: int, limit_s: float) -> bool:
    """Wait for the end of a process, child or not."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended = select.poll()  # select() knows no descriptor above 1023, and a process may have many open
        ended.register(pidfd, select.POLLIN)
        return bool(ended.poll(limit_s * 1000))
    finally:
        os.close(pidfd)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write_privately(path: Path, text: str) -> None:
    with open(path, "w", opener=_private) as file:
        file.write(text)
