"""Debezium's envelope of a change, in JSON and in Avro: as its connectors write it, and as its consumers read it.

A column's encoding is told by the schema of its message, in JSON beside the payload, in Avro under its id. Invariant: a
value whose unit or scale nothing tells is refused, never guessed. The row of a delete is read only where the user says
that it is whole: where a database sends the key alone, Debezium fills the other columns with empty values.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import fastavro
import msgspec

from exactlyonce.pipeline.avro import AvroCodec, encoded
from exactlyonce.pipeline.changes import UNCHANGED, Change, KeyForm, Op
from exactlyonce.pipeline.codec import Codec, Ignored, require_finite
from exactlyonce.pipeline.registry import Ids, PublishedSchema, SchemaCodec, Subjects, registry_of
from exactlyonce.pipeline.shape import SCALARS, Field, Form, Shape, UnsupportedType, describe, shape_of, type_name

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
B = TypeVar("B")
A = TypeVar("A")

Unit = Literal["ms", "us", "ns"]

UNAVAILABLE = b"__debezium_unavailable_value"
"""Stands for a large value that an update left as it was, and the database did not send."""
_TEXT = UNAVAILABLE.decode()
_UNAVAILABLE = frozenset({
    UNAVAILABLE, _TEXT, b64encode(UNAVAILABLE).decode(), UNAVAILABLE.hex(), f'{{"{_TEXT}":"{_TEXT}"}}',
})  # fmt: skip
"""Its forms in columns of text, bytes, and hstore."""
_UNAVAILABLE_ARRAYS: tuple[list[Any], ...] = ([_TEXT], list(UNAVAILABLE), ["b68a35a7-17ad-35b3-af2a-ae46edb4545a"])
"""Its forms in arrays: of texts, of numbers and dates, and of UUIDs."""
_OPS: Mapping[str, Op] = {"c": "insert", "u": "update", "d": "delete", "r": "read", "t": "truncate"}
_OP_LETTERS = {op: letter for letter, op in _OPS.items()}
_WITH_SCHEMA = (b'{"schema":', b'{"payload":')
"""The beginnings of a message with a schema, as Kafka Connect writes it."""
_PER_SECOND = {"ms": 10**3, "us": 10**6, "ns": 10**9}
_UNNAMED_SCHEMAS = (None, "", "public")
"""The schemas that `Change.table` leaves out."""
_CONNECT = "org.apache.kafka.connect.data."
_DATES = frozenset({"io.debezium.time.Date", f"{_CONNECT}Date", "date"})
_UNITS: Mapping[str, Unit] = {
    "io.debezium.time.Timestamp": "ms", "io.debezium.time.MicroTimestamp": "us", "io.debezium.time.NanoTimestamp": "ns",
    "io.debezium.time.Time": "ms", "io.debezium.time.MicroTime": "us", "io.debezium.time.NanoTime": "ns",
    "io.debezium.time.MicroDuration": "us", "io.debezium.time.NanoDuration": "ns",
    f"{_CONNECT}Timestamp": "ms", f"{_CONNECT}Time": "ms",
    "timestamp-millis": "ms", "timestamp-micros": "us", "local-timestamp-millis": "ms", "local-timestamp-micros": "us",
    "time-millis": "ms", "time-micros": "us",
}  # fmt: skip
"""By the name of a column's type."""
_ISO_IN_UTC = frozenset({"io.debezium.time.IsoTimestamp", "io.debezium.time.IsoTime"})
"""Types without a time zone, whose texts end with one."""
_DECIMAL, _VARIABLE_DECIMAL = f"{_CONNECT}Decimal", "io.debezium.data.VariableScaleDecimal"
_EPOCH, _EPOCH_DAY = datetime(1970, 1, 1), date(1970, 1, 1).toordinal()
_UUID = "io.debezium.data.Uuid"
_NEVER_LARGE = SCALARS - {Form.STR, Form.BYTES, Form.DECIMAL}
_KEY_FORMS = frozenset({Form.INT, Form.STR, Form.UUID, Form.DATE, Form.ENUM, Form.LITERAL})
_SCHEMAS_MAX = 64
"""The schemas of one topic whose readers are kept."""


class DebeziumCodec(SchemaCodec[Change[T]]):
    """Debezium's envelope, as ``DebeziumCodec(Customer, key="id")``: a topic of it is a stream of `Change[Customer]`.

    As the value of a `KafkaSource` it reads a topic that Debezium writes, JSON with or without schemas; with *registry*
    Avro. Tombstones are left out. As the value of a `KafkaSink` it writes a stream of `Change`, under keys as
    Debezium's, ``{"id": 1}``.

    - *type_*: the type of a row, whose fields are columns: a Struct, a dataclass, a TypedDict.
    - *key*: the column of the table's key, or a tuple of them: fields of *type_*.
    - *before*: True says that the database sends the whole row before an update and a delete, as PostgreSQL with
      REPLICA IDENTITY FULL and MySQL do. Else `Change.before` is None.
    - *timestamps*: the unit of a bare number, without a schema, in a field of datetime or time: "ms", "us" or "ns".
    - *decimals*: "string": a text in a field of Decimal, without a schema, is a decimal number.
    - *schemas*: whether to write JSON with schemas; Avro has them anyway.
    - *name*: the first part of the names of schemas that it writes, as "shop.public.customers"; by default the type's.
    - *tombstones*: whether to write a null value after a delete, under the same key.
    - *registry*, *subjects*, *register*, *ids*: as of `AvroCodec`, for keys and values.

    Raises `GraphError` for a type that has no such rows.
    """

    kind: ClassVar[str] = "AVRO"
    ignores_null: ClassVar[bool] = True

    def __init__(
        self,
        type_: TypeForm[T],
        key: str | Sequence[str],
        *,
        before: bool = False,
        timestamps: Unit | None = None,
        decimals: Literal["string"] | None = None,
        schemas: bool = False,
        name: str = "",
        tombstones: bool = True,
        registry: str | Mapping[str, Any] | None = None,
        subjects: Subjects = "topic",
        register: bool = False,
        ids: Ids = "prefix",
    ) -> None:
        self.registry = registry_of(registry, subjects, register, ids)
        self.key_columns = (key,) if isinstance(key, str) else tuple(key)
        self.before, self.tombstones = before, tombstones
        self._name = name or re.sub(r"\W", "_", type_name(type_))
        self._rows: _Rows[T] = _Rows(type_, self.key_columns, _Bare(timestamps, decimals))
        self._writer = writer = _Writer(self._rows, self._name, schemas=schemas or self.registry is not None)
        decode: Callable[[bytes], Change[T]]
        encode: Callable[[Change[T]], bytes]
        if self.registry is None:
            self.key_codec: Codec[Any] = Codec("json", dict[str, Any], writer.json_key, msgspec.json.decode)
            encode, decode = writer.json, _json_decoder(self._rows, before=before)
        else:
            self.schema = _avro(writer.schema)
            self.key_codec = AvroCodec(
                dict[str, Any], _avro(writer.key_schema), registry=registry, subjects=subjects, register=register,
                ids=ids,
            )  # fmt: skip
            encode, decode = _avro_encoder(writer, self.schema), self._avro_decoder(self.schema)
        super().__init__("debezium", Change[type_], encode, decode)  # type: ignore[valid-type]  # at run time

    @property
    def key_type(self) -> Any:
        """The type of `Change.key`."""
        return self._rows.key_form.type

    def key_of(self, change: Change[T]) -> dict[str, Any] | None:
        """The key of a message, by column, for `key_codec`; None of a truncate."""
        return None if change.key is None else self._rows.key_values(change.key)

    def writing_problems(self) -> list[str]:
        """The reasons why no change can be written, each with its remedy."""
        return self._writer.problems

    @property
    def published(self) -> PublishedSchema:
        return PublishedSchema(self.kind, msgspec.json.encode(self.schema).decode())

    @property
    def record_name(self) -> str:
        return f"{self._name}.Envelope"

    def decoder_of(self, writer: PublishedSchema) -> Callable[[bytes], Change[T]]:
        try:
            return self._avro_decoder(msgspec.json.decode(writer.text))
        except (UnsupportedType, LookupError, TypeError) as error:
            raise ValueError(f"its Avro schema is none of an envelope of Debezium: {error}") from None

    def _avro_decoder(self, schema: Any) -> Callable[[bytes], Change[T]]:
        read = AvroCodec(_DictEnvelope, _without_logical_types(schema)).decode
        change_of = _dict_reader(self._rows, _avro_columns(schema), before=self.before)
        return lambda data: change_of(read(data))

    def describe(self) -> dict[str, Any]:
        """The format, its key and the row; no names of schemas."""
        form = "avro" if self.registry is not None else "json"
        return {**super().describe(), "format": form, "key": list(self.key_columns)}


class _Bare(NamedTuple):
    """The user's word on values without a schema."""

    timestamps: Unit | None
    decimals: Literal["string"] | None


class _Column(NamedTuple):
    """The encoding of a column, as a schema tells it."""

    kind: str
    """The primitive type, in the terms of Kafka Connect or Avro."""
    name: str
    """The name of the type, as "io.debezium.time.Date"; empty: it has none."""
    scale: int = 0
    item: _Column | None = None


_Columns = Mapping[str, _Column]
_ABSENT = _Column("", "")


class _Source(msgspec.Struct, gc=False):
    """The place of a change in its database. Other databases have texts for numbers."""

    table: str = ""
    schema: str | None = None
    ts_ms: int | None = None
    lsn: int | str | None = None
    txId: int | str | None = None


class _Envelope(msgspec.Struct, Generic[B, A], gc=False):
    op: str
    before: B | None = None
    after: A | None = None
    source: _Source = msgspec.field(default_factory=_Source)
    ts_ms: int | None = None


_DictEnvelope = _Envelope[dict[str, Any], dict[str, Any]]


class _Wrapped(msgspec.Struct):
    """A message with its schema."""

    payload: msgspec.Raw
    schema: msgspec.Raw = msgspec.Raw(b"null")


# --- reading ----------------------------------------------------------------------------------------------------------

_Reader = Callable[[Any], Any]
_ChangeOf = Callable[[Any], Change[T]]
"""Makes a change of an `_Envelope`."""
_LACKED = (
    "an update left this large value as it was, and the database did not send it: let the table have REPLICA IDENTITY "
    "FULL, or give the field UNCHANGED as its default"
)
_NO_UNIT = (
    "it is a bare number, whose unit only a schema tells: let Debezium write schemas, or give DebeziumCodec timestamps="
)
_NO_SCALE = (
    "it is a text, which may be a number, or bytes whose scale only a schema tells: let Debezium write schemas, or "
    'decimal.handling.mode=string, and give DebeziumCodec decimals="string"'
)


class _Rows(Generic[T]):
    """The type of a row, and its key."""

    def __init__(self, type_: Any, key: tuple[str, ...], bare: _Bare) -> None:
        shape = shape_of(type_)
        if shape.form is not Form.RECORD or shape.is_array:
            raise UnsupportedType(f"DebeziumCodec takes a Struct, a dataclass or a TypedDict, not {type_name(type_)}")
        self.type, self.shape, self.bare = type_, shape, bare
        self.fields: Mapping[str, Field] = {field.name: field for field in shape.fields}
        missing = [column for column in key if column not in self.fields]
        if missing or not key:
            problem = f"{type_name(type_)} has no field {missing[0]!r}" if missing else "name one column or more"
            raise UnsupportedType(f"DebeziumCodec: key={key!r}: {problem}")
        self.key_fields = {column: self.fields[column] for column in key}
        for name, field in self.key_fields.items():
            form = field.shape.without_none.form
            if form not in _KEY_FORMS:
                raise UnsupportedType(
                    f"DebeziumCodec: key={name!r} is a field of {form.value}, and a key's is of int, str, "
                    f"UUID, date or an enumeration"
                )
        self.key_gets = [field.get for field in self.key_fields.values()]
        self.key_form = KeyForm([field.shape for field in self.key_fields.values()])
        self._key = self.key_form.maker

    def readers(self, columns: _Columns | None) -> dict[str, _Reader | None]:
        """The reader of each field's value; None: the type takes it as it is. *columns* None: without a schema."""
        return {
            name: _reader(field.shape, None if columns is None else columns.get(name, _ABSENT), self.bare)
            for name, field in self.fields.items()
        }

    def key_of(self, values: Sequence[Any]) -> Any:
        """`Change.key` of the values of the key's columns."""
        if None in values:
            raise ValueError(f"{' and '.join(self.key_fields)} of its key: {values!r:.100}, one of which is null")
        if self.key_form.is_number:
            if type(values[0]) is not int:
                raise ValueError(f"{next(iter(self.key_fields))} of its key is {values[0]!r:.100}, and no int")
            return values[0]
        return self._key([str(value.value if isinstance(value, Enum) else value) for value in values])

    def key_values(self, key: Any) -> dict[str, Any]:
        """The values of the key's columns by `Change.key`."""
        texts = self.key_form.values(key)
        shapes = {name: field.shape.without_none for name, field in self.key_fields.items()}
        return {name: _key_value(shape, text) for (name, shape), text in zip(shapes.items(), texts, strict=True)}


def _in_place(
    readers: Mapping[str, _Reader | None], fields: Mapping[str, Field]
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Reads the values in a row of a message, in place."""
    plan = [(name, read) for name, read in readers.items() if read is not None]
    large = [name for name in readers if fields[name].shape.without_none.form not in _NEVER_LARGE]

    def read_row(row: dict[str, Any]) -> dict[str, Any]:
        for name in large:
            if _is_unavailable(row.get(name)):
                if not fields[name].may_be_unchanged:
                    raise ValueError(f"{_LACKED} - at `$.{name}`")
                del row[name]  # for the default
        for name, read in plan:
            value = row.get(name)
            if value is not None:
                try:
                    row[name] = read(value)
                except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                    raise ValueError(f"{error} - at `$.{name}`") from None
        return row

    return read_row


def _is_unavailable(value: Any) -> bool:
    return value in _UNAVAILABLE if isinstance(value, str | bytes) else value in _UNAVAILABLE_ARRAYS


def _change_reader(
    rows: _Rows[T],
    row_of: Callable[[Any], T] | None,
    was_of: Callable[[Any], T] | None,
    key_values: Callable[[Any], list[Any]],
) -> _ChangeOf[T]:
    """*row_of* reads `after`; None: it is a row. *was_of* reads `before`; None: it is left out. *key_values* gives the
    values of the key's columns in `before`."""
    key_of, gets = rows.key_of, rows.key_gets
    get_int = (
        gets[0] if rows.key_form.is_number and not any(f.shape.nullable for f in rows.key_fields.values()) else None
    )

    def change_of(envelope: _Envelope[Any, Any]) -> Change[T]:
        op, source, before = _OPS.get(envelope.op), envelope.source, envelope.before
        after = was = key = None
        if op is None:
            raise ValueError(f"its op is {envelope.op!r:.20}, which is no change of a row")
        if op == "delete":
            if before is None:
                raise ValueError("it is a delete without before, which says which row it was")
            key = key_of(key_values(before))
        elif op != "truncate":
            if envelope.after is None:
                raise ValueError(f"its op is {envelope.op!r}, and it has no after")
            after = envelope.after if row_of is None else row_of(envelope.after)
            key = get_int(after) if get_int is not None else key_of([get(after) for get in gets])
        if was_of is not None and before is not None:
            was = was_of(before)
        table = source.table if source.schema in _UNNAMED_SCHEMAS else f"{source.schema}.{source.table}"
        timestamp_ms = source.ts_ms if source.ts_ms is not None else envelope.ts_ms or 0
        lsn = source.lsn if type(source.lsn) is int else 0
        transaction = source.txId if type(source.txId) is int and op != "read" else None
        return Change(op, key, after, was, table, timestamp_ms, lsn, transaction)

    return change_of


def _dict_reader(rows: _Rows[T], columns: _Columns | None, *, before: bool) -> _ChangeOf[T]:
    """The reader of envelopes whose rows are dicts."""
    readers, type_, convert, names = rows.readers(columns), rows.type, msgspec.convert, list(rows.key_fields)
    read_row = _in_place(readers, rows.fields)
    read_key = _in_place({name: readers[name] for name in names}, rows.key_fields)

    def row_of(row: dict[str, Any]) -> T:
        read: T = convert(read_row(row), type_)
        return read

    def key_values(row: dict[str, Any]) -> list[Any]:
        return list(read_key({name: row.get(name) for name in names}).values())

    return _change_reader(rows, row_of, row_of if before else None, key_values)


def _json_decoder(rows: _Rows[T], *, before: bool) -> Callable[[bytes], Change[T]]:
    """The decoder of JSON. Where the type takes each value as it is, rows are decoded to it at once."""
    type_, names, gets = rows.type, list(rows.key_fields), rows.key_gets
    large = [field.get for field in rows.fields.values() if field.shape.without_none.form in (Form.STR, Form.BYTES)]
    decode_dicts = msgspec.json.Decoder(_DictEnvelope).decode
    decode_wrapped = msgspec.json.Decoder(_Wrapped).decode
    decode_rows: Callable[[bytes], Any]
    if before:
        decode_rows = msgspec.json.Decoder(_Envelope[type_, type_]).decode  # type: ignore[valid-type]  # at run time
        change_of_rows = _change_reader(rows, None, lambda row: row, lambda row: [get(row) for get in gets])
    else:
        decode_rows = msgspec.json.Decoder(_Envelope[dict[str, Any], type_]).decode  # type: ignore[valid-type]  # likewise
        change_of_rows = _change_reader(rows, None, None, lambda row: list(map(row.get, names)))
    bare = _dict_reader(rows, None, before=before), not any(rows.readers(None).values())

    @lru_cache(_SCHEMAS_MAX)
    def columns_of(schema: bytes) -> tuple[_ChangeOf[T], bool]:
        """The reader by *schema*, and whether the type takes each value as it is."""
        columns = _connect_columns(schema)
        return _dict_reader(rows, columns, before=before), not any(rows.readers(columns).values())

    def decode(data: bytes) -> Change[T]:
        (change_of, takes_all), read = bare, data
        if data.startswith(_WITH_SCHEMA):
            wrapped = decode_wrapped(data)
            read = bytes(wrapped.payload)
            if read == b"null":
                raise Ignored("it is a tombstone")
            if (schema := bytes(wrapped.schema)) != b"null":
                change_of, takes_all = columns_of(schema)
        if takes_all:
            envelope = decode_rows(read)
            after = envelope.after
            if after is None or _UNAVAILABLE.isdisjoint([get(after) for get in large]):
                return change_of_rows(envelope)
        return change_of(decode_dicts(read))

    return decode


def _reader(shape: Shape, column: _Column | None, bare: _Bare) -> _Reader | None:
    """The reader of values of *column*, for a field of *shape*; *column* None: without a schema."""
    shape = shape.without_none
    match shape.form:
        case _ if column is not None and column.name in (_DECIMAL, _VARIABLE_DECIMAL):
            return _decimal_reader(shape, column)
        case Form.DECIMAL if column is None and bare.decimals is None:
            return _number
        case Form.DATE:
            return _date if column is None or column.name in _DATES else _iso_date
        case Form.DATETIME if not shape.tz:
            return _time_reader(_datetime, column, bare)
        case Form.TIME:
            return _time_reader(_time_of_day, column, bare)
        case Form.TIMEDELTA:
            return _duration_reader(column)
        case Form.ANY | Form.UNION:
            return lambda value: value  # it may be unavailable, in any form
        case Form.BYTES if column is not None and column.kind == "string":
            return _refused("it is a text by its schema, in hexadecimal digits or base64: declare str")
        case Form.RECORD | Form.DICT | Form.TUPLE:
            return _json_text
        case Form.LIST | Form.SET:
            item = _reader(shape.parts[0], None if column is None else column.item or _ABSENT, bare)
            return lambda value: _items(value, item)
    return None


def _refused(reason: str) -> _Reader:
    def refuse(value: Any) -> Any:
        raise ValueError(reason)

    return refuse


def _number(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(_NO_SCALE)
    return value


def _decimal_reader(shape: Shape, column: _Column) -> _Reader:
    convert: Mapping[Form, _Reader] = {Form.INT: _whole, Form.FLOAT: float, Form.STR: lambda number: f"{number:f}"}
    finish = convert.get(shape.form)

    def read(value: Any) -> Any:
        scale, digits = (column.scale, value) if column.name == _DECIMAL else (value["scale"], value["value"])
        unscaled = digits if isinstance(digits, bytes) else b64decode(digits, validate=True)
        number = Decimal(f"{int.from_bytes(unscaled, 'big', signed=True)}E{-scale}")
        return number if finish is None else finish(number)

    return read


def _whole(number: Decimal) -> int:
    if number != int(number):
        raise ValueError(f"{number:f} is no int")
    return int(number)


def _date(value: Any) -> Any:
    return date.fromordinal(_EPOCH_DAY + value) if isinstance(value, int) else _iso_date(value)


def _iso_date(value: Any) -> Any:
    return value.removesuffix("Z") if isinstance(value, str) else value


def _time_reader(of_micros: Callable[[int], Any], column: _Column | None, bare: _Bare) -> _Reader:
    unit = bare.timestamps if column is None else _UNITS.get(column.name)
    per_second, is_in_utc = _PER_SECOND.get(unit or ""), column is not None and column.name in _ISO_IN_UTC

    def read(value: Any) -> Any:
        if isinstance(value, int):
            if per_second is None:
                raise ValueError(_NO_UNIT if column is None else f"it is a number of type {column.name or column.kind}")
            return of_micros(value * 10**6 // per_second)
        return value.removesuffix("Z") if is_in_utc and isinstance(value, str) else value

    return read


def _datetime(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def _time_of_day(micros: int) -> time:
    if not 0 <= micros < _DAY_MICROS:
        raise ValueError(f"{micros} microseconds are no time of a day")
    return _datetime(micros).time()


_DAY_MICROS = 24 * 3600 * 10**6


def _duration_reader(column: _Column | None) -> _Reader:
    unit = "us" if column is None else _UNITS.get(column.name, "us")
    return lambda value: timedelta(microseconds=value * 10**6 // _PER_SECOND[unit]) if type(value) is int else value


def _json_text(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, str) else value


def _items(value: Any, read: _Reader | None) -> Any:
    items = _json_text(value)
    if read is None or not isinstance(items, list):
        return items
    return [None if item is None else read(item) for item in items]


# --- the schemas of messages ------------------------------------------------------------------------------------------


def _connect_columns(schema: bytes) -> _Columns:
    """The columns of a row by a schema of Kafka Connect. Raises ValueError."""
    try:
        fields = {field["field"]: field for field in msgspec.json.decode(schema)["fields"]}
        return {column["field"]: _connect_column(column) for column in fields["after"]["fields"]}
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"its schema is none of an envelope of Debezium: {error!r}") from None


def _connect_column(column: Mapping[str, Any]) -> _Column:
    scale = int((column.get("parameters") or {}).get("scale", 0))
    item = _connect_column(column["items"]) if column["type"] == "array" else None
    return _Column(column["type"], column.get("name") or "", scale, item)


def _avro_columns(schema: Any) -> _Columns:
    """The columns of a row by a schema of Avro. Raises LookupError or TypeError."""
    fields = {field["name"]: field["type"] for field in schema["fields"]}
    members = [member for name in ("before", "after") for member in fields[name]]
    row = next((member for member in members if isinstance(member, dict) and member["type"] == "record"), None)
    if row is None:
        raise LookupError("before and after are no records")
    return {column["name"]: _avro_column(column["type"]) for column in row["fields"]}


def _avro_column(type_: Any) -> _Column:
    if isinstance(type_, list):
        type_ = next((member for member in type_ if member != "null"), "null")
    if isinstance(type_, str):
        return _Column(type_, type_)  # the name of a type that an earlier column has
    full_name = f"{type_.get('namespace', '')}.{type_.get('name', '')}"
    name = type_.get("connect.name") or type_.get("logicalType") or full_name
    item = _avro_column(type_["items"]) if type_["type"] == "array" else None
    return _Column(type_["type"], _DECIMAL if name == "decimal" else name, type_.get("scale", 0), item)


def _without_logical_types(schema: Any) -> Any:
    """*schema* of the bare values."""
    if isinstance(schema, list):
        return [_without_logical_types(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _without_logical_types(part) for name, part in schema.items() if name != "logicalType"}


def _avro(schema: Mapping[str, Any]) -> Any:
    """A schema of Kafka Connect in Avro, as Connect's converters write it."""
    names: set[str] = set()

    def visit(part: Mapping[str, Any]) -> Any:
        type_ = type_of(part)
        return ["null", type_] if part["optional"] else type_

    def type_of(part: Mapping[str, Any]) -> Any:
        kind, name = part["type"], part.get("name", "")
        if kind == "array":
            return {"type": "array", "items": visit(part["items"])}
        if kind != "struct":
            plain = _AVRO_KINDS[kind]
            return {"type": plain, "connect.version": 1, "connect.name": name} if name else plain
        if name in names:
            return name
        names.add(name)
        namespace, _, short = name.rpartition(".")
        fields = [
            {"name": field["field"], "type": visit(field), **({"default": None} if field["optional"] else {})}
            for field in part["fields"]
        ]
        return {"type": "record", "namespace": namespace, "name": short, "fields": fields, "connect.name": name}

    return visit(schema)


_AVRO_KINDS = {
    "boolean": "boolean", "int32": "int", "int64": "long", "double": "double", "string": "string", "bytes": "bytes",
}  # fmt: skip


# --- writing ----------------------------------------------------------------------------------------------------------


class _Encoding(NamedTuple):
    """The encoding of a field."""

    schema: dict[str, Any] | None
    """Kafka Connect's; None: only JSON without schemas has it."""
    write: Callable[[Any], Any] | None = None
    """None: it is as the type has it."""


class _Writer:
    """Writes envelopes: as dicts, and as JSON."""

    def __init__(self, rows: _Rows[Any], name: str, *, schemas: bool) -> None:
        self._rows, self._source_name, self._schemas = rows, name.partition(".")[0], schemas
        encodings = {
            column: _encoding_of(field.shape.without_none, rows.bare, schemas) for column, field in rows.fields.items()
        }
        self.problems = [
            f"value=: field {column!r}: {problem}"
            for column, encoding in encodings.items()
            if (problem := _writing_problem(rows.fields[column].shape.without_none, encoding, rows.bare, schemas))
        ]
        self._plan = [(column, rows.fields[column].get, encoding.write) for column, encoding in encodings.items()]
        omits = rows.shape.tag is not None or any(f.is_omitted or f.may_be_unchanged for f in rows.fields.values())
        self._is_plain = not schemas and not omits and not any(write for _, _, write in self._plan)
        described = msgspec.json.encode(describe(rows.type))
        self._has_floats = b'"float"' in described or b'"any"' in described
        self._empty = {
            column: None if rows.fields[column].shape.nullable else _empty(encoding.schema)
            for column, encoding in encodings.items()
        }
        self._unavailable = {column: _unavailable(encoding.schema) for column, encoding in encodings.items()}
        self._header = self._key_header = b""
        if schemas:
            columns = {
                column: {
                    **(encoding.schema or {"type": "string"}),
                    "optional": rows.fields[column].shape.nullable,
                    "field": column,
                }
                for column, encoding in encodings.items()
            }
            self.schema = _envelope_schema(name, list(columns.values()))
            key = [{**columns[column], "optional": False} for column in rows.key_fields]
            self.key_schema = {"type": "struct", "fields": key, "optional": False, "name": f"{name}.Key"}
            self._header, self._key_header = map(_json_header, (self.schema, self.key_schema))

    def envelope(self, change: Change[Any]) -> dict[str, Any]:
        before = None if change.before is None else self._row(change.before)
        if change.op == "delete" and before is None:
            before = {**self._empty, **self._rows.key_values(change.key)}
        schema, _, table = change.table.rpartition(".")
        source = {
            "version": "1", "connector": "exactlyonce", "name": self._source_name, "ts_ms": change.timestamp_ms,
            "snapshot": "true" if change.op == "read" else "false", "db": "", "schema": schema or "public",
            "table": table, "txId": change.transaction, "lsn": change.lsn,
        }  # fmt: skip
        return {
            "before": before, "after": None if change.after is None else self._row(change.after), "source": source,
            "op": _OP_LETTERS[change.op], "ts_ms": change.timestamp_ms,
        }  # fmt: skip

    def _row(self, row: Any) -> Any:
        if self._is_plain:
            return row
        values: dict[str, Any] = {}
        for column, get, write in self._plan:
            value = get(row)
            if value is UNCHANGED:
                value = self._unavailable[column]
            elif write is not None and value is not None:
                value = write(value)
            values[column] = value
        return values

    def json(self, change: Change[Any]) -> bytes:
        envelope = self.envelope(change)
        text = _encode_json(envelope)
        if self._has_floats:
            require_finite(envelope, text)
        return self._header + text + b"}" if self._schemas else text

    def json_key(self, key: Mapping[str, Any]) -> bytes:
        return self._key_header + _encode_json(key) + b"}" if self._schemas else _encode_json(key)


def _avro_encoder(writer: _Writer, schema: Any) -> Callable[[Change[Any]], bytes]:
    parsed, to_builtins = fastavro.parse_schema(schema), msgspec.to_builtins
    return lambda change: encoded(to_builtins(writer.envelope(change), builtin_types=(bytes,)), parsed)


_encode_json = msgspec.json.Encoder().encode


def _json_header(schema: Any) -> bytes:
    return b'{"schema":' + _encode_json(schema) + b',"payload":'


def _key_value(shape: Shape, text: Any) -> Any:
    if shape.form is Form.DATE:
        return date.fromisoformat(text).toordinal() - _EPOCH_DAY
    return int(text) if shape.scalar is Form.INT else text


def _empty(schema: Mapping[str, Any] | None) -> Any:
    """The value that Debezium has for a column that it does not know, and that cannot be null."""
    if schema is None:
        return None
    return _EMPTY_NAMED.get(schema.get("name", ""), _EMPTY[schema["type"]])


def _unavailable(schema: Mapping[str, Any] | None) -> Any:
    """The value that Debezium has for one that the database did not send."""
    kind = "string" if schema is None else schema["type"]
    if kind != "array" or schema is None:
        return UNAVAILABLE if kind == "bytes" else _TEXT
    kinds = {"int32": _UNAVAILABLE_ARRAYS[1], "int64": _UNAVAILABLE_ARRAYS[1]}
    return (
        _UNAVAILABLE_ARRAYS[2] if schema["items"].get("name") == _UUID else kinds.get(schema["items"]["type"], [_TEXT])
    )


_EMPTY: Mapping[str, Any] = {
    "boolean": False, "int32": 0, "int64": 0, "double": 0.0, "string": "", "bytes": b"", "array": (),
    "struct": {"scale": 0, "value": b"\0"},
}  # fmt: skip
_EMPTY_NAMED = {"io.debezium.time.ZonedTimestamp": "1970-01-01T00:00:00Z", "io.debezium.data.Json": "{}"}


def _writing_problem(shape: Shape, encoding: _Encoding, bare: _Bare, schemas: bool) -> str | None:
    if schemas:
        return _NO_TYPE_WRITTEN if encoding.schema is None else None
    if shape.form is Form.DECIMAL and bare.decimals is None:
        return _NO_SCALE_WRITTEN
    is_naive = shape.form is Form.TIME or (shape.form is Form.DATETIME and shape.tz is False)
    return _NO_UNIT_WRITTEN if is_naive and bare.timestamps is None else None


def _encoding_of(shape: Shape, bare: _Bare, schemas: bool) -> _Encoding:
    unit = bare.timestamps or ("us" if schemas else None)
    match shape.scalar or shape.form:
        case Form.BOOL:
            return _Encoding({"type": "boolean"})
        case Form.INT:
            return _Encoding({"type": "int64"})
        case Form.FLOAT:
            return _Encoding({"type": "double"})
        case Form.STR:
            return _Encoding({"type": "string"})
        case Form.BYTES:
            return _Encoding({"type": "bytes"})
        case Form.UUID:
            return _Encoding({"type": "string", "name": _UUID}, str)
        case Form.DATE:
            return _Encoding({"type": "int32", "name": "io.debezium.time.Date"}, _days)
        case Form.DATETIME if shape.tz:
            return _Encoding({"type": "string", "name": "io.debezium.time.ZonedTimestamp"}, _in_utc)
        case Form.DATETIME:
            schema = {"type": "int64", "name": f"io.debezium.time.{_PREFIXES[unit or 'us']}Timestamp"}
            return _Encoding(schema if shape.tz is False else None, _numbers(_micros_since_epoch, unit))
        case Form.TIME:
            kind = "int32" if unit == "ms" else "int64"
            schema = {"type": kind, "name": f"io.debezium.time.{_PREFIXES[unit or 'us']}Time"}
            return _Encoding(schema, _numbers(_micros_of_day, unit))
        case Form.TIMEDELTA:
            return _Encoding({"type": "int64", "name": "io.debezium.time.MicroDuration"}, _micros)
        case Form.DECIMAL if bare.decimals == "string":
            return _Encoding({"type": "string"}, "{:f}".format)
        case Form.DECIMAL:
            return _Encoding(_VARIABLE_SCHEMA, _variable_decimal if schemas else _refused(_NO_SCALE_WRITTEN))
        case Form.LIST | Form.SET if (item := shape.parts[0]).without_none.form in SCALARS:
            items, write = _encoding_of(item.without_none, bare, schemas)
            array = items and {"type": "array", "items": {**items, "optional": item.nullable}}
            return _Encoding(array, write and (lambda values: [None if v is None else write(v) for v in values]))
        case Form.RECORD | Form.DICT | Form.TUPLE | Form.LIST | Form.SET:
            return _Encoding({"type": "string", "name": "io.debezium.data.Json"}, lambda v: _encode_json(v).decode())
    return _Encoding(None)


_NO_TYPE_WRITTEN = (
    "it has values of no one type, and a schema of Debezium's needs one; a datetime is to be "
    "Annotated[datetime, msgspec.Meta(tz=True)], or False"
)
_NO_SCALE_WRITTEN = (
    'a Decimal needs schemas, or is written as a text: give DebeziumCodec schemas=True, or decimals="string"'
)
_NO_UNIT_WRITTEN = "a time without a zone is written as a number: give DebeziumCodec timestamps=, its unit"
_PREFIXES: Mapping[Unit, str] = {"ms": "", "us": "Micro", "ns": "Nano"}
_VARIABLE_SCHEMA: dict[str, Any] = {
    "type": "struct",
    "name": _VARIABLE_DECIMAL,
    "fields": [
        {"type": "int32", "optional": False, "field": "scale"},
        {"type": "bytes", "optional": False, "field": "value"},
    ],
}


def _variable_decimal(number: Decimal) -> dict[str, Any]:
    sign, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f'{number} has no decimal places: give DebeziumCodec decimals="string"')
    unscaled = int("".join(map(str, digits))) * (-1 if sign else 1) * 10 ** max(exponent, 0)
    return {
        "scale": max(-exponent, 0),
        "value": unscaled.to_bytes(unscaled.bit_length() // 8 + 1, "big", signed=True),
    }


def _days(value: date) -> int:
    return value.toordinal() - _EPOCH_DAY


def _in_utc(value: datetime) -> str:
    return value.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")


def _numbers(micros: Callable[[Any], int], unit: Unit | None) -> Callable[[Any], Any]:
    per_second = _PER_SECOND.get(unit or "")

    def write(value: datetime | time) -> int | str:
        if value.tzinfo is not None:
            if isinstance(value, datetime):
                return _in_utc(value)
            raise ValueError(f"{value} has a time zone, and a column of time has none")
        if per_second is None:
            raise ValueError(_NO_UNIT_WRITTEN)
        return micros(value) * per_second // 10**6

    return write


def _micros(value: timedelta) -> int:
    return value // timedelta(microseconds=1)


def _micros_since_epoch(value: datetime) -> int:
    return _micros(value - _EPOCH)


def _micros_of_day(value: time) -> int:
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 10**6 + value.microsecond


def _envelope_schema(name: str, columns: list[dict[str, Any]]) -> dict[str, Any]:
    def struct(fields: list[dict[str, Any]], part: str, field: str = "", *, optional: bool = False) -> dict[str, Any]:
        place = {"field": field} if field else {}
        return {"type": "struct", "fields": fields, "optional": optional, "name": f"{name}.{part}", **place}

    source = [{"type": kind, "optional": optional, "field": field} for field, kind, optional in _SOURCE_FIELDS]
    return struct(
        [
            struct(columns, "Value", "before", optional=True),
            struct(columns, "Value", "after", optional=True),
            struct(source, "Source", "source"),
            {"type": "string", "optional": False, "field": "op"},
            {"type": "int64", "optional": True, "field": "ts_ms"},
        ],
        "Envelope",
    )


_SOURCE_FIELDS = (
    ("version", "string", False), ("connector", "string", False), ("name", "string", False), ("ts_ms", "int64", False),
    ("snapshot", "string", True), ("db", "string", False), ("schema", "string", False), ("table", "string", False),
    ("txId", "int64", True), ("lsn", "int64", True),
)  # fmt: skip
