"""Versions of the state that an operator keeps: which one the code has, and how older ones become it.

Invariant: a migration is a function of a state alone; states that lie in older blocks go through it each time that they
are read, until they are written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from exactlyonce.pipeline import functions, key_types, schema
from exactlyonce.pipeline.avro import AvroCodec
from exactlyonce.pipeline.hints import UNKNOWN


class MigrationStep(NamedTuple):
    """From one version of a state to the next."""

    version: int
    takes: Any
    """The type of what *migrate* takes."""
    migrate: Callable[[Any], Any]


@dataclass(frozen=True)
class VersionedState:
    """The type of a state in its present version."""

    type: Any
    """Also an `AvroCodec`: states are kept, and evolve, by its schema."""
    version: int = 1
    migrations: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    """By version, the function that makes a state of the next one. Without one, a state is taken over by the names and
    defaults of its fields, or by Avro's rules."""
    key_type: Any = UNKNOWN
    """Of the keys, as far as the function of `key_by` says it."""
    drops_fields: bool = False
    """Whether fields of kept states that the type does not have are given up, whatever they hold."""

    @property
    def keys(self) -> Any:
        """What checkpoints note of the keys; None: nothing is known."""
        return key_types.described(self.key_type)

    @property
    def codec(self) -> AvroCodec[Any] | None:
        """What states are kept by, if not by their type alone."""
        return self.type if isinstance(self.type, AvroCodec) else None

    @property
    def schema(self) -> Any:
        """What checkpoints note of the states: with defaults, for code that has some of the fields no more. Raises
        `UnsupportedType`."""
        return {"avro": self.codec.schema} if self.codec is not None else schema.describe(self.type, defaults=True)

    @property
    def layout(self) -> Any:
        """The schema without what no byte depends on: a part of the graph's fingerprint."""
        return self.schema if self.codec is not None else schema.describe(self.type)

    @property
    def name(self) -> str:
        """The type of a state, for people."""
        return schema.type_name(self.type if self.codec is None else self.codec.type)

    def steps(self, written: int) -> list[MigrationStep]:
        """The migrations from version *written* on."""
        return [
            MigrationStep(version, _taken(self.migrations[version]), self.migrations[version])
            for version in range(written, self.version)
            if version in self.migrations
        ]

    @property
    def problems(self) -> list[str]:
        """The mistakes in it, for people."""
        found = []
        if self.codec is not None and self.codec.schema_id is not None:
            found.append("state= is an AvroCodec with a schema_id, which is for topics: leave it out")
        if self.codec is not None and (lost := self.codec.dropped):
            found.append(
                f"the schema of state= has fields that {self.name} has not, {', '.join(lost)}, which would be lost "
                "with the next write: give the type these fields, or take them out of the schema"
            )
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
