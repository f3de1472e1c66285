"""JSON with a JSON Schema, by which other programs of a schema registry know the values; the type decodes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from exactlyonce.pipeline.codec import JsonCodec
from exactlyonce.pipeline.registry import Ids, PublishedSchema, SchemaCodec, Subjects, registry_of
from exactlyonce.pipeline.shape import UnsupportedType, type_name

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The newest dialect that the compatibility checks of all registries know."""


class JsonSchemaCodec(SchemaCodec[T]):
    """JSON, as `JsonCodec`, whose JSON Schema is derived from the type, unless *schema* gives one.

    *registry*, *subjects*, *register* and *ids* are as of `AvroCodec`. Without a registry values are plain JSON. The
    schema is for other programs: what a value may be here is said by the type.
    """

    kind: ClassVar[str] = "JSON"

    def __init__(
        self,
        type_: TypeForm[T],
        schema: dict[str, Any] | None = None,
        *,
        registry: str | Mapping[str, Any] | None = None,
        subjects: Subjects = "topic",
        register: bool = False,
        ids: Ids = "prefix",
    ) -> None:
        self.registry = registry_of(registry, subjects, register, ids)
        plain = JsonCodec(type_)
        self.schema = json_schema(type_) if schema is None else schema
        super().__init__("json-schema", type_, plain.encode, plain.decode)

    @property
    def published(self) -> PublishedSchema:
        return PublishedSchema(self.kind, json.dumps(self.schema))

    @property
    def record_name(self) -> str:
        return str(self.schema.get("title", type_name(self.type)))

    def decoder_of(self, writer: PublishedSchema) -> Callable[[bytes], T]:
        return self.decode

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "schema": self.schema}


def json_schema(type_: Any) -> dict[str, Any]:
    """The JSON Schema of a type, with a record's own properties at its top. Raises `UnsupportedType`.

    >>> json_schema(list[int])["items"]
    {'type': 'integer'}
    """
    try:
        schema = msgspec.json.schema(type_)
    except (TypeError, ValueError) as error:
        raise UnsupportedType(f"{type_name(type_)} has no JSON Schema of its own, give one: {error}") from None
    if (reference := schema.get("$ref")) is not None:
        definitions = schema["$defs"]
        root = definitions.pop(reference.rpartition("/")[2])
        if json.dumps(reference) in json.dumps([root, definitions]):  # it has others of its kind within
            definitions[reference.rpartition("/")[2]] = root
        schema = {**root, **({"$defs": definitions} if definitions else {})}
    return {"$schema": DIALECT, **schema}
