"""The bytes of the checkpoint topic: Avro single-object values and their keys.

A value is 0xC3 0x01, the CRC-64-AVRO fingerprint of the schema it was written with (little endian), and Avro binary.
A schema in use never changes: a new version is appended to its table. The last version is written, and all are read,
resolved to the last. Sizes are bounded before anything is decoded, and whatever is wrong
with a value raises `DamagedRecord`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from fastavro import parse_schema, schemaless_reader, schemaless_writer
from fastavro.schema import fingerprint, to_parsing_canonical_form

from exactlyonce.checkpoint.records.manifest import (
    BLOCK_SIZE_MAX,
    MANIFEST_SIZE_MAX,
    Finalized,
    Incarnation,
    Manifest,
    Repair,
)
from exactlyonce.pipeline.errors import Halt, InvariantViolation

MAGIC = b"\xc3\x01"
_HEADER_SIZE = 10


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


Decision = Incarnation | Manifest | Finalized | Repair
"""A record of partition 0. Only the coordinator's transactional producer writes these."""

T = TypeVar("T", bound=Decision | Block)


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


def _array(items: object) -> dict[str, object]:
    return {"type": "array", "items": items}


def _arrays(**items: object) -> dict[str, tuple[object, object]]:
    """Fields for `_with`: arrays that are empty in older versions."""
    return {name: (_array(of), []) for name, of in items.items()}


_BLOCK_REF = _record(
    "BlockRef",
    partition="int",
    offset="long",
    key="string",
    size="int",
    sha256={"type": "fixed", "name": "Sha256", "size": 32},
)
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
    sinks=_array(_record("SinkPartitions", sink="string", topic="string", partitions="int")),
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

SCHEMAS: dict[type, tuple[dict[str, object], ...]] = {
    Manifest: (_MANIFEST_1, _MANIFEST_2, _MANIFEST_3, _MANIFEST_4, _MANIFEST_5, _MANIFEST_6, _MANIFEST_7),
    Finalized: (
        _record(
            "Finalized",
            checkpoint="long",
            incarnation="long",
            at_ms="long",
            fates=_array(_record("Fate", transactional_id="string", fate="string")),
        ),
    ),
    Incarnation: (_INCARNATION_1, _INCARNATION_2, _INCARNATION_3, _INCARNATION_4),
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
    Finalized: MANIFEST_SIZE_MAX,
    Incarnation: MANIFEST_SIZE_MAX,
    Repair: MANIFEST_SIZE_MAX,
    Block: BLOCK_SIZE_MAX,
}

_TUPLES = {
    "sinks": ("sink", "topic", "partitions"),
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


def _parse(kind: type, schema: Mapping[str, object]) -> _Schema:
    parsed = parse_schema(dict(schema))
    digest = fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO")
    return _Schema(kind, parsed, bytes.fromhex(digest))


_WRITTEN = {kind: _parse(kind, versions[-1]) for kind, versions in SCHEMAS.items()}
_KNOWN = {
    schema.fingerprint: schema
    for schema in (_parse(kind, version) for kind, versions in SCHEMAS.items() for version in versions)
}


def encode(record: Decision | Block) -> bytes:
    """The value that stands for *record* in the topic."""
    schema = _WRITTEN[type(record)]
    fields = msgspec.structs.asdict(record) if isinstance(record, Block) else _to_avro(record)
    stream = io.BytesIO()
    stream.write(MAGIC + schema.fingerprint)
    schemaless_writer(stream, schema.parsed, fields)
    value = stream.getvalue()
    limit = SIZE_MAX[type(record)]
    if len(value) > limit:
        raise TooLarge(f"{_kind(type(record))} of {len(value):,} bytes is over the limit of {limit:,}")
    return value


def decode(value: bytes, expected: type[T]) -> T:
    """The record of class *expected* that *value* stands for, or `DamagedRecord`."""
    if len(value) > SIZE_MAX[expected]:
        raise DamagedRecord(f"{_kind(expected)} of {len(value):,} bytes is over the limit of {SIZE_MAX[expected]:,}.")
    schema = _schema_of(value)
    if schema.kind is not expected:
        raise DamagedRecord(f"A {_kind(schema.kind)} lies where a {_kind(expected)} should be.")
    stream = io.BytesIO(value)
    stream.seek(_HEADER_SIZE)
    try:
        fields = schemaless_reader(stream, schema.parsed, _WRITTEN[expected].parsed)
        record = msgspec.convert(_from_avro(fields), expected)
    except Exception as error:  # damaged bytes make the Avro decoder raise nearly anything
        raise DamagedRecord(f"{_kind(expected)} cannot be decoded: {type(error).__name__}: {error}.") from error
    if stream.tell() != len(value):
        raise DamagedRecord(f"{_kind(expected)} has {len(value) - stream.tell()} bytes too many.")
    return record


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


def _to_avro(record: Decision) -> Any:
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


class DecisionKey(msgspec.Struct, frozen=True):
    """The key of a record in partition 0: `manifest/<n>`, `finalized/<n>`, `incarnation/<i>`, `repair/<n>/<k>`."""

    kind: type[Incarnation] | type[Manifest] | type[Finalized] | type[Repair]
    number: int
    """The checkpoint, or the incarnation."""
    repair: int = 0

    def __str__(self) -> str:
        name = f"{_kind(self.kind)}/{self.number}"
        return f"{name}/{self.repair}" if self.kind is Repair else name

    @classmethod
    def of(cls, record: Decision) -> DecisionKey:
        """The key under which *record* is written."""
        if isinstance(record, Incarnation):
            return cls(Incarnation, record.incarnation)
        return cls(type(record), record.checkpoint, record.number if isinstance(record, Repair) else 0)

    @classmethod
    def parse(cls, text: str) -> DecisionKey | None:
        """The key that *text* spells whole, or None: then it is none of ours.

        >>> str(DecisionKey.parse("repair/7/2"))
        'repair/7/2'
        >>> DecisionKey.parse("manifest/07") is None
        True
        """
        match = _DECISION_KEY.match(text)
        if match is None:
            return None
        kind, number, repair_of, repair = match.groups()
        if kind is None:
            return cls(Repair, int(repair_of), int(repair))
        return cls(_DECISIONS[kind], int(number))


_DECISION_KEY = re.compile(rf"(?:(incarnation|manifest|finalized)/{_NUMBER}|repair/{_NUMBER}/{_NUMBER})\Z")
_DECISIONS: dict[str, Any] = {_kind(kind): kind for kind in (Incarnation, Manifest, Finalized, Repair)}
