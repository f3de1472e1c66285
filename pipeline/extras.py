"""Extras: packages that only some pipelines need, and the error for a missing one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from exactlyonce.pipeline.errors import ConfigError

DISTRIBUTION = "exactlyonce-kafka"
"""The package's name in an index."""


def install(extra: str) -> str:
    """The command that installs the packages of an extra, for a clone and for a wheel of exactlyonce.

    >>> install("redis")
    "pip install 'redis>=5.1'"
    >>> install("a newer one")  # than the installed version says that it has
    "pip install 'exactlyonce-kafka[a newer one]'"
    """
    from importlib import metadata  # workers start without it

    listed = re.compile(rf"([^;]+); extra == ['\"]{extra}['\"]")
    requirements = [
        match[1].strip() for line in metadata.requires(DISTRIBUTION) or () if (match := listed.fullmatch(line))
    ]
    return " ".join(["pip install", *(f"'{each}'" for each in requirements or [f"{DISTRIBUTION}[{extra}]"])])


@contextmanager
def needing(extra: str, package: str, user: str) -> Iterator[None]:
    """Raise `ConfigError` if the import of *package* fails, which *user* needs and the extra has."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{user} needs {package}, which cannot be imported ({error}). Run: {install(extra)}"
        ) from None
