"""Leftovers of a pipeline do not grow with its incarnations, nor queues under constant load."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from coordinator import SimulatedCoordinator
from luck import LUCK
from topologies import LOAD_SHAPES
from watched import TOPIC
from world import FEED_STEPS, World, lived

from exactlyonce.testing.broker.interface import Isolation

LIFE_STEPS_MAX = 500
DOWN_MS = 1_000
"""Between two incarnations. An id that nobody renews is forgotten after sixty of them."""


class Left(NamedTuple):
    blocks: int
    decisions: int
    """Keys in the decision log."""
    transactional_ids: int
    kept: int
    """Entries of the log and of blocks that the coordinator remembered."""


LIMITS = Left(blocks=30, decisions=50, transactional_ids=205, kept=40)
SEED = 5
"""A pipeline of one subtask with frequent checkpoints, of which some complete in so short incarnations."""


def died_early(seed: int, count: int) -> list[Left]:
    """The incarnations of a pipeline whose coordinator and workers all die after a few steps; no other bad luck."""
    world = World(seed, "chain")
    luck = world.faults
    luck._chance = luck._network_chance = luck._request_chance = luck._delivery_chance = luck._marker_chance = 0.0
    luck._decided_chance, luck._adds_at = 0.0, 1 << 60
    for each in world.inputs.values():
        assert each.at_first == len(each.partitions)
        for records in each.partitions:
            records += [(f"k{i % 3}", "") for i in range(100_000)]
    world._steps_per_record = 100
    found = []
    for number in range(count):
        coordinator = world.coordinator = SimulatedCoordinator(world)
        world.coordinators = [coordinator]
        for _ in range(world.rng.randint(1, LIFE_STEPS_MAX)):
            world.steps += 1
            world._step()
            if world.steps % FEED_STEPS == 0:
                world.feed()
        coordinator.kill_workers()
        coordinator.alive = False
        world.clock.advance(DOWN_MS)
        world.broker.compact(TOPIC, drop_tombstones=number % 2 == 0)
        found.append(left(world, coordinator))
    assert len(world.oracle.manifests) > count // 50, "some incarnations complete checkpoints"
    return found


def left(world: World, coordinator: SimulatedCoordinator) -> Left:
    log = world.broker.fetch(TOPIC, 0, 0, Isolation.READ_COMMITTED).records
    live = {record.key: record.value for record in log}
    history = coordinator.log.history
    kept = len(history.incarnations) + len(history.manifests) + len(history.finalized) + len(history.repairs)
    blocks = coordinator.leader.known_blocks
    kept += len(blocks.use.retained) + sum(map(len, blocks.use._unclaimed.values())) + len(blocks._ends)
    return Left(
        len(world.oracle.live_blocks()),
        sum(value is not None for value in live.values()),
        len(world.broker.list_transactions("eo:p:")),
        kept,
    )


def grown(found: list[Left]) -> set[str]:
    most = Left(*map(max, zip(*found, strict=True)))
    return {name for name, count, limit in zip(Left._fields, most, LIMITS, strict=True) if count > limit}


@pytest.mark.slow
def test_nothing_grows_over_a_hundred_incarnations() -> None:
    """Blocks, decisions, transactional ids and the coordinator's memory stay below bounds of ten incarnations."""
    found = died_early(SEED, 120)
    print(f"{found[-1]}, at most {Left(*map(max, zip(*found, strict=True)))}")
    assert grown(found) == set()


# --- constant load: checkpoints complete in time, and no queue grows --------------------------------------------------


LOADS = [luck for luck in LUCK if LUCK[luck].load]


@pytest.mark.slow
@pytest.mark.exhaustive(but=["two-shuffles-1", "retry-1"])
@pytest.mark.parametrize("seeds", [1, 25])
@pytest.mark.parametrize("shape", LOAD_SHAPES)
def test_constant_load_is_carried(shape: str, seeds: int) -> None:
    """Records cost up to 50 ms behind one to three shuffles, brokers limit sinks, and a called service is away."""
    for luck in LOADS if seeds > 1 else ["constant load"]:
        seen = lived(range(1, 1 + seeds), shape, luck)
        assert seen["checkpoint"] > seeds
        assert bool(seen["called in vain"]) == (shape == "retry")
        assert seen["sender muted"] or seeds == 1
