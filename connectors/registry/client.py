"""A schema registry, asked by Confluent's client, and that client's settings, with secrets as references.

Invariants: an id is looked up once in a process, for an id names the same schema permanently. An error is `Unavailable`
unless the registry has answered about the schema itself. A secret is looked up for each client, and is in no error, nor
in the problem of a setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.errors import ConfigError, Unavailable
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.registry import PublishedSchema, Registry, SchemaCodec, SchemaReference
from exactlyonce.pipeline.secrets import is_reference, look_up, masked, reference_problem

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaRegistryClient
    from confluent_kafka.schema_registry import SchemaReference as Reference

TIMEOUT_S = 10
_DEFAULTS = {"timeout": TIMEOUT_S, "max.retries": 0}  # the runtime waits and repeats, as for any outage
_SECRET = re.compile(r"password|secret|token$|user\.info")
_URL = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[^\s?#]*)?")


def problems(codec: Codec[Any]) -> Iterator[str]:
    """The mistakes in the settings of the registry of *codec*, if it has one, each with its remedy."""
    registry = codec.registry if isinstance(codec, SchemaCodec) else None
    for name, value in () if registry is None else registry.settings:
        if isinstance(value, str) and (problem := reference_problem(value)):
            yield f"registry= has {name}={value}: {problem}"
        elif _SECRET.search(name) and not (isinstance(value, str) and is_reference(value)):
            yield (
                f"registry= has {name} written out, which is a secret: put it into a variable, 'env:NAME', or into a "
                f"file, 'file:/path'"
            )
        elif not isinstance(value, str | int | float):
            yield f"registry= has a {name} that is neither text nor a number"
        elif name == "url" and not is_reference(str(value)) and (problem := url_problem(str(value))):
            yield f"registry= has a URL that is wrong: {problem}"
    if registry is not None and "url" not in dict(registry.settings):
        yield 'registry= names no URL: write registry="http://host:8081", or a dict with "url"'


def url_problem(urls: str) -> str | None:
    """The problem of one or more URLs, separated by commas, without the URLs, which may hold a password.

    >>> url_problem("http://a:8081,https://b/apis/ccompat/v7"), url_problem("a:8081")
    (None, 'it begins with neither http:// nor https://')
    """
    for url in map(str.strip, urls.split(",")):
        if not re.match("https?://", url):
            return "it begins with neither http:// nor https://"
        if "@" in url:
            return 'it has a login in it: give {"url": ..., "basic.auth.user.info": "env:NAME"} instead'
        if not _URL.fullmatch(url):
            return "it has a host or a port that is none"
    return None


def looked_up(registry: Registry) -> tuple[dict[str, Any], list[str]]:
    """The settings for a client, and the secrets among them. Raises `ConfigError`."""
    settings: dict[str, Any] = dict(_DEFAULTS)
    secrets = []
    for name, value in registry.settings:
        settings[name] = look_up(f"{name} of registry=", value) if isinstance(value, str) else value
        if settings[name] != value:
            secrets.append(settings[name])
    if problem := url_problem(settings["url"]):
        raise ConfigError(f"The url of registry= is wrong: {problem}.")
    return settings, secrets


_NO_SCHEMA, _NO_SUBJECT, _NO_VERSION = 40403, 40401, 40402
_INCOMPATIBLE = (409, 422)
_REMEDIES = {
    None: " Start it, or correct registry=.",
    404: " Correct registry=: it takes the URL of the registry's API. Apicurio's ends with /apis/ccompat/v7.",
}
"""By HTTP status; None: there was no answer."""


class SchemaId(NamedTuple):
    """The ids of one schema in a registry."""

    number: int
    guid: UUID | None
    """None: the registry gives its schemas none."""


_schemas: dict[tuple[Registry, int | UUID], PublishedSchema] = {}
_ids: dict[tuple[Registry, str, PublishedSchema], SchemaId] = {}
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

    def schema(self, id: int | UUID) -> PublishedSchema:
        """The schema of *id*, a number or a GUID, with those that it refers to.

        Raises `UnknownSchema`, also if the registry knows no GUIDs, and `Unavailable`.
        """
        known = _schemas.get((self._registry, id))
        if known is None:
            if isinstance(id, UUID):
                with self._asking(unknown=(404,)):
                    known = self._published(self._client.get_schema_by_guid(f"{id}"))
            else:
                with self._asking():
                    known = self._published(self._client.get_schema(id))
            _schemas[self._registry, id] = known
        return known

    def id_of(self, subject: str, schema: PublishedSchema) -> SchemaId:
        """The ids of *schema* under *subject*; where the codec says so, it is registered first.

        Raises `UnknownSchema`, `SchemaRefused`, `Unavailable`.
        """
        known = _ids.get((self._registry, subject, schema))
        if known is None:
            with self._asking():
                sent = self._sent(schema)
                ids = self._registered(subject, sent) if self._registry.register else self._looked_up(subject, sent)
            guid = UUID(ids.guid) if ids.guid else None
            known = _ids[self._registry, subject, schema] = SchemaId(ids.schema_id or 0, guid)
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
                self._registered(part.name, sent)
            version = self._looked_up(part.name, sent).version
            references.append(SchemaReference(part.name, part.name, version))
        return Schema(schema.text, schema.kind, references)

    def _registered(self, subject: str, sent: Schema) -> RegisteredSchema:
        return self._client.register_schema_full_response(subject, sent, normalize_schemas=True)

    def _looked_up(self, subject: str, sent: Schema) -> RegisteredSchema:
        return self._client.lookup_schema(subject, sent, normalize_schemas=True)

    @contextmanager
    def _asking(self, unknown: tuple[int, ...] = ()) -> Iterator[None]:
        """Turn the errors of the client into errors of this module; an HTTP status in *unknown* is `UnknownSchema`."""
        try:
            yield
        except (ConfigError, Unavailable, UnknownSchema, SchemaRefused):
            raise
        except Exception as error:  # an error of its HTTP library, or of an answer that is no registry's
            code, status = getattr(error, "error_code", None), getattr(error, "http_status_code", None)
            text = masked(f"{error}" or type(error).__name__, self._secrets).removesuffix(".")
            if code in (_NO_SCHEMA, _NO_SUBJECT, _NO_VERSION) or status in unknown:
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
