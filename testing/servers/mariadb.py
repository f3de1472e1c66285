"""A MariaDB server of a test's own, in a temporary folder."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pymysql

from exactlyonce.connectors.embedded.broker import free_port
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.servers.programs import programs

DATABASE = "shop"
LOG_SIZE = "--innodb-log-file-size=16M"
IN_MEMORY = Path("/dev/shm")
"""Tables are made and dropped at once where no disk is asked; what survives SIGKILL is the same."""
OPTIONS = (
    "--bind-address=127.0.0.1", "--skip-name-resolve", "--innodb-buffer-pool-size=32M", LOG_SIZE,
    "--max-connections=60", "--performance-schema=OFF", "--innodb-flush-log-at-trx-commit=2",
)  # fmt: skip


class MariaDB:
    """One server with one data folder. Root has no password; the database is `DATABASE`."""

    def __init__(self) -> None:
        places = ("/usr/sbin", "/usr/local/sbin")
        self._programs = programs("mariadbd", "mariadb-install-db", package="mariadb-server", places=places)
        self.folder = Path(
            tempfile.mkdtemp(prefix="exactlyonce-mariadb-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None)
        )
        self.port = free_port()
        self._user = "mysql" if os.geteuid() == 0 else getpass.getuser()
        self._process: subprocess.Popen[bytes] | None = None
        self._connections = threading.local()
        if os.geteuid() == 0:
            os.chown(self.folder, pwd.getpwnam(self._user).pw_uid, -1)
        install = [self._programs["mariadb-install-db"], "--no-defaults", f"--datadir={self.folder / 'data'}"]
        install += [f"--user={self._user}", "--auth-root-authentication-method=normal", "--skip-test-db"]
        install += ["--skip-name-resolve", LOG_SIZE, self._own_tmpdir]
        done = subprocess.run(install, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def _own_tmpdir(self) -> str:
        """A server that starts removes all temporary tables in its folder for them, also another server's."""
        return f"--tmpdir={self.folder}"

    @property
    def dsn(self) -> str:
        """The dsn of root, without TLS: the driver would read all authorities of the machine for each connection."""
        return f"mysql://root@127.0.0.1:{self.port}/{DATABASE}?ssl_mode=disabled"

    def start(self, *options: str, file_bytes_max: int | None = None) -> None:
        """Start it on its data, and wait until it answers. *file_bytes_max*: as on a disk that is full then."""
        files = [f"--{name}={self.folder / value}" for name, value in
                 (("datadir", "data"), ("socket", "sock"), ("pid-file", "pid"), ("log-error", "log.err"))]  # fmt: skip
        command = [self._programs["mariadbd"], "--no-defaults", f"--port={self.port}", *files, *OPTIONS, *options]
        command.append(self._own_tmpdir)
        with_this = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        if file_bytes_max:
            ignoring_the_signal = ["sh", "-c", 'trap "" XFSZ; exec "$@"', "sh"]
            with_this += ["prlimit", f"--fsize={file_bytes_max}", *ignoring_the_signal]
        user = self._user if os.geteuid() == 0 else None
        self._process = subprocess.Popen(
            [*with_this, *command], user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                with pymysql.connect(
                    host="127.0.0.1", port=self.port, user="root", ssl_disabled=True, connect_timeout=5
                ) as connection:
                    connection.cursor().execute(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")
                return
            except pymysql.MySQLError:
                assert self._process.poll() is None, self.log()
                assert time.monotonic() < until, "MariaDB does not come up"
                time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL; whatever was not committed is gone."""
        self._connections = threading.local()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: its sockets are open, and nobody answers."""
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # all of its threads have stopped

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def log(self) -> str:
        """The end of the server's log."""
        return (self.folder / "log.err").read_text()[-3000:]

    def remove(self) -> None:
        """Kill it, and remove its data."""
        self.kill()
        shutil.rmtree(self.folder)

    def sql(self, statement: str, values: Sequence[Any] = (), database: str | None = DATABASE) -> list[tuple[Any, ...]]:
        """The rows of a statement, by the plain driver, over the connection of this thread: no code of the sink."""
        connection = getattr(self._connections, "one", None)
        if connection is None or not connection.open:
            connection = self._connections.one = self.connection(None)
        if database is not None:
            connection.select_db(database)
        with connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return list(cursor.fetchall())

    def connection(self, database: str | None = DATABASE) -> Any:
        """A plain connection of root, which commits by itself."""
        return pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", ssl_disabled=True, database=database, autocommit=True,
            init_command="SET time_zone='+00:00'",
        )  # fmt: skip

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
