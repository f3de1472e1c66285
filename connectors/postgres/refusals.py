"""The errors of PostgreSQL as ours: what has to be done, and by whom, or that a retry helps.

Invariant: no error text has a password or an unreadable connection string in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import psycopg

from exactlyonce.connectors import refusals
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.pipeline.secrets import is_reference, masked

_AGAIN = {
    "08": "the connection was lost",
    "40": "another transaction was in the way",
    "53": "the server is short of something",
    "53100": "the server's disk is full: make room",
    "53300": "the server has no connection left: raise max_connections, or close others",
    "55": "the object is in use",
    "55P03": "another session holds a lock that was waited for: see pg_stat_activity",
    "57": "the server, or its administrator, has ended the request",
    "57P03": "the server is starting up or shutting down",
    "58": "the server cannot read or write its files: see its log",
    "25P": "the transaction lasted too long",
    "25006": "the server takes no writes now: it is a standby, or is becoming one. Where a standby may take over, name "
    "all hosts in the dsn, with target_session_attrs=read-write",
    "XX000": "the server has met an error of its own: see its log",
}
"""Errors that pass, by SQLSTATE or its beginning, the longest one that fits."""
_FATAL = {
    "0A": "PostgreSQL cannot do this with this table",
    "22": "a value does not fit its column. It passed the sink's own checks, so a domain, a trigger or a changed "
    "column refuses it: correct the table, or the rows' source, and run again",
    "23": "a row breaks a constraint of the table: correct the table, its data or the rows' source, and run again",
    "28": "correct the login in the connection string, or pg_hba.conf",
    "3D000": "create the database, or correct the connection string",
    "3F000": "create the schema, or correct the table's name",
    "42501": "the role lacks a right: GRANT it",
    "42703": "the column is missing: add it, or leave the field out",
    "42P01": "the table is missing: create it, or set create=True",
    "42P10": "there is no unique index on the key any more: create it again",
    "54": "a limit of PostgreSQL is exceeded; an index holds keys of up to about 2,700 bytes",
    "57P04": "the database was dropped: restore it, or correct the connection string",
    "XX001": "the database is damaged: restore it",
    "XX002": "an index is damaged: REINDEX it",
}
"""Errors that come again, by SQLSTATE or its beginning, with the remedy."""
_FATAL_BY_FUNCTION = {
    "check_enable_rls": "row-level security would hide rows from the role: ALTER ROLE ... BYPASSRLS, ALTER TABLE ... "
    "DISABLE ROW LEVEL SECURITY, or use another role; a function of a trigger may SET row_security = on",
    "CheckCmdReplicaIdentity": "the publication has to tell rows apart: ALTER TABLE ... ADD PRIMARY KEY, or "
    "ALTER TABLE ... REPLICA IDENTITY USING INDEX the unique index on the key",
}
"""Likewise by the server's function that raised it, if the SQLSTATE says too little."""
_LOGIN_PASSES = re.compile(
    r"starting up|shutting down|not (yet )?accepting connections|recovery mode|too many (clients|connections)|"
    r"remaining connection slots|connection limit|refused|timeout|timed out|reset by peer|closed the connection|"
    r"could not translate|resolve|unreachable|no route",
    re.IGNORECASE,
)
_LOGIN_STAYS = {
    r"password|authentication|SCRAM": "Correct the password or the user in the connection string",
    r"role .* does not exist|is not permitted to log in": "Create the role, or correct the user in the string",
    r"database .* does not exist": "Create the database, or correct its name in the connection string",
    r"permission denied for database": "GRANT CONNECT ON DATABASE to the role",
    r"no pg_hba\.conf entry|pg_hba\.conf rejects": "Let the role in by a line of the server's pg_hba.conf",
    r"SSL|certificate": "Correct sslmode and the certificates in the connection string",
    r"invalid|unsupported|unrecognized": "Correct the connection string",
}
"""The English texts of the server and libpq for failed logins, with the remedy."""


class LockHeld(StoreUnavailable):
    """Another session has held a lock for too long."""


class Refusals:
    """Converts errors of the driver to ours, for one connection string."""

    def __init__(self, dsn: str) -> None:
        self.dsn_shown = f"dsn={dsn}" if is_reference(dsn) else "the dsn as it is written"
        self.server = f"PostgreSQL ({self.dsn_shown})"
        self._secrets: set[str] = set()

    def learn(self, text: str, settings: Mapping[str, Any]) -> None:
        """Mask the secrets of a connection string from now on."""
        secrets = {str(value) for name, value in settings.items() if "password" in name and value}
        self._secrets |= {text} | secrets | {quote(secret, safe="") for secret in secrets}

    def redact(self, text: str) -> str:
        """*text* without any secret."""
        return masked(text, self._secrets)

    def of_dsn(self) -> StoreError:
        """The error for a connection string that libpq cannot read, without libpq's text, which quotes the string."""
        return StoreError(
            f"The connection string of PostgreSQL ({self.dsn_shown}) cannot be read. Write it as "
            f"postgresql://user:password@host:5432/database, special characters as %XX, or as name=value pairs."
        )

    def of_login(self, error: psycopg.Error, code: Callable[[], str]) -> StoreError | StoreUnavailable:
        """The error for a failed login. *code* asks for the SQLSTATE if the text is unknown, as of a server that does
        not speak English."""
        message = self.redact(_one_line(str(error)))
        if not _LOGIN_PASSES.search(message):
            for pattern, advice in _LOGIN_STAYS.items():
                if re.search(pattern, message, re.IGNORECASE):
                    return StoreError(f"{self.server} refuses the login: {message}. {advice}.")
            state = code()
            if stays := _longest(_FATAL, state):
                return StoreError(f"{self.server} refuses the login: {message} [{state}]. {_sentence(_FATAL[stays])}")
        return refusals.unreachable(self.server, message)

    def of(self, error: psycopg.Error) -> StoreError | StoreUnavailable:
        """The error for a failed request."""
        state, message = error.sqlstate, self.redact(_message_of(error))
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and state is None:
            return refusals.cut_off(self.server, message)
        state = "25006" if state == "0A000" and "recovery" in message else state or ""
        message = f"{message} [{state}]"
        if by_function := _FATAL_BY_FUNCTION.get(error.diag.source_function or ""):
            return refusals.refused(self.server, message, _sentence(by_function))
        fatal, passing = _longest(_FATAL, state), _longest(_AGAIN, state)
        if passing is not None and len(passing) > len(fatal or ""):
            kind = LockHeld if state == "55P03" else StoreUnavailable
            return refusals.passing(self.server, _AGAIN[passing], message, kind)
        advice = _FATAL[fatal] if fatal is not None else "correct what it names, then run again; nothing is lost"
        return refusals.refused(self.server, message, _sentence(advice))


def is_misread(text: str, settings: Mapping[str, Any]) -> bool:
    """Whether libpq reads a part of the password as host, port or database: it has an @ or a / that is not escaped.

    >>> dsn = "postgresql://ann:pa@ss@db:5432/shop"
    >>> is_misread(dsn, psycopg.conninfo.conninfo_to_dict(dsn))
    True
    """
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme not in ("postgresql", "postgres"):
        return False
    authority, _, path = rest.partition("/")
    ports = str(settings.get("port", "")).replace(",", "")
    return authority.count("@") > 1 or "@" in path.partition("?")[0] or not (ports == "" or ports.isdecimal())


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _longest(table: Mapping[str, str], state: str) -> str | None:
    return max((known for known in table if state.startswith(known)), key=len, default=None)


def _message_of(error: psycopg.Error) -> str:
    """Message, detail, hint and context of an error, in one line."""
    diag = error.diag
    parts = (diag.message_primary or str(error), diag.message_detail, diag.message_hint, diag.context)
    return _one_line("; ".join(part.rstrip(".") for part in parts if part))


def _one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", "; ", text.strip()).rstrip(".?")
