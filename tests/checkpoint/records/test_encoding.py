"""The bytes of the checkpoint topic."""

from __future__ import annotations

import typing
from contextlib import suppress
from string import ascii_letters, ascii_lowercase, digits
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.checkpoint.records import encoding as wire
from exactlyonce.checkpoint.records.committable import Committable, Written
from exactlyonce.checkpoint.records.encoding import Block, BlockKey, DamagedRecord, DecisionKey, decode, encode
from exactlyonce.checkpoint.records.manifest import (
    BLOCK_SIZE_MAX,
    MANIFEST_SIZE_MAX,
    BlockRef,
    Finalized,
    Incarnation,
    Manifest,
    Repair,
    SourceOffset,
    StoreCommittable,
)
from exactlyonce.pipeline.errors import InvariantViolation

KINDS = (Manifest, Finalized, Incarnation, Repair, Block)
INCARNATION = Incarnation(
    incarnation=3, host="host", process=42, started_at_ms=1_000, heartbeat_ms=2_000, fenced_below=1,
)  # fmt: skip


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    if annotation is int:
        return st.integers(0, 2**31 - 1)
    if annotation is str:
        return st.text("az09-_:/ \0\x7f\x80\u07ff\u0800\uffff\U0001f600", max_size=8)
    if annotation is bytes:
        return st.binary(min_size=32, max_size=32)
    if typing.get_origin(annotation) is tuple:
        arguments = typing.get_args(annotation)
        if arguments[-1] is ...:
            return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
        return st.tuples(*map(values_of, arguments))
    return st.builds(annotation, **{n: values_of(of) for n, of in typing.get_type_hints(annotation).items()})


records = st.one_of([values_of(kind) for kind in KINDS])


class TestValues:
    @given(records)
    def test_what_is_encoded_is_decoded(self, record: Any) -> None:
        assert decode(encode(record), type(record)) == record

    def test_the_bytes_are_single_object_encoding(self) -> None:
        """A value is the mark, the schema's fingerprint and Avro binary, as the specification says."""
        body = bytes([6]) + bytes([8]) + b"host" + bytes([84]) + b"\xd0\x0f" + b"\xa0\x1f" + bytes([2, *[0] * 6])
        assert encode(INCARNATION) == b"\xc3\x01" + bytes.fromhex(FINGERPRINTS[Incarnation][-1]) + body

    def test_a_version_that_was_written_is_never_changed(self) -> None:
        found = {
            kind: [wire._parse(kind, version).fingerprint.hex() for version in versions]
            for kind, versions in wire.SCHEMAS.items()
        }
        assert found == FINGERPRINTS

    def test_classes_and_schemas_are_in_step(self) -> None:
        """The newest version of each schema has the fields of its class, in the same order, down to nested ones."""
        nested = (BlockRef, Written, Committable, StoreCommittable, *_nested())
        known: dict[str, Any] = {each.__name__: each for each in (*KINDS, *nested)}
        for kind in KINDS:
            for name, fields in _record_fields(wire.SCHEMAS[kind][-1]):
                tuples = ("Fate", "SinkPartitions", "LedgerPosition", "DistributedSink")  # plain ones in Python
                if name not in tuples:
                    assert fields == known[name].__struct_fields__, name

    def test_an_older_version_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        older = wire._parse(Incarnation, wire.SCHEMAS[Incarnation][0])
        monkeypatch.setitem(wire._WRITTEN, Incarnation, older)
        value = encode(msgspec.structs.replace(INCARNATION, ended=True))
        monkeypatch.undo()
        assert value[2:10] != encode(INCARNATION)[2:10]
        assert decode(value, Incarnation) == INCARNATION, "it does not say that it has ended"

    def test_an_older_manifest_is_read(self, monkeypatch: pytest.MonkeyPatch, manifest: Any) -> None:
        offsets = (SourceOffset("orders", "orders", "id", 0, 7, 3), SourceOffset("orders", "orders", "id", 1, 9, 4))
        written = manifest(1, offsets=offsets)
        monkeypatch.setitem(wire._WRITTEN, Manifest, wire._parse(Manifest, wire.SCHEMAS[Manifest][0]))
        value = encode(written)
        monkeypatch.undo()
        assert value[2:10].hex() == FINGERPRINTS[Manifest][0]
        unknown = tuple(msgspec.structs.replace(each, leader_epoch=-1) for each in offsets)
        assert decode(value, Manifest) == msgspec.structs.replace(written, offsets=unknown)

    def test_a_manifest_of_before_has_outputs_by_subtask(self, monkeypatch: pytest.MonkeyPatch, manifest: Any) -> None:
        written = msgspec.structs.replace(manifest(1), outputs_by_partition=(("out", 4),))
        assert decode(encode(written), Manifest).partitions_of("out") == 4
        monkeypatch.setitem(wire._WRITTEN, Manifest, wire._parse(Manifest, wire.SCHEMAS[Manifest][5]))
        value = encode(written)
        monkeypatch.undo()
        assert decode(value, Manifest) == manifest(1)
        assert decode(value, Manifest).partitions_of("out") is None

    def test_a_manifest_over_its_limit_is_not_written(self, manifest: Any) -> None:
        committables = manifest(1).committables * 6_000
        with pytest.raises(InvariantViolation, match=rf"manifest of \d+,\d+ bytes is over .* {MANIFEST_SIZE_MAX:,}"):
            encode(manifest(1, committables=committables))

    def test_a_block_over_its_limit_is_not_written(self) -> None:
        overhead = (
            len(encode(Block("totals", 1, "image", "none", "", bytes(BLOCK_SIZE_MAX // 2)))) - BLOCK_SIZE_MAX // 2
        )
        largest = Block("totals", 1, "image", "none", "", bytes(BLOCK_SIZE_MAX - overhead))
        assert len(encode(largest)) == BLOCK_SIZE_MAX
        with pytest.raises(InvariantViolation, match="block of"):
            encode(msgspec.structs.replace(largest, body=largest.body + b"x"))


class TestDamage:
    @given(st.binary(max_size=300), st.sampled_from(KINDS))
    def test_random_bytes(self, value: bytes, kind: Any) -> None:
        with pytest.raises(DamagedRecord):
            decode(value, kind)

    @given(st.sampled_from(KINDS), st.binary(max_size=300))
    def test_random_bytes_behind_a_right_fingerprint(self, kind: Any, body: bytes) -> None:
        value = wire.MAGIC + bytes.fromhex(FINGERPRINTS[kind][-1]) + body
        with suppress(DamagedRecord):
            assert isinstance(decode(value, kind), kind)

    @given(records, st.data())
    def test_flipped_bits(self, record: Any, data: st.DataObject) -> None:
        value = bytearray(encode(record))
        for place in data.draw(st.lists(st.integers(0, len(value) - 1), min_size=1, max_size=4)):
            value[place] ^= data.draw(st.integers(1, 255))
        with suppress(DamagedRecord):
            assert isinstance(decode(bytes(value), type(record)), type(record))

    @given(records, st.data())
    def test_cut_values(self, record: Any, data: st.DataObject) -> None:
        value = encode(record)
        with pytest.raises(DamagedRecord):
            decode(value[: data.draw(st.integers(0, len(value) - 1))], type(record))

    @given(records, st.binary(min_size=1, max_size=10))
    def test_bytes_behind_the_record(self, record: Any, tail: bytes) -> None:
        with pytest.raises(DamagedRecord, match="bytes too many"):
            decode(encode(record) + tail, type(record))

    def test_another_class(self) -> None:
        with pytest.raises(DamagedRecord, match="A incarnation lies where a finalized should be"):
            decode(encode(INCARNATION), Finalized)

    def test_an_unknown_schema(self) -> None:
        value = wire.MAGIC + bytes(range(8)) + b"body"
        with pytest.raises(DamagedRecord, match="0001020304050607 is unknown: written by a newer exactlyonce"):
            decode(value, Manifest)

    def test_sizes_are_checked_before_anything_is_decoded(self) -> None:
        with pytest.raises(DamagedRecord, match="over the limit"):
            decode(bytes(MANIFEST_SIZE_MAX + 1), Manifest)

    def test_a_claimed_length_allocates_nothing(self) -> None:
        claim = b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"
        for kind in (Block, Finalized, Incarnation):
            with pytest.raises(DamagedRecord):
                decode(wire.MAGIC + bytes.fromhex(FINGERPRINTS[kind][-1]) + claim * 3, kind)


numbers = st.integers(0, 10**18 - 1)
names = st.text(f"{ascii_letters}{digits}_-", min_size=1, max_size=30)
nonces = st.text(f"{ascii_lowercase}{digits}", min_size=1, max_size=12)


class TestKeys:
    @given(st.builds(BlockKey, numbers, numbers, names, numbers, numbers, numbers, nonces))
    def test_block_keys(self, key: BlockKey) -> None:
        assert BlockKey.parse(str(key)) == key
        assert DecisionKey.parse(str(key)) is None

    @given(st.sampled_from((Manifest, Finalized, Incarnation, Repair)), numbers, numbers)
    def test_decision_keys(self, kind: Any, number: int, repair: int) -> None:
        key = DecisionKey(kind, number, repair if kind is Repair else 0)
        assert DecisionKey.parse(str(key)) == key
        assert BlockKey.parse(str(key)) is None

    def test_a_decision_knows_its_key(self, manifest: Any) -> None:
        repair = Repair(7, 2, 1, "lost", manifest(7).committables[0])
        found = [str(DecisionKey.of(each)) for each in (INCARNATION, manifest(7), Finalized(7, 1, 0, ()), repair)]
        assert found == ["incarnation/3", "manifest/7", "finalized/7", "repair/7/2"]

    @pytest.mark.parametrize(
        "text",
        ["", "manifest/", "manifest/07", "manifest/7/1", "manifest/7\n", "repair/7", "manifest/-1", "Manifest/1",
         "block/1/1/a/0/0/0", "block/1/1/a b/0/0/0-ab", "block/1/1//0/0/0-ab", "block/1/1/a/0/0/0-ab/", "manifest/९"],
    )  # fmt: skip
    def test_what_is_no_key(self, text: str) -> None:
        assert BlockKey.parse(text) is None
        assert DecisionKey.parse(text) is None


FINGERPRINTS = {
    Manifest: [
        "a0ee0191f086b58a", "420546f873bd7de7", "57be248af10ce47f", "e942cc97b09aa6ae", "f94a7e9d9cfdb206",
        "6ee16d65b769dd95", "e9ac39fbafffdb88",
    ],
    Finalized: ["97b9bc06bfcdb453"],
    Incarnation: ["c632357982f460cf", "b158923c13fbb150", "a4b39abdaec301cb", "bd89d7b11ccfd7e2"],
    Repair: ["1a1b454c5b4df844"],
    Block: ["d51d1de7b14f7065"],
}  # fmt: skip


def _nested() -> list[type]:
    from exactlyonce.checkpoint.records import manifest

    return [each for each in vars(manifest).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]


def _record_fields(schema: Any) -> list[tuple[str, tuple[str, ...]]]:
    """(name, field names) of every record within *schema*."""
    if not isinstance(schema, dict):
        return []
    if schema["type"] == "array":
        return _record_fields(schema["items"])
    if schema["type"] != "record":
        return []
    inner = [found for field in schema["fields"] for found in _record_fields(field["type"])]
    return [(schema["name"], tuple(field["name"] for field in schema["fields"])), *inner]
