"""The contract of every sink whose output the leader commits to a store with a ledger.

Tests use the writer and the committer that a description opens as the leader does: fence, then commit in the order of
the checkpoints. The leaders are incarnations 1 and 2; the older one is the zombie.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import Fenced, StoreError, StoreUnavailable
from exactlyonce.sinks.committer import Committer, Inspectable
from exactlyonce.sinks.ledger import ForeignLedger, LedgerBehind
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.contract import refused
from exactlyonce.testing.sink_contract.hooks import ORIGIN, ContractHooks, Forked, Row, again, all_of, known, works

FIRST: Sequence[Row] = [(number, 1) for number in range(5)]
"""The rows of the first checkpoint in most tests; with keys, the next one overwrites some of them."""
SECOND: Sequence[Row] = [(number, 2) for number in range(3, 8)]

TWICE = "What had been committed was committed again: look into the ledger, in the transaction, before any row."


class SinkContract(ContractHooks):
    """See the package."""

    def leader(self, incarnation: int, *, pipeline: str = "shop", sink: str = "orders") -> Committer:
        """A committer that has fenced its predecessors."""
        committer = self.committer(pipeline, sink)
        again(lambda: committer.fence(incarnation, ORIGIN))
        return committer

    def commits(
        self, committer: Committer, committable: StoreCommittable, incarnation: int = 1, origin: str = ORIGIN
    ) -> None:
        """Commit a committable for the first time."""
        failed = f"A commit of checkpoint {committable.checkpoint}, with what the ledger has as `previous`, is to work."
        assert works(lambda: committer.commit([committable], incarnation, origin), failed) is True, (
            f"A commit of checkpoint {committable.checkpoint}, the first, says that it had been committed: its rows "
            f"would be left out. Only a ledger row with this or a newer checkpoint, for this subtask, may say so."
        )

    def has_been(
        self, committer: Committer, committable: StoreCommittable, incarnation: int = 1, origin: str = ORIGIN
    ) -> None:
        """Commit a committable once more."""
        asked_again = "What has been committed is asked again, and is no error: it returns False."
        assert works(lambda: committer.commit([committable], incarnation, origin), asked_again) is False, TWICE

    def found(self, incarnation: int, expected: dict[int, int], why: str) -> Committer:
        """The next leader's committer; fails unless its fence returns *expected*."""
        committer = self.committer()
        ledger = known(works(lambda: committer.fence(incarnation, ORIGIN), why))
        assert ledger == expected, f"{why} The ledger is to have {expected}; fence returned {ledger}."
        return committer

    # --- the description ----------------------------------------------------------------------------------------------

    def test_the_description_is_data(self) -> None:
        """A description made twice describes the same, as JSON, and finds nothing wrong with records of the type."""
        sinks = self.sink(), self.sink()
        one, two = (sink.describe(self.type) for sink in sinks)
        assert json.loads(json.dumps(one)) == two, (
            f"describe() is part of the pipeline's fingerprint, and differs from one process to the next, or is no "
            f"JSON: {one}. After a restart the pipeline would count as changed."
        )
        problems = list(self.sink().problems(self.type))
        assert not problems, f"problems() finds fault with what the other tests write: {problems}"
        assert not self.sink().transactional, (
            "The sink says that it is transactional: a coordinator would wait for Kafka transactions that never come."
        )

    def test_check_may_be_repeated_and_changes_no_rows(self) -> None:
        """Every start of a run checks the target, also two at once; rows and ledger stay."""
        leader = self.leader(1)
        self.commits(leader, self.staged(FIRST, 1))
        others = [self.committer() for _ in range(4)]
        outcomes = _at_once([partial(again, other.check) for other in others])
        assert outcomes == [None] * 4, f"Of several processes that check at once, some fail: {outcomes}"
        leader.check()
        self.seen(FIRST, "check() changed rows that were there: it is run at every start.")
        self.found(2, {0: 1}, "check() emptied the ledger: what is in the target would be written again.")

    def test_a_look_beside_a_run(self) -> None:
        """A look shows the ledger and its writer, and disturbs nobody."""
        looking = self.committer()
        if not isinstance(looking, Inspectable) or (before := looking.look()) is None:
            pytest.skip("the store cannot be looked at: no look(), or it shows nothing; `exactlyonce doctor` says so")
        assert (before.ledger, before.problem) == ({}, ""), f"Nothing was committed yet, and look() shows {before}."
        leader = self.leader(2)
        self.commits(leader, self.staged(FIRST, 1), 2)
        view = looking.look()
        assert view is not None, "look() has shown the store before, and does not now."
        shown = (view.incarnation, view.origin, known(dict(view.ledger)), view.problem)
        assert shown == (2, ORIGIN, {0: 1}, ""), f"Incarnation 2 has committed checkpoint 1, and look() shows {view}."
        self.commits(leader, self.staged(SECOND, 2, previous=1), 2)
        self.seen([*FIRST, *SECOND], "A look disturbs nothing.")

    # --- commits ------------------------------------------------------------------------------------------------------

    def test_rows_are_seen_from_their_commit_on(self) -> None:
        """Staged rows are invisible until their checkpoint is decided; then all of them are visible."""
        leader = self.leader(1)
        first, second = self.staged(FIRST, 1), self.staged(SECOND, 2, previous=1)
        self.seen([], "Rows are in the target before their checkpoint was decided: if it is aborted, they come twice.")
        self.commits(leader, first)
        self.seen(FIRST, "The commit of a checkpoint gives exactly its rows.")
        self.commits(leader, second)
        self.seen([*FIRST, *SECOND], "The next commit adds its rows, in their order.")

    def test_a_lost_answer(self) -> None:
        """A commit lands and its answer is lost: a retry, now or after a restart, writes nothing more."""
        zombie, committable = self.leader(1), self.staged(FIRST, 1)
        self.commits(zombie, committable)
        self.has_been(zombie, committable)
        self.has_been(self.committer(), committable)
        self.has_been(self.found(2, {0: 1}, "A commit is to leave its checkpoint."), committable, incarnation=2)
        self.seen(FIRST, TWICE)

    def test_a_request_that_lands_late(self) -> None:
        """A request of an older checkpoint lands after newer ones: no row comes back or comes twice."""
        leader, first = self.leader(1), self.staged(FIRST, 1)
        for committable in (first, self.staged(SECOND, 2, previous=1)):
            self.commits(leader, committable)
        self.has_been(leader, first)
        self.seen([*FIRST, *SECOND], TWICE)
        self.found(2, {0: 2}, "A late request of an older checkpoint took the ledger back.")

    def test_many_checkpoints_and_incarnations(self) -> None:
        """Over restarts and gaps, past 9, 99 and 32 bits, the ledger's checkpoint only grows: 10 is more than 9."""
        checkpoints = [1, 2, 8, 9, 10, 11, 99, 100, 2**31 - 1, 2**31, 2**33]
        rows: list[Row] = []
        before = 0
        for number, checkpoint in enumerate(checkpoints):
            expected = {0: before} if before else {}
            leader = self.found(number + 1, expected, "The marker of what is done is a number that only grows.")
            committable = self.staged([(number, 0)], checkpoint, previous=before)
            self.commits(leader, committable, number + 1)
            self.has_been(leader, committable, number + 1)
            rows.append((number, 0))
            before = checkpoint
        self.seen(rows, "One row was written for each checkpoint.")

    def test_what_waits_for_a_later_leader(self) -> None:
        """A later leader commits the waiting committables of several checkpoints in their order."""
        zombie = self.leader(1)
        first, second = self.staged(FIRST, 3), self.staged(SECOND, 5, previous=3)
        self.staged([(99, 0)], 4)  # of a checkpoint that is aborted
        self.commits(zombie, self.staged([(50, 0)], 5, subtask=1))
        leader = self.found(2, {1: 5}, "Another subtask has committed.")
        self.commits(leader, first, 2)
        self.commits(leader, second, 2)
        self.seen(
            [(50, 0), *FIRST, *SECOND],
            "What waits is kept until it is committed, and what nobody decides is never seen, whatever others commit.",
        )

    def test_all_of_a_checkpoint_in_one_call(self) -> None:
        """A call gets all committables of a checkpoint, oldest first; once half are committed, it may be repeated."""
        leader = self.leader(1)
        first, second = self.staged(FIRST, 1), self.staged(SECOND, 2, previous=1)
        other = self.staged([(50, 0)], 2, subtask=1)
        self.commits(leader, first)
        why = "Of three committables one had been committed; the call commits the others, and says that it did."
        for committer, expected in ((leader, True), (leader, False), (self.committer(), False)):
            outcome = works(partial(committer.commit, [first, second, other], 1, ORIGIN), why)
            assert outcome is expected, f"{why} It returned {outcome}."
        self.seen([*FIRST, *SECOND, (50, 0)], TWICE, in_order=False)
        self.found(2, {0: 2, 1: 2}, "The ledger has the newest of each subtask.")

    def test_nothing_is_a_commit_too(self) -> None:
        """A committable that was given up (--accept-loss) has no rows, and is in the ledger all the same."""
        leader = self.leader(1)
        refused_rows = self.staged(FIRST, 1)
        self.commits(leader, msgspec.structs.replace(refused_rows, records=0, blocks=(), body=b""))
        self.seen([], "A committable without rows wrote some.")
        self.commits(leader, self.staged(SECOND, 2, previous=1))
        self.seen(SECOND, "The checkpoint after an empty one gives exactly its rows.")

    def test_the_ledger_is_behind(self) -> None:
        """The ledger lacks the checkpoint committed before, as in a restored store: LedgerBehind, no rows."""
        leader = self.leader(1)
        self.commits(leader, self.staged(FIRST, 1))
        why = "The ledger has checkpoint 1, and the entry's `previous` is 3: rows are missing, and nobody would know."
        error = refused(lambda: leader.commit([self.staged(SECOND, 4, previous=3)], 1, ORIGIN), LedgerBehind, why)
        assert int(str(error)) == 1, f"The argument of LedgerBehind is the ledger's checkpoint, 1, and not {error}."
        fresh = self.staged([(70, 0)], 4, previous=3, subtask=5)
        why = f"Without a row it has checkpoint 0. {why}"
        error = refused(lambda: leader.commit([fresh], 1, ORIGIN), LedgerBehind, why)
        assert int(str(error)) == 0, f"The argument of LedgerBehind is 0 where there is no row, and not {error}."
        self.seen(FIRST, "Rows were written behind a gap.")
        self.commits(leader, self.staged(SECOND, 4, previous=1))
        self.seen([*FIRST, *SECOND], "After a LedgerBehind, which changed nothing, the right one is committed.")

    # --- zombies ------------------------------------------------------------------------------------------------------

    def test_a_zombie_of_an_older_incarnation(self) -> None:
        """A leader that was declared dead commits once more: it is fenced, whatever its checkpoint."""
        zombie, committable = self.leader(1), self.staged(FIRST, 1)
        leader = self.leader(2)
        why = "Incarnation 1 committed after incarnation 2 had fenced: it may commit what 2 has not decided."
        refused(lambda: zombie.commit([committable], 1, ORIGIN), Fenced, why)
        refused(lambda: self.committer().commit([committable], 1, ORIGIN), Fenced, why)
        self.seen([], why)
        self.commits(leader, committable, 2)
        refused(lambda: zombie.commit([self.staged(SECOND, 7, previous=1)], 1, ORIGIN), Fenced, why)
        self.seen(FIRST, why)

    def test_a_zombie_that_fences(self) -> None:
        """A leader that was declared dead fences: it gets Fenced, and the newer one continues."""
        self.leader(1)
        leader = self.leader(3)
        why = "fence took the ledger's incarnation back: both leaders would commit."
        refused(lambda: self.committer().fence(2, ORIGIN), Fenced, why)
        self.commits(leader, self.staged(FIRST, 1), 3)
        refused(lambda: self.committer().commit([self.staged(SECOND, 2, previous=1)], 2, ORIGIN), Fenced, why)
        self.seen(FIRST, why)

    def test_a_fence_may_be_repeated(self) -> None:
        """A leader whose fence was not answered fences again and may commit."""
        leader = self.leader(1)
        self.commits(leader, self.staged(FIRST, 1))
        for _ in range(2):
            ledger = known(again(lambda: leader.fence(1, ORIGIN)))
            assert ledger == {0: 1}, f"A repeated fence loses what the ledger had, {{0: 1}}: it returned {ledger}."
        self.commits(leader, self.staged(SECOND, 2, previous=1))
        self.seen([*FIRST, *SECOND], "A repeated fence disturbs nothing.")

    def test_another_checkpoint_topic(self) -> None:
        """The checkpoint topic was recreated and checkpoints count from 1 again: ForeignLedger; nothing changes."""
        leader = self.leader(2)
        self.commits(leader, self.staged(FIRST, 1), 2)
        why = "A ledger of another checkpoint topic was taken for this one's: its numbers say which rows are left out."
        for incarnation in (1, 2, 5):
            error = refused(partial(self.committer().fence, incarnation, "topic-2"), ForeignLedger, why)
            assert str(error) == ORIGIN, f"The argument of ForeignLedger is the origin in the ledger, and not {error}."
        self.commits(leader, self.staged(SECOND, 2, previous=1), 2)
        self.seen([*FIRST, *SECOND], "A fence that was refused as foreign left its incarnation in the ledger.")
        why = "A leader of another checkpoint topic, which counts from 1 too, committed into this one's ledger."
        foreign = self.staged([(70, 0)], 3, previous=2)
        for incarnation in (1, 2):
            refused(partial(self.committer().commit, [foreign], incarnation, "topic-2"), ForeignLedger, why)
        self.seen([*FIRST, *SECOND], why)

    def test_a_ledger_that_nobody_has_begun(self) -> None:
        """A committer has always fenced, so the ledger was lost: ForeignLedger or StoreError, and no row is written."""
        why = "A commit began the ledger: a zombie of the life before a reset would write behind the emptied target."
        try:
            again(partial(self.committer().commit, [self.staged(FIRST, 1)], 1, ORIGIN))
        except (ForeignLedger, StoreError):
            self.seen([], why)
        else:
            raise AssertionError(why)

    # --- who is who ---------------------------------------------------------------------------------------------------

    def test_another_run_of_the_same_pipeline(self) -> None:
        """A run finds the commits of earlier runs by the names of pipeline and sink alone."""
        self.commits(self.leader(1), self.staged(FIRST, 1))
        leader = self.found(2, {0: 1}, "The ledger is found by pipeline and sink, never by anything of one run.")
        self.has_been(leader, self.staged(FIRST, 1), 2)
        self.seen(FIRST, TWICE)

    @pytest.mark.parametrize(
        ("pipeline", "sink"), [("shop", "orders-2"), ("shop-2", "orders"), ("Shop", "orders"), ("shop-orders", "o"),
                               ("s_op", "orders"), ("shop", "ORDERS")],
    )  # fmt: skip
    def test_neighbours_in_one_target(self, pipeline: str, sink: str) -> None:
        """Two pipelines, or two sinks of one, share a target; neither fences or delays the other."""
        one = self.leader(5)
        self.commits(one, self.staged(FIRST, 9), 5)
        why = f"Sink 'orders' of pipeline 'shop' and {sink!r} of {pipeline!r} share a row of the ledger: one of them is"
        other = self.committer(pipeline, sink)
        ledger = known(works(lambda: other.fence(1, "topic-2"), f"{why} fenced, or held to be foreign."))
        assert ledger == {}, f"{why} told that its rows are there, and leaves them out. fence returned {ledger}."
        rows = self.staged([(20, 0)], 1, pipeline=pipeline, sink=sink)
        self.commits(other, rows, origin="topic-2")
        self.has_been(other, rows, origin="topic-2")
        self.commits(one, self.staged([(21, 0)], 10, previous=9), 5)
        self.seen([*FIRST, (20, 0), (21, 0)], f"{why} in the way of the other.")

    def test_two_subtasks_of_one_checkpoint(self) -> None:
        """The commit of one subtask does not count for another's, also after rescaling."""
        leader = self.leader(1)
        rows: list[Row] = []
        for subtask in (0, 1, 11):
            self.commits(leader, self.staged([(subtask, 0)], 1, subtask=subtask))
            rows.append((subtask, 0))
        self.seen(rows, "The ledger has one row for several subtasks: one's commit hides the others'.")
        leader = self.found(2, {0: 1, 1: 1, 11: 1}, "fence returns every subtask of the sink.")
        self.commits(leader, self.staged([(2, 0)], 2, previous=1), 2)
        self.found(3, {0: 2, 1: 1, 11: 1}, "Rows of subtasks that rescaling took away stay: they may come back.")

    # --- at once ------------------------------------------------------------------------------------------------------

    def test_commits_at_once_in_threads(self) -> None:
        """Several committers commit the same at once, each by its own connection: one of them does it."""
        self.leader(1)
        committables = self._each_twice()
        committers = [self.committer() for _ in committables]
        both = zip(committers, committables, strict=True)
        outcomes = _at_once([partial(again, partial(one.commit, [rows], 1, ORIGIN)) for one, rows in both])
        self._one_each(list(map(str, outcomes)))

    def test_commits_at_once_in_processes(self) -> None:
        """The same in processes: a lock within one process does not hold another."""
        self._needs_processes()
        self.leader(1).close()
        children = [Forked(partial(self._commit_in_child, committable)) for committable in self._each_twice()]
        try:
            self._one_each([child.next_line() for child in children])
        finally:
            for child in children:
                child.end()

    def _each_twice(self) -> list[StoreCommittable]:
        """Two committables of two subtasks, twice each: never are two different ones decided for one subtask."""
        one, other = (self.staged([(subtask, 0)], 1, subtask=subtask) for subtask in (0, 1))
        return [one, one, other, other]

    def _commit_in_child(self, committable: StoreCommittable, tell: Callable[[], None]) -> bool:
        committer = self.committer()
        return again(lambda: committer.commit([committable], 1, ORIGIN))

    def _needs_processes(self) -> None:
        if not self.processes:
            pytest.skip("no other process reaches the target")

    def _one_each(self, outcomes: list[str]) -> None:
        pairs = [sorted(outcomes[:2]), sorted(outcomes[2:])]
        assert pairs == [["False", "True"]] * 2, (
            f"Of two who commit the same at once, one is to do it (True), the other to see that it was done (False), "
            f"in each of two subtasks; StoreUnavailable is asked again. The outcomes are {outcomes}."
        )
        why = "Two who committed at once wrote the same rows, or overwrote each other."
        self.seen([(0, 0), (1, 0)], why, in_order=False)

    # --- connections --------------------------------------------------------------------------------------------------

    def test_close_and_go_on(self) -> None:
        """close may come at any time, and twice; what is asked afterwards connects again."""
        leader = self.committer()
        leader.close()
        again(lambda: leader.fence(1, ORIGIN))
        leader.close()
        leader.close()
        self.commits(leader, self.staged(FIRST, 1))
        self.seen(FIRST, "A committer that was closed is used again.")

    def test_another_thread(self) -> None:
        """A committer is used by one thread at a time, not always the same one."""
        leader = self.leader(1)
        outcomes = _at_once([lambda: leader.commit([self.staged(FIRST, 1)], 1, ORIGIN)])
        assert outcomes == [True], f"A committer was made in one thread, and used in another: {outcomes}"
        self.seen(FIRST, "A committer was made in one thread, and used in another.")

    def test_a_store_that_is_away(self) -> None:
        """A store that is away raises StoreUnavailable, which is retried, not StoreError, which halts."""
        leader, first = self.leader(1), self.staged(FIRST, 1)
        self.commits(leader, first)
        second = self.staged(SECOND, 2, previous=1)
        why = "The store is away, for a while: only StoreUnavailable is waited for; whatever else ends the run."
        with self.unavailable():
            for committer in (leader, self.committer()):
                refused(partial(committer.commit, [second], 1, ORIGIN), StoreUnavailable, why)
                refused(partial(committer.fence, 1, ORIGIN), StoreUnavailable, why)
                refused(committer.check, StoreUnavailable, why)
        again(lambda: leader.commit([second], 1, ORIGIN))
        self.has_been(leader, second)
        self.seen([*FIRST, *SECOND], "The store was away, and is back: nothing is lost or doubled.")

    def test_a_store_that_was_restored(self) -> None:
        """The store is as it was a checkpoint ago: this run and the next learn that rows are missing."""
        leader = self.leader(1)
        self.commits(leader, self.staged([(0, 0)], 1))
        restore = self.backup()
        self.commits(leader, self.staged([(1, 0)], 2, previous=1))
        restore()
        third = self.staged([(2, 0)], 3, previous=2)
        for committer in (self.committer(), leader):
            try:
                again(partial(committer.commit, [third], 1, ORIGIN))
            except (LedgerBehind, StoreError):
                continue
            raise AssertionError("The store lost checkpoint 2 to a restore, and takes checkpoint 3 as if nothing were.")
        self.found(2, {0: 1}, "A leader compares the ledger, as the store has it now, with what was decided.")

    def test_what_the_store_cleans_up(self) -> None:
        """Expiry, compaction and restarts of the store keep the ledger as long as the data."""
        self.commits(self.leader(1), self.staged(FIRST, 1))
        self.clean_up()
        leader = self.found(2, {0: 1}, "The store's own cleaning took the ledger's row: all would be written again.")
        self.has_been(leader, self.staged(FIRST, 1), 2)
        self.seen(FIRST, "The store's own cleaning took rows, or rows were written again after it.")

    def test_secrets_show_nowhere(self) -> None:
        """Descriptions, reprs and errors, which are logged or stored, do not contain the password."""
        if self.secret is None:
            self.left_out("secret", "that a password shows nowhere")
        shown = {"repr(sink)": repr(self.sink()), "describe()": json.dumps(self.sink().describe(self.type))}
        leader = self.leader(1)
        shown["repr(committer)"] = repr(leader)
        shown["problems()"] = repr(list(self.sink().problems(self.type)))
        if type(self).unavailable is not ContractHooks.unavailable:
            first = self.staged(FIRST, 1)
            with self.unavailable():
                asked: dict[str, Callable[[], object]] = {
                    "commit": partial(leader.commit, [first], 1, ORIGIN),
                    "check": self.committer().check,
                }
                for name, action in asked.items():
                    error = refused(action, StoreUnavailable, "The store is away.")
                    shown[f"the error of {name}"] = all_of(error)
        leaking = [name for name, text in shown.items() if self.secret in text]
        assert not leaking, f"The password shows in {leaking}."


def _at_once(actions: Sequence[Callable[[], object]]) -> list[object]:
    """The result or error of each action, all begun at once in threads."""
    outcomes: list[object] = [None] * len(actions)
    begin = threading.Barrier(len(actions))

    def run(at: int) -> None:
        begin.wait(LIMIT_S)
        try:
            outcomes[at] = actions[at]()
        except BaseException as error:
            outcomes[at] = error

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return outcomes
