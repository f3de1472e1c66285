"""Database servers in containers, by testcontainers: killed, and started again on the same data and port.

Docker's clients are imported late: every test process collects, few start containers.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql
import pytest

from exactlyonce.connectors.embedded.broker import HOST, free_port
from exactlyonce.testing.cluster import LIMIT_S

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

PASSWORD = "only-f0r-tests"
"""The password of `owner`, or of root, in the images of docker/."""
DATABASE = "shop"


def pulled(image: str) -> str:
    """*image*, which a registry has. The test is skipped if no registry can be reached."""
    from docker.client import DockerClient
    from docker.errors import APIError

    client = DockerClient.from_env()
    try:
        client.images.pull(*image.split(":"))
    except APIError as error:
        if error.is_client_error():
            raise
        pytest.skip(f"The image {image} is not here, and the registry could not be reached: {error.explanation}")
    return image


class ContainedServer:
    """A server in *container* that listens on *port* there, and in here on a free port of the loopback."""

    def __init__(self, container: DockerContainer, port: int) -> None:
        self.port = free_port()
        container.ports[f"{port}/tcp"] = (HOST, self.port)  # type: ignore[assignment]  # as the engine's client takes it
        self._container = container

    def connect(self, database: str | None) -> Any:
        raise NotImplementedError

    def sql(self, statement: str, values: Sequence[Any] = (), /, database: str | None = DATABASE) -> list[Any]:
        with closing(self.connect(database)) as connection, connection.cursor() as cursor:
            cursor.execute(statement, tuple(values) or None)
            return list(cursor.fetchall()) if cursor.description else []

    def start(self) -> None:
        self._container.get_wrapped_container().start()
        self.await_answer()

    def kill(self) -> None:
        self._container.get_wrapped_container().kill()

    def await_answer(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                self.connect(None).close()
                return
            except (psycopg.OperationalError, pymysql.MySQLError, OSError):
                wrapped = self._container.get_wrapped_container()
                wrapped.reload()
                assert wrapped.status in ("created", "running"), wrapped.logs().decode(errors="replace")[-2000:]
                assert time.monotonic() < deadline, wrapped.logs().decode(errors="replace")[-2000:]
                time.sleep(0.05)


class ContainedPostgres(ContainedServer):
    def __init__(self, container: DockerContainer) -> None:
        super().__init__(container, 5432)

    @property
    def dsn(self) -> str:
        return f"host={HOST} port={self.port} user=owner password={PASSWORD} dbname={DATABASE}"

    def connect(self, database: str | None) -> Any:
        where = self.dsn.replace(f"dbname={DATABASE}", f"dbname={database or 'postgres'}")
        return psycopg.connect(where, autocommit=True, connect_timeout=5)

    def empty(self) -> None:
        self.sql(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)", database=None)
        self.sql(f"CREATE DATABASE {DATABASE} TEMPLATE template0", database=None)


class ContainedMySQL(ContainedServer):
    """MySQL or MariaDB, whose root may come from anywhere; *secured*: by TLS alone."""

    def __init__(self, container: DockerContainer, *, secured: bool = False) -> None:
        super().__init__(container, 3306)
        self._secured = secured

    @property
    def dsn(self) -> str:
        mode = "required" if self._secured else "disabled"
        return f"mysql://root:{PASSWORD}@{HOST}:{self.port}/{DATABASE}?ssl_mode={mode}"

    def connect(self, database: str | None) -> Any:
        tls: dict[str, Any] = {"ssl_disabled": True}
        if self._secured:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # its certificate is its own
            tls = {"ssl": context}
        return pymysql.connect(
            host=HOST, port=self.port, user="root", password=PASSWORD, database=database, autocommit=True,
            connect_timeout=5, **tls,
        )  # fmt: skip

    def empty(self) -> None:
        self.sql(f"DROP DATABASE IF EXISTS {DATABASE}", database=None)
        self.sql(f"CREATE DATABASE {DATABASE} CHARACTER SET utf8mb4", database=None)


@contextmanager
def contained(image: str, kind: Callable[[DockerContainer], ContainedServer], **environment: str) -> Iterator[Any]:
    """A server of *kind* in a container of *image*, which is removed at the end."""
    from testcontainers.core.config import testcontainers_config
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.network import Network

    # Its reaper is an image to be pulled from a registry; the container is removed here, and nothing is pulled.
    testcontainers_config.ryuk_disabled = True
    container = DockerContainer(image)
    for name, value in environment.items():
        container.with_env(name, value)
    server = kind(container)
    # A network of its own: what another Docker engine left in the usual one would be in the way.
    with Network() as network, container.with_network(network):
        server.await_answer()
        yield server
