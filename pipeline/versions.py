"""Versions of the state that an operator keeps: which one the code has, and how older ones become it.

Invariant: a migration is a function of a state alone; states that lie in older blocks go through it each time that they
are read, until they are written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exactlyonce.pipeline import functions
from exactlyonce.pipeline.hints import UNKNOWN


@dataclass(frozen=True)
class VersionedState:
    """The type of a state in its present version."""

    type: Any
    version: int = 1
    migrations: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    """By version, the function that makes a state of the next one. Without one, a state is taken over by the names and
    defaults of its fields."""

    def steps(self, written: int) -> list[tuple[int, Any, Callable[[Any], Any]]]:
        """(version, type of what it takes, function) of each migration from version *written* on."""
        return [
            (version, _taken(self.migrations[version]), self.migrations[version])
            for version in range(written, self.version)
            if version in self.migrations
        ]

    @property
    def problems(self) -> list[str]:
        """The mistakes in it, for people."""
        found = []
        if self.version < 1:
            found.append(f"state_version is {self.version}: versions begin at 1")
        for version in sorted(self.migrations):
            if not 1 <= version < self.version:
                found.append(
                    f"there is a migration of version {version}, and state_version is {self.version}: migrations are "
                    f"keyed by the version that they take, which lies below state_version: raise it, or correct the key"
                )
        return found


def _taken(migration: Callable[[Any], Any]) -> Any:
    """The type that *migration* says it takes; what it says nothing of comes as msgpack has it, a record as a dict."""
    read = functions.read(migration, ("state",), {})
    taken = read.parameters[0] if read.parameters else UNKNOWN
    return Any if taken is UNKNOWN else taken
