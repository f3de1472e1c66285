"""Snapshots of random graphs under random schedules, and with planted defects, judged by the checker.

The barrier modes are one algorithm under several disciplines: the reaction of a subtask to the first barrier. The
shipped `Alignment` decides in the shipped modes.
"""

from __future__ import annotations

from collections import Counter

import pytest
from chandy_lamport.cuts import Flaw
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from network import MONEY_EACH, Aligned, AtLeastOnce, AtOnce, Link, Network, Overtaking
from schedules import Make, Schedule, any_graph, lived_through, pipeline, schedules, under, violations


def demand_right(schedule: Schedule, network: Network) -> None:
    everybody = set(range(schedule.graph.processes))
    assert [link for link, queue in network.queues.items() if queue] == []
    assert [process.under_way for process in network.processes.values() if process.under_way] == []
    for snapshot in schedule.snapshots:
        assert network.complete[snapshot] == everybody
        assert network.recorded_money(snapshot) == MONEY_EACH * len(everybody)
    assert violations(schedule, network) == []


def recorded(schedule: Schedule, network: Network) -> int:
    return sum(len(each) for snapshot in schedule.snapshots for each in network.in_flight[snapshot].values())


@given(schedules(any_graph()))
def test_a_snapshot_of_any_graph_is_a_consistent_cut(schedule: Schedule) -> None:
    demand_right(schedule, lived_through(schedule))


@given(schedules(any_graph(), overtaking=True))
def test_a_marker_may_overtake_what_it_names(schedule: Schedule) -> None:
    demand_right(schedule, lived_through(schedule))


# --- the barrier modes ----------------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 2)
@given(schedules(pipeline(), by_sources=True))
def test_aligned_barriers_are_markers_that_are_taken_together(schedule: Schedule) -> None:
    network = lived_through(schedule, under(Aligned))
    demand_right(schedule, network)
    assert recorded(schedule, network) == 0


@settings(max_examples=settings().max_examples // 2)
@given(schedules(pipeline(), by_sources=True, overtaking=True))
def test_unaligned_barriers_are_markers_that_overtake_and_sources_that_initiate(schedule: Schedule) -> None:
    demand_right(schedule, lived_through(schedule, under(AtOnce)))


@given(st.booleans().flatmap(lambda cyclic: schedules(pipeline(cyclic=cyclic), by_all=True)))
def test_shipped_unaligned_barriers_are_markers_that_everybody_initiates(schedule: Schedule) -> None:
    """Each process is told of a snapshot at a moment of its own, in cycles, too."""
    demand_right(schedule, lived_through(schedule, under(Overtaking)))


@settings(max_examples=settings().max_examples // 2)
@given(schedules(pipeline(cyclic=True), by_sources=True))
def test_in_a_cycle_feedback_is_recorded_and_the_rest_is_aligned(schedule: Schedule) -> None:
    network = lived_through(schedule, under(Aligned))
    demand_right(schedule, network)
    holding = {link for snapshot in schedule.snapshots for link, each in network.in_flight[snapshot].items() if each}
    assert holding <= schedule.graph.feedback


@settings(max_examples=settings().max_examples // 2)
@given(schedules(pipeline(), by_sources=True))
def test_without_holding_back_a_cut_has_one_flaw_at_most(schedule: Schedule) -> None:
    """A message may be received before the cut and sent after it, at a process with several inputs: no more."""
    network = lived_through(schedule, under(AtLeastOnce))
    inputs = Counter(link.receiver for link in schedule.graph.links)
    for each in violations(schedule, network):
        assert each.flaw is Flaw.SENT_AFTER
        assert isinstance(each.place, Link)
        assert inputs[each.place.receiver] > 1


# --- what the modes differ in, and planted defects: over the same schedules always ----------------------------------


def drawn(strategy: SearchStrategy[Schedule], count: int) -> list[Schedule]:
    """The same schedules in every process."""
    found: list[Schedule] = []

    @settings(max_examples=count, derandomize=True, database=None, phases=[Phase.generate])
    @given(strategy)
    def collect(schedule: Schedule) -> None:
        found.append(schedule)

    collect()
    return found


@pytest.fixture(scope="module")
def pipelines() -> list[Schedule]:
    return drawn(schedules(pipeline(), by_sources=True), 60)


@pytest.fixture(scope="module")
def told() -> list[Schedule]:
    return drawn(schedules(pipeline(), by_all=True), 60)


def flaws(histories: list[Schedule], make: Make) -> set[Flaw]:
    return {each.flaw for schedule in histories for each in violations(schedule, lived_through(schedule, make))}


def test_at_least_once_is_no_consistent_cut(pipelines: list[Schedule]) -> None:
    assert flaws(pipelines, under(AtLeastOnce)) == {Flaw.SENT_AFTER}
    assert flaws(pipelines, under(Aligned)) == set()


def test_taken_at_once_barriers_find_something_in_the_channels(pipelines: list[Schedule]) -> None:
    networks = [(schedule, lived_through(schedule, under(AtOnce))) for schedule in pipelines]
    assert sum(recorded(*each) for each in networks) > 0


def test_shipped_unaligned_barriers_find_something_in_the_channels_too(told: list[Schedule]) -> None:
    """Some schedules have something on its way; in others every barrier has come in time, and nothing is recorded."""
    networks = [(schedule, lived_through(schedule, under(Overtaking))) for schedule in told]
    assert {recorded(*each) > 0 for each in networks} == {True, False}
