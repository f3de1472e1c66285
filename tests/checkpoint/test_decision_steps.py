"""The decision: what goes out together, what waits, and what is taken back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from scripted_broker import BLOCK, MANIFEST, World, committable, manifest, name, precommit, transactions

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.commits.kafka import TransactionCommits
from exactlyonce.checkpoint.decision import Dropped, finalize
from exactlyonce.checkpoint.events import Decided, PendingCheckpoint, Refuse, Unresolved, Verdict
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.records.encoding import TooLarge, encode
from exactlyonce.checkpoint.records.manifest import (
    CheckpointStats,
    Committable,
    Finalized,
    Manifest,
    Output,
    Precommit,
    StoredBlock,
)
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import Outcome
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt, InvariantViolation, Undetermined

Check = Callable[[], ask.Procedure[Refuse | None]]


# --- decide ---------------------------------------------------------------------------------------------------------


class Deciding(Leader):
    """A leader at a decision: *world* is its log, and *checks* are in place of its own."""

    def __init__(self, world: Any, protocol: TransactionCommits, checks: Sequence[Check]) -> None:
        self.log, self.retention = world, cast(Any, Expiring(world))
        self._clock = cast(Any, SimpleNamespace(now_ms=itertools.count(100).__next__))
        self._protocols, self._given = (protocol,), checks

    def verdict(self, plan: PendingCheckpoint) -> ask.Procedure[Verdict]:
        return self._decide(plan, ())

    def _checks(self, plan: PendingCheckpoint) -> tuple[ask.Procedure[Refuse | None], ...]:
        return tuple(check() for check in self._given)

    def _manifest(self, plan: PendingCheckpoint, outputs: ask.Outputs, kind: str = "") -> Manifest:
        made = msgspec.structs.replace(manifest(), sinks=outputs)
        return self._protocols[0].with_committables(made, plan, None)


class Expiring:
    """Drops a manifest and a block, once there is another one."""

    def __init__(self, world: World) -> None:
        self._world = world

    def completed(self, checkpoint: int, blocks: object, *, keep: bool) -> None:
        assert checkpoint == manifest().checkpoint

    def expire(self, made: Manifest, pinned: object) -> ask.Procedure[Dropped]:
        assert made in self._world.appended, "blocks expire only after the manifest is durable"
        return (4,), (StoredBlock(TOPIC, BLOCK),)
        yield


def decided(
    world: World,
    *precommits: Precommit,
    counted: bool = True,
    known: dict[str, Committable] | None = None,
    checks: Sequence[Check] = (),
) -> Verdict:
    """*counted*: whether precommits were counted as they arrived; *known*: what came of that."""
    protocol = transactions()
    if known is not None:
        protocol.counted.update(known)
    elif counted:
        protocol.counted.update(ask.drive(protocol.count(precommits, (Output("out", "t", 1),)), world))
    world.asked.clear()
    plan = PendingCheckpoint(
        checkpoint=5, base=4, previous=4, final=False, triggered_ms=0, attempt=0, precommits=list(precommits),
        ages_ms={each.transactional_id: 0 for each in precommits},
    )  # fmt: skip

    return ask.drive(Deciding(world, protocol, checks).verdict(plan), world)


def looking() -> ask.Procedure[Refuse | None]:
    yield ask.LookAtTopics(MANIFEST)
    return None


def refusing() -> ask.Procedure[Refuse | None]:
    yield ask.LookAtTopics(MANIFEST)
    return Refuse("a block is gone")


def halting() -> ask.Procedure[Refuse | None]:
    yield ask.LookAtTopics(MANIFEST)
    raise Halt("the topic is gone")


def kinds(world: World) -> list[Any]:
    """The kinds of all requests; those that went out together as a set."""
    found: list[Any] = []
    waiting = 0
    for each in world.asked:
        if isinstance(each, ask.Together):
            found.append({type(one) for one in each.requests})
            waiting = len(each.requests)
        elif waiting:
            waiting -= 1
        else:
            found.append(type(each))
    return found


def test_what_was_counted_is_decided_in_one_round_of_questions() -> None:
    world = World()
    verdict = decided(world, precommit(0), precommit(1, subtask=1), checks=[looking])
    expected = manifest(committable(0), committable(1, subtask=1))
    fates, stats = {name(0): "committed", name(1, 1): "committed"}, encode(CheckpointStats(5, (), ()))
    assert verdict == Decided(expected, fates)
    assert verdict.finalized
    assert kinds(world) == [
        {ask.Append, ask.DescribeTransactions, ask.LookAtTopics}, ask.Reached,
        ask.EndTransactions, ask.DescribeProducers, ask.Append,
    ]  # fmt: skip
    assert world.of(ask.Append) == [
        ask.Append((expected,)),
        ask.Append((Finalized(7, 3, 101, tuple(fates.items()), 100, stats),), (4,), (StoredBlock(TOPIC, BLOCK),)),
    ]
    assert world.taken_back == []


def test_what_was_not_counted_is_checked_before_behind_all_else() -> None:
    world = World()
    assert isinstance(decided(world, precommit(0), counted=False, checks=[looking]), Decided)
    assert kinds(world)[:4] == [
        {ask.LookAtTopics}, ask.DescribeTransactions, ask.DescribeProducers,
        {ask.Append, ask.DescribeTransactions, ask.LookAtTopics},
    ]  # fmt: skip


def test_a_count_of_an_older_transaction_of_the_id_is_none() -> None:
    """A transactional id is used again: what was counted under another epoch is not what a manifest names."""
    world = World()
    older = msgspec.structs.replace(committable(0), epoch=2)
    verdict = decided(world, precommit(0), known={older.transactional_id: older})
    assert isinstance(verdict, Decided)
    assert verdict.manifest == manifest(committable(0))


def test_a_checkpoint_without_output_is_decided_and_finalized_all_the_same() -> None:
    world = World()
    assert decided(world, precommit(0, records=0)) == Decided(manifest())
    assert kinds(world) == [{ask.Append}, ask.Reached, ask.Append]


def test_a_count_that_is_not_the_brokers_writes_nothing() -> None:
    world = World()
    assert isinstance(decided(world, precommit(0, records=4)), Refuse)
    assert kinds(world) == [ask.DescribeTransactions, ask.DescribeProducers]


@pytest.mark.parametrize(
    ("question", "counted"),
    [(ask.DescribeTransactions, True), (ask.LookAtTopics, True), (ask.DescribeProducers, False)],
)
def test_a_broker_that_does_not_answer_a_check_refuses_the_checkpoint(question: type, counted: bool) -> None:
    """Before the manifest is committed the checkpoint never happened; what was produced is taken back."""
    world = World()
    world.raising[question] = BrokerUnavailable("no broker answers")
    assert decided(world, precommit(0), counted=counted, checks=[looking]) == Refuse("no broker answers")
    assert world.taken_back == ["no broker answers"] * counted
    assert world.of(ask.EndTransactions) == []


@pytest.mark.parametrize(("check", "said"), [(refusing, "a block is gone"), (halting, "the topic is gone")])
def test_what_a_check_refuses_is_taken_back(check: Check, said: str) -> None:
    world = World()
    if check is halting:
        with pytest.raises(Halt, match=said):
            decided(world, precommit(0), checks=[looking, check])
    else:
        assert decided(world, precommit(0), checks=[looking, check]) == Refuse(said)
    assert world.taken_back == [said]
    assert isinstance(world.asked[-1], ask.Reached)
    assert world.of(ask.EndTransactions) == []


def test_a_checkpoint_that_a_manifest_has_no_room_for_is_refused_before_anything_is_asked() -> None:
    """It is no defect: an attempt that carries nothing over may have room."""

    class Small(World):
        def produce(self, made: Manifest) -> ask.Procedure[bool]:
            raise TooLarge("manifest of 300,000 bytes is over the limit of 262,144")

    world = Small()
    refused = decided(world, precommit(0), checks=[looking])
    assert isinstance(refused, Refuse)
    assert "checkpoint 7 names more than a manifest has room for: manifest of 300,000 bytes" in refused.reason
    assert "1 transactions in 1 output partitions" in refused.reason
    assert world.asked == []


def test_a_halt_is_raised_though_another_check_refuses() -> None:
    """A failure that needs a person is not hidden by one that a restart would fix."""
    with pytest.raises(Halt, match="the topic is gone"):
        decided(World(), precommit(0), checks=[refusing, halting])


def test_a_transaction_that_ended_since_it_was_counted_refuses_the_checkpoint() -> None:
    world = World()
    world.states[name(0)] = "CompleteAbort"
    verdict = decided(world, precommit(0))
    assert verdict == Refuse(f"transaction {name(0)} is CompleteAbort, not Ongoing")
    assert world.taken_back == [str(verdict)]


def test_a_manifest_that_the_checks_have_overtaken_is_written_anew() -> None:
    world, more = World(), (Output("out", "t", 2),)
    world.outputs = [(), more]
    verdict = decided(world, precommit(0), checks=[looking])
    assert isinstance(verdict, Decided)
    assert verdict.manifest.sinks == more
    assert world.taken_back == ["a topic of its sinks has more partitions"]
    assert [len(each.records) for each in world.of(ask.Append)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome.NOT_WRITTEN, Refuse("the manifest of checkpoint 7 was not written: the disk is full")),
        (Outcome.UNKNOWN, Unresolved(7)),
    ],
)
def test_without_a_durable_manifest_nothing_is_ended(outcome: Outcome, verdict: Refuse | Unresolved) -> None:
    world = World(outcomes=[outcome])
    assert decided(world, precommit(0)) == verdict
    assert world.of(ask.EndTransactions) == []


@pytest.mark.parametrize("answer", ["R", "U"])
def test_a_decision_with_a_commit_that_is_not_proven_is_not_finalized(answer: str) -> None:
    world = World({name(1, 1): answer})
    verdict = decided(world, precommit(0), precommit(1, subtask=1))
    assert isinstance(verdict, Decided)
    assert not verdict.finalized
    assert len(world.of(ask.Append)) == 1
    assert world.asked_for(commit=False) == []


@pytest.mark.parametrize("outcome", [Outcome.NOT_WRITTEN, Outcome.UNKNOWN])
def test_a_mark_that_could_not_be_written_ends_this_incarnation(outcome: Outcome) -> None:
    with pytest.raises(Undetermined, match=r"Checkpoint 7 is complete and committed.*Nothing is lost"):
        decided(World(outcomes=[Outcome.DONE, outcome]), precommit(0))


def test_finalizing_with_an_unknown_fate_is_a_violation() -> None:
    with pytest.raises(InvariantViolation, match="fate of every committable"):
        ask.drive(finalize(manifest(committable(0)), {}, 3, 0), World())
