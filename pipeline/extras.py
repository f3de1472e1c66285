"""Extras: packages that only some pipelines need, and what is said where one is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from exactlyonce.pipeline.errors import ConfigError


def install(extra: str) -> str:
    """The command that installs what an extra brings. It works for a clone as for a wheel of exactlyonce.

    >>> install("redis")
    "pip install 'redis>=5.1'"
    """
    from importlib import metadata  # workers, which lack nothing, start without it

    listed = re.compile(rf"([^;]+); extra == ['\"]{extra}['\"]")
    found = [match[1].strip() for line in metadata.requires("exactlyonce") or () if (match := listed.fullmatch(line))]
    return " ".join(["pip install", *(f"'{requirement}'" for requirement in found)])


@contextmanager
def needing(extra: str, package: str, user: str) -> Iterator[None]:
    """Within, *package* is imported, which *user* needs and the extra brings; `ConfigError` where that fails."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{user} needs {package}, which cannot be imported ({error}). Run: {install(extra)}"
        ) from None
