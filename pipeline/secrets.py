"""Secrets by reference: `env:NAME` and `file:/path` stand for the content of a variable or a file.

A reference is looked up for each new client, so the next one takes a changed secret. Other processes get the reference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from exactlyonce.pipeline.errors import ConfigError

SECRET_CHARACTERS = 8
"""A shorter secret is masked only as a whole word: the rest of longer words would reveal it."""
PASSWORD_WRITTEN = "dsn= has a password written out: put all of it into a variable, dsn='env:NAME', or into a file"


class Secret(str):
    """A secret for a client library. Its repr hides it: libraries log their arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def masked(text: str, secrets: Iterable[str]) -> str:
    """*text* without any of *secrets*.

    >>> masked("the pipeline has password=p, and user:secret-of-bob@host", ["p", "secret-of-bob"])
    'the pipeline has password=***, and user:***@host'
    """
    for secret in sorted(filter(None, set(secrets)), key=len, reverse=True):
        text = re.sub(_pattern(secret), "***", text)
    return text


def _pattern(secret: str) -> str:
    literal = re.escape(secret)
    if len(secret) >= SECRET_CHARACTERS:
        return literal
    before, after = r"(?<!\w)" if re.match(r"\w", secret) else "", r"(?!\w)" if re.search(r"\w\Z", secret) else ""
    return f"{before}{literal}{after}"


def is_reference(value: str) -> bool:
    """Whether *value* is a reference to a secret.

    >>> is_reference("env:PASSWORD"), is_reference("hunter2")
    (True, False)
    """
    return value.startswith(("env:", "file:"))


def shown_reference(value: str) -> str:
    """*value* for people, unless it may be a secret itself.

    >>> shown_reference("env:ORDERS_DSN"), shown_reference("postgresql://ann@db/shop")
    ('env:ORDERS_DSN', 'the pipeline')
    """
    return value if is_reference(value) else "the pipeline"


def reference_problem(value: str) -> str | None:
    """The mistake in a reference; None: there is none, or it is no reference.

    >>> reference_problem("env:"), reference_problem("env:PASSWORD")
    ('it names no variable: write env:NAME', None)
    """
    missing = {"env:": "it names no variable: write env:NAME", "file:": "it names no file: write file:/path"}
    return missing.get(value.strip())


def look_up(name: str, value: str) -> str:
    """The secret that *value*, of the setting *name*, refers to, or *value* itself. An empty secret is an error."""
    if problem := reference_problem(value):
        raise ConfigError(f"{name} is {value}, but {problem}.")
    kind, _, target = value.partition(":")
    if kind == "env":
        if target not in os.environ:
            raise ConfigError(f"{name} is {value}, but the environment has no variable {target}. Export it.")
        secret, place = os.environ[target], f"the variable {target}"
    elif kind == "file":
        try:
            text = Path(target).read_text(encoding="utf-8", errors="surrogateescape")  # as the environment is read
        except OSError as error:
            raise ConfigError(f"{name} is {value}, which cannot be read: {error.strerror}.") from None
        secret, place = text.rstrip("\r\n"), f"the file {target}"
    else:
        return value
    if any("\udc80" <= character <= "\udcff" for character in secret):
        raise ConfigError(f"{name} is {value}, but {place} is not UTF-8. Encode it so.")
    if not secret.strip():
        raise ConfigError(f"{name} is {value}, but {place} is empty. Put the secret there.")
    return secret
