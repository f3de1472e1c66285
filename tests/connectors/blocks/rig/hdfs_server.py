"""Hadoop's own HDFS on this machine: MiniDFSCluster, whose jar Maven gets, with the rest of Hadoop from PySpark."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import until

from exactlyonce.connectors.embedded.broker import free_port

JARS = Path.home() / ".cache" / "exactlyonce" / "minidfs-3.5.0"
_MAIN = "org.apache.hadoop.test.MiniDFSClusterManager"
_OF_PYSPARK = ("hadoop-client-*", "slf4j-api-*", "jcl-over-slf4j-*", "log4j-*")
_ARTIFACTS = (
    ("org.apache.hadoop", "hadoop-client-minicluster", "3.5.0"),
    ("org.junit.jupiter", "junit-jupiter-api", "5.13.4"),
    ("org.junit.platform", "junit-platform-commons", "1.13.4"),
    ("org.opentest4j", "opentest4j", "1.3.0"),
)
_DEPENDENCY = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>"
    "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions></dependency>"
)


def jars(folder: Path) -> str:
    """The class path; downloads what is missing. Skips the test, and says so, where that cannot be done."""
    pyspark = pytest.importorskip("pyspark", reason="HDFS NOT TESTED: Hadoop's classes come with PySpark")
    if shutil.which("java") is None:
        pytest.skip("HDFS NOT TESTED: there is no java")
    if not JARS.is_dir():
        maven = shutil.which("mvn")
        if maven is None:
            pytest.skip("HDFS NOT TESTED: its test server comes by Maven, and there is no mvn")
        pom = folder / "pom.xml"
        dependencies = "".join(_DEPENDENCY.format(*each) for each in _ARTIFACTS)
        pom.write_text(
            '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>x</groupId>'
            f"<artifactId>x</artifactId><version>1</version><dependencies>{dependencies}</dependencies></project>"
        )
        part = JARS.with_name(f"{JARS.name}.part-{os.getpid()}")
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={part}"]
        done = subprocess.run([maven, "-q", "-B", "-f", str(pom), *goal], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(part, ignore_errors=True)
            pytest.skip(f"HDFS NOT TESTED: Maven could not get its test server: {done.stdout[-500:]}")
        try:
            part.rename(JARS)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    found = [f"{JARS}/*"]
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

    @contextmanager
    def silent(self) -> Iterator[None]:
        """It takes connections, and answers nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

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
