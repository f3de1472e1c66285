"""Iceberg's reference REST catalog on this machine: Maven gets it, and Java 17 or newer runs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from waiting import until

from exactlyonce.connectors.embedded.broker import free_port
from exactlyonce.testing.servers.programs import copy_jars, downloaded

ICEBERG, JETTY, HADOOP = "1.10.0", "11.0.25", "3.4.1"
ARTIFACTS = [
    f"org.apache.iceberg:iceberg-core:{ICEBERG}",
    f"org.apache.iceberg:iceberg-core:{ICEBERG}:tests",
    f"org.eclipse.jetty:jetty-server:{JETTY}",
    f"org.eclipse.jetty:jetty-servlet:{JETTY}",
    "org.xerial:sqlite-jdbc:3.50.3.0",
    f"org.apache.hadoop:hadoop-client-api:{HADOOP}",
    f"org.apache.hadoop:hadoop-client-runtime:{HADOOP}",
]
PROGRAM = Path(__file__).with_name("CatalogOnLoopback.java")
NOT_TESTED = "ICEBERG'S REST CATALOG NOT TESTED"


def jars(folder: Path) -> Path:
    """The folder of jars; downloads them, by way of *folder*, if they are missing."""
    return downloaded(f"iceberg-rest-{ICEBERG}", lambda part: copy_jars(ARTIFACTS, part, folder, NOT_TESTED))


class RestCatalog:
    """A catalog server, whose tables outlive a kill."""

    def __init__(self, folder: Path) -> None:
        java = shutil.which("java")
        if java is None:
            pytest.skip(f"{NOT_TESTED}: it needs Java")
        self._java, self._folder, self._jars, self.port = java, folder, jars(folder), free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{self._jars}/*"]
        arguments = [str(self.port), str(self._folder / "catalog.db"), f"file://{self._folder}/warehouse"]
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
