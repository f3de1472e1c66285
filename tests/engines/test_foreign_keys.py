"""Joins of tables by a foreign key: whatever way the messages of the steps take, the last results are a plain join."""

from __future__ import annotations

import random
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.engines.runtime import foreign_key_operators
from exactlyonce.engines.runtime.batch import Batch, Coordinates
from exactlyonce.engines.runtime.faults import DeadLetterOutput, Notes
from exactlyonce.engines.runtime.foreign_key_operators import Answerer, Resolver, Subscriber, TableJoiner
from exactlyonce.engines.runtime.timed_operators import KeyReader
from exactlyonce.errors import RecordError
from exactlyonce.pipeline.foreign_keys import (
    COUNTS,
    RIGHT,
    ROW_VERSIONS,
    ROWS,
    Answering,
    Resolving,
    Subscribing,
    bucket_of,
    key_of_row,
    key_of_subscription,
    parent_of,
)
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.pipeline.records import Record
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.key_groups import group_range, subtask_of
from exactlyonce.testing.state_contract.memory import MAX_PARALLELISM, StateBlocks, TimedSubtasks

LEFT_KEYS, FOREIGN_KEYS = 9, 3
How = Literal["inner", "left"]


class Row(NamedTuple):
    """A left row, with the number of the change that made it."""

    number: int
    foreign_key: str | None


class Channel(NamedTuple):
    """From a subtask, or -1 where it is a source or restored, to a subtask."""

    edge: str
    sender: int
    receiver: int


STEPS = {
    "subscribe": (Subscribing().kept_state(), ("left",)),
    "answer": (Answering().kept_state(int), ("subscriptions", "right")),
    "resolve": (Resolving("inner").kept_state(Row, int), ("versions", "answers")),
}
"""The type of the state of each step, and its inputs."""


@pytest.fixture(autouse=True, scope="module")
def small_buckets() -> Iterator[None]:
    """Few rows make several buckets, and several batches of answers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, number in (("BUCKET_ROWS", 2), ("BUCKET_ROWS_LEAST", 1), ("ANSWERS_TOGETHER", 2)):
            patch.setattr(foreign_key_operators, name, number)
        yield


class Cluster:
    """The steps in some subtasks, with channels between all of them, which keep their order."""

    def __init__(self, how: How, parallelism: int, seed: int, *, batches: bool = True) -> None:
        self.how, self.chance, self.batches = how, random.Random(seed), batches
        self.given: dict[str, list[Any]] = defaultdict(list)
        """The results of each left key."""
        self.rows: dict[str, Row] = {}
        self.rights: dict[str, int] = {}
        self.number = 0
        self.checkpoint = 0
        self.tables: dict[str, TimedSubtasks] = {}
        self.waiting: dict[Channel, deque[tuple[bytes, Any]]] = {}
        self._begin(parallelism, {step: (StateBlocks(), ()) for step in STEPS})

    def _begin(self, parallelism: int, saved: dict[str, tuple[StateBlocks, Sequence[bytes]]]) -> None:
        self.parallelism = parallelism
        self.operators: dict[str, list[Any]] = {}
        for step, (type_, _) in STEPS.items():
            blocks, indexes = saved[step]
            self.tables[step] = TimedSubtasks(
                HashMapBackend(), blocks, type_, parallelism=parallelism, checkpoint=self.checkpoint, indexes=indexes
            )
            self.operators[step] = [self._operator(step, subtask) for subtask in range(parallelism)]

    def _operator(self, step: str, subtask: int) -> TableJoiner:
        table, groups = self.tables[step].tables[subtask], group_range(subtask, self.parallelism, MAX_PARALLELISM)
        operator: TableJoiner
        if step == "subscribe":
            operator = Subscriber(step, table, groups, MAX_PARALLELISM, lambda row: row.foreign_key)
            operator.sides = {ROW_VERSIONS: [self._sends("versions", subtask, key_of_row)]}
            operator.downstream = [self._sends("subscriptions", subtask, key_of_subscription)]
        elif step == "answer":
            operator = Answerer(step, table, groups, MAX_PARALLELISM)
            operator.downstream = [self._sends("answers", subtask, key_of_row)]
        else:
            operator = Resolver(step, table, groups, MAX_PARALLELISM, Resolving(self.how), KeyReader(step, str))
            operator.downstream = [self._take]
        return operator

    def _sends(self, edge: str, sender: int, key_of: Callable[[Any], bytes]) -> Callable[[Batch], None]:
        def send(batch: Batch) -> None:
            for record in batch.records:
                self._send(edge, sender, key_of(record), record)

        return send

    def _send(self, edge: str, sender: int, key: bytes, record: Any) -> None:
        receiver = subtask_of(key_group(key, MAX_PARALLELISM), self.parallelism, MAX_PARALLELISM)
        self.waiting.setdefault(Channel(edge, sender, receiver), deque()).append((key, record))

    def _take(self, batch: Batch) -> None:
        """Results of a row come in the order of its versions, and a tombstone only where a result stands."""
        for record in batch.records:
            before = self.given[record.key]
            if record.value is None:
                assert before
                assert before[-1] is not None
            else:
                pair = record.value.left.number, record.value.right
                assert record.value.key == record.key
                numbers = [pair[0] for pair in before if pair is not None]
                assert not numbers or numbers[-1] <= pair[0]
                assert before[-1:] != [None] or numbers[-1] <= pair[0]
            before.append(None if record.value is None else pair)

    def change_left(self, key: str, foreign_key: str | None, *, deletes: bool) -> None:
        self.number += 1
        row = None if deletes else Row(self.number, foreign_key)
        if row is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = row
        self._send("left", -1, canonical_key(key), Record(row, key))

    def change_right(self, key: str, *, deletes: bool) -> None:
        self.number += 1
        if deletes:
            self.rights.pop(key, None)
        else:
            self.rights[key] = self.number
        self._send("right", -1, canonical_key(key), Record(None if deletes else self.number, key))

    def deliver(self, most: int) -> bool:
        """Let some operator take up to *most* records of some channel; restored ones go first. False: none waits."""
        channels = [channel for channel, records in self.waiting.items() if records]
        if not channels:
            return False
        restored = {(self._step(each.edge), each.receiver) for each in channels if each.edge[0] == "-"}
        ready = [
            each for each in channels if each.edge[0] == "-" or (self._step(each.edge), each.receiver) not in restored
        ]
        channel = self.chance.choice(ready)
        waiting = self.waiting[channel]
        taken = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        for some in [taken] if self.batches else [[one] for one in taken]:
            keys, records = map(list, zip(*some, strict=True))
            self._receiver(channel)(Batch(records, [Coordinates("t", 0, 0)] * len(keys), keys))
        return True

    def _step(self, edge: str) -> str:
        return next(step for step, (_, inputs) in STEPS.items() if edge.removeprefix("-") in inputs)

    def _receiver(self, channel: Channel) -> Callable[[Batch], None]:
        step = self._step(channel.edge)
        operator = self.operators[step][channel.receiver]
        if step == "subscribe":
            return operator  # type: ignore[no-any-return]  # it is called
        port = STEPS[step][1].index(channel.edge.removeprefix("-"))
        return operator.right if port else operator.left  # type: ignore[no-any-return]  # likewise

    def restore(self, parallelism: int) -> None:
        """Go on at another *parallelism* from an unaligned checkpoint: records in channels are part of it."""
        self.checkpoint += 1
        saved: dict[str, tuple[StateBlocks, Sequence[bytes]]] = {}
        for step, operators in self.operators.items():
            for operator in operators:
                operator.settle()
            tables = self.tables[step]
            saved[step] = tables.blocks, tables.write(tables.freeze(self.checkpoint, self.checkpoint - 1))
        before, self.waiting = self.waiting, {}
        self._begin(parallelism, saved)
        for channel in sorted(before, key=lambda each: (each.receiver, each.edge[0] != "-")):
            for key, record in before[channel]:
                edge = channel.edge if channel.edge in ("left", "right") else f"-{channel.edge.removeprefix('-')}"
                self._send(edge, -1, key, record)

    def finish(self) -> None:
        while self.deliver(3):
            pass
        for operators in self.operators.values():
            for operator in operators:
                operator.settle()

    @property
    def table(self) -> dict[str, Any]:
        """The last result of each left key that has one."""
        return {key: given[-1] for key, given in self.given.items() if given and given[-1] is not None}

    @property
    def expected(self) -> dict[str, Any]:
        joined = {key: (row.number, self.rights.get(row.foreign_key or "")) for key, row in self.rows.items()}
        return {key: pair for key, pair in joined.items() if self.how == "left" or pair[1] is not None}

    def assert_keeps_what_is_there(self) -> None:
        """Nothing is kept of deleted rows, or of messages that have gone, and each bucket has the rows of its place."""
        kept = {step: tables.items() for step, tables in self.tables.items()}
        refer = {canonical_key(key): row.foreign_key for key, row in self.rows.items() if row.foreign_key is not None}
        first = {(slot, key): state for (slot, key), state in kept["subscribe"].items() if slot != COUNTS}
        assert first == {(ROWS, row): canonical_key(foreign_key) for row, foreign_key in refer.items()}
        subscribed: dict[bytes, set[bytes]] = defaultdict(set)
        for (slot, key), (_, rows, count) in kept["answer"].items():
            if slot == RIGHT:
                continue
            buckets = max(other for other, of in kept["answer"] if of == key)
            assert all(bucket_of(row, buckets) == slot for row in rows)
            assert buckets > 1 or not count
            subscribed[key] |= {*rows}
        assert {row for rows in subscribed.values() for row in rows} == {*refer}
        assert all(canonical_key(refer[row]) == key for key, rows in subscribed.items() for row in rows)
        for key, rows in subscribed.items():
            buckets = max(slot for slot, of in kept["answer"] if of == key)
            assert [(slot, key) in kept["answer"] for slot in range(1, buckets + 1)] == [True] * buckets
            assert buckets == 1 or kept["answer"][1, key][2] == len(rows)
        rows = {canonical_key(key) for key, row in self.rows.items() if self.how == "left" or row.foreign_key}
        assert {(slot, key) for slot, key in kept["resolve"] if slot != COUNTS} == {(ROWS, row) for row in rows}


LEFT = st.tuples(
    st.just("left"), st.integers(0, LEFT_KEYS - 1), st.one_of(st.none(), st.integers(0, FOREIGN_KEYS - 1)),
    st.sampled_from([False, False, False, True]),
)  # fmt: skip
RIGHTS = st.tuples(st.just("right"), st.integers(0, FOREIGN_KEYS - 1), st.just(None), st.booleans())
DELIVER = st.tuples(st.just("deliver"), st.integers(1, 4), st.just(None), st.just(False))
RESTORE = st.tuples(st.just("restore"), st.integers(1, 4), st.just(None), st.just(False))
ACTIONS = st.lists(st.one_of(LEFT, LEFT, RIGHTS, DELIVER, DELIVER, DELIVER, RESTORE), max_size=60)


def play(cluster: Cluster, actions: Sequence[tuple[str, int, int | None, bool]]) -> Cluster:
    for name, number, foreign_key, deletes in actions:
        if name == "left":
            cluster.change_left(f"l{number}", None if foreign_key is None else f"f{foreign_key}", deletes=deletes)
        elif name == "right":
            cluster.change_right(f"f{number}", deletes=deletes)
        elif name == "deliver":
            cluster.deliver(number)
        else:
            cluster.restore(number)
    cluster.finish()
    return cluster


@pytest.mark.parametrize("how", ["inner", "left"])
@given(actions=ACTIONS, seed=st.integers(0, 1_000), parallelism=st.integers(1, 3))
def test_the_last_results_are_the_join_of_the_last_rows(how: How, actions: Any, seed: int, parallelism: int) -> None:
    cluster = play(Cluster(how, parallelism, seed), actions)
    assert cluster.table == cluster.expected
    cluster.assert_keeps_what_is_there()


@given(actions=ACTIONS, seed=st.integers(0, 1_000), parallelism=st.integers(1, 3))
def test_results_do_not_depend_on_the_batches_of_a_step(actions: Any, seed: int, parallelism: int) -> None:
    one = play(Cluster("left", parallelism, seed), actions)
    other = play(Cluster("left", parallelism, seed, batches=False), actions)
    assert one.given == other.given


def test_an_answer_of_the_row_before_it_was_deleted_and_came_again_is_left_out() -> None:
    """The schedule that breaks a version that begins anew with the row."""
    cluster = Cluster("inner", 1, 0)

    def take(*edges: str) -> None:
        for edge in edges:
            waiting = cluster.waiting[Channel(edge, 0 if edge not in ("left", "right") else -1, 0)]
            key, record = waiting.popleft()
            cluster._receiver(Channel(edge, 0, 0))(Batch([record], [Coordinates("t", 0, 0)], [key]))

    cluster.change_right("f0", deletes=False)
    cluster.change_left("l", "f0", deletes=False)
    take("right", "left", "versions", "subscriptions")  # the answer of the first row is on its way
    cluster.change_left("l", None, deletes=True)
    cluster.change_left("l", "f1", deletes=False)
    take("left", "left", "versions", "versions", "answers")
    assert not cluster.given["l"]
    cluster.change_right("f1", deletes=False)
    take("right", "subscriptions", "subscriptions", "answers")
    assert cluster.table == {"l": (cluster.rows["l"].number, cluster.rights["f1"])}


def subscriber(by: Callable[[Any], Any], right_key: Any) -> Subscriber:
    cluster = Cluster("inner", 1, 0)
    step = Subscriber(
        "join", cluster.tables["subscribe"].tables[0], range(MAX_PARALLELISM), MAX_PARALLELISM, by, right_key
    )
    step.sides = {ROW_VERSIONS: []}
    return step


def subscribed(step: Subscriber, *rows: Any) -> list[Any]:
    """The foreign keys to which *rows* subscribe."""
    given: list[Batch] = []
    step.downstream = [given.append]
    origins = [Coordinates("in", 0, offset) for offset in range(len(rows))]
    step(Batch([Record(row, row) for row in rows], origins, [canonical_key(row) for row in rows]))
    return [msgspec.msgpack.decode(each.foreign_key) for batch in given for each in batch.records]


@pytest.mark.parametrize(("right_key", "name"), [(bytes, "bytes"), (int, "int"), (tuple[str, int], "tuple[str, int]")])
def test_a_foreign_key_of_another_type_than_the_right_tables_keys_is_an_error_of_its_record(
    right_key: Any, name: str
) -> None:
    said = f"by= gives 'ann', of type str, and the keys of the right table are {name}: none would ever be equal"
    with pytest.raises(RecordError, match=re.escape(said)) as raised:
        subscribed(subscriber(lambda row: None if row == "nobody" else row, right_key), "nobody", "ann")
    assert (raised.value.facts["operator"], raised.value.facts["offset"]) == ("join", 1)
    step = subscriber(lambda row: {"ann": "ann", "bob": b"", "eve": 7, "tom": ("a", 1)}[row], right_key)
    step.dead_letters = DeadLetterOutput("p", "join", "operator", Notes())
    assert len(subscribed(step, "ann", "bob", "eve", "tom")) == 1, "the others are dead letters"


def test_values_of_several_types_are_one_foreign_key() -> None:
    known = UUID(int=1)
    assert subscribed(subscriber(lambda row: row, UUID), str(known)) == [str(known)]
    assert subscribed(subscriber(lambda row: known, str), "row") == [str(known)]
    assert subscribed(subscriber(lambda row: row, Any), "a", 1) == ["a", 1]


@given(counts=st.lists(st.integers(0, 60), max_size=6))
def test_buckets_grow_and_shrink_with_their_rows(counts: list[int]) -> None:
    cluster, present = Cluster("inner", 1, 0), set[int]()
    cluster.change_right("f0", deletes=False)
    for count in counts:
        for number in sorted(present ^ {*range(count)}):
            cluster.change_left(f"l{number}", "f0", deletes=number in present)
        present = {*range(count)}
        cluster.finish()
        cluster.assert_keeps_what_is_there()
        buckets = max(slot for slot, _ in cluster.tables["answer"].items())
        assert count / 2 <= buckets <= max(1, count)
    cluster.change_right("f0", deletes=False)
    cluster.finish()
    assert cluster.table == cluster.expected


def test_a_bucket_is_divided_into_itself_and_the_new_one() -> None:
    for buckets in range(2, 200):
        for number in range(300):
            row = msgspec.msgpack.encode(number)
            before, after = bucket_of(row, buckets - 1), bucket_of(row, buckets)
            assert after == before or (before, after) == (parent_of(buckets), buckets)
