"""The checker of histories finds every anomaly of its list, and nothing in what comes near to one."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from edn import Keyword, NotEdn, lines, read, written
from history_checker import Checker, Malformed, cycles_of, history_of, judged
from history_mutants import FOUND_AS, MUTANTS, USERS
from hypothesis import given
from hypothesis import strategies as st

Lines = list[dict[str, Any]]
HERE = Path(__file__).parent


def line(process: int | str, type: str, f: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"process": process, "type": type, "f": f, "value": value, **more}


def done(process: int, *micro: Any, type: str = "ok", f: str = "txn", unordered: Sequence[int] = ()) -> Lines:
    """An operation that ends before another begins; its polls of keys *unordered* need not follow each other."""
    more = {"rebalance-log": ({"keys": (*unordered,)},)} if unordered else {}
    invoked = tuple(each[:1] if each[0] == "poll" else (*each[:2], each[2][1]) for each in micro)
    return [line(process, "invoke", f, invoked), line(process, type, f, micro, **more)]


def sent(key: int, offset: int | None, value: Any) -> tuple[Any, ...]:
    return "send", key, (offset, value)


def polled(**keys: Sequence[tuple[int | None, Any]]) -> tuple[Any, ...]:
    """`polled(k0=[(0, 1)])`: of key 0, value 1 at offset 0."""
    return "poll", {int(key[1:]): tuple(pairs) for key, pairs in keys.items()}


def assigned(process: int, *keys: int, seek: bool = False) -> Lines:
    more = {"seek-to-beginning?": True} if seek else {}
    return [line(process, type, "assign", keys, **more) for type in ("invoke", "ok")]


def together(*operations: Lines) -> Lines:
    """All begin before any ends."""
    return [invoked for invoked, _ in operations] + [ended for _, ended in operations]


def anomalies(maps: Lines, pipeline: Mapping[str, Any] | None = None) -> set[str]:
    return {*Checker(history_of(maps), pipeline).verdict()["anomalies"]}


ONE, TWO = sent(0, 0, 1), sent(0, 1, 2)
BOTH = polled(k0=[(0, 1), (1, 2)])

VALID: dict[str, Lines] = {
    "one is sent, and polled": [*done(0, ONE), *done(1, polled(k0=[(0, 1)]))],
    "offsets have gaps where markers are": [
        *done(0, ONE), *done(0, sent(0, 7, 2)), *done(1, polled(k0=[(0, 1), (7, 2)])),
    ],
    "a value is in two partitions": [*done(0, ONE, sent(1, 0, 1)), *done(1, polled(k0=[(0, 1)], k1=[(0, 1)]))],
    "a poll is empty": [*done(0, ONE), *done(1, polled(k0=[])), *done(1, polled(k0=[(0, 1)]))],
    "a failed transaction is not seen": [*done(0, ONE, type="fail"), *done(1, polled(k0=[]))],
    "an unknown one is not seen": [*done(0, ONE, type="info"), *done(1, polled(k0=[]))],
    "an unknown one is seen": [*done(0, sent(0, None, 1), type="info"), *done(1, polled(k0=[(0, 1)]))],
    "an operation never ends": [line(0, "invoke", "send", (("send", 0, 1),)), *done(1, polled(k0=[(0, 1)]))],
    "an unknown record of no transaction is not seen": [
        *done(0, ONE, sent(1, 0, 2), type="info", f="send"), *done(1, polled(k0=[(0, 1)])),
    ],
    "a poller begins at the beginning again": [
        *done(0, ONE, TWO), *done(1, BOTH), *assigned(1, 0, seek=True), *done(1, BOTH),
    ],
    "a poller comes back to a partition": [
        *done(0, ONE, TWO), *done(1, BOTH), *assigned(1, 1), *assigned(1, 0), *done(1, BOTH),
    ],
    "a failed transaction polls again": [*done(0, ONE, TWO), *done(1, BOTH, type="fail"), *done(1, BOTH)],
    "a transaction's input is keyed": [
        *done(0, ONE, TWO), *done(0, sent(0, 2, 3)),
        *done(1, polled(k0=[(0, 1), (2, 3)]), unordered=(0,)),
        *done(2, polled(k0=[(0, 1), (1, 2), (2, 3)])),
    ],
    "sends of two transactions interleave": [
        *together(done(0, sent(0, 0, 1), sent(0, 2, 3)), done(1, sent(0, 1, 2))),
        *done(2, polled(k0=[(0, 1), (1, 2), (2, 3)])),
    ],
    "each polls what the other has sent, at last": [
        *together(done(0, ONE), done(1, sent(1, 0, 2))), *done(0, polled(k1=[(0, 2)])), *done(1, polled(k0=[(0, 1)])),
    ],
    "an aborted offset is in the log": [
        *done(0, ONE, type="fail"), *done(0, TWO), *done(1, polled(k0=[(1, 2)])),
        line(2, "invoke", "log", None), line(2, "ok", "log", {0: ((0, 0),)}),
    ],
    "the nemesis": [line("nemesis", "info", "kill", "a worker"), *done(0, ONE), *done(1, polled(k0=[(0, 1)]))],
}  # fmt: skip

INVALID: dict[str, tuple[str, Lines]] = {
    "two values at an offset": (
        "inconsistent-offsets",
        [*done(0, ONE), *done(1, polled(k0=[(0, 1)])), *done(2, polled(k0=[(0, 2)]))],
    ),
    "sent to another offset than polled": (
        "inconsistent-offsets", [*done(0, ONE, TWO), *done(1, polled(k0=[(0, 2)]))],
    ),
    "a value at two offsets": ("duplicate", [*done(0, ONE), *done(1, polled(k0=[(0, 1), (1, 1)]))]),
    "a failed transaction is seen": ("G1a", [*done(0, ONE, type="fail"), *done(1, polled(k0=[(0, 1)]))]),
    "a failed transaction is seen by a failed one": (
        "G1a", [*done(0, ONE, type="fail"), *done(1, polled(k0=[(0, 1)]), type="fail")],
    ),
    "an offset is polled that the log has as aborted": (
        "G1a",
        [*done(1, polled(k0=[(5, 2)])), line(2, "invoke", "log", None), line(2, "ok", "log", {0: ((0, 0), (4, 5))})],
    ),
    "a transaction polls its own": ("precommitted-read", done(0, ONE, polled(k0=[(0, 1)]))),
    "only the last one is polled": ("lost-write", [*done(0, ONE, TWO), *done(1, polled(k0=[(1, 2)]))]),
    "the last one is not polled": ("unseen", [*done(0, ONE, TWO), *done(1, polled(k0=[(0, 1)]))]),
    "part of an unknown transaction": (
        "unseen", [*done(0, ONE, sent(1, None, 2), type="info"), *done(1, polled(k0=[(0, 1)]))],
    ),
    "a poll skips": (
        "int-poll-skip",
        [*done(0, ONE, TWO, sent(0, 2, 3)), *done(1, polled(k0=[(0, 1), (2, 3)])), *done(2, polled(k0=[(1, 2)]))],
    ),
    "a poll goes back": ("int-nonmonotonic-poll", [*done(0, ONE, TWO), *done(1, polled(k0=[(1, 2), (0, 1)]))]),
    "a poll repeats": ("int-nonmonotonic-poll", [*done(0, ONE), *done(1, polled(k0=[(0, 1), (0, 1)]))]),
    "the next poll skips": (
        "poll-skip",
        [
            *done(0, ONE, TWO, sent(0, 2, 3)), *done(1, polled(k0=[(0, 1)])), *done(1, polled(k0=[(2, 3)])),
            *done(2, polled(k0=[(1, 2)])),
        ],
    ),
    "the next poll goes back": (
        "nonmonotonic-poll", [*done(0, ONE, TWO), *done(1, BOTH), *done(1, polled(k0=[(0, 1)]))],
    ),
    "sends of an operation change places": ("int-nonmonotonic-send", [*done(0, TWO, ONE), *done(1, BOTH)]),
    "sends of a process change places": ("nonmonotonic-send", [*done(0, TWO), *done(0, ONE), *done(1, BOTH)]),
    "each polls what the other has sent": (
        "G1c",
        together(done(0, ONE, polled(k1=[(0, 2)])), done(1, sent(1, 0, 2), polled(k0=[(0, 1)]))),
    ),
    "a process polls what it causes later": (
        "G1c-process",
        [
            line(1, "invoke", "txn", ()),
            *done(0, polled(k1=[(0, 2)]), type="fail"), *done(0, ONE, type="info"),
            line(1, "ok", "txn", (polled(k0=[(0, 1)]), sent(1, 0, 2))),
        ],
    ),
    "a poll ends before what it has polled is sent": (
        "G1c-realtime", [*done(1, polled(k0=[(0, 1)])), *done(0, ONE)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VALID)
def test_valid(name: str) -> None:
    assert anomalies(VALID[name]) == set()


@pytest.mark.parametrize("name", INVALID)
def test_anomaly(name: str) -> None:
    anomaly, maps = INVALID[name]
    assert anomaly in anomalies(maps)


def test_sends_in_a_cycle_are_allowed() -> None:
    cycle = together(done(0, sent(0, 0, 1), sent(1, 1, 4)), done(1, sent(0, 1, 2), sent(1, 0, 3)))
    verdict = Checker(history_of([*cycle, *done(2, polled(k0=[(0, 1), (1, 2)], k1=[(0, 3), (1, 4)]))])).verdict()
    assert (verdict["valid"], verdict["allowed"]) == (True, {"G0": 1})


PIPELINE = {"inputs": (0,), "outputs": ((1, 2), (3, 4)), "by-user": ((3, 4),), "users": USERS}
FIRST, SECOND, OTHER = 16, 32, 17
"""Two values of user 0, and one of user 1."""
INPUT = done(0, sent(0, 0, FIRST), sent(0, 1, SECOND), sent(0, 2, OTHER))


def outputs(copies: Sequence[Any], more: Sequence[Any], counts: Sequence[Any], others: Sequence[Any] = ()) -> Lines:
    """Two partitions of copies, and two of counts, whose key is the user."""
    values_of = enumerate((copies, more, counts, others), 1)
    polls = [polled(**{f"k{key}": [*enumerate(values)] for key, values in values_of})]
    return [*INPUT, *done(1, polled(k0=[*enumerate((FIRST, SECOND, OTHER))])), *done(2, *polls)]


COUNTS = ((FIRST, 1), (OTHER, 1), (SECOND, 2))
OUTPUTS: dict[str, tuple[set[str], Lines]] = {
    "once": (set(), outputs((FIRST, SECOND), (OTHER,), COUNTS)),
    "users in any order": (set(), outputs((OTHER, FIRST, SECOND), (), COUNTS)),
    "a user's in two partitions": (set(), outputs((SECOND, OTHER), (FIRST,), COUNTS)),
    "users in two partitions": (set(), outputs((FIRST, SECOND), (OTHER,), COUNTS[::2], COUNTS[1:2])),
    "a user's in two partitions by user": (
        {"output-scattered"},
        outputs((FIRST, SECOND), (OTHER,), COUNTS[:2], COUNTS[2:]),
    ),
    "missing": ({"output-lost"}, outputs((FIRST,), (OTHER,), COUNTS)),
    "twice": ({"output-duplicate"}, outputs((FIRST, SECOND), (OTHER, SECOND), COUNTS)),
    "foreign": ({"output-foreign"}, outputs((FIRST, SECOND, 48), (OTHER,), COUNTS)),
    "another order": ({"output-reordered"}, outputs((SECOND, FIRST), (OTHER,), COUNTS)),
    "another number": ({"output-number"}, outputs((FIRST, SECOND), (OTHER,), ((FIRST, 1), (OTHER, 2), (SECOND, 2)))),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_a_pipeline(name: str) -> None:
    expected, maps = OUTPUTS[name]
    assert anomalies(maps, PIPELINE) == expected


@pytest.mark.parametrize("broken", [
    [line(0, "ok", "send", ())],
    [line(0, "invoke", "send", ()), line(0, "invoke", "send", ())],
    [*done(0, ONE, type="info"), *done(0, TWO)],
])  # fmt: skip
def test_malformed(broken: Lines) -> None:
    """A process does one thing at a time, and nothing after an unknown outcome."""
    with pytest.raises(Malformed):
        history_of(broken)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=30))
def test_cycles(edges: list[tuple[int, int]]) -> None:
    """A cycle is found in each component that has one, and goes along edges."""
    edges = [edge for edge in edges if edge[0] != edge[1]]
    after: dict[int, set[int]] = defaultdict(set)
    for first, second in edges:
        after[first].add(second)
    reached = {node: {node} for node in range(8)}
    for _ in range(8):
        reached = {node: set().union(found, *(after[each] for each in found)) for node, found in reached.items()}
    components = {frozenset(b for b in reached[a] if a in reached[b]) for a in range(8)}
    cycles = [*cycles_of(edges)]
    assert len(cycles) == sum(len(component) > 1 for component in components)
    for cycle in cycles:
        assert all(second in after[first] for first, second in zip(cycle, [*cycle[1:], cycle[0]], strict=True))


# --- random histories -------------------------------------------------------------------------------------------------


IDEAL_PIPELINE = {"inputs": (0, 1), "outputs": ((2, 3), (4, 5)), "by-user": ((4, 5),), "users": USERS}


class IdealKafka:
    """Two partitions of input, two outputs of two partitions, and a pipeline that does all once."""

    def __init__(self, luck: random.Random) -> None:
        self.luck, self.lines = luck, [line(99, "invoke", "log", None)]
        self.log: dict[int, list[Any]] = {key: [] for key in range(6)}
        """None at an offset: a marker, or what was aborted."""
        self.aborted: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.processes, self.next_process, self.next_id = [0, 1, 2], 3, 1
        self.positions: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.passed = [0, 0]
        self.counts: dict[int, int] = defaultdict(int)

    def played(self, actions: int) -> Lines:
        for _ in range(actions):
            self.luck.choice((self.send, self.send, self.poll, self.run_pipeline))(self.luck.randrange(3))
        self.send(0, "ok", 12)
        self.send(1, "ok", 12)
        self.run_pipeline(0)
        last = [self._polls(98, key, 10**9) for key in self.log]
        self.lines += [*assigned(98, *self.log), *done(98, ("poll", dict(zip(self.log, last, strict=True))), f="poll")]
        return [*self.lines, line(99, "ok", "log", {key: tuple(ranges) for key, ranges in self.aborted.items()})]

    def send(self, client: int, outcome: str = "", count: int = 0) -> None:
        process = self.processes[client]
        outcome = outcome or self.luck.choice(("ok", "ok", "fail", "info"))
        is_visible = outcome == "ok" or (outcome == "info" and self.luck.random() < 0.5)
        micro, invoked = [], []
        for number in range(count or self.luck.randrange(1, 4)):
            user = number % 3 if count else self.luck.randrange(3)
            key, value = user % 2, self.next_id * USERS + user
            self.next_id += 1
            offset = len(self.log[key])
            self.log[key].append(value if is_visible else None)
            if not is_visible:
                self.aborted[key].append((offset, offset))
            invoked.append(("send", key, value))
            micro.append(sent(key, None if outcome == "info" and self.luck.random() < 0.5 else offset, value))
        for key in {key for _, key, _ in micro}:
            self.log[key].append(None)
        self.lines += [line(process, "invoke", "txn", tuple(invoked)), line(process, outcome, "txn", tuple(micro))]
        if outcome == "info":
            self.processes[client], self.next_process = self.next_process, self.next_process + 1

    def _polls(self, process: int, key: int, count: int) -> tuple[Any, ...]:
        first = self.positions[process][key]
        pairs = [(offset, value) for offset, value in enumerate(self.log[key]) if offset >= first and value is not None]
        if pairs := pairs[:count]:
            self.positions[process][key] = pairs[-1][0] + 1
        return tuple(pairs)

    def poll(self, client: int) -> None:
        process = self.processes[client]
        keys = self.luck.sample(range(6), 2)
        self.lines += done(process, ("poll", {key: self._polls(process, key, 4) for key in keys}), f="poll")

    def run_pipeline(self, _: int) -> None:
        """One transaction, of all that is there."""
        polls: dict[int, tuple[Any, ...]] = {}
        sends = []
        for key in (0, 1):
            polls[key] = tuple((o, v) for o, v in enumerate(self.log[key]) if o >= self.passed[key] and v is not None)
            self.passed[key] = len(self.log[key])
            for _, value in polls[key]:
                self.counts[value % USERS] += 1
                for output, result in ((2 + value % 2, value), (4 + value % 2, (value, self.counts[value % USERS]))):
                    sends.append(sent(output, len(self.log[output]), result))
                    self.log[output].append(result)
        self.lines += done(self.next_process, ("poll", polls), *sends, unordered=(0, 1))
        self.next_process += 1


@given(st.integers(0, 2**32), st.integers(0, 40))
def test_random_valid_histories(seed: int, actions: int) -> None:
    maps = IdealKafka(random.Random(seed)).played(actions)
    assert anomalies(maps, IDEAL_PIPELINE) == set()


@pytest.mark.parametrize("mutant", MUTANTS)
@given(seed=st.integers(0, 2**32), actions=st.integers(0, 40))
def test_planted_anomalies(mutant: str, seed: int, actions: int) -> None:
    maps = copy.deepcopy(IdealKafka(random.Random(seed)).played(actions))
    MUTANTS[mutant](maps)
    assert FOUND_AS[mutant] in anomalies(maps, IDEAL_PIPELINE)


# --- files ------------------------------------------------------------------------------------------------------------

ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False, allow_infinity=False),
    st.from_regex(r"[a-z][a-z-]{0,8}\??", fullmatch=True).map(Keyword),
)  # fmt: skip
VALUES = st.recursive(ATOMS, lambda inner: st.lists(inner).map(tuple) | st.dictionaries(ATOMS, inner), max_leaves=12)


@given(st.lists(VALUES))
def test_edn_is_read_as_it_was_written(values: list[Any]) -> None:
    assert read(lines(values)) == values


def test_edn_of_others() -> None:
    """As Jepsen writes it, with tags, sets, commas and comments."""
    text = '#jepsen.history.Op{:index 0, :value [[:poll {1 [[2 3N]]}]], :ok? #{nil "a b"}} ; the first'
    assert read(text) == [{"index": 0, "value": (("poll", {1: ((2, 3),)}),), "ok?": frozenset({None, "a b"})}]
    for broken in ("[1", "1]", "{1}", "(1]", "a/b"):
        with pytest.raises(NotEdn):
            read(broken)


@pytest.mark.parametrize("is_valid", [True, False])
def test_the_command(is_valid: bool, tmp_path: Path) -> None:
    maps = VALID["one is sent, and polled"] if is_valid else INVALID["a value at two offsets"][1]
    keywords = [
        {Keyword(name): Keyword(item) if isinstance(item, str) else item for name, item in each.items()}
        for each in maps
    ]  # fmt: skip
    text = lines(keywords).replace('"send"', ":send").replace('"poll"', ":poll")
    (tmp_path / "history.edn").write_text(text)
    (tmp_path / "test.edn").write_text(written({}))
    command = [sys.executable, str(HERE / "rig" / "history_checker.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, json.loads(ended.stdout)) == (int(not is_valid), judged(tmp_path))


def test_no_code_of_the_product() -> None:
    for module in ("edn", "history_checker", "history_mutants"):
        assert "exactlyonce" not in (HERE / "rig" / f"{module}.py").read_text()
