"""Servers of stores for the benchmarks: the machine's own programs, on loopback, with temporary data.

They have the default durability, except that Redis gets the log that the sink requires.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from cluster import LIMIT_S

from exactlyonce.connectors.embedded.broker import free_port

PACKAGES = {"postgres": "postgresql", "mariadb": "mariadb-server", "redis": "redis-server"}
_PROGRAMS = {
    "postgres": ("initdb", "postgres"), "mariadb": ("mariadb-install-db", "mariadbd"), "redis": ("redis-server",),
    "duckdb": (),
}  # fmt: skip
_DRIVERS = {"postgres": "psycopg", "mariadb": "pymysql", "redis": "redis", "duckdb": "duckdb"}


def missing(store: str) -> str:
    """A sentence about programs that *store* needs and that are not installed, or empty."""
    lacking = [name for name in _PROGRAMS[store] if _path(name) is None]
    if lacking:
        return f"{', '.join(lacking)} is not installed (Debian: {PACKAGES[store]}), so {store} is left out"
    if find_spec(_DRIVERS[store]) is None:
        return f"{_DRIVERS[store]} is not installed, so {store} is left out"
    return ""


@contextmanager
def running(store: str) -> Iterator[str]:
    """A server of *store*, and its address as a URL; gone after the `with`. DuckDB has a file alone."""
    if store == "duckdb":
        with tempfile.TemporaryDirectory(prefix="exactlyonce-bench-duckdb-") as place:
            yield f"{place}/orders.duckdb"
        return
    folder, port = Path(tempfile.mkdtemp(prefix=f"exactlyonce-bench-{store}-")), free_port()
    command, user, url, answers = _SERVERS[store](folder, port)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, user=user, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{store} does not come up: {(folder / 'output').read_text()}")
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


_Server = tuple[list[str], str | None, str, Callable[[str], bool]]
"""The command, the user that runs it (None: this one), the URL, and whether a server answers there."""


def _postgres(folder: Path, port: int) -> _Server:
    user = _given_to("postgres", folder)
    begin = [*_program("initdb"), "-D", str(folder / "data"), "-U", "owner", "-E", "UTF8", "--locale=C", "--auth=trust"]
    subprocess.run(begin, check=True, cwd=folder, user=user, capture_output=True)
    settings = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_wal_size": "4GB"}
    settings["wal_level"] = "logical"
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    command = [*_program("postgres"), "-D", str(folder / "data"), *options]
    return command, user, f"postgresql://owner@127.0.0.1:{port}/postgres", _postgres_answers


def _postgres_answers(url: str) -> bool:
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def _mariadb(folder: Path, port: int) -> _Server:
    user = _given_to("mysql", folder)
    log_size = "--innodb-log-file-size=512M"
    install = [*_program("mariadb-install-db"), "--no-defaults", f"--datadir={folder / 'data'}", log_size]
    install.append(f"--tmpdir={folder}")
    install += ["--auth-root-authentication-method=normal", *([f"--user={user}"] if user else [])]
    subprocess.run(install, check=True, cwd=folder, capture_output=True)
    files = [f"--datadir={folder / 'data'}", f"--socket={folder / 'sock'}", f"--pid-file={folder / 'pid'}"]
    network = ["--bind-address=127.0.0.1", f"--port={port}", "--skip-name-resolve"]
    command = [*_program("mariadbd"), "--no-defaults", *files, *network, log_size, f"--tmpdir={folder}"]
    return command, user, f"mysql://root@127.0.0.1:{port}/test?ssl_mode=disabled", _mariadb_answers


def _mariadb_answers(url: str) -> bool:
    import pymysql

    try:
        pymysql.connect(**mysql_arguments(url), connect_timeout=5).close()
    except pymysql.MySQLError:
        return False
    return True


def mysql_arguments(url: str) -> dict[str, object]:
    """PyMySQL's arguments for *url*."""
    host, port = url.split("@")[1].split("/")[0].split(":")
    return {"host": host, "port": int(port), "user": "root", "database": "test", "ssl_disabled": True}


def _redis(folder: Path, port: int) -> _Server:
    settings = {"bind": "127.0.0.1", "port": port, "dir": folder, "appendonly": "yes", "save": ""}
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [*_program("redis-server"), *options], None, f"redis://127.0.0.1:{port}/0", _redis_answers


def _redis_answers(url: str) -> bool:
    import redis

    try:
        return bool(redis.Redis.from_url(url).ping())
    except redis.RedisError:
        return False


_SERVERS = {"postgres": _postgres, "mariadb": _mariadb, "redis": _redis}


def _path(name: str) -> str | None:
    places = [os.environ.get("PATH", ""), "/usr/sbin", *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    return shutil.which(name, path=os.pathsep.join(places))


def _program(name: str) -> list[str]:
    path = _path(name)
    assert path is not None
    return [path]


def _given_to(user: str, folder: Path) -> str | None:
    """The user that runs a database, None: this one. Root must not: *folder* then becomes *user*'s."""
    if os.geteuid():
        return None
    os.chown(folder, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
    return user
