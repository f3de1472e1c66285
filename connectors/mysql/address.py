"""The address of a server, and the description of a table there, without the driver. An address is a URL,
``mysql://user:password@host:3306/database?ssl_mode=verify_identity``.

Invariant: no part of the URL is in an error or a repr: in a malformed one, any part may be of the password.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

from exactlyonce.connectors.tables import Database, DatabaseTable
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.secrets import look_up, masked

FORM = "mysql://user:password@host:3306/database, with %40 for an @ in the password, %2F for a /, and so on"
SCHEMES = ("mysql", "mariadb")
SSL_MODES = ("disabled", "preferred", "required", "verify_ca", "verify_identity")
"""The names of MySQL's clients; the default is preferred, and with *ssl_ca* verify_identity."""
OPTIONS = ("ssl_mode", "ssl_ca", "ssl_cert", "ssl_key", "unix_socket")
PORT = 3306


@dataclass(frozen=True, kw_only=True)
class MySQLAddress:
    """The address of a server, the login, and the TLS settings."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    database: str
    options: dict[str, str]

    @classmethod
    def parse(cls, url: str) -> MySQLAddress:
        """The address in *url*; the `ConfigError` of a wrong one has nothing of it."""
        try:
            parts = urlsplit(url.strip())
            host, port = parts.hostname, parts.port
            options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        except ValueError:
            raise ConfigError(f"The dsn is no URL. Write {FORM}.") from None
        database = unquote(parts.path[1:])
        has_place = bool(host) or "unix_socket" in options
        if parts.scheme not in SCHEMES or parts.fragment or not parts.username or not has_place:
            raise ConfigError(f"The dsn is not of the form {FORM}.")
        if not database or "/" in parts.path[1:]:
            raise ConfigError(f"The dsn names no database. Write {FORM}.")
        if unknown := sorted(options.keys() - set(OPTIONS)):
            raise ConfigError(
                f"The dsn has {len(unknown)} option(s) that are not known. Known are {', '.join(OPTIONS)}."
            )
        if (mode := options.get("ssl_mode", "preferred")) not in SSL_MODES:
            raise ConfigError(f"The ssl_mode of the dsn must be one of {', '.join(SSL_MODES)}.")
        if "ssl_key" in options and "ssl_cert" not in options:
            raise ConfigError("The dsn has an ssl_key without its certificate. Add ssl_cert.")
        if mode in ("disabled", "preferred") and options.keys() & {"ssl_ca", "ssl_cert"} and "ssl_mode" in options:
            raise ConfigError(f"The dsn has certificates, but ssl_mode={mode}. Use verify_identity.")
        return cls(
            host=host or "localhost",
            port=port or PORT,
            user=unquote(parts.username),
            password=unquote(parts.password or ""),
            database=database,
            options=options,
        )

    @classmethod
    def at(cls, dsn: str) -> MySQLAddress:
        """The address that *dsn*, a reference or a URL, has now."""
        return cls.parse(look_up("dsn", dsn))

    @property
    def place(self) -> str:
        """The server, for error texts."""
        return self.options.get("unix_socket") or f"{self.host}:{self.port}"

    def arguments(self) -> dict[str, Any]:
        """The driver's arguments. The password is bytes: the driver would encode text as Latin-1."""
        arguments: dict[str, Any] = {
            "host": self.host, "port": self.port, "user": self.user, "password": self.password.encode(),
            "database": self.database, "unix_socket": self.options.get("unix_socket"),
        }  # fmt: skip
        mode = self.options.get("ssl_mode") or ("verify_identity" if "ssl_ca" in self.options else None)
        if mode == "disabled":
            arguments["ssl_disabled"] = True
        elif mode in ("required", "verify_ca", "verify_identity") or "ssl_cert" in self.options:
            arguments["ssl"] = self._tls(mode or "required")
        return arguments

    def redact(self, text: str) -> str:
        """*text* without the password."""
        return masked(text, [self.password])

    def _tls(self, mode: str) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.options.get("ssl_ca"))
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # servers' own certificates fail it
            context.check_hostname = mode == "verify_identity"
            context.verify_mode = ssl.CERT_NONE if mode == "required" else ssl.CERT_REQUIRED
            if "ssl_cert" in self.options:
                context.load_cert_chain(self.options["ssl_cert"], self.options.get("ssl_key"))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(f"A certificate or key that the dsn names cannot be read: {reason}.") from None
        return context


class MySQLDatabase(Database):
    """See `Database`."""

    extra: ClassVar[str] = "mysql"
    driver: ClassVar[str] = "PyMySQL"
    client: ClassVar[str] = 'mysql "$MYSQL_DATABASE"'
    schemes: ClassVar[tuple[str, ...]] = tuple(f"{scheme}:" for scheme in SCHEMES)

    @staticmethod
    def has_password(dsn: str) -> bool:
        return bool(MySQLAddress.parse(dsn).password)

    @staticmethod
    def query(dsn: str, statement: str) -> Iterator[Any]:
        from exactlyonce.connectors.mysql.session import MySQLSession

        with closing(MySQLSession(lambda: MySQLAddress.at(dsn))) as session:
            yield from session.objects(statement)

    def address(self) -> MySQLAddress:
        """The server's address, looked up now."""
        return MySQLAddress.at(self.dsn)


class MySQLTable(MySQLDatabase, DatabaseTable):
    """See `DatabaseTable`."""

    def reading_grants(self, user: str) -> tuple[str, ...]:
        return (f"GRANT SELECT ON `{self.table}` TO `{user}`@'%';",)
