"""The bytes of the checkpoint topic."""

from __future__ import annotations

import base64
import re
import typing
from contextlib import suppress
from pathlib import Path
from random import Random
from string import ascii_letters, ascii_lowercase, digits
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from wide_manifest import wide

from exactlyonce.checkpoint.records import encoding as wire
from exactlyonce.checkpoint.records.encoding import (
    Block,
    BlockKey,
    DamagedRecord,
    DecisionKey,
    ManifestPart,
    TooLarge,
    decode,
    encode,
    encode_in_parts,
)
from exactlyonce.checkpoint.records.manifest import (
    BLOCK_SIZE_MAX,
    LATE_AT_FLOOR,
    LATE_BELOW_LATEST,
    MANIFEST_SIZE_MAX,
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
    Output,
    RecordPlace,
    Repair,
    SourceOffset,
    StoreCommittable,
    SubtaskStats,
    Written,
)
from exactlyonce.pipeline.errors import InvariantViolation

KINDS = (Manifest, ManifestPart, Finalized, CheckpointStats, Incarnation, Repair, Block)
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
        body = bytes([6]) + bytes([8]) + b"host" + bytes([84]) + b"\xd0\x0f" + b"\xa0\x1f" + bytes([2, *[0] * 9])
        assert encode(INCARNATION) == b"\xc3\x01" + bytes.fromhex(FINGERPRINTS[Incarnation][-1]) + body

    def test_a_version_that_was_written_is_never_changed(self) -> None:
        found = {
            kind: [wire._parse(kind, version).fingerprint.hex() for version in versions]
            for kind, versions in wire.SCHEMAS.items()
        }
        assert found == FINGERPRINTS

    def test_classes_and_schemas_are_in_step(self) -> None:
        """The newest version of each schema has the fields of its class, down to nested ones; some in its lists."""
        nested = (BlockRef, Written, Committable, StoreCommittable, *_nested())
        known: dict[str, Any] = {each.__name__: each for each in (*KINDS, *nested)}
        for kind in KINDS:
            for name, fields in _record_fields(wire.SCHEMAS[kind][-1]):
                packed = set(wire.LAYOUTS[kind][-1].fields) if name == kind.__name__ and kind in wire.LAYOUTS else set()
                packing = {"layout", "size", "parts", "body"} if packed else set()
                if name not in ("SinkPartitions", "DistributedSink"):  # plain tuples in Python
                    assert {*fields} - packing | packed == {*known[name].__struct_fields__}, name

    def test_an_older_version_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        older = wire._parse(Incarnation, wire.SCHEMAS[Incarnation][0])
        monkeypatch.setitem(wire._WRITTEN, Incarnation, older)
        value = encode(msgspec.structs.replace(INCARNATION, ended=True))
        monkeypatch.undo()
        assert value[2:10] != encode(INCARNATION)[2:10]
        assert decode(value, Incarnation) == INCARNATION, "it does not say that it has ended"

    @pytest.mark.parametrize("version", range(1, 9))
    def test_an_older_manifest_is_read(self, version: int) -> None:
        """These bytes were written by older releases; what a version did not have yet is as if it were not there."""
        value = WRITTEN[f"manifest {version}"]
        assert value[2:10].hex() == FINGERPRINTS[Manifest][version - 1]
        assert decode(value, Manifest) == without_news_since(version)

    @pytest.mark.parametrize("version", [1, 2])
    def test_an_older_mark_is_read(self, version: int) -> None:
        value = WRITTEN[f"mark {version}"]
        assert value[2:10].hex() == FINGERPRINTS[Finalized][version - 1]
        assert decode(value, Finalized) == MARK

    def test_this_version_has_these_bytes(self) -> None:
        """Later releases must read them: when a version is added, they become those of an older one."""
        assert decode(WRITTEN["manifest 9"], Manifest) == WHOLE
        assert WRITTEN["manifest 9"][2:10].hex() == FINGERPRINTS[Manifest][8]
        stats = WRITTEN["stats 1"]
        assert (stats[2:10].hex(), decode(stats, CheckpointStats)) == (FINGERPRINTS[CheckpointStats][0], STATS)
        mark = WRITTEN["mark 3"]
        assert mark[2:10].hex() == FINGERPRINTS[Finalized][2]
        assert decode(mark, Finalized) == replace(MARK, decided_at_ms=1_950, stats=b"stats")

    def test_figures_of_500_subtasks_are_small(self) -> None:
        """About 20 bytes for each: times, and sizes, that have little in common."""
        dice = Random(1)
        subtasks = [
            SubtaskStats(
                task=task, subtask=subtask, waiting_ms=dice.randrange(3_000), aligning_ms=dice.randrange(3_000),
                snapshot_ms=dice.randrange(900), capture_ms=dice.randrange(100), flush_ms=dice.randrange(3_000),
                state_bytes=dice.randrange(1 << 30), written_bytes=dice.randrange(1 << 20),
                records_in_flight=dice.randrange(1_000), bytes_in_flight=dice.randrange(100_000),
            )
            for task in ("orders", "totals") for subtask in range(250)
        ]  # fmt: skip
        value = encode(CheckpointStats(7, tuple(subtasks)))
        assert decode(value, CheckpointStats).subtasks == tuple(subtasks)
        assert len(value) < 12_000

    def test_a_block_over_its_limit_is_not_written(self) -> None:
        overhead = (
            len(encode(Block("totals", 1, "image", "none", "", bytes(BLOCK_SIZE_MAX // 2)))) - BLOCK_SIZE_MAX // 2
        )
        largest = Block("totals", 1, "image", "none", "", bytes(BLOCK_SIZE_MAX - overhead))
        assert len(encode(largest)) == BLOCK_SIZE_MAX
        with pytest.raises(InvariantViolation, match="block of"):
            encode(msgspec.structs.replace(largest, body=largest.body + b"x"))


class TestParts:
    @given(values_of(Manifest), st.integers(1, 400))
    def test_what_is_encoded_in_parts_is_decoded(self, manifest: Manifest, part_bytes: int) -> None:
        *parts, value = encode_in_parts(manifest, part_bytes)
        assert decode(value, Manifest, parts) == manifest
        assert decode(value, Manifest, [b"another", *reversed(parts), *parts]) == manifest
        bodies = [decode(part, ManifestPart) for part in parts]
        assert [each.part for each in bodies] == [*range(1, len(parts) + 1)]
        assert {each.checkpoint for each in bodies} <= {manifest.checkpoint}
        assert all(0 < len(each.body) <= part_bytes for each in bodies)

    def test_a_part_that_is_missing_or_another(self, manifest: Any) -> None:
        *parts, value = encode_in_parts(manifest(7), 50)
        for number, _ in enumerate(parts, 1):
            others = [*parts[: number - 1], *parts[number:], encode(ManifestPart(7, 1, number, b"other"))]
            with pytest.raises(DamagedRecord, match=f"Part {number} of {len(parts)} is missing, or it is another"):
                decode(value, Manifest, others)

    @pytest.mark.parametrize(
        ("subtasks", "partitions", "records", "bytes_max"),
        [(120, 200, 1, 28_000), (2_000, 200, 3, 365_000), (10_000, 1_000, 8, 1_800_000)],
    )
    def test_sizes(self, subtasks: int, partitions: int, records: int, bytes_max: int) -> None:
        """A reference takes 45 bytes: 32 of its digest, 6 of the nonce of its process, and 7 of place and size."""
        manifest = wide(subtasks, partitions)
        values = encode_in_parts(manifest)
        assert decode(values[-1], Manifest, values[:-1]) == manifest
        assert len(values) == records
        assert max(map(len, values)) <= MANIFEST_SIZE_MAX
        assert sum(map(len, values)) < bytes_max

    def test_a_full_record_has_no_parts(self, manifest: Any) -> None:
        """A little more, and there are."""
        body = Random(1).randbytes(MANIFEST_SIZE_MAX)

        def values(size: int) -> tuple[bytes, ...]:
            return encode_in_parts(manifest(1, staged=(replace(WHOLE.staged[0], body=body[:size]),)))

        size = MANIFEST_SIZE_MAX - (len(values(200_000)[0]) - 200_000)
        assert [len(values(size + more)) for more in (-40, 400)] == [1, 3]
        assert MANIFEST_SIZE_MAX - len(values(size - 40)[0]) < 50

    def test_what_could_never_be_finalized_or_repaired_is_too_large(self, manifest: Any) -> None:
        one = manifest(1).committables[0]
        many = tuple(replace(one, transactional_id=f"{Random(n).getrandbits(99):x}", subtask=n) for n in range(20_000))
        with pytest.raises(TooLarge, match=r"finalized of .* is over the limit of 262,144"):
            encode_in_parts(manifest(1, committables=many))
        broad = replace(one, written=tuple(Written("a topic of some length", n, n, 1) for n in range(12_000)))
        with pytest.raises(TooLarge, match=r"repair of .* is over the limit of 262,144"):
            encode_in_parts(manifest(1, committables=(broad,)))

    def test_lists_that_nobody_would_inflate_are_too_large(
        self, manifest: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(wire, "COLUMNS_SIZE_MAX", 100_000)
        logs = (OrderLog("totals", 0, (REF,)),) * 4_000
        with pytest.raises(TooLarge, match=r"manifest of \d+,\d+ bytes is over the limit of 100,000"):
            encode_in_parts(manifest(1, order_logs=logs))


class TestDamage:
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

    @given(st.sampled_from((Manifest, ManifestPart, Finalized, Incarnation, Repair)), numbers, numbers)
    def test_decision_keys(self, kind: Any, number: int, ordinal: int) -> None:
        key = DecisionKey(kind, number, ordinal if kind in (ManifestPart, Repair) else 0)
        assert DecisionKey.parse(str(key)) == key
        assert BlockKey.parse(str(key)) is None

    def test_a_decision_knows_its_key(self, manifest: Any) -> None:
        repair = Repair(7, 2, 1, "lost", manifest(7).committables[0])
        part = ManifestPart(7, 1, 2, b"")
        found = [str(DecisionKey.of(each)) for each in (INCARNATION, manifest(7), part, Finalized(7, 1, 0, ()), repair)]
        assert found == ["incarnation/3", "manifest/7", "manifest/7/2", "finalized/7", "repair/7/2"]

    @pytest.mark.parametrize(
        "text",
        ["", "manifest/", "manifest/07", "manifest/7/", "manifest/7/1/1", "finalized/7/1", "manifest/7\n", "repair/7",
         "manifest/-1", "Manifest/1", "block/1/1/a/0/0/0", "block/1/1/a b/0/0/0-ab", "block/1/1//0/0/0-ab",
         "block/1/1/a/0/0/0-ab/", "manifest/९"],
    )  # fmt: skip
    def test_what_is_no_key(self, text: str) -> None:
        assert BlockKey.parse(text) is None
        assert DecisionKey.parse(text) is None


FINGERPRINTS = {
    Manifest: [
        "a0ee0191f086b58a", "420546f873bd7de7", "57be248af10ce47f", "e942cc97b09aa6ae", "f94a7e9d9cfdb206",
        "6ee16d65b769dd95", "e9ac39fbafffdb88", "97df18cb78e088be", "cfdf562741c8705e",
    ],
    ManifestPart: ["abcda5c455931ae6"],
    Finalized: ["97b9bc06bfcdb453", "65b62497561b98ea", "8b0564428567ae04"],
    CheckpointStats: ["0b743963e0c71a93"],
    Incarnation: [
        "c632357982f460cf", "b158923c13fbb150", "a4b39abdaec301cb", "bd89d7b11ccfd7e2",
        "7e7f2a0564eca1ef",
    ],
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


REF = BlockRef(1, 5, "block/1/1/totals/0/0/0-ab", 10, b"x" * 32)
FOREIGN = BlockRef(0, -1, "elsewhere", 7, bytes(range(32)))
WHOLE = Manifest(
    pipeline="p", checkpoint=5, incarnation=1, attempt=2, kind="savepoint", base=4, previous=3, triggered_at_ms=1_000,
    completed_at_ms=1_100, outputs_by_partition=(("out", 3),), fingerprint="f1", max_parallelism=128, parallelism=2,
    block_partitions=5, block_end_offsets=(1, 2, 3, 4, 5), written_bytes=10,
    rules=LATE_BELOW_LATEST, offsets=(
        SourceOffset("orders", "orders", "id", 0, 7, 3, 2, (4, 6)), SourceOffset("orders", "orders", "id", 1, 1 << 40),
    ),
    operators=(OperatorSnapshot("totals", 2, 10, ((REF, FOREIGN), ())),), order_logs=(OrderLog("totals", 0, (REF,)),),
    committables=(
        Committable(
            transactional_id="eo:p:out:0:1.0:0", producer_id=4001, epoch=7, transaction_version=2, cluster_id="cluster",
            sink="out", subtask=0, checkpoint=4, written=(Written("totals", 0, 5, 6), Written("totals", 1, 9, 1)),
        ),
    ),
    sinks=(Output("out", "totals", 3, "id", "murmur2_random"),),
    staged=(
        StoreCommittable(
            sink="db", subtask=1, checkpoint=4, records=3, kind="rows", description="d", previous=2, blocks=(REF,),
            body=b"\0body",
        ),
    ),
    ledger=(("db", 1, 4), ("db", 9, 2)), requests=("r1",), channel_logs=(ChannelLog("head", 0, 5, (FOREIGN,), True),),
    storage="s3://b/c", origin="o", skips=(RecordPlace("orders", 0, 3),),
)  # fmt: skip
MARK = Finalized(5, 1, 2_000, (("db:1:4", "committed"), ("eo:p:out:0:1.0:0", "repaired")))
_written = (Path(__file__).parent / "written.txt").read_text()
WRITTEN = {kind: base64.b64decode(value) for kind, value in re.findall(r"(\w+ \d) (.+)", _written)}
"""`WHOLE`, `MARK` and `STATS`, as each version has written them."""
STATS = CheckpointStats(
    5,
    (
        SubtaskStats(
            task="totals", subtask=0, waiting_ms=1, aligning_ms=2, snapshot_ms=3, capture_ms=4, flush_ms=5,
            state_bytes=6, written_bytes=7, records_in_flight=8, bytes_in_flight=9,
        ),
        SubtaskStats(task="totals", subtask=1),
    ),
    (AbortedCheckpoint(4, 1_500, 1_000, "it took too long"),),
)  # fmt: skip


def without_news_since(version: int) -> Manifest:
    """`WHOLE` as a reader of a manifest of *version* knows it."""
    offsets, logs, changes = WHOLE.offsets, WHOLE.channel_logs, dict[str, Any]()
    if version < 9:
        changes |= {"sinks": (Output("out", "totals", 3),), "rules": LATE_AT_FLOOR}
    if version < 7:
        changes["outputs_by_partition"] = ()
    if version < 6:
        offsets, changes["skips"] = tuple(replace(each, skipped=0, skipped_at=()) for each in offsets), ()
    if version < 5:
        logs = tuple(replace(log, indexed=False) for log in logs)
    if version < 4:
        logs = ()
        changes |= {"requests": (), "storage": "", "origin": ""}
    if version < 3:
        changes |= {"staged": (), "ledger": ()}
    if version < 2:
        offsets = tuple(replace(each, leader_epoch=-1) for each in offsets)
    return replace(WHOLE, offsets=offsets, channel_logs=logs, **changes)
