"""Redis as a sink: what to write and under which keys. It opens nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from urllib.parse import parse_qsl, urlsplit

from exactlyonce.pipeline import hints, shape
from exactlyonce.pipeline.codec import Codec, codec_for
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.grants import Grants
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.registry import SchemaCodec
from exactlyonce.pipeline.secrets import is_reference, reference_problem, shown_reference
from exactlyonce.pipeline.shape import Form
from exactlyonce.pipeline.sink import StoreDelivery, StoredRow, StoredRows
from exactlyonce.pipeline.sizes import is_count
from exactlyonce.sinks.redis.rows import RedisEncoder
from exactlyonce.sinks.redis.scripts import KINDS, ledger_key
from exactlyonce.sinks.write_ahead.sink import WriteAheadSink
from exactlyonce.sinks.write_ahead.store import Store
from exactlyonce.sinks.writer import codec_problems, holds_keys, value_type

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
PART_ROWS_MAX = 100_000
COMMANDS = (
    "select", "info", "config|get", "command|info", "eval", "evalsha", "hmget", "hgetall", "hset", "hdel"
)  # fmt: skip
COMMANDS_BY_KIND = {
    "string": ("set", "del"), "hash": ("type", "del"), "stream": ("type", "exists", "xinfo|stream", "xadd")
}  # fmt: skip
"""The commands of a connection and its ledger, and those that write rows."""
SINCE_7_2 = "waitaof"
"""A command that older servers do not know."""
_SERVER = re.compile(r"/?\d*")


@dataclass(frozen=True, eq=False)
class RedisSink(WriteAheadSink[T], Generic[T]):
    """Writes to a Redis server, exactly once: a part of a checkpoint and its ledger entry in one step.

    - *url*: where ``redis://user:password@host:6379/0`` is, ``rediss://`` with TLS, or ``unix:///path``: ``env:NAME``,
      ``file:/path``; looked up when a connection is made. One without a password may be written out.
    - *key*: a function from the output to its key: str in UTF-8, bytes as they are, all else JSON.
    - *kind*: "string": SET key value; "hash": HSET with the fields of the record, where None deletes a field; "stream":
      XADD with the fields of the record, or with the field `value` where *value* is given.
    - *value*: a type or a codec; None: by the type of the stream (bytes as they are, str in UTF-8, all else JSON).
    - *maxlen*: the approximate number of entries that a stream keeps.
    - *hash_tag*: in a Redis Cluster, the tag that all keys have; the ledger gets it too.
    - *durable*: False allows a server that loses everything when it stops.
    - *part_rows*: the number of rows that become visible at one moment; the server does nothing else meanwhile.

    None as an output deletes the key; a stream has no use for it. A stream of `Record[T]` is written with each record's
    own value and key, so that ``Record(key="total:ann", value=None)`` deletes; *key*, where given, wins. One of
    `Change[T]` likewise: the row by its key, which a delete removes.
    """

    url: str = field(repr=False)
    _: KW_ONLY
    key: Callable[[T], object] | None = None
    kind: Literal["string", "hash", "stream"] = "string"
    value: TypeForm[Any] | Codec[Any] | None = None
    maxlen: int | None = None
    hash_tag: str | None = None
    durable: bool = True
    part_rows: int = 10_000
    delivery: StoreDelivery = "exactly_once"

    @property
    def needs_type(self) -> bool:
        """True unless a codec is given."""
        return self.value is None

    def problems(self, type_: Any) -> Iterator[str]:
        """The problems of the arguments, and of the type for the kind; never with the URL itself."""
        if not isinstance(self.url, str):
            yield "the URL of the server must be text: redis://host:6379/0"
        elif problem := reference_problem(self.url):
            yield f"the URL of the server is {self.url!r}: {problem}"
        elif not is_reference(self.url) and (problem := url_problem(self.url)):
            yield f"the URL of the server is wrong: {problem}; write redis://host:6379/0, or env:NAME"
        elif not is_reference(self.url) and has_password(self.url):
            yield (
                "the URL of the server has a password written out: put all of it into a variable, 'env:NAME', or into "
                "a file"
            )
        if self.kind not in KINDS:
            yield f"kind={self.kind!r} must be one of {', '.join(KINDS)}"
        if self.key is None and not holds_keys(type_):
            yield "key= is missing: give a function from the output to its key; only Record and Change have their own"
        elif self.key is not None and not callable(self.key):
            yield f"key={self.key!r} must be a function of the output"
        if not isinstance(self.durable, bool):
            yield f"durable={self.durable!r} must be True or False"
        if not is_count(self.part_rows, most=PART_ROWS_MAX):
            yield f"part_rows={self.part_rows!r} must be a number from 1 to {PART_ROWS_MAX}"
        tag = self.hash_tag
        if tag is not None and not (isinstance(tag, str) and tag and not set(tag) & set("{}")):
            yield f"hash_tag={tag!r} must be text without braces: the part of every key that stands between {{ and }}"
        if self.maxlen is not None and self.kind != "stream":
            yield f"maxlen= is of streams; with kind={self.kind!r} leave it out"
        elif self.maxlen is not None and not is_count(self.maxlen, most=1 << 62):
            yield f"maxlen={self.maxlen!r} must be a number from 1 on"
        if isinstance(self.value, SchemaCodec) and self.value.registry is not None:
            yield "value= is a codec with registry=, which is for topics: leave registry= out"
        yield from self._type_problems(type_)

    def _type_problems(self, type_: Any) -> Iterator[str]:
        held = hints.without_none(value_type(type_))
        if self.kind == "hash" and self.value is not None:
            yield "value= is of strings and streams; a hash has the fields of the record: leave it out"
        elif self.kind == "string" or self.value is not None:
            if self.value is not None or held is not UNKNOWN:
                yield from codec_problems(self._codec, type_)
        elif held is not UNKNOWN and not _has_fields(held):
            hint = "; or give value=, which makes it the field `value`" if self.kind == "stream" else ""
            yield (
                f"kind={self.kind!r} writes the fields of a record, and the stream is of {shape.type_name(held)}: "
                f"use a msgspec Struct, a dataclass, a NamedTuple, a TypedDict or a dict[str, ...]{hint}"
            )

    @property
    def shown(self) -> str:
        """The kind of its values."""
        return self.kind

    def describe(self, type_: Any) -> dict[str, Any]:
        """Kind and encoding, without address and functions."""
        value = self._codec(type_).describe() if self._has_codec else _described(type_)
        return {"sink": "redis", "kind": self.kind, "value": value}

    def ledger_of(self, pipeline: str, sink: str) -> str:
        """Its hash."""
        return f"the key {ledger_key(pipeline, sink, self.hash_tag)}"

    def grants(self, user: str, type_: Any, *, creates: bool) -> Grants:
        """See `Sink`. Only the pipeline knows its keys, so all are allowed."""
        commands = " ".join(f"+{command}" for command in (*COMMANDS, *COMMANDS_BY_KIND[self.kind]))
        statements = (f"ACL SETUSER {user} on ~* {commands}", f"ACL SETUSER {user} +{SINCE_7_2}")
        return Grants(f"the Redis of {shown_reference(self.url)}", 'redis-cli -u "$REDIS_URL"', statements)

    def store(self, type_: Any) -> Store:
        """See `WriteAheadSink`; `ConfigError` if the redis library is missing."""
        with needing("redis", "the redis library", "RedisSink"):
            from exactlyonce.sinks.redis.store import RedisStore
        return RedisStore(
            self.url, kind=self.kind, encoder=self._encoder(type_), hash_tag=self.hash_tag, maxlen=self.maxlen,
            durable=self.durable, part_rows=self.part_rows,
        )  # fmt: skip

    def stored_rows(self, type_: Any) -> StoredRows[Any]:
        """See `Sink`: values as they are written, or the fields of a record."""
        encoder = self._encoder(type_)

        def rows(records: Sequence[Any]) -> list[StoredRow]:
            keys, contents = encoder.keys(records), encoder.contents(records)
            return [StoredRow((key,), content) for key, content in zip(keys, contents, strict=True)]

        return StoredRows(f"{self.kind}s of Redis", "key=", rows)

    def _encoder(self, type_: Any) -> RedisEncoder:
        return RedisEncoder(
            kind=self.kind,
            key=self.key or attrgetter("key"),
            keyed=holds_keys(type_),
            value=self._codec(type_) if self._has_codec else None,
            hash_tag=self.hash_tag,
        )

    @property
    def _has_codec(self) -> bool:
        """Whether values are encoded; else the fields of the record are written."""
        return self.kind == "string" or self.value is not None

    def _codec(self, type_: Any) -> Codec[Any]:
        return codec_for(value_type(type_) if self.value is None else self.value)


def _described(type_: Any) -> Any:
    try:
        return shape.describe(value_type(type_))
    except shape.UnsupportedType:
        return shape.type_name(type_)


def _has_fields(type_: Any) -> bool:
    """Whether all alternatives of the type have named fields."""
    try:
        members = shape.shape_of(type_).members
    except shape.UnsupportedType:
        return False
    return all(
        member.form is Form.RECORD or (member.form is Form.DICT and member.parts[0].form is Form.STR)
        for member in members
    )


def url_problem(url: str) -> str | None:
    """The problem of a URL, without the URL, which may hold a password.

    >>> url_problem("redis://cache:6379/0"), url_problem("redis://cache:6379/orders")
    (None, 'it ends with a database that is no number')
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "it has a port or a host that is none"
    if parts.scheme not in ("redis", "rediss", "unix"):
        return "it begins with none of redis://, rediss:// and unix://"
    if parts.scheme == "unix":
        return None if parts.path else "it names no socket"
    if not parts.hostname:
        return "it names no host"
    if "@" in parts.path + parts.query + parts.fragment:
        return "it has an @ after its host: in a password a / is written %2F, a ? %3F, a # %23 and an @ %40"
    return None if _SERVER.fullmatch(parts.path) else "it ends with a database that is no number"


def has_password(url: str) -> bool:
    """Whether a URL that has no problem has a password in it.

    >>> has_password("redis://:hunter2@cache:6379/0"), has_password("redis://ann@cache:6379/0")
    (True, False)
    """
    parts = urlsplit(url)
    return bool(parts.password) or any("password" in name for name, _ in parse_qsl(parts.query))
