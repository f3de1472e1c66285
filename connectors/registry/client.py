"""A schema registry, asked by Confluent's client.

Invariants: an id is looked up once in a process, for an id names the same schema permanently. An error is `Unavailable`
unless the registry has answered about the schema itself. A secret is looked up for each client, and is in no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from exactlyonce.connectors.registry.settings import looked_up
from exactlyonce.pipeline.errors import ConfigError, Unavailable
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.registry import PublishedSchema, Registry, SchemaReference
from exactlyonce.pipeline.secrets import masked

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaRegistryClient
    from confluent_kafka.schema_registry import SchemaReference as Reference

_NO_SCHEMA, _NO_SUBJECT, _NO_VERSION = 40403, 40401, 40402
_INCOMPATIBLE = (409, 422)
_REMEDIES = {
    None: " Start it, or correct registry=.",
    404: " Correct registry=: it takes the URL of the registry's API. Apicurio's ends with /apis/ccompat/v7.",
}
"""By HTTP status; None: there was no answer."""

_schemas: dict[tuple[Registry, int], PublishedSchema] = {}
_ids: dict[tuple[Registry, str, PublishedSchema], int] = {}
"""What this process knows; ids are never taken back."""


class UnknownSchema(Exception):
    """The registry has no such id or schema."""


class SchemaRefused(Exception):
    """The registry does not take a schema. The message has its reason."""


class RegistryClient:
    """One registry. It connects when it is first asked; for one thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._secrets: list[str] = []
        self._made: SchemaRegistryClient | None = None
        self.url = dict(registry.settings)["url"]
        """For people: it has no login in it."""

    def schema(self, id: int) -> PublishedSchema:
        """The schema of *id*, with those that it refers to. Raises `UnknownSchema`, `Unavailable`."""
        known = _schemas.get((self._registry, id))
        if known is None:
            with self._asking():
                known = self._published(self._client.get_schema(id))
            _schemas[self._registry, id] = known
        return known

    def id_of(self, subject: str, schema: PublishedSchema) -> int:
        """The id of *schema* under *subject*; where the codec says so, it is registered first.

        Raises `UnknownSchema`, `SchemaRefused`, `Unavailable`.
        """
        known = _ids.get((self._registry, subject, schema))
        if known is None:
            with self._asking():
                sent = self._sent(schema)
                if self._registry.register:
                    id = self._client.register_schema(subject, sent, normalize_schemas=True)
                else:
                    id = self._looked_up(subject, sent).schema_id or 0
            known = _ids[self._registry, subject, schema] = id
        return known

    def is_compatible(self, subject: str, schema: PublishedSchema) -> bool:
        """Whether *schema* is compatible with the newest version of *subject*. Raises as `id_of`."""
        with self._asking():
            return bool(self._client.test_compatibility(subject, self._sent(schema)))

    def ping(self) -> None:
        """Raises `Unavailable` if the registry does not answer."""
        with self._asking():
            self._client.get_schema_types()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    @property
    def _client(self) -> SchemaRegistryClient:
        if self._made is None:
            with needing("registry", "the client of schema registries", "registry= of a codec"):
                from confluent_kafka.schema_registry import SchemaRegistryClient
            settings, self._secrets = looked_up(self._registry)
            try:
                self._made = SchemaRegistryClient(settings)
            except (ValueError, TypeError, OSError) as error:  # OSError: of a file with a certificate
                why = masked(f"{error}", self._secrets).removesuffix(".")
                raise ConfigError(f"registry= has settings that Confluent's client refuses: {why}.") from None
        return self._made

    def _published(self, schema: Schema) -> PublishedSchema:
        references = tuple(
            SchemaReference(part.name or "", self._published(self._version(part))) for part in schema.references or ()
        )
        return PublishedSchema(schema.schema_type or "AVRO", schema.schema_str or "", references)

    def _version(self, reference: Reference) -> Schema:
        return self._client.get_version(reference.subject or "", reference.version or "latest").schema

    def _sent(self, schema: PublishedSchema) -> Schema:
        """*schema* with the versions of its references, each of which has its name as its subject."""
        from confluent_kafka.schema_registry import Schema, SchemaReference

        references = []
        for part in schema.references:
            sent = self._sent(part.schema)
            if self._registry.register:
                self._client.register_schema(part.name, sent, normalize_schemas=True)
            version = self._looked_up(part.name, sent).version
            references.append(SchemaReference(part.name, part.name, version))
        return Schema(schema.text, schema.kind, references)

    def _looked_up(self, subject: str, sent: Schema) -> RegisteredSchema:
        return self._client.lookup_schema(subject, sent, normalize_schemas=True)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn the errors of the client into those of this module."""
        try:
            yield
        except (ConfigError, Unavailable, UnknownSchema, SchemaRefused):
            raise
        except Exception as error:  # an error of its HTTP library, or of an answer that is no registry's
            code, status = getattr(error, "error_code", None), getattr(error, "http_status_code", None)
            text = masked(f"{error}" or type(error).__name__, self._secrets).removesuffix(".")
            if code in (_NO_SCHEMA, _NO_SUBJECT, _NO_VERSION):
                raise UnknownSchema(text) from None
            if status in _INCOMPATIBLE:
                raise SchemaRefused(text) from None
            advice = _REMEDIES.get(status, "")
            raise Unavailable(f"The schema registry at {self.url} {_how(status)}: {text}.{advice}") from None


def _how(status: int | None) -> str:
    if status in (401, 403):
        return "refuses the login; correct basic.auth.user.info, or the right of the user"
    if status == 404:
        return "has no such page"
    return "does not answer" if status is None else "answers with an error"
