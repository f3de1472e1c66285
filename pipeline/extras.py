"""Extras: packages that only some pipelines need, and what is said where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from exactlyonce.pipeline.errors import ConfigError


def install(extra: str) -> str:
    """The command that installs an extra beside exactlyonce.

    >>> install("redis")
    "pip install 'exactlyonce[redis]'"
    """
    return f"pip install 'exactlyonce[{extra}]'"


@contextmanager
def needing(extra: str, package: str, user: str) -> Iterator[None]:
    """Within, *package* is imported, which *user* needs and the extra brings; `ConfigError` where that fails."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{user} needs {package}, which cannot be imported ({error}). Run: {install(extra)}"
        ) from None
