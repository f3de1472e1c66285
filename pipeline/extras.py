"""Packages beside this one: extras that only some pipelines need, and sources, sinks and engines that others have made.

A package of others names them by entry points, of the group `SOURCES`, `SINKS` or `ENGINES`. None is loaded before it
is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DISTRIBUTION = "exactlyonce-kafka"
"""The package's name in an index."""
SOURCES, SINKS, ENGINES = "exactlyonce.sources", "exactlyonce.sinks", "exactlyonce.engines"
"""The groups of entry points: a name, as "sqlite", and the class, as "their_package:SqliteSink"; of an engine, the
function that runs a pipeline."""


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


def announced(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of *group*, by name. Raises `ConfigError` where two packages have the same name."""
    from importlib.metadata import entry_points  # as above

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        if (other := found.setdefault(entry.name, entry)).value != entry.value:
            raise ConfigError(
                f"The packages {_package(other)} and {_package(entry)} both have an entry point {entry.name!r} of "
                f"{group}: uninstall one of them."
            )
    return found


def loaded(entry: EntryPoint) -> Any:
    """The object of an entry point. Raises `ConfigError` with the package if it cannot be imported."""
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f"The entry point {entry.name!r} of {entry.group}, {entry.value}, cannot be loaded: "
            f"{type(error).__name__}: {error}. Repair or uninstall the package {_package(entry)}."
        ) from error


def announcement(group: str, type_: type) -> str:
    """The name of *type_* as an entry point of *group*, with its package; empty if no package has announced it.

    >>> announcement(SINKS, ConfigError)
    ''
    """
    package = type_.__module__.partition(".")[0]
    if package == __name__.partition(".")[0]:
        return ""
    near = (entry for entry in announced(group).values() if entry.module.partition(".")[0] == package)
    return next((f"{entry.name} of {_package(entry)}" for entry in near if loaded(entry) is type_), "")


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.module
