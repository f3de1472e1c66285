"""Replay repair: what is lost and can no longer be copied is computed again, and counted before it is believed."""

from __future__ import annotations

import msgspec
import pytest
from scripted_broker import World, committable, finished, finished_after_a_crash, manifest, name

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.records.manifest import Committable, Finalized, Repair, Written, shares
from exactlyonce.pipeline.errors import Halt

GONE = "compaction removed them"


def test_a_replay_is_asked_for_only_after_the_copy_was_refused() -> None:
    lost = committable(0)
    world = World({name(0): "R"}, copies={name(0): GONE}, replays={name(0): 5})
    assert finished(world, manifest(lost)) == {name(0): "repaired"}
    again = "eo:p:out:0:3.1:repair-7-1"
    assert world.of(ask.CopyTransaction) == [ask.CopyTransaction(lost, again)]
    assert world.of(ask.ReplayTransaction) == [ask.ReplayTransaction(manifest(lost), lost, again)]
    stand_in = msgspec.structs.replace(lost, transactional_id=again, producer_id=78, epoch=0)
    assert world.appended == [Repair(7, 1, 3, name(0), stand_in), Finalized(7, 3, 99, ((name(0), "repaired"),))]
    assert world.asked_for(commit=True) == [name(0), again]


def test_what_can_be_copied_is_not_replayed() -> None:
    """A replay needs the input, old state and a deterministic pipeline; a copy needs none of them."""
    world = World({name(0): "R"}, replays={name(0): 5})
    assert finished(world, manifest(committable(0))) == {name(0): "repaired"}
    assert world.of(ask.ReplayTransaction) == []


@pytest.mark.parametrize("count", [4, 6])
def test_a_replay_with_other_counts_is_never_committed(count: int) -> None:
    world = World({name(0): "R"}, copies={name(0): GONE}, replays={name(0): count})
    with pytest.raises(Halt, match=rf"A replay gives other counts: t\[0\] .*{count} records\b(?s:.*)Choices"):
        finished(world, manifest(committable(0)))
    assert world.appended == []
    assert world.asked_for(commit=True) == [name(0)]


def test_a_halt_says_why_it_could_neither_be_copied_nor_replayed() -> None:
    world = World({name(0): "R"}, copies={name(0): GONE}, replays={name(0): "the input is gone"})
    with pytest.raises(Halt, match=rf"{GONE}(?s:.*)by a replay: the input is gone"):
        finished(world, manifest(committable(0)))


def test_a_chain_may_be_repaired_in_both_ways() -> None:
    first, second = committable(0, 0, 6), committable(1, 0, 7)
    world = World({name(0): "R"}, copies={name(0): GONE}, replays={name(0): 5})
    assert finished(world, manifest(second, first)) == {name(0): "repaired", name(1): "repaired"}
    assert [each.committable for each in world.of(ask.ReplayTransaction)] == [first]
    assert [each.committable for each in world.of(ask.CopyTransaction)] == [first, second]
    assert len(world.of(ask.Append)[0].records) == 2


def test_an_accepted_loss_is_replayed_all_the_same_if_it_can_be() -> None:
    """The user's word gives up what is lost, not what a replay brings back."""
    world = World({name(0): "R"}, copies={name(0): GONE}, replays={name(0): 5})
    assert finished(world, manifest(committable(0)), accept_loss=True) == {name(0): "repaired"}


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_replay_that_crashes_between_any_two_requests_is_done_again(stop: int) -> None:
    script = {"answers": {name(0): "R"}, "copies": {name(0): GONE}, "replays": {name(0): 5}}
    assert finished_after_a_crash(stop, manifest(committable(0)), **script) == {name(0): "repaired"}


def test_the_output_of_a_sink_subtask_is_its_committables_in_the_order_of_their_checkpoints() -> None:
    def made(slot: int, subtask: int, checkpoint: int, *counts: int) -> Committable:
        written = tuple(Written("t", partition, 0, count) for partition, count in enumerate(counts))
        return msgspec.structs.replace(committable(slot, subtask, checkpoint), written=written)

    first, second, last, other = made(0, 0, 7, 2, 1), made(1, 0, 8), made(2, 0, 9, 4), made(3, 1, 8, 5)
    spans = {first: range(3), second: range(3, 3), last: range(3, 7), other: range(5)}
    assert shares([last, first, other, second]) == {each.transactional_id: span for each, span in spans.items()}
