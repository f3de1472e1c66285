"""Protobuf: messages of a generated class, which are the records of the stream."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.registry import Ids, PublishedSchema, SchemaCodec, SchemaReference, Subjects, registry_of
from exactlyonce.pipeline.shape import UnsupportedType, type_name

T = TypeVar("T")

_BUILT_IN = ("google/protobuf/", "google/type/", "confluent/")
"""The files that every registry has."""
_ONLY_MESSAGE = (0,)
"""The message indexes of a file's first message, which are written as one zero byte."""
_TOKEN = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[\w.]+|[{};]""", re.DOTALL)


class ProtobufCodec(SchemaCodec[T]):
    """Protobuf, as ``ProtobufCodec(Order)``, where *Order* is a class that protoc has generated.

    *registry*, *subjects*, *register* and *ids* are as of `AvroCodec`; the schema is the file of the class, with its
    imports. Messages cannot be sent to another process: map them to a type of your own before `key_by`.
    """

    kind: ClassVar[str] = "PROTOBUF"

    def __init__(
        self,
        type_: type[T],
        *,
        registry: str | Mapping[str, Any] | None = None,
        subjects: Subjects = "topic",
        register: bool = False,
        ids: Ids = "prefix",
    ) -> None:
        with needing("protobuf", "protobuf", "ProtobufCodec"):
            from google.protobuf.message import DecodeError, EncodeError, Message
        if not (isinstance(type_, type) and issubclass(type_, Message)):
            raise UnsupportedType(f"ProtobufCodec takes a class that protoc has generated, not {type_name(type_)}")
        self.registry = registry_of(registry, subjects, register, ids)
        message: Any = type_
        self._descriptor = message.DESCRIPTOR
        serialize, parse = message.SerializeToString, message.FromString

        def encode(value: Any) -> bytes:
            if type(value) is not type_:  # any message would be written
                raise TypeError(f"it is a {type(value).__name__}, and {self.record_name} is written")
            try:
                return bytes(serialize(value, deterministic=True))
            except EncodeError as error:
                raise ValueError(f"it lacks a required field: {error}") from None

        def decode(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError as error:
                raise ValueError(f"the bytes are no {self.record_name}: {error}") from None

        super().__init__("protobuf", type_, encode, decode)

    @property
    def published(self) -> PublishedSchema:
        return _published(self._descriptor.file)

    @property
    def record_name(self) -> str:
        return str(self._descriptor.full_name)

    @property
    def message_indexes(self) -> bytes:
        indexes = _indexes_of(self._descriptor)
        return b"\0" if indexes == _ONLY_MESSAGE else b"".join(map(_zigzag, (len(indexes), *indexes)))

    def decoder_of(self, writer: PublishedSchema) -> Callable[[bytes], T]:
        names = list(_outer_messages(writer.text))
        outer, depth, decode = _outermost(self._descriptor).full_name, len(_indexes_of(self._descriptor)), self.decode
        known: set[tuple[int, ...]] = set()

        def read(data: bytes) -> T:
            indexes, start = (_ONLY_MESSAGE, 1) if data[:1] == b"\0" else _message_indexes(data)
            if indexes not in known:
                name = names[indexes[0]] if indexes[0] < len(names) else "a message that its schema lacks"
                if name != outer or len(indexes) != depth:
                    raise ValueError(f"it is {name}{' with nested ones' if len(indexes) > 1 else ''}, by its indexes")
                known.add(indexes)
            return decode(data[start:])

        return read

    def describe(self) -> dict[str, Any]:
        """The message's name, and the digest of its file and those that it imports."""
        texts = "\n".join([self.published.text, *sorted(_texts(self.published))])
        described = {"message": self.record_name, "sha256": hashlib.sha256(texts.encode()).hexdigest()}
        return {**super().describe(), "schema": described}


def _published(file: Any) -> PublishedSchema:
    """A file as registries take it from Python: its descriptor in base64."""
    references = tuple(
        SchemaReference(part.name, _published(part))
        for part in file.dependencies
        if not part.name.startswith(_BUILT_IN)
    )
    return PublishedSchema(ProtobufCodec.kind, base64.b64encode(file.serialized_pb).decode(), references)


def _texts(schema: PublishedSchema) -> Iterator[str]:
    for reference in schema.references:
        yield reference.schema.text
        yield from _texts(reference.schema)


def _outermost(descriptor: Any) -> Any:
    while descriptor.containing_type is not None:
        descriptor = descriptor.containing_type
    return descriptor


def _indexes_of(descriptor: Any) -> tuple[int, ...]:
    """The place of a message among the messages of its file, then of each message within the one around."""
    around = descriptor.containing_type
    if around is None:
        return (list(descriptor.file.message_types_by_name).index(descriptor.name),)
    names = [nested.name for nested in around.nested_types]
    return (*_indexes_of(around), names.index(descriptor.name))


def _zigzag(number: int) -> bytes:
    """A number from 0 on, as Avro and Protobuf write signed ones.

    >>> _zigzag(1), _zigzag(64)
    (b'\\x02', b'\\x80\\x01')
    """
    number, encoded = number << 1, bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _message_indexes(data: bytes) -> tuple[tuple[int, ...], int]:
    """The message indexes at the beginning of *data*, and the offset after them. Raises ValueError."""
    numbers: list[int] = []
    number, shift = 0, 0
    for offset, byte in enumerate(data):
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number >> 1)
            number, shift = 0, 0
            if len(numbers) == 1 + numbers[0]:
                return tuple(numbers[1:]) or _ONLY_MESSAGE, offset + 1
    raise ValueError("it ends within the indexes of its message")


def _outer_messages(text: str) -> Iterator[str]:
    """The full names of the messages at the top of a file, in their order. Raises ValueError.

    *text* is a file in Protobuf's language, or its descriptor in base64.

    >>> list(_outer_messages('package shop; message A { message B {} } /* message C {} */ message D {}'))
    ['shop.A', 'shop.D']
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    try:
        file = FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, DecodeError):
        yield from _declared_messages(_TOKEN.findall(text))
    else:
        for message in file.message_type:
            yield f"{file.package}.{message.name}" if file.package else message.name


def _declared_messages(tokens: list[str]) -> Iterator[str]:
    package, depth = "", 0
    tokens = [token for token in tokens if not token.startswith(("//", "/*"))]
    for place, token in enumerate(tokens):
        begins = place == 0 or tokens[place - 1] in "{};"
        if depth == 0 and begins and token == "package":
            package = f"{tokens[place + 1]}."
        elif depth == 0 and begins and token == "message":
            yield f"{package}{tokens[place + 1]}"
        depth += (token == "{") - (token == "}")
