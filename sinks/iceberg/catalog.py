"""A catalog, as its properties describe it, and its errors as ours.

Invariant: no error text has a secret in it. Each connection looks references to secrets up anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyiceberg import exceptions as iceberg
from pyiceberg.catalog import Catalog, load_catalog

from exactlyonce.connectors import refusals
from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.pipeline.secrets import look_up, masked
from exactlyonce.sinks.lake.sink import refers
from exactlyonce.sinks.lake.table import NO_BUCKET, RIGHTS, Conflict, has_no_bucket, is_denied

ANSWER_TIMEOUT_S = 30
_AWAY = (
    iceberg.CommitStateUnknownException, iceberg.ServerError, iceberg.ServiceUnavailableError, iceberg.RESTError,
    iceberg.WaitingForLockException,
)  # fmt: skip
_REMEDIES: Mapping[type[Exception], str] = {
    iceberg.NoSuchTableError: "Create the table, set create=True, or correct its name",
    iceberg.NoSuchNamespaceError: "Create the namespace, set create=True, or correct the table's name",
    iceberg.ForbiddenError: "Give the catalog's user the right to read and commit the table",
    iceberg.UnauthorizedError: "Correct the login in catalog=",
    iceberg.OAuthError: "Correct the login in catalog=",
    iceberg.NoSuchPropertyException: "Add it to catalog=",
    iceberg.NotInstalledError: "Install what it names beside exactlyonce",
}
_MISSING_TABLES = re.compile(r"no such table|does not exist|doesn't exist|UndefinedTable")
_NO_FILE = "unable to open database file"
_LOGIN = re.compile(r"password|authentication|permission denied|role .* does not exist|database .* does not exist")


class OpenCatalog:
    """A connection to the catalog of *properties*, made when it is first asked. For one thread at a time."""

    def __init__(self, properties: Mapping[str, str], table: str) -> None:
        self._properties, self._table = properties, table
        self._secrets: list[str] = []
        self._catalog: Catalog | None = None

    @property
    def name(self) -> str:
        """The name by which a catalog that serves several knows this one."""
        return self._properties.get("name", "default")

    def get(self, *, create: bool = False) -> Catalog:
        """The catalog; with *create*, its own tables in an empty database are created."""
        if self._catalog is None:
            given = {name: value for name, value in self._properties.items() if name != "name"}
            secrets = {name: look_up(f"catalog[{name!r}]", value) for name, value in given.items() if refers(value)}
            properties = {**given, **secrets}
            self._secrets = list(secrets.values())
            if properties.get("type") == "sql":
                properties.setdefault("init_catalog_tables", str(create).lower())
            catalog = load_catalog(self.name, **properties)
            _bound_waits(catalog)
            self._catalog = catalog
        engine = getattr(self._catalog, "engine", None)
        if engine is not None and engine.dialect.name == "sqlite":
            engine.dispose()  # a file that was put back from a backup is another one than the open one
        return self._catalog

    def close(self) -> None:
        catalog, self._catalog = self._catalog, None
        if catalog is not None:
            catalog.close()

    @contextmanager
    def explained(self, *, starting: bool = False) -> Iterator[None]:
        """Turn errors of pyiceberg and the libraries below it into ours. *starting*: at the start of a run a file of
        SQLite that cannot be opened is an error, too."""
        try:
            yield
        except iceberg.CommitFailedException as error:
            raise Conflict(self._text(error)) from None
        except (StoreError, StoreUnavailable, ConfigError, Conflict):
            raise
        except Exception as error:
            explained = self._explained(error, starting)
            if explained is None:
                raise
            self.close()  # a lost connection is not used again
            raise explained from None

    def _text(self, error: BaseException) -> str:
        lines = masked(str(error), self._secrets).strip().splitlines() or [type(error).__name__]
        return lines[0].rstrip(".")

    def _explained(self, error: Exception, starting: bool) -> StoreError | StoreUnavailable | None:
        where, text = f"The catalog of table {self._table}", self._text(error)
        for kind, remedy in _REMEDIES.items():
            if isinstance(error, kind):
                return refusals.refused(where, text, f"{remedy}.")
        if isinstance(error, _AWAY):
            return refusals.passing(where, "it has not answered as it should", text)
        origin = type(error).__module__.partition(".")[0]
        if origin == "sqlalchemy":
            if starting and _NO_FILE in text:
                return refusals.refused(
                    where, text, "Make or mount the folder of its file, or correct uri in catalog=."
                )
            return self._of_database(where, text, error)
        if origin in ("requests", "urllib3"):
            return refusals.unreachable(where, text)
        if isinstance(error, OSError) and is_denied(error):
            return refusals.refused(
                f"The warehouse of table {self._table}", text,
                f"Give this user the right to read and write the warehouse; in S3 {RIGHTS}.",
            )  # fmt: skip
        if isinstance(error, OSError) and has_no_bucket(error):
            return refusals.refused(
                f"The warehouse of table {self._table}", NO_BUCKET, "Create it, or correct warehouse in catalog=."
            )
        if isinstance(error, FileNotFoundError):
            return refusals.passing(f"The warehouse of table {self._table}", "is it mounted?", text)
        if isinstance(error, OSError | pa.ArrowException):
            return refusals.passing(f"The warehouse of table {self._table}", "it cannot be read or written", text)
        if isinstance(error, iceberg.ValidationError | ValueError | ModuleNotFoundError):
            return refusals.refused(where, text, "Correct catalog=, or the table.")
        return None

    def _of_database(self, where: str, text: str, error: Exception) -> StoreError | StoreUnavailable:
        from sqlalchemy import exc

        if _MISSING_TABLES.search(text) and not _LOGIN.search(text):
            return refusals.refused(
                where, text, "The database has no catalog in it: correct uri in catalog=, or set create=True."
            )
        if _LOGIN.search(text):
            return refusals.refused(where, text, "Correct uri in catalog=, or grant the right.")
        if isinstance(error, exc.OperationalError | exc.InterfaceError | exc.InternalError | exc.TimeoutError):
            return refusals.unreachable(where, text)
        if getattr(error, "connection_invalidated", False):
            return refusals.cut_off(where, text)
        return refusals.refused(where, text, "Correct catalog=.")


def _bound_waits(catalog: Catalog) -> None:
    """Let no request wait without end, which is the default of both libraries."""
    engine: Any = getattr(catalog, "engine", None)
    session: Any = getattr(catalog, "_session", None)
    if engine is not None and engine.dialect.name == "postgresql":
        from sqlalchemy import event

        @event.listens_for(engine, "do_connect")
        def _limits(dialect: Any, record: Any, arguments: Any, parameters: dict[str, Any]) -> None:
            parameters.setdefault("connect_timeout", ANSWER_TIMEOUT_S)
            limit_ms = ANSWER_TIMEOUT_S * 1000
            parameters.setdefault(
                "options",
                f"-c statement_timeout={limit_ms} -c idle_in_transaction_session_timeout={limit_ms} "
                f"-c tcp_user_timeout={limit_ms}",
            )

    elif session is not None:
        from functools import partial

        session.request = partial(session.request, timeout=ANSWER_TIMEOUT_S)
