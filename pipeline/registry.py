"""A schema registry as codecs name it: its settings, its subjects, and schemas in its terms. Nothing here connects.

Invariant: the description of a codec has neither the settings of its registry nor ids of schemas, so that manifests and
fingerprints are the same with another registry.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, get_args

import msgspec

from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.errors import ConfigError

T = TypeVar("T")

Subjects = Literal["topic", "record", "topic-record"]
"""The subject of a sink's schema: `<topic>-value` or `<topic>-key`, the record's full name, or `<topic>-<name>`."""
Ids = Literal["prefix", "header"]
"""The place of a schema's id in a record that is written: before the key or value, or, as a GUID, in a header."""
Part = Literal["key", "value"]


@dataclass(frozen=True)
class Registry:
    """A registry, and the use that a codec makes of it."""

    settings: tuple[tuple[str, Any], ...] = field(repr=False)
    """The settings of Confluent's client, sorted; secrets are references."""
    subjects: Subjects
    register: bool
    """Whether a sink registers its schema."""
    ids: Ids = "prefix"
    """Where a sink writes the id of its schema."""

    def subject(self, topic: str, part: Part, record_name: str) -> str:
        """The subject of keys or values of *topic*.

        >>> Registry((), "topic", False).subject("orders", "value", "shop.Order")
        'orders-value'
        """
        named = {"topic": f"{topic}-{part}", "record": record_name, "topic-record": f"{topic}-{record_name}"}
        return named[self.subjects]


def registry_of(
    given: str | Mapping[str, Any] | None,
    subjects: Subjects,
    register: bool,
    ids: Ids,
    schema_id: int | None = None,
) -> Registry | None:
    """The registry that a codec was *given*: a URL, or the settings of Confluent's client. None: none.

    The settings are not looked at. Raises `ConfigError` for arguments of the codec that contradict each other.
    """
    if given is None:
        if subjects != "topic" or register or ids != "prefix":
            raise ConfigError(
                "subjects=, register= and ids= are about a schema registry: give registry=, or leave them out."
            )
        return None
    if schema_id is not None:
        raise ConfigError("schema_id= is for topics without a registry at hand: leave it out, or leave out registry=.")
    if subjects not in get_args(Subjects):
        raise ConfigError(f"subjects={subjects!r} must be one of {', '.join(map(repr, get_args(Subjects)))}.")
    if ids not in get_args(Ids):
        raise ConfigError(f"ids={ids!r} must be one of {', '.join(map(repr, get_args(Ids)))}.")
    if not isinstance(given, str | Mapping):
        raise ConfigError('registry= must be a URL, or a dict of settings with "url" among them.')
    settings = {"url": given} if isinstance(given, str) else dict(given)
    return Registry(tuple(sorted(settings.items())), subjects, register, ids)


class PublishedSchema(msgspec.Struct, frozen=True):
    """A schema as a registry keeps it."""

    kind: str
    """AVRO, JSON or PROTOBUF."""
    text: str
    references: tuple[SchemaReference, ...] = ()
    """The schemas that it names, in their order."""


class SchemaReference(msgspec.Struct, frozen=True):
    """A schema, by the name under which another one uses it."""

    name: str
    schema: PublishedSchema


class SchemaCodec(Codec[T]):
    """A codec whose schemas a registry may keep. Its `encode` and `decode` are of the bytes without an id."""

    kind: ClassVar[str]
    registry: Registry | None

    @property
    @abstractmethod
    def published(self) -> PublishedSchema:
        """The schema of encoded values."""

    @property
    @abstractmethod
    def record_name(self) -> str:
        """The full name of the record, for subjects."""

    @property
    def message_indexes(self) -> bytes:
        """The bytes between the id and the value: only Protobuf has any."""
        return b""

    @abstractmethod
    def decoder_of(self, writer: PublishedSchema) -> Callable[[bytes], T]:
        """The decoder of bytes after an id of *writer*. Raises ValueError if this codec cannot read them."""

    def describe(self) -> dict[str, Any]:
        described = super().describe()
        return described if self.registry is None else {**described, "subjects": self.registry.subjects}
