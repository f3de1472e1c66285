"""The bytes of the checkpoint topic: Avro single-object values and their keys.

A value is 0xC3 0x01, the CRC-64-AVRO fingerprint of the schema it was written with (little endian), and Avro binary. A
schema in use never changes: a new version is appended to its table. The last version is written, and all are read,
resolved to the last. The long lists of a record are packed, by columns, deflated, in one field: what repeats, or grows
by steps, takes next to nothing. A list of records is written field by field, each over all records; a list of lists as
its lengths, then the items of all; numbers are steps from the one before; equal texts in a row are one text and its
count. Bytes of any form allocate no more than a fixed multiple of `COLUMNS_SIZE_MAX`. A manifest that is larger than a
record has its lists in further records, the *parts*, which are written before it in the same transaction; it names
their digests. Sizes are bounded before anything is decoded or inflated, and whatever is wrong with a value raises
`DamagedRecord`.
"""

from __future__ import annotations

import hashlib
import io
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby, islice, repeat
from operator import attrgetter, sub
from typing import Any, TypeVar

import msgspec
from fastavro import parse_schema, schemaless_reader, schemaless_writer
from fastavro.schema import fingerprint, to_parsing_canonical_form

from exactlyonce.checkpoint.records.manifest import (
    BLOCK_SIZE_MAX,
    LATE_AT_FLOOR,
    LOSS_ACCEPTED,
    MANIFEST_SIZE_MAX,
    STATS_SIZE_MAX,
    AbortedCheckpoint,
    BlockRef,
    ChannelLog,
    CheckpointStats,
    Committable,
    Finalized,
    Incarnation,
    Manifest,
    OperatorSnapshot,
    OrderLog,
    Repair,
    SourceOffset,
    StoreCommittable,
    SubtaskStats,
    Written,
)
from exactlyonce.pipeline.errors import Halt, InvariantViolation

COLUMNS_SIZE_MAX = 16 * 1024 * 1024
"""The most bytes of all columns before they are deflated."""
_LEVEL = 6
_LONG_MIN, _LONGS = -(1 << 63), 1 << 64
_FIXED_SHA256 = {"type": "fixed", "name": "Sha256", "size": 32}


class BadColumns(ValueError):
    """No record has these columns."""


@dataclass(frozen=True, eq=False)
class ListOf:
    """The kind of a list; in Python it is a tuple."""

    items: Kind

    @cached_property
    def width(self) -> int:
        """The number of columns of its items."""
        return sum(1 for _ in _columns_of(self.items))


class RecordOf(msgspec.Struct, frozen=True):
    """The kind of a record: its fields in order, and how records become columns and are made of them."""

    fields: Mapping[str, Kind]
    split: Callable[[Sequence[Any]], Iterable[Sequence[Any]]]
    join: Callable[[Sequence[Sequence[Any]]], Sequence[Any]]


Kind = str | ListOf | RecordOf
"""The kind of a value: "long", "string", "boolean", "bytes" or "sha256", a list, or a record."""


class Layout(msgspec.Struct, frozen=True):
    """The fields of a record that are packed together, in order."""

    fields: Mapping[str, Kind]
    schema: Any
    """Of their columns, as fastavro has parsed it."""


def layout_of(**fields: Kind) -> Layout:
    columns = [column for kind in fields.values() for column in _columns_of(kind)]
    types: list[object] = [_FIXED_SHA256["name"] if column == "sha256" else column for column in columns]
    if "sha256" in columns:
        types[columns.index("sha256")] = _FIXED_SHA256  # it is defined where it comes first
    arrays = [{"name": f"c{place}", "type": {"type": "array", "items": items}} for place, items in enumerate(types)]
    return Layout(fields, parse_schema({"type": "record", "name": "Columns", "fields": arrays}))


def _columns_of(kind: Kind) -> Iterator[str]:
    """The columns of a value, as `_to_columns` writes them."""
    if isinstance(kind, RecordOf):
        for field in kind.fields.values():
            yield from _columns_of(field)
    elif isinstance(kind, ListOf):
        yield "long"
        yield from _columns_of(kind.items)
    else:
        yield from ("long", "string") if kind == "string" else (kind,)


def record_of(struct: type[msgspec.Struct], **fields: Kind) -> RecordOf:
    """The kind of *struct*; fields that are not among *fields* are not written, and read with their defaults."""
    names = tuple(fields)
    return RecordOf(
        fields,
        lambda records: [list(map(attrgetter(name), records)) for name in names],
        lambda columns: [struct(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)],
    )


def tuple_of(**fields: Kind) -> RecordOf:
    """The kind of a plain tuple with these items."""
    return RecordOf(
        fields,
        lambda rows: list(zip(*rows, strict=True)) or [()] * len(fields),
        lambda columns: list(zip(*columns, strict=True)),
    )


def pack(layout: Layout, record: msgspec.Struct) -> bytes:
    """The fields of *record* that *layout* names, by columns."""
    columns: list[Sequence[Any]] = []
    for name, kind in layout.fields.items():
        _to_columns(columns, kind, [getattr(record, name)])
    stream = io.BytesIO()
    schemaless_writer(stream, layout.schema, {f"c{place}": column for place, column in enumerate(columns)})
    return stream.getvalue()


def unpack(layout: Layout, packed: bytes) -> dict[str, Any]:
    """The fields that `pack` wrote. Raises `BadColumns`, or an error of Avro's decoder."""
    stream = io.BytesIO(packed)
    record: Any = schemaless_reader(stream, layout.schema, None)
    if stream.tell() != len(packed):
        raise BadColumns(f"its lists have {len(packed) - stream.tell():,} bytes too many")
    columns = iter(record.values())
    return {name: _from_columns(columns, kind, 1, len(packed))[0] for name, kind in layout.fields.items()}


def deflate(columns: bytes) -> bytes:
    """*columns* for `inflate`."""
    return zlib.compress(columns, _LEVEL)


def inflate(body: bytes, size: int) -> bytes:
    """The *size* bytes that were deflated to *body*. Raises `BadColumns` if they are fewer or more."""
    if not 0 <= size <= COLUMNS_SIZE_MAX:
        raise BadColumns(f"its lists claim {size:,} bytes; the limit is {COLUMNS_SIZE_MAX:,}")
    inflater = zlib.decompressobj()
    try:
        columns = inflater.decompress(body, size + 1)
    except zlib.error as error:
        raise BadColumns(f"its lists do not inflate: {error}") from error
    if len(columns) != size or not inflater.eof or inflater.unused_data:
        raise BadColumns(f"its lists are not the {size:,} bytes that they claim")
    return columns


# --- columns


def _to_columns(columns: list[Sequence[Any]], kind: Kind, values: Sequence[Any]) -> None:
    """Add the columns of *values* to *columns*."""
    if isinstance(kind, RecordOf):
        for field, column in zip(kind.fields.values(), kind.split(values), strict=True):
            _to_columns(columns, field, column)
    elif isinstance(kind, ListOf):
        _to_columns(columns, "long", list(map(len, values)))
        _to_columns(columns, kind.items, list(chain.from_iterable(values)))
    elif kind == "long":
        columns.append(_wrapped(list(map(sub, values, chain((0,), values)))))
    elif kind == "string":
        runs = [(text, sum(1 for _ in run)) for text, run in groupby(values)]
        columns.append([length for _, length in runs])
        columns.append([text for text, _ in runs])
    else:
        columns.append(values)


def _from_columns(columns: Iterator[list[Any]], kind: Kind, count: int, items_max: int) -> Sequence[Any]:
    """*count* values. No list has more than *items_max* items: each takes a byte at least, besides texts."""
    if kind == "string":
        lengths, texts = next(columns), next(columns)
        if min(lengths, default=1) < 1 or sum(lengths) != count or len(texts) != len(lengths):
            raise BadColumns("a column of texts has another length")
        return texts if len(texts) == count else list(chain.from_iterable(map(repeat, texts, lengths)))
    if isinstance(kind, str):
        values = next(columns)
        if len(values) != count:
            raise BadColumns("a column has another length")
        return _wrapped(list(accumulate(values))) if kind == "long" else values
    if isinstance(kind, RecordOf):
        return kind.join([_from_columns(columns, field, count, items_max) for field in kind.fields.values()])
    sizes = _from_columns(columns, "long", count, items_max)
    total = sum(sizes)
    if min(sizes, default=0) < 0 or total > items_max:
        raise BadColumns("the length of a list cannot be")
    if not total:  # as in most lists of most records
        if any(islice(columns, kind.width)):
            raise BadColumns("a column has another length")
        return [()] * count
    items = _from_columns(columns, kind.items, total, items_max)
    return [tuple(items[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _wrapped(values: list[int]) -> list[int]:
    """*values* in 64 bits: the step from the lowest number to the highest would need more."""
    if not values or (min(values) >= _LONG_MIN and max(values) < -_LONG_MIN):
        return values
    return [(value - _LONG_MIN) % _LONGS + _LONG_MIN for value in values]


MAGIC = b"\xc3\x01"
_HEADER_SIZE = 10
_LENGTH_SIZE_MAX = 5
"""Bytes of the length of a field."""
PART_BYTES = MANIFEST_SIZE_MAX - 64
"""The bytes of a manifest's lists in one record: beside them a part has its numbers."""


class DamagedRecord(Halt):
    """A record of the checkpoint topic is damaged."""


class TooLarge(InvariantViolation):
    """A record is over its limit, and was not written."""


class Block(msgspec.Struct, frozen=True):
    """A piece of a snapshot, as one record of the checkpoint topic."""

    operator: str
    checkpoint: int
    kind: str
    codec: str
    """How `body` was compressed."""
    schema: str
    """The format of the decompressed body, in the writer's words."""
    body: bytes


class ManifestPart(msgspec.Struct, frozen=True):
    """Some bytes of the lists of a manifest that is larger than a record."""

    checkpoint: int
    incarnation: int
    part: int
    """From 1."""
    body: bytes


Decision = Incarnation | Manifest | Finalized | Repair
"""A record of partition 0. Only the coordinator's transactional producer writes these, and parts of manifests."""

T = TypeVar("T", bound=Decision | ManifestPart | CheckpointStats | Block)


def _record(_name: str, **fields: object) -> dict[str, Any]:
    return {"type": "record", "name": _name, "fields": [{"name": name, "type": of} for name, of in fields.items()]}


def _with(record: dict[str, Any], **added: tuple[object, object]) -> dict[str, Any]:
    """The next version of *record*, with more fields: each a type, and the value that older versions are read with."""
    fields = [{"name": name, "type": of, "default": default} for name, (of, default) in added.items()]
    return {**record, "fields": [*record["fields"], *fields]}


def _with_items(record: dict[str, Any], **items: object) -> dict[str, Any]:
    """The next version of *record*: with arrays of other items, at their old places."""
    types = {name: _array(of) for name, of in items.items()}
    fields = [{**field, "type": types.get(field["name"], field["type"])} for field in record["fields"]]
    return {**record, "fields": fields}


def _packed(record: dict[str, Any], names: Collection[str], **added: object) -> dict[str, Any]:
    """The next version of *record*: with one field of bytes for the lists *names*, and others for their parts."""
    fields = [field for field in record["fields"] if field["name"] not in names]
    packed = {"layout": "int", "size": "long", **added, "body": "bytes"}
    return {**record, "fields": [*fields, *({"name": name, "type": of} for name, of in packed.items())]}


def _array(items: object) -> dict[str, object]:
    return {"type": "array", "items": items}


def _arrays(**items: object) -> dict[str, tuple[object, object]]:
    """Fields for `_with`: arrays that are empty in older versions."""
    return {name: (_array(of), []) for name, of in items.items()}


_SINK_1 = _record("SinkPartitions", sink="string", topic="string", partitions="int")
_SHA256 = {"type": "fixed", "name": "Sha256", "size": 32}
_BLOCK_REF = _record("BlockRef", partition="int", offset="long", key="string", size="int", sha256=_SHA256)
_SOURCE_OFFSET_1 = _record(
    "SourceOffset", source="string", topic="string", topic_id="string", partition="int", offset="long"
)
_OPERATOR = _record(
    "OperatorSnapshot", operator="string", parallelism="int", state_bytes="long", index=_array(_array(_BLOCK_REF))
)
_ORDER_LOG = _record("OrderLog", task="string", subtask="int", blocks=_array("BlockRef"))
_COMMITTABLE = _record(
    "Committable",
    transactional_id="string",
    producer_id="long",
    epoch="int",
    transaction_version="int",
    cluster_id="string",
    sink="string",
    subtask="int",
    checkpoint="long",
    written=_array(_record("Written", topic="string", partition="int", first_offset="long", count="long")),
)
_STORE_COMMITTABLE = _record(
    "StoreCommittable",
    sink="string",
    subtask="int",
    checkpoint="long",
    records="long",
    kind="string",
    description="string",
    previous="long",
    blocks=_array("BlockRef"),
    body="bytes",
)
_CHANNEL_LOG_1 = _record("ChannelLog", task="string", subtask="int", records="long", blocks=_array("BlockRef"))
_LEDGER = _record("LedgerPosition", sink="string", subtask="int", checkpoint="long")
_INCARNATION_1 = _record(
    "Incarnation",
    incarnation="long",
    host="string",
    process="long",
    started_at_ms="long",
    heartbeat_ms="long",
    fenced_below="long",
)
_TEXT, _FLAG = ("string", ""), ("boolean", False)
_INCARNATION_2 = _with(_INCARNATION_1, ended=_FLAG)
_INCARNATION_3 = _with(_INCARNATION_2, bounded=_FLAG, cancelled=_TEXT, storage=_TEXT, condemned=_FLAG)
_INCARNATION_4 = _with(_INCARNATION_3, machine=_TEXT)
_INCARNATION_5 = _with(_INCARNATION_4, exit_code=("int", 0), failure=_TEXT, skip=_TEXT)

_MANIFEST_1 = _record(
    "Manifest",
    pipeline="string",
    checkpoint="long",
    incarnation="long",
    attempt="long",
    kind="string",
    base="long",
    previous="long",
    triggered_at_ms="long",
    completed_at_ms="long",
    fingerprint="string",
    max_parallelism="int",
    parallelism="int",
    block_partitions="int",
    block_end_offsets=_array("long"),
    written_bytes="long",
    offsets=_array(_SOURCE_OFFSET_1),
    operators=_array(_OPERATOR),
    order_logs=_array(_ORDER_LOG),
    committables=_array(_COMMITTABLE),
    sinks=_array(_SINK_1),
)

_SOURCE_OFFSET_2 = _with(_SOURCE_OFFSET_1, leader_epoch=("int", -1))
_MANIFEST_2 = _with_items(_MANIFEST_1, offsets=_SOURCE_OFFSET_2)
_MANIFEST_3 = _with(_MANIFEST_2, **_arrays(staged=_STORE_COMMITTABLE, ledger=_LEDGER))
_MANIFEST_4 = _with(
    _MANIFEST_3, **_arrays(requests="string", channel_logs=_CHANNEL_LOG_1), storage=_TEXT, origin=_TEXT
)  # fmt: skip
_MANIFEST_5 = _with_items(_MANIFEST_4, channel_logs=_with(_CHANNEL_LOG_1, indexed=_FLAG))
_SOURCE_OFFSET_3 = _with(_SOURCE_OFFSET_2, skipped=("long", 0), **_arrays(skipped_at="long"))
_DISTRIBUTED_SINK = _record("DistributedSink", sink="string", partitions="int")
_RECORD_PLACE = _record("RecordPlace", topic="string", partition="int", offset="long")
_MANIFEST_6 = _with(_with_items(_MANIFEST_5, offsets=_SOURCE_OFFSET_3), **_arrays(skips=_RECORD_PLACE))
_MANIFEST_7 = _with(_MANIFEST_6, **_arrays(outputs_by_partition=_DISTRIBUTED_SINK))


def _split_keys(keys: Sequence[str]) -> list[Sequence[Any]]:
    parsed = [(BlockKey.parse(text), text) for text in keys]
    rows = [(*msgspec.structs.astuple(key or _NO_KEY), "" if key else text) for key, text in parsed]
    return list(zip(*rows, strict=True)) or [()] * len(_BLOCK_KEY_COLUMNS)


def _join_keys(columns: Sequence[Sequence[Any]]) -> list[str]:
    return [foreign if parts[0] < 0 else str(BlockKey(*parts)) for *parts, foreign in zip(*columns, strict=True)]


_BLOCK_KEY_COLUMNS: dict[str, Kind] = {
    "incarnation": "long", "checkpoint": "long", "operator": "string", "key_group": "long", "part": "long",
    "attempt": "long", "nonce": "string", "foreign": "string",
}  # fmt: skip
"""The parts of a `BlockKey`; a key of another form is text, and no incarnation is below 0."""
_BLOCK_KEYS = RecordOf(_BLOCK_KEY_COLUMNS, _split_keys, _join_keys)
_BLOCKS = ListOf(record_of(BlockRef, partition="long", offset="long", key=_BLOCK_KEYS, size="long", sha256="sha256"))
_MANIFEST_LISTS_1 = layout_of(
    offsets=ListOf(
        record_of(
            SourceOffset, source="string", topic="string", topic_id="string", partition="long", offset="long",
            leader_epoch="long", skipped="long", skipped_at=ListOf("long"),
        )
    ),
    operators=ListOf(
        record_of(
            OperatorSnapshot, operator="string", parallelism="long", state_bytes="long", index=ListOf(_BLOCKS)
        )
    ),
    order_logs=ListOf(record_of(OrderLog, task="string", subtask="long", blocks=_BLOCKS)),
    committables=ListOf(
        record_of(
            Committable, transactional_id="string", producer_id="long", epoch="long", transaction_version="long",
            cluster_id="string", sink="string", subtask="long", checkpoint="long",
            written=ListOf(record_of(Written, topic="string", partition="long", first_offset="long", count="long")),
        )
    ),
    staged=ListOf(
        record_of(
            StoreCommittable, sink="string", subtask="long", checkpoint="long", records="long", kind="string",
            description="string", previous="long", blocks=_BLOCKS, body="bytes",
        )
    ),
    ledger=ListOf(tuple_of(sink="string", subtask="long", checkpoint="long")),
    channel_logs=ListOf(
        record_of(ChannelLog, task="string", subtask="long", records="long", blocks=_BLOCKS, indexed="boolean")
    ),
)  # fmt: skip
_SOURCE_OFFSET_4 = record_of(
    SourceOffset, source="string", topic="string", topic_id="string", partition="long", offset="long",
    leader_epoch="long", skipped="long", skipped_at=ListOf("long"), ended="boolean",
)  # fmt: skip
_MANIFEST_LISTS_2 = layout_of(**{**_MANIFEST_LISTS_1.fields, "offsets": ListOf(_SOURCE_OFFSET_4)})
_SOURCE_OFFSET_5 = record_of(SourceOffset, **_SOURCE_OFFSET_4.fields, cursor="string")
_MANIFEST_LISTS_3 = layout_of(**{**_MANIFEST_LISTS_1.fields, "offsets": ListOf(_SOURCE_OFFSET_5)})
_SOURCE_OFFSET_6 = record_of(SourceOffset, **_SOURCE_OFFSET_5.fields, floor="long")
_MANIFEST_LISTS_4 = layout_of(**{**_MANIFEST_LISTS_1.fields, "offsets": ListOf(_SOURCE_OFFSET_6)})
LAYOUTS: dict[type, tuple[Layout, ...]] = {
    Manifest: (_MANIFEST_LISTS_1, _MANIFEST_LISTS_2, _MANIFEST_LISTS_3, _MANIFEST_LISTS_4),
    Finalized: (layout_of(fates=ListOf(tuple_of(transactional_id="string", fate="string"))),),
    CheckpointStats: (
        layout_of(
            subtasks=ListOf(
                record_of(
                    SubtaskStats,
                    task="string",
                    subtask="long",
                    waiting_ms="long",
                    aligning_ms="long",
                    snapshot_ms="long",
                    capture_ms="long",
                    flush_ms="long",
                    state_bytes="long",
                    written_bytes="long",
                    records_in_flight="long",
                    bytes_in_flight="long",
                )
            ),
            aborted=ListOf(
                record_of(AbortedCheckpoint, checkpoint="long", before_ms="long", lasted_ms="long", reason="string")
            ),
        ),
    ),
}
"""Every way in which the lists of a class were ever packed, oldest first; a record has its place here."""

_MANIFEST_8 = _packed(_MANIFEST_7, _MANIFEST_LISTS_1.fields, parts=_array(_SHA256))
_SINK_2 = _with(_SINK_1, topic_id=_TEXT, partitioner=_TEXT)
_MANIFEST_9 = _with(_with_items(_MANIFEST_8, sinks=_SINK_2), rules=("int", LATE_AT_FLOOR))
_FINALIZED_1 = _record(
    "Finalized",
    checkpoint="long",
    incarnation="long",
    at_ms="long",
    fates=_array(_record("Fate", transactional_id="string", fate="string")),
)
_FINALIZED_2 = _packed(_FINALIZED_1, ("fates",))
_FINALIZED_3 = _with(_FINALIZED_2, decided_at_ms=("long", 0), stats=("bytes", ""))

SCHEMAS: dict[type, tuple[dict[str, object], ...]] = {
    Manifest: (
        *(_MANIFEST_1, _MANIFEST_2, _MANIFEST_3, _MANIFEST_4, _MANIFEST_5, _MANIFEST_6, _MANIFEST_7),
        *(_MANIFEST_8, _MANIFEST_9),
    ),
    ManifestPart: (_record("ManifestPart", checkpoint="long", incarnation="long", part="int", body="bytes"),),
    Finalized: (_FINALIZED_1, _FINALIZED_2, _FINALIZED_3),
    CheckpointStats: (_packed(_record("CheckpointStats", checkpoint="long"), ()),),
    Incarnation: (_INCARNATION_1, _INCARNATION_2, _INCARNATION_3, _INCARNATION_4, _INCARNATION_5),
    Repair: (
        _record(
            "Repair",
            checkpoint="long",
            number="long",
            incarnation="long",
            replaced="string",
            committable=_COMMITTABLE,
        ),
    ),
    Block: (
        _record(
            "Block", operator="string", checkpoint="long", kind="string", codec="string", schema="string", body="bytes"
        ),
    ),
}
"""Every version of a schema that was ever written, by class, oldest first."""

SIZE_MAX: dict[type, int] = {
    Manifest: MANIFEST_SIZE_MAX,
    ManifestPart: MANIFEST_SIZE_MAX,
    Finalized: BLOCK_SIZE_MAX,
    CheckpointStats: STATS_SIZE_MAX,
    Incarnation: MANIFEST_SIZE_MAX,
    Repair: BLOCK_SIZE_MAX,
    Block: BLOCK_SIZE_MAX,
}
"""A mark and a repair have room for four times as much as a manifest was taken for: see `_require_room_after`. A mark
has `CheckpointStats`, too."""

_TUPLES = {
    "sinks": ("sink", "topic", "partitions", "topic_id", "partitioner"),
    "fates": ("transactional_id", "fate"),
    "ledger": ("sink", "subtask", "checkpoint"),
    "outputs_by_partition": ("sink", "partitions"),
}
"""Fields whose elements are plain tuples in Python; Avro knows records only."""


class _Schema(msgspec.Struct, frozen=True):
    kind: type
    parsed: Any
    fingerprint: bytes
    """CRC-64-AVRO of the canonical form, little endian."""

    @property
    def is_packed(self) -> bool:
        return any(field["name"] == "layout" for field in self.parsed["fields"])


def _parse(kind: type, schema: Mapping[str, object]) -> _Schema:
    parsed = parse_schema(dict(schema))
    digest = fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO")
    return _Schema(kind, parsed, bytes.fromhex(digest))


_VERSIONS = {kind: [_parse(kind, version) for version in versions] for kind, versions in SCHEMAS.items()}
_WRITTEN = {kind: versions[-1] for kind, versions in _VERSIONS.items()}
_KNOWN = {schema.fingerprint: schema for versions in _VERSIONS.values() for schema in versions}
_READ_AS = {(kind, schema.is_packed): schema for kind, versions in _VERSIONS.items() for schema in versions}
"""The newest version of each form: the others are resolved to it."""


def encode(record: Decision | ManifestPart | CheckpointStats | Block) -> bytes:
    """The value that stands for *record* in the topic. Raises `TooLarge`, also for a manifest that needs parts."""
    if isinstance(record, Manifest):
        *parts, value = encode_in_parts(record)
        if parts:
            raise _too_large(Manifest, sum(map(len, parts)) + len(value), MANIFEST_SIZE_MAX)
        return value
    if isinstance(record, Finalized | CheckpointStats):
        return _value(type(record), _packed_fields(record))
    if isinstance(record, Block | ManifestPart):
        return _value(type(record), msgspec.structs.asdict(record))
    return _value(type(record), _to_avro(record))


def encode_in_parts(manifest: Manifest, part_bytes: int = PART_BYTES) -> tuple[bytes, ...]:
    """The values that stand for *manifest*: its parts' in order, then its own, the only one if it has room.

    Each has *part_bytes* of its lists at most. Raises `TooLarge`, also if it could never be finalized or repaired.
    """
    _require_room_after(manifest)
    fields = {**_packed_fields(manifest), "parts": ()}
    body = fields["body"]
    own = _value(Manifest, {**fields, "body": b""})
    if len(body) <= min(part_bytes, MANIFEST_SIZE_MAX - len(own) - _LENGTH_SIZE_MAX):
        return (_value(Manifest, fields),)
    pieces = [body[start : start + part_bytes] for start in range(0, len(body), part_bytes)]
    parts = [
        encode(ManifestPart(manifest.checkpoint, manifest.incarnation, number, piece))
        for number, piece in enumerate(pieces, 1)
    ]
    digests = [hashlib.sha256(part).digest() for part in parts]
    return (*parts, _value(Manifest, {**fields, "body": b"", "parts": digests}))


def _require_room_after(manifest: Manifest) -> None:
    """Raise `TooLarge` unless the mark of *manifest*, and a repair of each committable, are a quarter of what may be.

    The fates may differ, and a repair has other offsets.
    """
    fates = tuple((name, LOSS_ACCEPTED) for name in sorted(manifest.decided))
    records: list[Finalized | Repair] = [Finalized(manifest.checkpoint, manifest.incarnation, 0, fates)]
    if manifest.committables:
        widest = max(manifest.committables, key=lambda committable: len(committable.written))
        records.append(Repair(manifest.checkpoint, 1, manifest.incarnation, widest.transactional_id, widest))
    for record in records:
        size, limit = len(encode(record)), SIZE_MAX[type(record)] // 4
        if size > limit:
            raise _too_large(type(record), size, limit)


def decode(value: bytes, expected: type[T], parts: Iterable[bytes] = ()) -> T:
    """The record of class *expected* that *value* stands for, or `DamagedRecord`.

    *parts* are the values of a manifest's parts, in any order, and maybe more.
    """
    fields = _decoded(value, expected)
    layout = fields.pop("layout", None)
    try:
        if layout is None:
            return msgspec.convert(_from_avro(fields), expected)
        body, size = fields.pop("body"), fields.pop("size")
        if digests := fields.pop("parts", ()):
            body = _joined(digests, parts)
        layouts = LAYOUTS[expected]
        if not 0 <= layout < len(layouts):
            raise BadColumns(f"layout {layout} of its lists is unknown: written by a newer exactlyonce, or damaged")
        lists = unpack(layouts[layout], inflate(body, size))
        others = msgspec.convert(_from_avro({**fields, **dict.fromkeys(lists, ())}), expected)
        return msgspec.structs.replace(others, **lists)
    except DamagedRecord:
        raise
    except Exception as error:  # damaged bytes make the Avro decoder raise nearly anything
        raise _undecodable(expected, error) from error


def _decoded(value: bytes, expected: type) -> dict[str, Any]:
    """The fields of *value*, as Avro has them."""
    if len(value) > SIZE_MAX[expected]:
        raise DamagedRecord(f"{_kind(expected)} of {len(value):,} bytes is over the limit of {SIZE_MAX[expected]:,}.")
    schema = _schema_of(value)
    if schema.kind is not expected:
        raise DamagedRecord(f"A {_kind(schema.kind)} lies where a {_kind(expected)} should be.")
    stream = io.BytesIO(value)
    stream.seek(_HEADER_SIZE)
    try:
        fields: Any = schemaless_reader(stream, schema.parsed, _READ_AS[expected, schema.is_packed].parsed)
    except Exception as error:  # damaged bytes make the Avro decoder raise nearly anything
        raise _undecodable(expected, error) from error
    if stream.tell() != len(value):
        raise DamagedRecord(f"{_kind(expected)} has {len(value) - stream.tell()} bytes too many.")
    return dict(fields)


def _joined(digests: Sequence[bytes], parts: Iterable[bytes]) -> bytes:
    """The lists in the parts with these *digests*."""
    by_digest = {hashlib.sha256(part).digest(): part for part in parts}
    for number, digest in enumerate(digests, 1):
        if digest not in by_digest:
            raise DamagedRecord(f"Part {number} of {len(digests)} is missing, or it is another.")
    return b"".join(decode(by_digest[digest], ManifestPart).body for digest in digests)


def _undecodable(kind: type, error: Exception) -> DamagedRecord:
    return DamagedRecord(f"{_kind(kind)} cannot be decoded: {type(error).__name__}: {error}.")


def _packed_fields(record: Manifest | Finalized | CheckpointStats) -> dict[str, Any]:
    """The fields of *record* for Avro, its lists in one."""
    layouts = LAYOUTS[type(record)]
    columns = pack(layouts[-1], record)
    if len(columns) > COLUMNS_SIZE_MAX:
        raise _too_large(type(record), len(columns), COLUMNS_SIZE_MAX)
    fields = _to_avro(msgspec.structs.replace(record, **dict.fromkeys(layouts[-1].fields, ())))
    return {**fields, "layout": len(layouts) - 1, "size": len(columns), "body": deflate(columns)}


def _value(kind: type, fields: Mapping[str, Any]) -> bytes:
    schema = _WRITTEN[kind]
    stream = io.BytesIO()
    stream.write(MAGIC + schema.fingerprint)
    schemaless_writer(stream, schema.parsed, fields)
    value = stream.getvalue()
    if len(value) > SIZE_MAX[kind]:
        raise _too_large(kind, len(value), SIZE_MAX[kind])
    return value


def _too_large(kind: type, size: int, limit: int) -> TooLarge:
    return TooLarge(f"{_kind(kind)} of {size:,} bytes is over the limit of {limit:,}")


def _schema_of(value: bytes) -> _Schema:
    if value[:2] != MAGIC:
        raise DamagedRecord("The value is not in Avro's single-object encoding.")
    schema = _KNOWN.get(value[2:_HEADER_SIZE])
    if schema is None:
        shown = value[2:_HEADER_SIZE].hex()
        raise DamagedRecord(f"Schema {shown} is unknown: written by a newer exactlyonce, or damaged.")
    return schema


def _kind(kind: type) -> str:
    return kind.__name__.lower()


def _to_avro(record: Decision | CheckpointStats) -> Any:
    fields = msgspec.to_builtins(record, builtin_types=(bytes,))
    for name in _TUPLES.keys() & fields.keys():
        fields[name] = [dict(zip(_TUPLES[name], values, strict=True)) for values in fields[name]]
    return fields


def _from_avro(fields: Any) -> Any:
    for name in _TUPLES.keys() & fields.keys():
        fields[name] = [tuple(record.values()) for record in fields[name]]
    return fields


class BlockKey(msgspec.Struct, frozen=True):
    """`block/<incarnation>/<n>/<operator>/<key group>/<part>/<attempt>-<random>`: one block, written once."""

    incarnation: int
    checkpoint: int
    operator: str
    key_group: int
    part: int
    attempt: int
    nonce: str

    def __str__(self) -> str:
        return (
            f"block/{self.incarnation}/{self.checkpoint}/{self.operator}/{self.key_group}/{self.part}"
            f"/{self.attempt}-{self.nonce}"
        )

    @classmethod
    def parse(cls, text: str) -> BlockKey | None:
        """The key that *text* spells whole, or None: then it is none of ours.

        >>> BlockKey.parse("block/3/17/totals/5/0/1-9f2c").checkpoint
        17
        >>> BlockKey.parse("manifest/17") is None
        True
        """
        match = _BLOCK_KEY.match(text)
        if match is None:
            return None
        incarnation, checkpoint, operator, key_group, part, attempt, nonce = match.groups()
        return cls(int(incarnation), int(checkpoint), operator, int(key_group), int(part), int(attempt), nonce)


_NUMBER = r"(0|[1-9][0-9]{0,17})"
_BLOCK_KEY = re.compile(rf"block/{_NUMBER}/{_NUMBER}/([A-Za-z0-9_-]+)/{_NUMBER}/{_NUMBER}/{_NUMBER}-([a-z0-9]+)\Z")


_NO_KEY = BlockKey(-1, 0, "", 0, 0, 0, "")


class DecisionKey(msgspec.Struct, frozen=True):
    """The key of a record in partition 0.

    `manifest/<n>`, `manifest/<n>/<part>`, `finalized/<n>`, `incarnation/<i>`, or `repair/<n>/<k>`.
    """

    kind: type[Incarnation] | type[Manifest] | type[ManifestPart] | type[Finalized] | type[Repair]
    number: int
    """The checkpoint, or the incarnation."""
    ordinal: int = 0
    """The number of the repair, or of the manifest's part."""

    def __str__(self) -> str:
        name = f"{_KEY_NAMES[self.kind]}/{self.number}"
        return f"{name}/{self.ordinal}" if self.kind in (ManifestPart, Repair) else name

    @classmethod
    def of(cls, record: Decision | ManifestPart) -> DecisionKey:
        """The key under which *record* is written."""
        if isinstance(record, Incarnation):
            return cls(Incarnation, record.incarnation)
        if isinstance(record, ManifestPart):
            return cls(ManifestPart, record.checkpoint, record.part)
        return cls(type(record), record.checkpoint, record.number if isinstance(record, Repair) else 0)

    @classmethod
    def parse(cls, text: str) -> DecisionKey | None:
        """The key that *text* spells whole, or None: then it is none of ours.

        >>> str(DecisionKey.parse("repair/7/2"))
        'repair/7/2'
        >>> DecisionKey.parse("manifest/7/2").kind.__name__
        'ManifestPart'
        >>> DecisionKey.parse("manifest/07") is None
        True
        """
        match = _DECISION_KEY.match(text)
        if match is None:
            return None
        kind, number, numbered, of, ordinal = match.groups()
        if kind is None:
            return cls(ManifestPart if numbered == "manifest" else Repair, int(of), int(ordinal))
        return cls(_DECISIONS[kind], int(number))


_DECISION_KEY = re.compile(rf"(?:(incarnation|manifest|finalized)/{_NUMBER}|(manifest|repair)/{_NUMBER}/{_NUMBER})\Z")
_DECISIONS: dict[str, Any] = {_kind(kind): kind for kind in (Incarnation, Manifest, Finalized, Repair)}
_KEY_NAMES: dict[type, str] = {**{kind: name for name, kind in _DECISIONS.items()}, ManifestPart: _kind(Manifest)}
