"""Rows that all subtasks have: whatever the interleaving, all have the rows of a checkpoint at its barrier."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.engines.local.channels import LocalChannel
from exactlyonce.engines.local.inputs import ChannelInput
from exactlyonce.engines.local.task import Snapshots, Subtask
from exactlyonce.engines.runtime import broadcast_operators
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates
from exactlyonce.engines.runtime.broadcast_operators import Broadcaster, WithBroadcast
from exactlyonce.engines.runtime.faults import Notes
from exactlyonce.engines.runtime.operators import ToAll
from exactlyonce.engines.runtime.timed_operators import KeyReader
from exactlyonce.engines.runtime.watermarks import Barrier
from exactlyonce.pipeline.errors import GraphError, RecordError
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.pipeline.records import Record
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.key_groups import subtask_of
from exactlyonce.testing.state_contract.memory import MAX_PARALLELISM, StateBlocks, Subtasks

KEYS = 5
BARRIER = b""


def batch_of(records: Sequence[Any], keys: Sequence[bytes] | None = None) -> Batch:
    return Batch([*records], [Coordinates("t", 0, 0)] * len(records), None if keys is None else [*keys])


def operator_of(subtask: int = 0, fn: Callable[..., Any] = lambda record, rows: {**rows}) -> WithBroadcast:
    return WithBroadcast("rules", fn, KeyReader("rules", str), Notes(), subtask == 0)


class Cluster:
    """Subtasks that keep rows, and subtasks that have all of them, with channels between all of them."""

    def __init__(self, parallelism: int, seed: int) -> None:
        self.chance, self.number, self.checkpoint = random.Random(seed), 0, 0
        self.versions: dict[str, list[int | None]] = defaultdict(lambda: [None])
        """The values of each key, in order."""
        self._begin(parallelism, StateBlocks(), ())

    def _begin(self, parallelism: int, blocks: StateBlocks, indexes: Sequence[bytes]) -> None:
        self.parallelism = parallelism
        self.tables = Subtasks(
            HashMapBackend(), blocks, int, parallelism=parallelism, checkpoint=self.checkpoint, indexes=indexes
        )
        rows = {**self.tables.items()}
        self.channels: dict[tuple[int, int], deque[bytes]] = {}
        """The frames from a keeper to a receiver."""
        self.keepers = [Broadcaster("rules-rows", table) for table in self.tables.tables]
        self.receivers = [operator_of(subtask) for subtask in range(parallelism)]
        self.alignments = [Alignment(range(parallelism)) for _ in range(parallelism)]
        self.at_barrier: dict[int, dict[str, int]] = {}
        """The rows of each receiver at its snapshot."""
        for sender, keeper in enumerate(self.keepers):
            keeper.downstream = [ToAll("rules", self._sends(sender), parallelism, MAX_PARALLELISM)]
        for subtask, receiver in enumerate(self.receivers):
            receiver.restore(rows.items())
            self.channels |= {(sender, subtask): deque() for sender in range(parallelism)}
        self.reached: list[dict[str, int]] = [defaultdict(int) for _ in range(parallelism)]
        """The place of the version that each receiver has, by key."""

    def _sends(self, sender: int) -> Callable[[int, Batch], None]:
        codec = BatchCodec(int | None)
        return lambda receiver, batch: self.channels[sender, receiver].append(codec.encode(batch))

    def change(self, number: int, *, deletes: bool) -> None:
        key = f"k{number}"
        self.number += 1
        value = None if deletes else self.number
        self.versions[key].append(value)
        own = canonical_key(key)
        keeper = self.keepers[subtask_of(key_group(own, MAX_PARALLELISM), self.parallelism, MAX_PARALLELISM)]
        keeper(batch_of([Record(value, key)], [own]))

    def deliver(self) -> bool:
        """Let some receiver take a frame of a channel that is not held back. False: none waits."""
        ready = [
            (sender, receiver) for (sender, receiver), frames in self.channels.items()
            if frames and not self.alignments[receiver].is_held(sender)
        ]  # fmt: skip
        if not ready:
            return False
        sender, receiver = self.chance.choice(ready)
        frame, operator = self.channels[sender, receiver].popleft(), self.receivers[receiver]
        if frame == BARRIER:
            if self.alignments[receiver].barrier(sender, self.checkpoint):
                self.at_barrier[receiver] = {**operator.rows}
            return True
        self.alignments[receiver].take(sender)
        operator.right(BatchCodec(int | None).decode(frame))
        self.assert_in_order(receiver)
        return True

    def assert_in_order(self, receiver: int) -> None:
        """No receiver has a version of a key that is older than one that it has had."""
        for key, versions in self.versions.items():
            reached, value = self.reached[receiver][key], self.receivers[receiver].rows.get(key)
            self.reached[receiver][key] = versions.index(value, reached)

    def restore(self, parallelism: int) -> None:
        """Take a checkpoint, with records in channels, and go on from it at another *parallelism*."""
        self.checkpoint += 1
        rows = {key: value for key, value in self.last.items() if value is not None}
        indexes = self.tables.write(self.tables.freeze(self.checkpoint, self.checkpoint - 1))
        for frames in self.channels.values():
            frames.append(BARRIER)
        self.change(0, deletes=False)  # after the barrier: the restart loses it
        while self.deliver_before_barrier():
            pass
        self.versions["k0"].pop()
        assert self.at_barrier == dict.fromkeys(range(self.parallelism), rows)
        self._begin(parallelism, self.tables.blocks, indexes)
        assert [{**receiver.rows} for receiver in self.receivers] == [rows] * parallelism

    def deliver_before_barrier(self) -> bool:
        return len(self.at_barrier) < self.parallelism and self.deliver()

    @property
    def last(self) -> dict[str, int | None]:
        return {key: versions[-1] for key, versions in self.versions.items()}


CHANGE = st.tuples(st.just("change"), st.integers(0, KEYS - 1), st.booleans())
DELIVER = st.tuples(st.just("deliver"), st.just(0), st.just(False))
RESTORE = st.tuples(st.just("restore"), st.integers(1, 4), st.just(False))


@given(
    actions=st.lists(st.one_of(CHANGE, CHANGE, DELIVER, DELIVER, RESTORE), max_size=60), seed=st.integers(0, 1_000),
    parallelism=st.integers(1, 3),
)  # fmt: skip
def test_every_subtask_has_the_rows_of_the_checkpoint_and_at_last_all_rows(
    actions: Any, seed: int, parallelism: int
) -> None:
    cluster = Cluster(parallelism, seed)
    for name, number, deletes in actions:
        if name == "change":
            cluster.change(number, deletes=deletes)
        elif name == "deliver":
            cluster.deliver()
        else:
            cluster.restore(number)
    while cluster.deliver():
        pass
    rows = {key: value for key, value in cluster.last.items() if value is not None}
    assert [{**receiver.rows} for receiver in cluster.receivers] == [rows] * cluster.parallelism
    assert {**cluster.tables.items()} == {canonical_key(key): value for key, value in rows.items()}


def test_a_barrier_that_overtakes_waits_for_changes_of_rows_which_need_no_room() -> None:
    operator, operators, out = operator_of(), TaskOperators("t", 0), LocalChannel()
    records, changes = LocalChannel(), LocalChannel()
    out.took(0, 1)
    out.send(b"", 1)
    subtask = Subtask(
        operators=operators,
        inputs=[
            ChannelInput("records", records, BatchCodec(str), operator.left),
            ChannelInput("changes", changes, BatchCodec(int | None), operator.right, overtaken=False),
        ],
        outputs=[out], fed=[], snapshots=Snapshots(operators, cast(Any, None), lambda message: None, lambda: 0.0),
        monotonic_s=lambda: 0.0, processing_s=lambda: 0.0,
    )  # fmt: skip
    records.send(BatchCodec(str).encode(batch_of(["x"], [b"k"])), 1)
    changes.send(BatchCodec(int | None).encode(batch_of([7], [canonical_key("a")])), 1)
    assert not subtask.room
    assert not subtask.step(), "what is sent has no room"
    subtask.triggered(Barrier(1, 0), 0.0)
    assert not subtask.overtake(), "the barrier behind the change is not there"
    assert subtask.step()
    assert {**operator.rows} == {"a": 7}
    assert not subtask.overtake()
    changes.send_signal(Barrier(1, 0))
    changes.send(BatchCodec(int | None).encode(batch_of([8], [canonical_key("a")])), 1)
    assert subtask.step()
    assert not subtask.step(), "the change after the barrier is held back"
    assert subtask.overtake()
    assert subtask.snapshots.capturing == 1, "the record before it is in flight"
    assert {**operator.rows} == {"a": 7}
    assert [out.receive(), out.receive()] == [b"", Barrier(1, 0)]


def test_a_function_cannot_change_the_rows() -> None:
    operator = operator_of(fn=lambda record, rows: rows.update(record))
    with pytest.raises(RecordError, match=r"mappingproxy.* has no attribute 'update'"):
        operator.left(batch_of([{"a": 1}]))


def test_outputs_keep_the_keys_of_their_records() -> None:
    operator, given = operator_of(), list[Batch]()
    operator.downstream = [given.append]
    operator.right(batch_of([1, 2], [canonical_key("a"), canonical_key("b")]))
    operator.left(batch_of(["x", "y"], [b"k", b"l"]))
    assert [(batch.records, batch.keys) for batch in given] == [([{"a": 1, "b": 2}] * 2, [b"k", b"l"])]


def test_rows_come_in_the_order_of_their_keys_whatever_came_first() -> None:
    operator, given = operator_of(fn=lambda record, rows: [*rows]), list[Batch]()
    operator.downstream = [given.append]
    for key, row in (("c", 1), ("a", 2), ("b", 3), ("a", None), ("a", 4), ("c", 5)):
        operator.right(batch_of([row], [canonical_key(key)]))
        operator.left(batch_of(["x"]))
    assert [batch.records[0] for batch in given] == [
        ["c"], ["a", "c"], ["a", "b", "c"], ["b", "c"], ["a", "b", "c"], ["a", "b", "c"]
    ]  # fmt: skip


def test_the_first_subtask_says_once_that_there_are_too_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_operators, "ROWS_MAX", 2)
    for subtask in (0, 1):
        operator = operator_of(subtask)
        for number in range(5):
            operator.right(batch_of([number], [canonical_key(f"k{number}")]))
        said = operator.notes.take_lines()
        assert len(said) == (subtask == 0)
        assert all("operator 'rules' has more than 2 rows" in line for line in said)


@pytest.mark.parametrize(
    ("type_", "keys", "why"), [(list[int], [[1]], "unhashable"), (int | bool, [1, True], "it equals that of another")]
)
def test_keys_that_no_mapping_takes_are_refused(type_: Any, keys: list[Any], why: str) -> None:
    operator = WithBroadcast("rules", lambda record, rows: record, KeyReader("rules", type_), Notes(), True)
    with pytest.raises(GraphError, match=f"of a row cannot be one of that: {why}"):
        operator.right(batch_of([1] * len(keys), [*map(canonical_key, keys)]))
