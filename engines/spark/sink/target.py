"""A store other than Kafka as the target of a write: its description, from Spark's options, and rows as its records.

Options are the arguments of the sink's class, by their types: of one in `sinks.STORES`, or of another package. Their
case and underscores do not matter. A function of the record is a template of columns. Invariants: nothing is opened; a
target is text alone, which Spark pickles, so that all processes make the same description and record type of it;
secrets are references; a column keeps its name; no value is rounded, cut or turned into text; a column's type without
equal in Python is refused before any write.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property, lru_cache
from keyword import iskeyword
from string import Formatter
from types import GenericAlias, SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import pyarrow as pa
from pyspark.sql import types as spark

from exactlyonce import sinks
from exactlyonce.pipeline.columns import RowField, fields_of, kind_name
from exactlyonce.pipeline.errors import ConfigError, RecordError
from exactlyonce.pipeline.extras import SINKS, announced, loaded
from exactlyonce.pipeline.hints import members, without_none
from exactlyonce.pipeline.shape import Form
from exactlyonce.pipeline.sink import Sink, delivery_problems

if TYPE_CHECKING:
    from pyarrow import RecordBatch

Parsed = Callable[[str, str], Any]
"""A parser of an option's name and text; it raises ConfigError."""


def _text(name: str, text: str) -> str:
    return text


def _names(name: str, text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"The option {name} is {text!r}: write true or false.")
    return text.lower() == "true"


def _count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"The option {name} is {text!r}: write a number.")
    return int(text)


def _properties(name: str, text: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.MsgspecError:
        raise ConfigError(
            f"""The option {name} must be a JSON object of text, as '{{"type": "rest", "uri": "env:CATALOG"}}'."""
        ) from None


@dataclass(frozen=True)
class Template:
    """A text with columns of the row in braces, for a function of the record."""

    text: str
    parts: tuple[tuple[str, str | None], ...]
    """Text, and the column after it."""

    @classmethod
    def parse(cls, name: str, text: str) -> Template:
        """
        >>> Template.parse("key", "total:{customer}").parts, Template.parse("key", "{{shop}}:{customer}").parts
        ((('total:', 'customer'),), (('{', None), ('shop}', None), (':', 'customer')))
        """
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(
                f"{name}={text!r} is no template: {error}. Write columns in braces, 'total:{{customer}}'; a brace that "
                f"is meant is written twice, '{{{{shop}}}}:{{customer}}'."
            ) from None
        if any(column == "" or form or conversion for _, column, form, conversion in parts):
            raise ConfigError(f"{name}={text!r} has braces with something else than a column: 'total:{{customer}}'.")
        return cls(text, tuple((before, column) for before, column, _, _ in parts))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(column for _, column in self.parts if column is not None)

    def function(self, fields: tuple[RowField, ...]) -> Callable[[Any], str]:
        getters = {field.name: field.get for field in fields}
        parts = [(text, getters[column] if column is not None else None) for text, column in self.parts]
        return lambda record: "".join(text + ("" if part is None else _written(part(record))) for text, part in parts)


_OPTIONAL = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NEEDED_FOR = {
    "table": "the name of the table that rows go to",
    "dsn": 'where the connection string is, as .option("dsn", "env:ORDERS_DSN")',
    "url": 'where the address of the server is, as .option("url", "env:CACHE_URL")',
    "key": 'the key of a row, with columns in braces, as .option("key", "total:{customer}")',
    "catalog": """the catalog's properties, as .option("catalog", '{"type": "rest", "uri": "http://..."}')""",
    "path": 'the folder, from / on, which the driver and all executors see, as .option("path", "/data/totals")',
}
"""By argument without a default, what it is."""
_SCALARS: dict[type[spark.DataType], Any] = {
    spark.BooleanType: bool,
    **dict.fromkeys((spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType), int),
    **dict.fromkeys((spark.FloatType, spark.DoubleType), float),
    **dict.fromkeys((spark.StringType, spark.CharType, spark.VarcharType), str),
    spark.BinaryType: bytes,
    spark.DecimalType: Decimal,
    spark.DateType: date,
    spark.TimestampType: datetime,
    spark.TimestampNTZType: Annotated[datetime, msgspec.Meta(tz=False)],
    spark.DayTimeIntervalType: timedelta,
}
if (_time_type := getattr(spark, "TimeType", None)) is not None:  # Spark 4.1 has it
    _SCALARS[_time_type] = time
_PLACE = "column_{}"
"""The attribute of a column whose name is no attribute's in Python."""


def arguments_of(store: str) -> Mapping[str, Parsed]:
    """The arguments of the description of *store*, as options. Raises `ConfigError` for an unknown store."""
    sink = sink_of(store)
    parsers = {name: _parser(_annotated(sink, parameter)) for name, parameter in _parameters(sink).items()}
    return {name: parsed for name, parsed in parsers.items() if parsed is not None}


@lru_cache
def sink_of(store: str) -> type[Sink[Any]]:
    """The class of a sink, by its name in `sinks.STORES`, or by the name of another package's entry point."""
    if store in sinks.STORES:
        own: type[Sink[Any]] = getattr(sinks, sinks.STORES[store])
        return own
    entries = announced(SINKS)
    if store not in entries:
        names = ", ".join(("kafka", *sinks.STORES, *sorted(entries)))
        raise ConfigError(
            f"The option sink is {store!r}: write one of {names}. An entry point of {SINKS} names the sink of another "
            f"package, which must be installed on the driver and on every executor."
        )
    sink = loaded(entries[store])
    if not (isinstance(sink, type) and issubclass(sink, Sink)):
        raise ConfigError(
            f"The entry point {store!r} of {SINKS}, {entries[store].value}, must be a class derived from "
            f"exactlyonce.sinks.WriteAheadSink or exactlyonce.sinks.Sink: correct the package."
        )
    return sink


def _parameters(sink: type) -> dict[str, inspect.Parameter]:
    return {
        name: parameter for name, parameter in inspect.signature(sink).parameters.items() if parameter.kind in _OPTIONAL
    }


def _annotated(sink: type, parameter: inspect.Parameter) -> Any:
    """The type of an argument: text without an annotation, None with one that does not resolve."""
    annotation = parameter.annotation
    if not isinstance(annotation, str):
        return str if annotation is parameter.empty else annotation
    holder = SimpleNamespace(__annotations__={"it": annotation})
    for class_ in sink.__mro__:
        with suppress(Exception):  # an annotation may be any code
            return get_type_hints(holder, vars(sys.modules[class_.__module__]), include_extras=True)["it"]
    return None


def _parser(type_: Any) -> Parsed | None:
    """The parser for an argument of *type_*; None if no text stands for its values.

    >>> _parser(int | None) is _count, _parser(str | tuple[str, ...]) is _names, _parser(Callable[[Any], str])
    (True, True, None)
    """
    for member in sorted(members(without_none(type_)), key=lambda each: getattr(each, "__origin__", None) is not tuple):
        origin, parameters = get_origin(member) or member, get_args(member)
        if parameters and isinstance(parameters[0], list) and any(isinstance(part, TypeVar) for part in parameters[0]):
            return Template.parse  # a function of the record
        if origin is str or (origin is Literal and all(isinstance(value, str) for value in parameters)):
            return _text
        if origin in _PARSERS and set(parameters) <= {str, ...}:
            return _PARSERS[origin]
    return None


_PARSERS: Mapping[Any, Parsed] = {bool: _flag, int: _count, tuple: _names, dict: _properties, Mapping: _properties}


@dataclass(frozen=True)
class StoreTarget:
    """A store, the arguments of its description, and the DataFrame's schema as JSON."""

    store: str
    arguments: tuple[tuple[str, str], ...] = field(repr=False)
    schema: str

    def __getstate__(self) -> tuple[str, tuple[tuple[str, str], ...], str]:
        """The pickled state, without types and functions."""
        return self.store, self.arguments, self.schema

    def __setstate__(self, state: tuple[str, tuple[tuple[str, str], ...], str]) -> None:
        for name, value in zip(("store", "arguments", "schema"), state, strict=True):
            object.__setattr__(self, name, value)

    @cached_property
    def parsed(self) -> dict[str, Any]:
        parsers = arguments_of(self.store)
        return {name: parsers[name](name, text) for name, text in self.arguments}

    @cached_property
    def key(self) -> tuple[str, ...]:
        """The columns by which a row is found."""
        key = self.parsed.get("key", ())
        if isinstance(key, Template):
            return key.columns
        return key if isinstance(key, tuple) else ()

    @cached_property
    def type(self) -> Any:
        return record_type(self.schema, self.key)

    @cached_property
    def sink(self) -> Any:
        return sink_of(self.store)(
            **{
                name: value.function(fields_of(self.type)) if isinstance(value, Template) else value
                for name, value in self.parsed.items()
            }
        )

    def records(self) -> Records:
        """A maker of records of a task's batches."""
        return Records(self.type, self.key, "which is part of the key")


def parse_target(store: str, options: dict[str, str], schema: spark.StructType, sink_id: str) -> StoreTarget:
    """Check and parse *options*, by argument; the caller refuses unknown ones."""
    needed = dict(_needed_arguments(store))
    if missing := [name for name in needed if name not in options]:
        raise ConfigError(f"sink={store} needs the option {missing[0]}: {needed[missing[0]]}.")
    target = StoreTarget(store, tuple(sorted(options.items())), schema.json())
    if problems := list(_problems(target)):
        raise ConfigError(f"Sink {sink_id!r} cannot write to {store}: {'; '.join(problems)}.")
    return target


def _needed_arguments(store: str) -> Iterator[tuple[str, str]]:
    sink, options = sink_of(store), arguments_of(store)
    for name, parameter in _parameters(sink).items():
        if parameter.default is parameter.empty:
            if name not in options:
                raise ConfigError(
                    f"sink={store} cannot be used on Spark: {sink.__name__} needs the argument {parameter}, and no "
                    f"text stands for that. Its package must give {name} a default."
                )
            yield name, _NEEDED_FOR.get(name, f"an argument of {sink.__name__} without a default")


def _problems(target: StoreTarget) -> Iterator[str]:
    yield from _key_problems(target)
    delivery = target.parsed.get("delivery", "")
    yield from delivery_problems(delivery, to_kafka=False) if delivery else ()


def _key_problems(target: StoreTarget) -> Iterator[str]:
    """The problems of the key, or else of the description with it."""
    columns = {column.name: column for column in fields_of(record_type(target.schema))}
    unknown = [name for name in target.key if name not in columns]
    if unknown:
        yield f"key names {unknown[0]!r}, and the DataFrame has the columns {', '.join(columns)}: name one of them"
    elif isinstance(key := target.parsed.get("key"), Template):
        if not target.key and target.parsed.get("kind") != "stream":
            example = next(iter(columns))
            yield f"key={key.text!r} names no column, so that all rows had one key: 'total:{{{example}}}'"
        for name in target.key:
            if columns[name].kind not in _IN_KEYS:
                kind = kind_name(columns[name].kind)
                yield f"key names {name!r}, a column of {kind}, which is no part of a key: cast it to a string"
    if not unknown:
        yield from target.sink.problems(target.type)


_IN_KEYS = {Form.STR, Form.INT, Form.BOOL, Form.DATE}
"""Kinds with one form as text."""


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, date) else str(value)


@lru_cache(maxsize=64)
def record_type(schema: str, required: tuple[str, ...] = ()) -> Any:
    """The type of rows with *schema*, in JSON; *required* columns have no null.

    >>> from exactlyonce.pipeline import shape
    >>> columns = spark.StructType().add("customer", spark.StringType()).add("sum", spark.LongType())
    >>> shape.describe(record_type(columns.json(), ("customer",)))["fields"]
    [['customer', 'str'], ['sum', {'union': ['int', 'null']}]]
    """
    columns = spark.StructType.fromJson(msgspec.json.decode(schema))
    _refuse_same_names(columns, "the DataFrame")
    fields, renamed = [], {}
    for place, column in enumerate(columns):
        attribute = column.name
        if not attribute.isidentifier() or iskeyword(attribute) or attribute.startswith("_"):
            attribute = _PLACE.format(place)
            renamed[attribute] = column.name
        type_ = _type_of(column.dataType, column.name)
        fields.append((attribute, type_ if column.name in required or not column.nullable else type_ | None))
    return msgspec.defstruct("Row", fields, rename=renamed, gc=False)


def _refuse_same_names(columns: spark.StructType, where: str) -> None:
    names = columns.names
    if not names:
        raise ConfigError(f"There is no column in {where}: select what is to be written.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"Two columns of {where} are named {twice!r}: rename one, or leave it out.")


def _type_of(type_: spark.DataType, where: str) -> Any:
    """The type of values other than null; *where* is the column's name."""
    if isinstance(type_, spark.ArrayType):
        item = _type_of(type_.elementType, where)
        return GenericAlias(list, (item | None if type_.containsNull else item,))
    if isinstance(type_, spark.MapType):
        key, value = _type_of(type_.keyType, where), _type_of(type_.valueType, where)
        return GenericAlias(dict, (key, value | None if type_.valueContainsNull else value))
    if isinstance(type_, spark.StructType):
        _refuse_same_names(type_, f"column {where!r}")
        fields: dict[str, Any] = {}
        for field in type_:
            inner = _type_of(field.dataType, f"{where}.{field.name}")
            fields[field.name] = inner | None if field.nullable else inner
        return TypedDict(where, fields)  # type: ignore[operator]  # it is known when it runs
    scalar = _SCALARS.get(type(type_))
    if scalar is None:
        raise ConfigError(
            f"Column {where!r} is of type {type_.simpleString()}, which cannot be written to a store: cast it, to a "
            f"string for instance, or leave it out."
        )
    return scalar


class Records:
    """Makes records of the batches of one task. *required*: columns in which null is refused, and why."""

    def __init__(self, type_: Any, required: Collection[str], why: str) -> None:
        self._type, self._required, self._why = type_, required, why
        self.taken = 0
        """The number of rows taken so far."""

    def take(self, batch: RecordBatch) -> tuple[list[tuple[Any, ...]], list[Any]]:
        """The rows of *batch* as plain values, and as records."""
        for name in self._required:
            if batch.column(name).null_count:
                place = self.taken + batch.column(name).to_pylist().index(None) + 1
                raise RecordError(f"Row {place} of a task has null in column {name!r}, {self._why}: filter such rows.")
        columns = [_values(batch.column(place)) for place in range(batch.num_columns)]
        self.taken += batch.num_rows
        return list(zip(*columns, strict=True)), list(map(self._type, *columns))


def _values(column: pa.Array) -> list[Any]:
    plain = _plain(column.type)
    values = column.to_pylist()
    return values if plain is None else list(map(plain, values))


def _plain(type_: pa.DataType) -> Callable[[Any], Any] | None:
    """A function that makes dicts of the maps in a value, which Arrow gives as pairs; None where there is no map."""
    if pa.types.is_map(type_):
        item = _plain(type_.item_type)
        if item is None:
            return lambda pairs: None if pairs is None else dict(pairs)
        return lambda pairs: None if pairs is None else {key: item(value) for key, value in pairs}
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        element = _plain(type_.value_type)
        return None if element is None else lambda items: None if items is None else list(map(element, items))
    if pa.types.is_struct(type_):
        parts = {field.name: plain for field in type_ if (plain := _plain(field.type)) is not None}
        if not parts:
            return None
        return lambda row: None if row is None else {**row, **{name: part(row[name]) for name, part in parts.items()}}
    return None
