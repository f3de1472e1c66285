"""Commits to stores with a ledger: what is asked in which order, what is waited for, and what makes a run halt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.commits.stores import (
    ForeignLedger,
    LedgerBehind,
    StagedCommits,
    StagingSink,
    UnderWay,
    in_order,
    ledger_after,
    positions_of,
)
from exactlyonce.checkpoint.records.encoding import DamagedRecord, decode, encode
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Finalized, Incarnation, Manifest, StoreCommittable
from exactlyonce.checkpoint.requests import Procedure, drive
from exactlyonce.pipeline.errors import (
    ASKED_AGAIN,
    Fenced,
    Halt,
    InvariantViolation,
    RecordsRefused,
    StoreError,
    StoreUnavailable,
    StoreUnready,
)
from exactlyonce.testing.clock import SimulatedClock

TIMEOUT_MS = 60_000
ORIGIN = "topic"
"""The id of the checkpoint topic."""
INCARNATION = Incarnation(incarnation=4, host="here", process=1, started_at_ms=0, heartbeat_ms=0)


def staged(checkpoint: int, subtask: int = 0, sink: str = "db", records: int = 3) -> StoreCommittable:
    return StoreCommittable(sink=sink, subtask=subtask, checkpoint=checkpoint, records=records, kind="rows")


LEDGER = r"The ledger of sink 'db' \(table kept of shop\)"


class Store:
    """Answers requests to stores; raises `fail` first, once for each entry, and the answers in `slow` come later."""

    def __init__(self, ledger: dict[int, int] | None = None, *, at_once: bool = False) -> None:
        self.clock = SimulatedClock()
        self.ledger, self.fail, self.slow = ledger or {}, list[Exception](), list[UnderWay]()
        self.asked: list[Any] = []
        self.notes: list[str] = []
        self.beats = 0
        self.commits = StagedCommits(
            clock=self.clock, sinks={"db": StagingSink("digest", "table kept of shop", at_once)}, timeout_ms=TIMEOUT_MS,
            note=self.notes.append, meanwhile=self._beat,
        )  # fmt: skip
        self.commits.begin(INCARNATION, (0, 0), ORIGIN)

    def _beat(self) -> Procedure[None]:
        self.beats += 1
        return
        yield  # never: it makes this a procedure

    def __call__(self, request: ask.Request) -> Any:
        if isinstance(request, ask.Pause):
            self.clock.advance(request.duration_ms)
            return None
        if isinstance(request, ask.Reached):
            return None
        self.asked.append(request)
        if self.fail:
            raise self.fail.pop(0)
        if self.slow:
            return self.slow.pop(0)
        return dict(self.ledger) if isinstance(request, ask.FenceStore) else True

    def commit(self, manifest: Manifest, *, accept_loss: bool = False) -> dict[str, str]:
        return dict(drive(self.commits.finish(manifest, (), accept_loss=accept_loss), self))

    def fence(self, newest: Manifest | None, finalized: Manifest | None) -> None:
        drive(self.commits.fence(newest, finalized), self)


Of = Callable[..., Manifest]


def test_what_is_staged_is_committed_in_the_order_of_its_checkpoints(manifest: Of) -> None:
    before = {("db", 0): 2, ("db", 1): 3, ("old", 5): 1}
    carried = in_order([staged(7), staged(6, subtask=1), staged(6)], before, {"db": StagingSink("digest")})
    assert {each.description for each in carried} == {"digest"}
    assert [(each.subtask, each.checkpoint, each.previous) for each in carried] == [(0, 6, 2), (1, 6, 3), (0, 7, 6)]
    assert ledger_after(carried, before) == (("db", 0, 7), ("db", 1, 6), ("old", 5, 1)), "nothing is forgotten"
    store = Store()
    fates = store.commit(manifest(7, staged=carried))
    assert [each.committables for each in store.asked] == [(committable,) for committable in carried]
    assert fates == {"db:0:6": "committed", "db:1:6": "committed", "db:0:7": "committed"}


def test_a_store_that_commits_at_once_gets_all_of_a_checkpoint(manifest: Of) -> None:
    """One request has all of it, oldest first, and fails as a whole, apart from other sinks' requests."""
    store = Store(at_once=True)
    carried = in_order([staged(7), staged(6, subtask=1), staged(6), staged(7, sink="files")], {}, store.commits.sinks)
    of_table = tuple(committable for committable in carried if committable.sink == "db")
    assert [(committable.checkpoint, committable.subtask) for committable in of_table] == [(6, 0), (6, 1), (7, 0)]
    fates = store.commit(manifest(7, staged=carried))
    assert [request.committables for request in store.asked] == [of_table, (carried[-1],)]
    assert set(fates) == {committable.name for committable in carried}
    store.fail = [StoreError("no such column.")]
    with pytest.raises(Halt, match=r"sink 'db' refuses its 9 records of subtasks 0, 1: no such column"):
        store.commit(manifest(7, staged=carried))
    store.fail, store.asked = [StoreError("no such column.")], []
    fates = store.commit(manifest(7, staged=carried), accept_loss=True)
    assert [sum(committable.records for committable in request.committables) for request in store.asked] == [9, 0, 3]
    assert [fates[committable.name] for committable in of_table] == ["loss accepted"] * 3
    assert fates["files:0:7"] == "committed"
    store.fail = [LedgerBehind(5)]
    with pytest.raises(Halt, match="has checkpoint 5 for subtasks 0, 1, but checkpoint 6 was committed"):
        store.commit(manifest(7, staged=carried))


def test_a_store_that_is_away_is_waited_for(manifest: Of) -> None:
    store = Store()
    store.fail = [StoreUnavailable("no answer from db.example:5432.")] * 5
    assert store.commit(manifest(1, staged=(staged(1),))) == {"db:0:1": "committed"}
    assert (len(store.asked), len(set(store.asked)), store.beats) == (6, 1, 5)
    assert store.notes == ["waiting for the store of sink 'db': no answer from db.example:5432."]


def test_a_store_that_stays_away_ends_the_run(manifest: Of) -> None:
    store = Store()
    store.fail = [StoreUnavailable(f"no answer. {ASKED_AGAIN}")] * 10_000
    said = r"'db' has not answered for 60 s \(store_timeout, --store-timeout; on Spark storeTimeout\).*run it again"
    with pytest.raises(StoreUnavailable, match=said) as ended:
        store.commit(manifest(1, staged=(staged(1),)))
    assert str(ended.value).count("Nothing is lost") == 1, "nobody asks again"
    assert len(store.notes) == 2, "one every half minute"


def test_a_store_that_is_at_work_is_not_given_up(manifest: Of) -> None:
    """The same is asked again at once, with heartbeats; a note claims no more than is known."""
    store = Store()
    store.slow = [UnderWay(1_000 * number) for number in range(1, 2 * TIMEOUT_MS // 1_000)]
    count = len(store.slow)
    assert store.commit(manifest(1, staged=(staged(1),))) == {"db:0:1": "committed"}
    assert (len(store.asked), len(set(store.asked)), store.beats) == (count + 1, 1, count)
    assert store.clock.monotonic_ms() == 0
    said = "waiting for the store of sink 'db': no answer yet to what began 30 s ago"
    assert store.notes == [said], "the clock stands still here"


def test_a_store_that_answers_is_not_said_to_be_silent(manifest: Of) -> None:
    """The end has its answer, with what to correct; a note has the last failure of a request."""
    store = Store()
    answer = "The service answers 404. It has no such address: correct url=."
    store.slow = [UnderWay(30_000, answer)]
    store.commit(manifest(1, staged=(staged(1),)))
    said = f"waiting for the store of sink 'db': what began 30 s ago is not done yet. The last failure: {answer}"
    assert store.notes == [said]
    store.fail = [StoreUnready(f"{answer} {ASKED_AGAIN}", 404)] * 10_000
    with pytest.raises(StoreUnavailable) as ended:
        store.commit(manifest(1, staged=(staged(1),)))
    assert str(ended.value).startswith("The store of sink 'db' has answers, but has not taken all records for 60 s (")
    assert str(ended.value).endswith(f"the next run goes on there. {answer}")


def test_the_number_of_refused_records_is_said(manifest: Of) -> None:
    store = Store()
    store.fail = [RecordsRefused("422 no such customer.", 1, "give the sink on_error=DeadLetters(...)")]
    with pytest.raises(Halt, match=r"refuses 1 or more of its \d+ records of subtask 0: 422 .*") as halted:
        store.commit(manifest(1, staged=(staged(1),)))
    assert "(1) give the sink on_error=DeadLetters(...), and run again; (2) go on without" in str(halted.value)


def test_a_store_that_was_at_work_has_the_whole_timeout(manifest: Of) -> None:
    store = Store()
    store.slow, store.fail = [UnderWay(2 * TIMEOUT_MS)], [StoreUnavailable("no answer.")] * 20
    answer = store.__call__

    def slow_first(request: ask.Request) -> Any:
        if store.slow:
            store.clock.advance(2 * TIMEOUT_MS)
            return store.slow.pop()
        return answer(request)

    fates = drive(store.commits.finish(manifest(1, staged=(staged(1),)), (), accept_loss=False), slow_first)
    assert fates == {"db:0:1": "committed"}


@pytest.mark.parametrize("attempt_ms", [500, 2 * TIMEOUT_MS])
def test_attempts_that_end_without_an_answer_do_not_put_off_the_end(manifest: Of, attempt_ms: int) -> None:
    """The wait ends at the first failure after the timeout, which counts from the first failure of a connection."""
    store = Store()
    failed_at_ms: list[int] = []
    under_way_ms = 0

    def silent(request: ask.Request) -> Any:
        nonlocal under_way_ms
        if not isinstance(request, ask.CommitStaged):
            return store(request)
        step_ms = min(1_000, attempt_ms - under_way_ms)
        store.clock.advance(step_ms)
        under_way_ms += step_ms
        if under_way_ms < attempt_ms:
            return UnderWay(under_way_ms)
        under_way_ms = 0
        failed_at_ms.append(store.clock.monotonic_ms())
        assert len(failed_at_ms) < 1_000, "it is waited for without end"
        raise StoreUnavailable("no answer.")

    with pytest.raises(StoreUnavailable, match="'db' has not answered for 60 s"):
        drive(store.commits.finish(manifest(1, staged=(staged(1),)), (), accept_loss=False), silent)
    assert failed_at_ms[0] == attempt_ms
    assert failed_at_ms[-1] >= failed_at_ms[0] + TIMEOUT_MS > failed_at_ms[-2]


def test_an_answer_ends_a_row_of_failures(manifest: Of) -> None:
    store = Store()
    outcomes = [[StoreUnavailable("no answer.")] * 20, [StoreUnavailable("no answer.")] * 20]
    both = (staged(1), staged(1, subtask=1))

    def away(request: ask.Request) -> Any:
        if isinstance(request, ask.CommitStaged) and (left := outcomes[request.committables[0].subtask]):
            store.clock.advance(500)
            raise left.pop()
        return store(request)

    fates = drive(store.commits.finish(manifest(1, staged=both), (), accept_loss=False), away)
    assert fates == {"db:0:1": "committed", "db:1:1": "committed"}
    assert store.clock.monotonic_ms() > TIMEOUT_MS


def test_what_a_store_refuses_halts_with_choices(manifest: Of) -> None:
    store = Store()
    store.fail = [StoreError("value too long for column 'name'.")]
    with pytest.raises(Halt, match=r"(?s)Checkpoint 9 .* sink 'db' refuses its 3 records.*'name'.*all 3 of .*-loss 9"):
        store.commit(manifest(9, staged=(staged(9),)))
    store.fail, store.asked = [StoreError("value too long.")], []
    assert store.commit(manifest(9, staged=(staged(9),)), accept_loss=True) == {"db:0:9": "loss accepted"}
    assert [each.committables[0].records for each in store.asked] == [3, 0]
    assert store.notes == [
        "checkpoint 9: all 3 records of subtask 0 of sink 'db' are given up, not only those that could not be written: "
        "value too long."
    ]


def test_rows_that_are_damaged_halt_with_choices(manifest: Of) -> None:
    store, damaged = Store(), DamagedRecord("Block 7 is damaged")
    store.fail = [damaged]
    why = r"(?s)Checkpoint 9 .* 3 records .* sink 'db', of subtask 0, are damaged .*Block 7.*Choices.*--accept-loss 9"
    with pytest.raises(Halt, match=why):
        store.commit(manifest(9, staged=(staged(9),)))
    store.fail, store.asked = [damaged], []
    both = (staged(9), staged(9, subtask=1))
    fates = {"db:0:9": "loss accepted", "db:1:9": "committed"}
    assert store.commit(manifest(9, staged=both), accept_loss=True) == fates
    assert [each.committables[0].records for each in store.asked] == [3, 0, 3]


ANSWERS = {
    "a newer incarnation": (Fenced("a newer one"), Fenced, "a newer one"),
    "it went back, and what is missing is not written again": (
        LedgerBehind(2), Halt, rf"^{LEDGER} has checkpoint 2 for subtask 0, but checkpoint 6 was committed"),
    "the pipeline was reset": (
        ForeignLedger("another"), Halt,
        rf"^{LEDGER} was begun for another checkpoint topic, with id another; this one has id topic"),
    "it is gone": (ForeignLedger(""), Halt, rf"^{LEDGER} is gone, .* restored from a backup. Run again"),
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_ledger_that_changed_during_a_run_ends_it(manifest: Of, answer: str) -> None:
    error, kind, said = ANSWERS[answer]
    store = Store()
    store.fail = [error]
    with pytest.raises(kind, match=said):
        store.commit(manifest(7, staged=in_order([staged(7)], {("db", 0): 6}, {})))


@pytest.mark.parametrize(
    ("ledger", "why"),
    [
        ({0: 4}, r"has checkpoint 4 for subtask 0, but checkpoint 5 was committed.*restored from a backup"),
        ({}, r"has nothing for subtask 0, but checkpoint 5 was committed"),
        ({0: 5, 1: 9}, r"has checkpoint 9 for subtask 1, but the newest that was decided is 7.*topic was restored"),
    ],
)
def test_a_ledger_that_is_not_where_the_decisions_say_halts(manifest: Of, ledger: dict[int, int], why: str) -> None:
    finalized = manifest(6, ledger=(("db", 0, 5),))
    with pytest.raises(Halt, match=f"(?s)^{LEDGER} {why}.*Choices: "):
        Store(ledger).fence(manifest(7), finalized)


def test_a_ledger_between_the_newest_manifests_is_right(manifest: Of) -> None:
    """The newest manifest may have been committed or not; the one before it was."""
    finalized = manifest(6, ledger=(("db", 0, 5),))
    for ledger in ({0: 5}, {0: 7}, {0: 5, 1: 7}):
        store = Store(ledger)
        store.fence(manifest(7), finalized)
        assert store.asked == [ask.FenceStore("db", 4, ORIGIN)]


def test_a_ledger_of_another_checkpoint_topic_halts(manifest: Of) -> None:
    """A pipeline that was reset begins with checkpoint 1 again, which an old ledger has."""
    store = Store()
    store.fail = [ForeignLedger("other-id")]
    said = rf"(?s)^{LEDGER} was begun for .*, with id other-id; this one has id topic.* what the ledger has of the sink"
    with pytest.raises(Halt, match=said):
        store.fence(None, None)


def test_what_nobody_committed_goes() -> None:
    store = Store()
    store.fail = [StoreUnavailable("no answer.")]
    store.commits.sinks = {name: StagingSink("digest") for name in ("db", "files")}
    store.commits.begin_attempt(2)
    drive(store.commits.clean(), store)
    assert store.asked == [*[ask.CleanStore("db", 4, 2)] * 2, ask.CleanStore("files", 4, 2)]


def test_a_manifest_keeps_what_is_staged(manifest: Of) -> None:
    decided = manifest(1, staged=(msgspec.structs.replace(staged(1), body=b"x", previous=3),), ledger=(("db", 0, 1),))
    assert decode(encode(decided), Manifest) == decided
    assert positions_of(decided) == {("db", 0): 1}
    history = History(decided.pipeline)
    history.admit(decided)
    fates = tuple((each.transactional_id, "committed") for each in decided.committables)
    with pytest.raises(InvariantViolation, match="db:0:1"):
        history.admit(Finalized(1, 1, 0, fates))
    history.admit(Finalized(1, 1, 0, (*fates, ("db:0:1", "committed"))))
