"""Versions of an operator's state: the present one, and the migrations of older ones.

Invariant: a migration is a function of a state alone. It runs whenever a state in an older block is read, until the
state is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from exactlyonce.pipeline import functions, shape
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.keys import key_schema

KEPT_BY_AVRO = (
    "is kept by an Avro schema, which this exactlyonce does not read any more. Run the pipeline once more by the "
    "exactlyonce that wrote it, with the type of the state as state=, and with state_version raised and a migration: "
    "what it writes then can be read."
)
"""The rest of a sentence about states of older versions."""


def is_by_avro(written: Any) -> bool:
    """Whether states of schema *written* are kept by an Avro schema, as older versions did."""
    return isinstance(written, dict) and "avro" in written


class MigrationStep(NamedTuple):
    """A migration from one version of a state to the next."""

    version: int
    takes: Any
    """The parameter type of *migrate*."""
    migrate: Callable[[Any], Any]


@dataclass(frozen=True)
class VersionedState:
    """The type of a state in its present version."""

    type: Any
    version: int = 1
    migrations: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    """The function by version that converts a state to the next one. Without one, the names and defaults of fields
    convert it."""
    key_type: Any = UNKNOWN
    """The annotated type of the keys."""
    drops_fields: bool = False
    """Whether stored fields that the type lacks are dropped, whatever they hold."""

    declared: Callable[[Any], Any] = field(default=lambda kept: kept)
    """Gives the type of the user's state, where more is kept as `type`."""

    @property
    def keys(self) -> Any:
        """The schema of the keys for checkpoints; None: unknown."""
        return key_schema(self.key_type)

    @property
    def schema(self) -> Any:
        """The schema of states for checkpoints, with defaults, for code that lacks some of the fields. Raises
        `UnsupportedType`."""
        return shape.describe(self.type, defaults=True)

    @property
    def layout(self) -> Any:
        """The schema of the bytes alone: part of the graph's fingerprint."""
        return shape.describe(self.type)

    @property
    def name(self) -> str:
        """The type of a state, for people."""
        return shape.type_name(self.type)

    @property
    def declared_name(self) -> str:
        """The type of the user's state, for people."""
        return shape.type_name(self.declared(self.type))

    def steps(self, written: int) -> list[MigrationStep]:
        return [
            MigrationStep(version, parameter_type(self.migrations[version]), self.migrations[version])
            for version in range(written, self.version)
            if version in self.migrations
        ]

    @property
    def problems(self) -> list[str]:
        problems = []
        if self.version < 1:
            problems.append(f"state_version is {self.version}: versions begin at 1")
        for version in sorted(self.migrations):
            if not 1 <= version < self.version:
                problems.append(
                    f"there is a migration of version {version}, but state_version is {self.version}: the key of a "
                    f"migration is its old version, below state_version: raise that, or correct the key"
                )
        return problems


def parameter_type(migration: Callable[[Any], Any]) -> Any:
    """The annotated parameter type of *migration*; without one it gets msgpack's plain values, such as dicts."""
    read = functions.read(migration, ("state",), {})
    taken = read.parameters[0] if read.parameters else UNKNOWN
    return Any if taken is UNKNOWN else taken
