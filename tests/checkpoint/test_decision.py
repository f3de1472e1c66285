"""The finishing of a decided checkpoint after a crash."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from scripted_broker import World, committable, finished, finished_after_a_crash, manifest, name

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.commits.kafka import REPAIRS_MAX, standing
from exactlyonce.checkpoint.records.manifest import (
    LOSS_ACCEPTED,
    Committable,
    Finalized,
    Repair,
    TransactionalId,
    Written,
)
from exactlyonce.checkpoint.requests import Fate, ListedTransaction, Outcome
from exactlyonce.pipeline.errors import Halt, Undetermined

# --- finish ---------------------------------------------------------------------------------------------------------

ENDS = ["C", "BC", "R", "U:committed", "U:aborted", "U:gone"]


def scripted(ends: Mapping[str, str], **more: Any) -> World:
    answers = {each: end.split(":")[0] for each, end in ends.items()}
    fates = {each: Fate(end[2:]) for each, end in ends.items() if end.startswith("U")}
    return World(answers, fates, **more)


@pytest.mark.parametrize("ends", list(itertools.product(ENDS, repeat=2)), ids="+".join)
def test_every_combination_of_answers_ends_proven_repaired_or_in_a_halt(ends: tuple[str, str]) -> None:
    """Nothing decided is aborted but what a durable repair stands in for; the mark is written last, or not at all."""
    first, second = committable(0, 0), committable(1, 1)
    world = scripted({first.transactional_id: ends[0], second.transactional_id: ends[1]})
    expected = {"C": "committed", "BC": "committed", "R": "repaired", "U:committed": "proven", "U:aborted": "repaired"}
    if "U:gone" in ends:
        with pytest.raises(Halt, match="Checkpoint 7"):
            finished(world, manifest(first, second))
        assert not any(isinstance(each, Finalized) for each in world.appended)
    else:
        fates = {c.transactional_id: expected[end] for c, end in zip((first, second), ends, strict=True)}
        assert finished(world, manifest(first, second)) == fates
        assert world.appended[-1] == Finalized(7, 3, 99, tuple(sorted(fates.items())))
    stood_in_for = {each.replaced for each in world.appended if isinstance(each, Repair)}
    assert set(world.asked_for(commit=False)) <= stood_in_for
    named = {first.transactional_id, second.transactional_id} | {
        each.committable.transactional_id for each in world.appended if isinstance(each, Repair)
    }
    assert set(world.asked_for(commit=True)) <= named
    assert bool(world.of(ask.ListTransactions)) is bool({"R", "U:committed", "U:aborted", "U:gone"} & set(ends))


def test_finishing_again_asks_the_same_commit_again() -> None:
    world = World()
    assert finished(world, manifest(committable(0))) == finished(world, manifest(committable(0)))
    assert world.asked_for(commit=True) == [name(0), name(0)]


def test_undecided_transactions_are_swept_before_records_are_looked_at_and_decided_ones_are_protected() -> None:
    world = scripted({name(0): "U:committed"})
    world.listed = [ListedTransaction(each, 1, "CompleteAbort") for each in (name(0), name(5))]
    assert finished(world, manifest(committable(0))) == {name(0): "proven"}
    assert world.asked_for(commit=False) == [name(5)]
    asked = [type(each) for each in world.asked]
    assert asked.index(ask.ListTransactions) < asked.index(ask.Look)


def test_a_repair_is_recorded_before_it_is_committed_under_an_id_of_this_incarnation() -> None:
    lost = committable(0)
    world = World({name(0): "R"})
    assert finished(world, manifest(lost)) == {name(0): "repaired"}
    copy = "eo:p:out:0:3.1:repair-7-1"
    assert TransactionalId.parse(copy) is not None
    assert world.of(ask.CopyTransaction) == [ask.CopyTransaction(lost, copy)]
    stand_in = msgspec.structs.replace(lost, transactional_id=copy, producer_id=77, epoch=0)
    assert world.appended == [
        Repair(7, 1, 3, name(0), stand_in), Finalized(7, 3, 99, ((name(0), "repaired"),))
    ]  # fmt: skip
    assert [type(each) for each in world.asked] == [
        ask.EndTransactions, ask.ListTransactions, ask.CopyTransaction, ask.Append,
        ask.EndTransactions, ask.DescribeProducers, ask.EndTransactions, ask.DescribeProducers, ask.Append,
    ]  # fmt: skip
    assert world.asked_for(commit=True) == [name(0), copy]


def repair_of(lost: Committable, number: int, incarnation: str = "2.0") -> Repair:
    stand_in = msgspec.structs.replace(lost, transactional_id=name(f"repair-7-{number}", lost.subtask, incarnation))
    return Repair(7, number, 2, lost.transactional_id, stand_in)


def test_recovery_follows_the_newest_repair() -> None:
    lost = committable(0)
    world = World({name(0): "R"})
    repairs = [repair_of(lost, 2), repair_of(lost, 1)]
    assert finished(world, manifest(lost), repairs) == {name(0): "repaired"}
    assert world.asked_for(commit=True) == [name("repair-7-2")]
    assert [type(each) for each in world.appended] == [Finalized]


def test_a_repair_that_was_aborted_is_repaired_from_the_original_under_the_next_number() -> None:
    lost = committable(0)
    world = World({name("repair-7-4"): "R"})
    assert finished(world, manifest(lost), [repair_of(lost, 4)]) == {name(0): "repaired"}
    assert world.of(ask.CopyTransaction) == [ask.CopyTransaction(lost, "eo:p:out:0:3.1:repair-7-5")]


def test_a_stand_in_is_protected_from_the_sweep_and_the_original_is_not() -> None:
    lost, other = committable(0), committable(1, 1)
    stand_in = repair_of(lost, 1)
    world = scripted({stand_in.committable.transactional_id: "C", other.transactional_id: "U:committed"})
    world.listed = [
        ListedTransaction(each, 1, "CompleteAbort")
        for each in (name(0), stand_in.committable.transactional_id, other.transactional_id)
    ]
    assert finished(world, manifest(lost, other), [stand_in]) == {name(0): "repaired", name(1, 1): "proven"}
    assert world.asked_for(commit=False) == [name(0)]


def test_what_follows_a_lost_transaction_of_its_subtask_is_copied_behind_it() -> None:
    """Both are recorded together before the original of the second is aborted: it is never visible before the first."""
    first, second, other = committable(0, 0, 6), committable(1, 0, 7), committable(2, 1, 7)
    world = World({name(0): "R"})
    fates = finished(world, manifest(second, other, first))
    assert fates == {name(0): "repaired", name(1): "repaired", name(2, 1): "committed"}
    assert [each.committable for each in world.of(ask.CopyTransaction)] == [first, second]
    copies = ["eo:p:out:0:3.1:repair-7-1", "eo:p:out:0:3.1:repair-7-2"]
    recorded = next(i for i, each in enumerate(world.asked) if isinstance(each, ask.Append))
    assert [each.replaced for each in world.appended if isinstance(each, Repair)] == [name(0), name(1)]
    assert len(world.of(ask.Append)[0].records) == 2
    aborted = next(i for i, e in enumerate(world.asked) if isinstance(e, ask.EndTransactions) and not e.commit)
    assert recorded < aborted
    assert world.asked_for(commit=False) == [name(0), name(1)]
    assert world.asked_for(commit=True) == [name(0), name(2, 1), *copies]


def test_what_follows_a_transaction_that_is_proven_is_committed_as_it_is() -> None:
    first, second = committable(0, 0, 6), committable(1, 0, 7)
    world = scripted({name(0): "U:committed"})
    assert finished(world, manifest(first, second)) == {name(0): "proven", name(1): "committed"}
    assert world.asked_for(commit=True) == [name(0), name(1)]


def test_a_lost_middle_of_a_chain_leaves_what_was_committed_before_it() -> None:
    chain = [committable(slot, 0, 5 + slot) for slot in range(3)]
    world = World({name(1): "R"})
    assert finished(world, manifest(*chain)) == {name(0): "committed", name(1): "repaired", name(2): "repaired"}
    assert [each.committable for each in world.of(ask.CopyTransaction)] == chain[1:]


def test_copies_that_are_aborted_are_copied_again_and_end_before_their_successors_begin() -> None:
    first, second = committable(0, 0, 6), committable(1, 0, 7)
    world = World({name(0): "R", "eo:p:out:0:3.1:repair-7-1": "R"})
    assert finished(world, manifest(first, second)) == {name(0): "repaired", name(1): "repaired"}
    copies = [f"eo:p:out:0:3.1:repair-7-{number}" for number in (1, 2, 3, 4)]
    assert [each.transactional_id for each in world.of(ask.CopyTransaction)] == copies
    assert world.asked_for(commit=True) == [name(0), copies[0], copies[2], copies[3]]
    assert world.asked_for(commit=False) == [name(0), name(1), copies[0], copies[1]]


def test_repairs_that_are_aborted_one_after_the_other_end_in_a_halt() -> None:
    copies = {f"eo:p:out:0:3.1:repair-7-{number}": "R" for number in range(1, REPAIRS_MAX + 1)}
    world = World({name(0): "R", **copies})
    with pytest.raises(Halt, match=f"{REPAIRS_MAX} repairs of it were aborted"):
        finished(world, manifest(committable(0)))
    assert len(world.of(ask.CopyTransaction)) == REPAIRS_MAX


COPY = "eo:p:out:0:3.1:repair-7-1"


def test_a_copy_whose_fate_cannot_be_learnt_is_not_copied_again() -> None:
    """The job halts if a committed copy is neither visible nor aborted: a second copy might double its records."""
    world = World({name(0): "R", COPY: "U"}, {COPY: Fate.GONE})
    with pytest.raises(Halt, match="fate is unknown"):
        finished(world, manifest(committable(0)))
    assert len(world.of(ask.CopyTransaction)) == 1


@pytest.mark.parametrize("outcome", [Outcome.NOT_WRITTEN, Outcome.UNKNOWN])
def test_a_repair_that_is_not_known_to_be_recorded_is_not_committed(outcome: Outcome) -> None:
    world = World({name(0): "R"}, outcomes=[outcome])
    with pytest.raises(Undetermined, match="could not be recorded"):
        finished(world, manifest(committable(0)))
    assert world.asked_for(commit=True) == [name(0)]
    assert world.asked_for(commit=False) == []


@pytest.mark.parametrize(
    ("world", "why"),
    [
        (World({name(0): "R"}, copies={name(0): "retention removed 3 of them"}), "retention removed 3 of them"),
        (World({name(0): "U"}, {name(0): Fate.GONE}), "no longer in the output log"),
    ],
)
def test_a_halt_names_what_is_affected_and_the_choices(world: World, why: str) -> None:
    lost = committable(0, records=5)
    with pytest.raises(Halt) as halt:
        finished(world, manifest(msgspec.structs.replace(lost, written=(Written("t", 2, 340, 5),))))
    text = str(halt.value)
    for part in (
        "Checkpoint 7", "sink 'out' subtask 0", why, "t[2] offsets 340 and on, 5 records", lost.transactional_id,
        "restored from a replica or a backup", "`exactlyonce reset p`", "`exactlyonce run ... --accept-loss 7`",
        "Nothing else is affected",
    ):  # fmt: skip
        assert part in text
    assert not any(isinstance(each, Finalized) for each in world.appended)


@pytest.mark.parametrize(
    "world",
    [
        World({name(0): "R"}, copies={name(0): "gone"}),
        World({name(0): "U"}, {name(0): Fate.GONE}),
        World({name(0): "R", COPY: "U"}, {COPY: Fate.GONE}),
    ],
)
def test_an_accepted_loss_is_written_into_the_mark(world: World) -> None:
    fates = {name(0): "loss accepted", name(1, 1): "committed"}
    assert finished(world, manifest(committable(0), committable(1, 1)), accept_loss=True) == fates
    assert world.appended[-1] == Finalized(7, 3, 99, tuple(sorted(fates.items())))


def test_an_accepted_loss_does_not_give_up_what_follows_it() -> None:
    first, second = committable(0, 0, 6), committable(1, 0, 7)
    world = World({name(0): "R"}, copies={name(0): "gone"})
    fates = finished(world, manifest(first, second), accept_loss=True)
    assert fates == {name(0): "loss accepted", name(1): "repaired"}


@pytest.mark.parametrize("stop", range(1, 10))
def test_a_finish_that_crashes_between_any_two_requests_can_be_run_again(stop: int) -> None:
    chain = manifest(committable(0, 0, 6), committable(1, 0, 7))
    fates = finished_after_a_crash(stop, chain, answers={name(0): "R"})
    assert fates == {name(0): "repaired", name(1): "repaired"}


# --- what readers must see ------------------------------------------------------------------------------------------


def test_what_stands_for_a_committable_is_its_newest_repair_where_there_is_one() -> None:
    def made(slot: object, *partitions: int) -> Committable:
        written = tuple(Written("t", partition, 0, 5) for partition in partitions)
        return msgspec.structs.replace(committable(0), transactional_id=name(slot), written=written)

    whole, lost, accepted = made(0, 0, 1, 2), made(1, 0), made(2, 0)
    repairs = [Repair(7, 1, 3, name(0), made("r1", 1, 2)), Repair(7, 2, 3, name(0), made("r2", 2))]
    repairs.append(Repair(7, 3, 3, name(1), made("r3", 0)))
    fates = {name(0): "repaired", name(1): "repaired", name(2): LOSS_ACCEPTED}
    found = standing(manifest(whole, lost, accepted), repairs, fates)
    assert set(found) == {made("r2", 2), made("r1", 1), made(0, 0), made("r3", 0)}
