"""Hadoop's own HDFS on this machine: MiniDFSCluster, whose jar Maven gets, with the rest of Hadoop from PySpark."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from waiting import until

from exactlyonce.connectors.embedded.broker import free_port
from exactlyonce.testing.servers.programs import copy_jars, downloaded, stopped

NOT_TESTED = "HDFS NOT TESTED"
_MAIN = "org.apache.hadoop.test.MiniDFSClusterManager"
_OF_PYSPARK = ("hadoop-client-*", "slf4j-api-*", "jcl-over-slf4j-*", "log4j-*")
_ARTIFACTS = (
    "org.apache.hadoop:hadoop-client-minicluster:3.5.0",
    "org.junit.jupiter:junit-jupiter-api:5.13.4",
    "org.junit.platform:junit-platform-commons:1.13.4",
    "org.opentest4j:opentest4j:1.3.0",
)


def jars(folder: Path) -> str:
    """The class path; downloads what is missing, by way of *folder*."""
    pyspark = pytest.importorskip("pyspark", reason=f"{NOT_TESTED}: Hadoop's classes come with PySpark")
    if shutil.which("java") is None:
        pytest.skip(f"{NOT_TESTED}: there is no java")
    own = downloaded("minidfs-3.5.0", lambda part: copy_jars(_ARTIFACTS, part, folder, NOT_TESTED, with_needed=False))
    found = [f"{own}/*"]
    for pattern in _OF_PYSPARK:
        found += map(str, sorted((Path(pyspark.__file__).parent / "jars").glob(f"{pattern}.jar")))
    return ":".join(found)


class HdfsServer:
    """A name node and a data node, whose files outlive a kill."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._class_path = folder, jars(folder)
        self.port = free_port()
        self.process: subprocess.Popen[bytes]
        self._start("-format")

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"hdfs://{self.host}"

    @property
    def env(self) -> dict[str, str]:
        return {"HADOOP_USER_NAME": getpass.getuser()}

    def _start(self, *arguments: str) -> None:
        details = self._folder / "details.json"
        details.unlink(missing_ok=True)
        options = [
            "-nnport", str(self.port), "-datanodes", "1", "-D", f"hdfs.minidfs.basedir={self._folder / 'base'}",
            "-writeDetails", str(details), *arguments,
        ]  # fmt: skip
        java = ["java", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", self._class_path, _MAIN]
        with open(self._folder / "server.log", "ab") as log:
            self.process = subprocess.Popen([*java, *options], cwd=self._folder, stdout=log, stderr=log)
        until(lambda: _whole(details) or self.process.poll() is not None, pause_s=0.1)
        assert self.process.poll() is None, (self._folder / "server.log").read_text()[-2000:]

    @contextmanager
    def away(self) -> Iterator[None]:
        """Kill it by SIGKILL; then it is started again, on the same files."""
        self.process.kill()
        self.process.wait()
        try:
            yield
        finally:
            self._start()

    def silent(self) -> AbstractContextManager[None]:
        """It takes connections, and answers nothing."""
        return stopped(self.process.pid)

    def admin(self, *words: str) -> None:
        """A command of Hadoop's administrators, as this user."""
        java = ["java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", self._class_path]
        line = [*java, "org.apache.hadoop.hdfs.tools.DFSAdmin", "-fs", self.url, *words]
        done = subprocess.run(line, env={**os.environ, **self.env}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _whole(details: Path) -> bool:
    try:
        return "namenode_port" in json.loads(details.read_text())
    except (FileNotFoundError, ValueError):
        return False
