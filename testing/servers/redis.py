"""A Redis server of a test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from exactlyonce.connectors.embedded.broker import free_port
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.servers.programs import programs

PROGRAM = os.environ.get("EXACTLYONCE_REDIS_SERVER", "redis-server")
"""Tests may be run with another version of the server."""


class RedisServer:
    """One server with its data in *folder*, where each write is durable; *settings* go into redis.conf."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self._program = programs(PROGRAM, package="redis-server")[PROGRAM]
        self.folder = folder
        self.port = free_port()
        self.bus_port = free_port()
        """The bus port of servers of a cluster."""
        self.settings = {"appendonly": "yes", "appendfsync": "always", "save": "", **settings}
        if "cluster-enabled" in settings:
            self.settings["cluster-port"] = str(self.bus_port)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        """A client that shares no code with the store but the library."""
        return redis.Redis(port=self.port, decode_responses=True, retry=Retry(NoBackoff(), 0))

    def start(self) -> None:
        """Start it, and wait until it has loaded its data."""
        self.launch()
        assert self._process is not None
        deadline = time.monotonic() + LIMIT_S
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def launch(self) -> None:
        """Start it, and do not wait."""
        assert self._process is None
        options = [part for name, value in self.settings.items() for part in (f"--{name}", value)]
        fixed = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([self._program, *fixed, *options], stdout=log, stderr=log)

    def _answers(self) -> bool:
        try:
            self.client.ping()
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL; the data stay as they are."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    remove = kill

    def restart(self) -> None:
        """Kill it, and start it again on its data."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """It answers nothing more, and keeps its connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a pause."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def has_waitaof(self) -> bool:
        """Whether it has the command WAITAOF."""
        version = self.client.info("server")["redis_version"].split(".")
        return (int(version[0]), int(version[1])) >= (7, 2)

    @property
    def log_files(self) -> list[Path]:
        """The files of its append-only log."""
        return sorted((self.folder / "appendonlydir").glob("*.incr.aof"))
