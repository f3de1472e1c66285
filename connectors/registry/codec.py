"""A codec with a schema registry, opened. Confluent's wire formats: a zero byte and the id of the schema in four bytes
before the value; or a byte 1 and its GUID in a header, or, read only, before the value.

Invariants: the registry is asked once for an id, never for a record; nothing is asked before the first record. An id
that the registry does not know counts as an outage at first, since a follower may lag behind its leader. A value whose
id is in a header is never read as if it began with an id; so a record is never written with the header of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from exactlyonce.connectors.registry.client import RegistryClient, SchemaRefused, UnknownSchema
from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.errors import ConfigError, Unavailable
from exactlyonce.pipeline.registry import Part, PublishedSchema, Registry, SchemaCodec

if TYPE_CHECKING:
    from confluent_kafka import Message

T = TypeVar("T")

MAGIC = b"\0"
ID_BYTES = 5
"""The magic byte, and an id in big-endian."""
MAGIC_OF_GUID = b"\1"
GUID_BYTES = 17
ID_HEADERS = {"key": "__key_schema_id", "value": "__value_schema_id"}
"""By part: the header with the id of its schema."""
LOOKS = 3
"""The looks for an unknown id before its record is a bad one; between them the runtime pauses, as in an outage."""


Headers = Sequence[list[tuple[str, bytes | None]]]


@dataclass(frozen=True, eq=False)
class OpenedCodec(Codec[T]):
    """A codec with a registry, for the keys or values of a topic."""

    header_name: str
    header: Callable[[], bytes] | None
    """Gives the id for a header; None: encoded values begin with it."""

    def headers(self, headers: Headers | None, parts: Sequence[bytes | None]) -> Headers | None:
        """The *headers* of encoded *parts* with the id of their schema, and no other id; a null has none."""
        name = self.header_name
        if headers is not None:
            headers = [[pair for pair in pairs if pair[0] != name] for pairs in headers]
        if self.header is None or not any(part is not None for part in parts):
            return headers
        id = [(name, self.header())]
        return [
            list(pairs) if part is None else [*pairs, *id]
            for pairs, part in zip(headers or [[]] * len(parts), parts, strict=True)
        ]


def opened(codec: Codec[T], topic: str, part: Part) -> Codec[T]:
    """*codec* for the keys or values of *topic*: itself, unless it has a registry. To be made where it is used."""
    if not isinstance(codec, SchemaCodec) or codec.registry is None:
        return codec
    ids = _Ids(codec, codec.registry, topic, part)
    readers: dict[bytes, Callable[[bytes], T]] = {}
    encode_value = codec.encode
    id = b""

    def decode(data: bytes) -> T:
        length = GUID_BYTES if data[:1] == MAGIC_OF_GUID else ID_BYTES
        prefix = data[:length]
        read = readers.get(prefix)
        if read is None:
            read = readers[prefix] = ids.reader(prefix)
        return read(data[length:])

    def written() -> bytes:
        nonlocal id
        if not id:
            id = ids.written()
        return id

    if codec.registry.ids == "header":
        return OpenedCodec(codec.name, codec.type, encode_value, decode, ID_HEADERS[part], written)
    return OpenedCodec(
        codec.name, codec.type, lambda value: written() + encode_value(value), decode, ID_HEADERS[part], None
    )


def bytes_of(codec: Codec[Any], part: Part) -> Callable[[Message], bytes | None]:
    """What `decode` of *codec*, opened, is given of a message: its bytes, after the id in a header if it has one."""
    from confluent_kafka import Message

    plain: Callable[[Message], Any] = Message.value if part == "value" else Message.key
    if not isinstance(codec, SchemaCodec) or codec.registry is None:
        return plain
    header = ID_HEADERS[part]

    def with_id(message: Message) -> bytes | None:
        data: bytes | None = plain(message)
        headers: Any = message.headers()
        if headers is None or data is None:
            return data
        return next((id for name, id in headers if name == header and id), b"") + data

    return with_id


def all_bytes_of(codec: Codec[Any], part: Part) -> Callable[[Sequence[Message]], list[bytes | None]]:
    """`bytes_of` of each message of a batch: without a call of ours for each, unless one of them has headers."""
    from confluent_kafka import Message

    one, plain = bytes_of(codec, part), Message.value if part == "value" else Message.key
    return lambda messages: list(map(one if any(map(Message.headers, messages)) else plain, messages))


def check_reading(codec: Codec[Any]) -> None:
    """Raise `Unavailable` if the registry of *codec* does not answer."""
    if isinstance(codec, SchemaCodec) and codec.registry is not None:
        client = RegistryClient(codec.registry)
        try:
            client.ping()
        finally:
            client.close()


def check_writing(codec: Codec[Any], topic: str, part: Part) -> None:
    """Look up, or register, the schema of keys or values of *topic*.

    Raises `ConfigError` with the registry's reason, and `Unavailable`.
    """
    if isinstance(codec, SchemaCodec) and codec.registry is not None:
        client = RegistryClient(codec.registry)
        try:
            _written_id(codec, codec.registry, client, topic, part)
        finally:
            client.close()


class _Ids:
    """The ids of a codec's schemas, looked up when a value first has them."""

    def __init__(self, codec: SchemaCodec[Any], registry: Registry, topic: str, part: Part) -> None:
        self._codec, self._registry, self._topic, self._part = codec, registry, topic, part
        self._client = RegistryClient(registry)
        self._unknown: Counter[bytes] = Counter()

    def written(self) -> bytes:
        """The bytes before an encoded value, or in its header. Raises `ConfigError`, `Unavailable`."""
        return _written_id(self._codec, self._registry, self._client, self._topic, self._part)

    def reader(self, prefix: bytes) -> Callable[[bytes], Any]:
        """The decoder of the bytes after *prefix*. Raises ValueError, `Unavailable`."""
        if len(prefix) == GUID_BYTES:
            id: int | UUID = UUID(bytes=prefix[1:])
        elif len(prefix) == ID_BYTES and prefix[:1] == MAGIC:
            id = int.from_bytes(prefix[1:], "big")
        else:
            raise ValueError(
                f"it begins with {prefix!r}, and not with a zero byte and the id of a schema in four bytes, and has no "
                f"id in a header: it was written without a registry"
            )
        try:
            writer = self._client.schema(id)
        except UnknownSchema as error:
            self._unknown[prefix] += 1
            why = f"the registry at {self._client.url} has no schema of its id {id}: {error}"
            if self._unknown[prefix] < LOOKS:
                raise Unavailable(why) from None
            raise ValueError(f"{why}. Was it written with another registry?") from None
        if writer.kind != self._codec.kind:
            raise ValueError(f"its schema {id} is one of {writer.kind}, and the codec one of {self._codec.kind}")
        return self._codec.decoder_of(writer)


def _written_id(codec: SchemaCodec[Any], registry: Registry, client: RegistryClient, topic: str, part: Part) -> bytes:
    """The id of the schema that *codec* writes, as bytes. Raises `ConfigError`, which has the remedy, and
    `Unavailable`."""
    subject, schema = registry.subject(topic, part, codec.record_name), codec.published
    at = f"subject {subject!r} of the registry at {client.url}"
    try:
        number, guid = client.id_of(subject, schema)
    except SchemaRefused as error:
        raise ConfigError(
            f"{at} does not take the schema of the {part}s of topic {topic!r}: {error}. Change the type so that it is "
            f"compatible, or the compatibility of the subject. Nothing has been written."
        ) from None
    except UnknownSchema as error:
        why = f"{error}{_compatibility(client, subject, schema)}"
        raise ConfigError(
            f"{at} lacks the schema of the {part}s of topic {topic!r}: {why}. Register it, or let the sink do so: "
            f"register=True. Nothing has been written. It is: {schema.text:.1000}"
        ) from None
    if registry.ids == "prefix":
        return MAGIC + number.to_bytes(4, "big") + codec.message_indexes
    if guid is None:
        raise ConfigError(
            f"ids='header' writes the GUID of a schema, and the registry at {client.url} gives its schemas none: "
            f"Confluent's does, since 8.0. Leave out ids=: the id then comes before the {part}s of topic {topic!r}. "
            f"Nothing has been written."
        )
    return MAGIC_OF_GUID + guid.bytes + codec.message_indexes


def _compatibility(client: RegistryClient, subject: str, schema: PublishedSchema) -> str:
    """Whether *subject* would take *schema*; empty: it has no version, or lacks what the schema refers to."""
    try:
        is_compatible = client.is_compatible(subject, schema)
    except UnknownSchema:
        return ""
    return f"; it would {'' if is_compatible else 'not '}be compatible with the newest version"
