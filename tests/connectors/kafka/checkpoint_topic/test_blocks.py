"""Blocks on a real broker, beyond the contract of a block storage (test_topic.py)."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer
from waiting import until

from exactlyonce.checkpoint.block_storage import DamagedBlock
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, OrderLog, TopicInfo
from exactlyonce.checkpoint.requests import Outcome
from exactlyonce.connectors.kafka.checkpoint_topic import blocks as store_blocks
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockReader, BlockWriter, OnDelivery, scan_blocks
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import LogFollower
from exactlyonce.connectors.kafka.checkpoint_topic.scan import read_range
from exactlyonce.connectors.kafka.checkpoint_topic.topic import as_topic, prepare_topic
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.errors import BrokerUnavailable, InvariantViolation
from exactlyonce.testing.cluster import LIMIT_S

pytestmark = pytest.mark.broker


def block(body: bytes, checkpoint: int = 1, operator: str = "totals") -> Block:
    return Block(operator, checkpoint, "image", "zlib", "int", body)


def bytes_of(seed: object, size: int) -> bytes:
    return hashlib.shake_128(str(seed).encode()).digest(size)


def written(writer: BlockWriter, bodies: Iterable[bytes], checkpoint: int = 1) -> list[BlockRef]:
    tickets = [writer.write(block(body, checkpoint), group) for group, body in enumerate(bodies)]
    writer.wait(LIMIT_S)
    return [ticket.ref for ticket in tickets if ticket.ref is not None]


def read(reader: BlockReader, refs: Iterable[BlockRef]) -> dict[str, bytes]:
    return {ref.key: found.body for ref, found in reader.fetch(refs)}


class TestWritingAndReading:
    def test_sparse_references(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_blocks, "_GAP_BYTES_MAX", 400_000)
        bodies = [bytes_of(group, 30_000) for group in range(200)]
        refs = written(BlockWriter.connected(store.config, store.topic, 1, 0), bodies)
        reader = BlockReader(store.config, store.topic)
        for step in (3, 8, 90):
            assert read(reader, refs[::step]) == {r.key: b for r, b in list(zip(refs, bodies, strict=True))[::step]}

    def test_what_was_not_read_to_its_end(self, store: Any) -> None:
        refs = written(BlockWriter.connected(store.config, store.topic, 1, 0), map(bytes_of, range(40), [5_000] * 40))
        reader = BlockReader(store.config, store.topic, stays_connected=True)
        for _ in range(3):
            begun = iter(reader.fetch(refs))
            next(begun)
            assert set(read(reader, refs[:9])) == {ref.key for ref in refs[:9]}, "while another reads"
            del begun
            with pytest.raises(DamagedBlock):
                read(reader, [msgspec.structs.replace(refs[0], sha256=bytes(32)), *refs[1:]])
            assert set(read(reader, refs)) == {ref.key for ref in refs}
        reader.close()

    def test_no_references(self, store: Any) -> None:
        assert list(BlockReader({"bootstrap.servers": "127.0.0.1:1"}, store.topic).fetch([])) == []

    def test_an_open_transaction_hides_no_block(self, store: Any) -> None:
        orphan = Producer({**store.config, "transactional.id": store.pipeline})
        orphan.init_transactions(LIMIT_S)
        orphan.begin_transaction()
        for partition in range(1, 5):
            orphan.produce(store.topic.name, b"x", b"x", partition)
        assert orphan.flush(LIMIT_S) == 0
        refs = written(BlockWriter.connected(store.config, store.topic, 1, 0), [b"a", b"b", b"c", b"d"])
        assert len(read(BlockReader(store.config, store.topic), refs)) == 4
        orphan.abort_transaction(LIMIT_S)

    def test_a_block_of_an_operator_with_a_bad_name(self, store: Any) -> None:
        with pytest.raises(InvariantViolation, match="well-formed"):
            BlockWriter.connected(store.config, store.topic, 1, 0).write(block(b"", operator="a/b"), 0)


class TestDamage:
    @pytest.fixture
    def refs(self, store: Any) -> list[BlockRef]:
        writer = BlockWriter.connected(store.config, store.topic, 1, 0)
        return written(writer, [bytes_of(group, 100) for group in range(8)])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"sha256": bytes(32)}, "not those that were written"),
            ({"size": 3}, "not those that were written"),
            ({"key": "block/1/1/other/0/0/0-ab"}, "another record lies there"),
            ({"offset": 1}, "another record lies there"),
            ({"offset": 2}, "is gone"),
            ({"offset": 1_000_000}, "is gone"),
        ],
    )
    def test_a_wrong_reference(self, store: Any, refs: list[BlockRef], change: dict[str, Any], message: str) -> None:
        wrong = msgspec.structs.replace(refs[0], **change)
        for idle_timeout_s in (1.0, 10.0, float(LIMIT_S)):  # what may yet come is waited for, as is a slow broker
            with pytest.raises((DamagedBlock, BrokerUnavailable)) as damage:
                read(BlockReader(store.config, store.topic, idle_timeout_s), [wrong, *refs[1:]])
            if isinstance(damage.value, DamagedBlock):
                break
        assert isinstance(damage.value, DamagedBlock)
        assert message in str(damage.value)
        assert damage.value.ref == wrong
        assert wrong.key in str(damage.value)


class UnsureProducer:
    """Takes every record for delivered, and does not know at which offset."""

    def produce(self, topic: str, value: bytes, key: str, partition: int, on_delivery: OnDelivery) -> None:
        on_delivery(None, SimpleNamespace(partition=lambda: partition, offset=lambda: None))

    def poll(self, timeout_s: float) -> None: ...


def test_a_block_of_unknown_offset_fails_its_checkpoint() -> None:
    writer = BlockWriter(UnsureProducer(), TopicInfo("totals.checkpoints", "", 2, 1), 1, 0, "nonce")
    ticket = writer.write(block(b"body"), 0)
    with pytest.raises(
        BrokerUnavailable, match=r"did not say at which offset it took it. Its checkpoint cannot complete"
    ):
        _ = ticket.ref
    assert writer.poll() == 0


class TestCleaning:
    def test_a_tombstone_counts_once_it_is_committed(self, store: Any) -> None:
        """One of a transaction that is open, or was aborted, says nothing: the block is found, and dropped again."""
        refs = written(BlockWriter.connected(store.config, store.topic, 1, 0), [b"body"] * 4)
        dropping = Producer({**store.config, "transactional.id": f"{store.pipeline}-x"})
        dropping.init_transactions(LIMIT_S)
        for end in (dropping.abort_transaction, dropping.commit_transaction):
            dropping.begin_transaction()
            for ref in refs:
                dropping.produce(store.topic.name, None, ref.key, ref.partition)
            assert dropping.flush(LIMIT_S) == 0
            assert set(scan_blocks(store.client, store.topic, [0] * 5).blocks) == set(refs)
            end(LIMIT_S)
        until(lambda: not scan_blocks(store.client, store.topic, [0] * 5).blocks)  # markers take a moment

    def test_dead_blocks(self, store: Any) -> None:
        """A tombstoned block is dead, so is one before the first offset, and so are all if the topic is another."""
        refs = written(BlockWriter.connected(store.config, store.topic, 1, 0), [b"body"] * 8)
        log = store.living()
        assert log.do(log.dead(refs)) == []
        log.appended(blocks_dropped=[refs[0]])
        assert log.do(log.dead(refs)) == [refs[0]]
        store.remove_before(2, 1)
        assert log.do(log.dead(refs)) == [refs[0], refs[1]]
        Topics(store.client).delete(as_topic(store.topic))
        assert log.do(log.dead(refs)) == refs
        prepare_topic(store.client, store.pipeline)
        assert log.do(log.dead(refs)) == refs


@pytest.mark.slow
class TestCompaction:
    @pytest.fixture
    def compacting(self, own_broker: Any, new_store: Any, topic_name: str) -> Any:
        cluster = own_broker({"log.cleaner.backoff.ms": "50"})
        store = new_store(cluster.bootstrap_servers, topic_name)
        store.kafka.configure_topic(
            store.topic.name, segment_bytes=1 << 20, min_cleanable_dirty_ratio=0.001, segment_ms=1000
        )
        return store

    @pytest.mark.exhaustive
    def test_references_stay_right_while_compaction_runs(self, compacting: Any) -> None:
        store = compacting
        log, writer = store.living(), BlockWriter.connected(store.config, store.topic, 1, 0)
        reader = BlockReader(store.config, store.topic)
        bodies = [bytes_of(group, 150_000) for group in range(120)]
        refs = written(writer, bodies)
        live, dropped = refs[::5], [ref for place, ref in enumerate(refs) if place % 5]
        expected = {ref.key: body for ref, body in list(zip(refs, bodies, strict=True))[::5]}
        errors: list[BaseException] = []
        done = threading.Event()

        def restore() -> None:
            try:
                while not done.is_set():
                    assert read(reader, live) == expected
            except BaseException as error:
                errors.append(error)

        restoring = threading.Thread(target=restore)
        restoring.start()
        try:
            assert log.appended(blocks_dropped=dropped) is Outcome.DONE
            _until_compacted(store, writer, reader, dropped)
        finally:
            done.set()
            restoring.join()
        assert errors == []
        assert read(reader, live) == expected
        for ref in dropped[:4]:
            with pytest.raises(DamagedBlock, match="is gone") as damage:
                read(reader, [*live, ref])
            assert damage.value.ref == ref

    @pytest.mark.exhaustive
    def test_the_decision_log_is_read_over_its_gaps(self, compacting: Any) -> None:
        """Its manifests are in parts, of a record each."""
        store = compacting
        log = store.living(part_bytes=3_000)
        refs = tuple(BlockRef(1, number, "block", 1, bytes_of(number, 32)) for number in range(600))
        wide = {"order_logs": (OrderLog("totals", 0, refs),)}
        follower = LogFollower(store.client, store.pipeline)
        for checkpoint in range(150):
            log.appended(store.manifest(checkpoint, **wide))
            dropped = [checkpoint - 3] if checkpoint >= 3 else []
            log.appended(store.mark(checkpoint), manifests_dropped=dropped)
            if checkpoint % 10 == 0:
                assert follower.look().latest == store.manifest(checkpoint, **wide)
        records = 1 + len(log.history.parts.get(149, ()))
        assert records == 8
        until(lambda: _manifests_left(store, log.end_offsets[0]) <= 75 * records, meanwhile=log.beaten)
        follower.look().halt_if_damaged()
        assert follower.look().retained == log.history.retained
        follower.close()
        history = store.opened().history
        assert history.retained == [store.manifest(checkpoint, **wide) for checkpoint in (147, 148, 149)]
        assert sorted(history.finalized) == [147, 148, 149]
        assert (history.unfinalized, history.damaged) == (None, {})


def _until_compacted(store: Any, writer: BlockWriter, reader: BlockReader, dropped: list[BlockRef]) -> None:
    """Wait until the broker has removed the first of *dropped* from every partition, rolling segments meanwhile."""
    firsts = {ref.partition: ref for ref in reversed(dropped)}

    def gone() -> bool:
        written(writer, [b"roll"] * 4, checkpoint=time.monotonic_ns())
        for partition, ref in list(firsts.items()):
            try:
                read(reader, [ref])
            except DamagedBlock:
                del firsts[partition]
        return not firsts

    until(gone)


def _nothing_damaged(first: int, behind: int) -> None:
    raise AssertionError(f"offsets {first} to {behind - 1} are damaged")


def _manifests_left(store: Any, end: int) -> int:
    records = read_range(store.config, store.topic.name, 0, 0, end, "read_uncommitted", _nothing_damaged)
    return sum(1 for each in records if each.value() and (each.key() or b"").startswith(b"manifest/"))
