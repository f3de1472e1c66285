"""A store other than Kafka as the target of a write: its description, from options as Spark hands them on.

Options are named after the arguments of `PostgresSink`, `MySQLSink`, `RedisSink` and `FileSink`, in any case and with
or without underscores, and written as text: names are separated by commas, flags are true or false. Invariants: nothing
is opened; a target is made of text alone, for Spark pickles it, so that all processes make the same description of it;
secrets are references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from string import Formatter
from typing import TYPE_CHECKING, Any

from exactlyonce.engines.spark.sink.records import Records, record_type
from exactlyonce.pipeline.delivery import AT_MOST_ONCE, delivery_problems
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.sinks.files.sink import FileSink
from exactlyonce.sinks.mysql.sink import MySQLSink
from exactlyonce.sinks.postgres.sink import PostgresSink
from exactlyonce.sinks.redis.sink import RedisSink
from exactlyonce.sinks.sql.fields import FieldKind, RowField, fields_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

KAFKA = "kafka"
Parsed = Callable[[str, str], Any]
"""An argument from an option's name and text; ConfigError where it is none."""


def _text(name: str, text: str) -> str:
    return text


def _names(name: str, text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(","))


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"The option {name} is {text!r}: write true or false.")
    return text.lower() == "true"


def _count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"The option {name} is {text!r}: write a number.")
    return int(text)


_TABLE: dict[str, Parsed] = {
    "table": _text, "dsn": _text, "mode": _text, "key": _names, "create": _flag, "commit": _text, "delivery": _text,
}  # fmt: skip
ARGUMENTS: Mapping[str, Mapping[str, Parsed]] = {
    "postgres": {**_TABLE, "schema": _text, "answer_timeout": _text},
    "mysql": _TABLE,
    "mariadb": _TABLE,
    "redis": {
        "url": _text, "key": _text, "kind": _text, "maxlen": _count, "hash_tag": _text, "durable": _flag,
        "part_rows": _count, "delivery": _text,
    },
    "files": {
        "path": _text, "format": _text, "partition_by": _names, "roll_bytes": _count, "roll_interval": _text,
        "delivery": _text,
    },
}  # fmt: skip
"""By store: the arguments of its description, as options."""
_NEEDED = {"redis": ("url", "key"), "files": ("path",)}
_NEEDED_OF_TABLES = ("table", "dsn")
_NEEDED_FOR = {
    "table": "the name of the table that rows go to",
    "dsn": 'where the connection string is, as .option("dsn", "env:ORDERS_DSN")',
    "url": 'where the address of the server is, as .option("url", "env:CACHE_URL")',
    "key": 'the key of a row, with columns in braces, as .option("key", "total:{customer}")',
    "path": 'the folder, from / on, which the driver and all executors see, as .option("path", "/data/totals")',
}


@dataclass(frozen=True)
class StoreTarget:
    """A store, the arguments of its description, and the DataFrame's schema as JSON."""

    store: str
    arguments: tuple[tuple[str, str], ...] = field(repr=False)
    schema: str

    def __getstate__(self) -> tuple[str, tuple[tuple[str, str], ...], str]:
        """What Spark carries: no type and no function."""
        return self.store, self.arguments, self.schema

    def __setstate__(self, state: tuple[str, tuple[tuple[str, str], ...], str]) -> None:
        for name, value in zip(("store", "arguments", "schema"), state, strict=True):
            object.__setattr__(self, name, value)

    @cached_property
    def parsed(self) -> dict[str, Any]:
        """The arguments as values."""
        return {name: ARGUMENTS[self.store][name](name, text) for name, text in self.arguments}

    @cached_property
    def key(self) -> tuple[str, ...]:
        """The columns by which a row is found."""
        if self.store == "redis":
            return tuple(name for _, name in _template(self.parsed["key"]) if name is not None)
        return tuple(self.parsed.get("key", ()))

    @cached_property
    def type(self) -> Any:
        """Of the records."""
        return record_type(self.schema, self.key)

    @cached_property
    def sink(self) -> Any:
        """The description."""
        arguments = dict(self.parsed)
        if self.store == "files":
            return FileSink[Any](arguments.pop("path"), **arguments)
        if self.store == "redis":
            key = _key_of(arguments.pop("key"), fields_of(self.type))
            return RedisSink[Any](arguments.pop("url"), key=key, **arguments)
        made: Any = PostgresSink if self.store == "postgres" else MySQLSink
        return made(arguments.pop("table"), **arguments)

    def records(self) -> Records:
        """What makes records of the batches of a task."""
        return Records(self.type, self.key, "which is part of the key")


def parse_target(store: str, options: dict[str, str], schema: StructType, sink_id: str) -> StoreTarget:
    """Check and parse. *options*: by the argument that each is; more are refused by whoever calls this."""
    needed = _NEEDED.get(store, _NEEDED_OF_TABLES)
    if missing := [name for name in needed if name not in options]:
        raise ConfigError(f"sink={store} needs the option {missing[0]}: {_NEEDED_FOR[missing[0]]}.")
    target = StoreTarget(store, tuple(sorted(options.items())), schema.json())
    if problems := list(_problems(target)):
        raise ConfigError(f"Sink {sink_id!r} cannot write to {store}: {'; '.join(problems)}.")
    return target


def _problems(target: StoreTarget) -> Iterator[str]:
    yield from _key_problems(target)
    delivery = target.parsed.get("delivery", "")
    yield from delivery_problems(delivery) if delivery else ()
    if delivery == AT_MOST_ONCE and target.store != "files":
        yield (
            f"delivery={delivery!r} is not for Spark: its tasks have ended before a batch is decided, and what they "
            f'would then write is gone. Take "exactly_once", or "at_least_once"'
        )


def _key_problems(target: StoreTarget) -> Iterator[str]:
    """Of the key, and if there is nothing wrong with it, of the description with it."""
    columns = {each.name: each for each in fields_of(record_type(target.schema))}
    unknown = [name for name in target.key if name not in columns]
    if unknown:
        yield f"key names {unknown[0]!r}, and the DataFrame has the columns {', '.join(columns)}: name one of them"
    elif target.store == "redis":
        if not target.key and target.parsed.get("kind") != "stream":
            example = next(iter(columns))
            yield f"key={target.parsed['key']!r} names no column, so that all rows had one key: 'total:{{{example}}}'"
        for name in target.key:
            if columns[name].kind not in _IN_KEYS:
                kind = columns[name].kind.value
                yield f"key names {name!r}, a column of {kind}, which is no part of a key: cast it to a string"
    if not unknown:
        yield from target.sink.problems(target.type)


_IN_KEYS = {FieldKind.STR, FieldKind.INT, FieldKind.BOOL, FieldKind.DATE}
"""What has one form as text."""


def _template(template: str) -> list[tuple[str, str | None]]:
    """The parts of a key: text, and the column behind it.

    >>> _template("total:{customer}"), _template("{{shop}}:{customer}")
    ([('total:', 'customer')], [('{', None), ('shop}', None), (':', 'customer')])
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"key={template!r} is no template: {error}. Write columns in braces, 'total:{{customer}}'; a brace that is "
            f"meant is written twice, '{{{{shop}}}}:{{customer}}'."
        ) from None
    if any(name == "" or form or conversion for _, name, form, conversion in parts):
        raise ConfigError(f"key={template!r} has braces with something else than a column: 'total:{{customer}}'.")
    return [(text, name) for text, name, _, _ in parts]


def _key_of(template: str, fields: tuple[RowField, ...]) -> Callable[[Any], str]:
    """The key of a record."""
    get = {each.name: each.get for each in fields}
    parts = [(text, get[name] if name is not None else None) for text, name in _template(template)]
    return lambda record: "".join(text + ("" if part is None else _written(part(record))) for text, part in parts)


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, date) else str(value)
