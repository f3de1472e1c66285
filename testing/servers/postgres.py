"""A PostgreSQL server of a test's own. It ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from glob import glob
from pathlib import Path
from typing import Any

import psycopg

from exactlyonce.connectors.embedded.broker import free_port
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.servers.programs import programs

PASSWORD = "s3cret:p@ss/word"
OWNER = "owner"
INSTALLED = "/usr/lib/postgresql/*/bin"
"""The folders with the programs of Debian's packages, which are not on the PATH."""


class PostgresServer:
    """One server with one data folder. Its owner is `OWNER`."""

    def __init__(self, bin: Path | None = None) -> None:
        """*bin*: the folder of its programs; None: they are those that are installed."""
        if bin is None:
            places = sorted(glob(INSTALLED), reverse=True)
            self._programs = programs("initdb", "postgres", package="postgresql", places=places)
        else:
            self._programs = {name: str(bin / name) for name in ("initdb", "postgres")}
        self._user: dict[str, Any] = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
        self.folder = Path(tempfile.mkdtemp(prefix="exactlyonce-postgres-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: dict[str, psycopg.Connection[Any]] = {}
        self.port = free_port()
        self.settings: dict[str, str | int] = {}
        """Those of the next start, beside its own."""
        self._initialize()

    def _initialize(self) -> None:
        if self._user:
            shutil.chown(self.folder, **self._user)
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        subprocess.run(
            [
                *(self._programs["initdb"], "-D", str(self.folder / "data"), "-U", OWNER, "-E", "UTF8", "--locale=C"),
                *("--auth=password", f"--pwfile={secret}", "--no-sync"),
            ],
            **self._user, check=True, cwd=self.folder, capture_output=True,
        )  # fmt: skip

    def start(self) -> None:
        """Start it on its data, and wait until it answers."""
        settings = {
            "port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off",
            "max_connections": 40, "shared_buffers": "32MB", "lc_messages": "C", "superuser_reserved_connections": 3,
            "wal_level": "logical",
            "dynamic_shared_memory_type": "mmap",  # files of its folder: one that is killed leaves none in /dev/shm
            **self.settings,
        }  # fmt: skip
        options = [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs["postgres"], "-D", str(self.folder / "data"), *options],
                **self._user, cwd=self.folder, stdout=log, stderr=log, preexec_fn=_end_with_parent,
            )  # fmt: skip
        limit = time.monotonic() + LIMIT_S
        while True:
            try:
                psycopg.connect(self.dsn("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > limit or self._process.poll() is not None:
                    raise RuntimeError((self.folder / "log").read_text()) from None
                time.sleep(0.02)

    def dsn(
        self, database: str = "postgres", user: str = OWNER, password: str = PASSWORD, port: int | None = None
    ) -> str:
        """The connection string of libpq."""
        return psycopg.conninfo.make_conninfo(
            "", host="127.0.0.1", port=port or self.port, dbname=database, user=user, password=password
        )

    def execute(self, statement: str, *values: Any, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run a statement as the owner, in the connection to this database that all such statements have."""
        connection = self._connections.get(database)
        if connection is None or connection.closed:
            connection = psycopg.connect(self.dsn(database), autocommit=True, prepare_threshold=None)
            self._connections[database] = connection
        cursor = connection.execute(statement.encode(), values or None)
        return cursor.fetchall() if cursor.description else []

    def kill(self) -> None:
        """SIGKILL to the server and all its processes, which have ended then; the data stay as they are."""
        if self._process is None:
            return
        while self._connections:
            self._connections.popitem()[1].close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # it starts no other now
        pids = self._pids()
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        limit = time.monotonic() + LIMIT_S
        while not all(map(_has_ended, pids)):  # one that lives holds the memory that the next server would share
            assert time.monotonic() < limit
            time.sleep(0.005)

    def pause(self) -> None:
        """SIGSTOP to all its processes: its sockets are open, and nobody answers."""
        for pid in self._pids():
            _signal(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in self._pids():
            _signal(pid, signal.SIGCONT)

    def _pids(self) -> list[int]:
        """The server's first, so that it starts no other, then its children's."""
        assert self._process is not None
        pid = self._process.pid
        try:
            return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        except FileNotFoundError:
            return [pid]

    def remove(self) -> None:
        """Kill it, and remove its data."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)
