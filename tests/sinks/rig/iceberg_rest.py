"""Iceberg's reference REST catalog on this machine: Maven gets it, and Java 17 or newer runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from waiting import until

from exactlyonce.connectors.embedded.broker import free_port

ICEBERG, JETTY, HADOOP = "1.10.0", "11.0.25", "3.4.1"
ARTIFACTS = [
    ("org.apache.iceberg", "iceberg-core", ICEBERG, ""),
    ("org.apache.iceberg", "iceberg-core", ICEBERG, "tests"),
    ("org.eclipse.jetty", "jetty-server", JETTY, ""),
    ("org.eclipse.jetty", "jetty-servlet", JETTY, ""),
    ("org.xerial", "sqlite-jdbc", "3.50.3.0", ""),
    ("org.apache.hadoop", "hadoop-client-api", HADOOP, ""),
    ("org.apache.hadoop", "hadoop-client-runtime", HADOOP, ""),
]
PROGRAM = Path(__file__).with_name("CatalogOnLoopback.java")
JARS = Path.home() / ".cache" / "exactlyonce" / f"iceberg-rest-{ICEBERG}"
NOT_TESTED = "ICEBERG'S REST CATALOG NOT TESTED"


def jars(folder: Path) -> Path:
    """The folder of jars; downloads them if they are missing. Skips the test, and says so, where that fails."""
    if not JARS.is_dir():
        maven = shutil.which("mvn")
        if maven is None:
            pytest.skip(f"{NOT_TESTED}: it comes by Maven, and there is no mvn")
        dependencies = "".join(
            f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version>"
            f"{f'<classifier>{classifier}</classifier>' if classifier else ''}</dependency>"
            for group, name, version, classifier in ARTIFACTS
        )
        (folder / "pom.xml").write_text(
            '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
            "<groupId>tests</groupId><artifactId>rest</artifactId><version>1</version>"
            f"<dependencies>{dependencies}</dependencies></project>"
        )
        part = JARS.with_name(f"{JARS.name}.part-{os.getpid()}")
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={part}"]
        done = subprocess.run([maven, "-q", "-B", *goal], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{NOT_TESTED}: Maven could not get it: {done.stdout[-500:]}")
        try:
            part.rename(JARS)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return JARS


class RestCatalog:
    """A catalog server, whose tables outlive a kill."""

    def __init__(self, folder: Path) -> None:
        java = shutil.which("java")
        if java is None:
            pytest.skip(f"{NOT_TESTED}: it needs Java")
        self._java, self._folder, self._jars, self._port = java, folder, jars(folder), free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{self._jars}/*"]
        arguments = [str(self._port), str(self._folder / "catalog.db"), f"file://{self._folder}/warehouse"]
        log = self._folder / "server.log"
        with open(log, "ab") as output:
            command = [self._java, *options, str(PROGRAM), *arguments]
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        until(lambda: self._answers() or self.process.poll() is not None, pause_s=0.1)
        assert self.process.poll() is None, log.read_text()[-2000:]

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.uri}/v1/config", timeout=5):
                return True
        except (URLError, OSError):
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
