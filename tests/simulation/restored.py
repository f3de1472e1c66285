"""Runs that begin from a savepoint, which shipped code finds, checks and writes anew; a crash may follow.

The parallelism may differ from the savepoint's. The oracle judges the restored checkpoint like any other: the same
offsets, the states of the records before them, no output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import Message
from watched import demand

from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.encoding import Block, DamagedRecord
from exactlyonce.checkpoint.records.manifest import BlockRef, Restored
from exactlyonce.checkpoint.requests import Procedure
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockWriter
from exactlyonce.engines.blocks import Storages
from exactlyonce.engines.options import Restoration
from exactlyonce.engines.savepoints.restoring import RestoreTarget, Restoring
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, Fenced
from exactlyonce.state.errors import DamagedState
from exactlyonce.testing.broker.interface import Error
from exactlyonce.testing.simulation.clients import FetchedBlocks, at_once

if TYPE_CHECKING:
    from coordinator import SimulatedCoordinator
    from world import World


class _Producer:
    def __init__(self, world: World) -> None:
        self._world = world
        self._id = at_once(partial(world.ask, "init_transactions", None))
        self._sequences: dict[int, int] = {}

    def produce(
        self, topic: str, value: bytes, key: str, partition: int, on_delivery: Callable[[Any, Any], None]
    ) -> None:
        sequence = self._sequences.get(partition, 0)
        producer = None, self._id.producer_id, self._id.epoch
        produce = partial(self._world.ask, "produce", *producer, topic, partition, [(key, value)])
        answer = at_once(partial(produce, sequence=sequence, added=bool(sequence)))
        if answer.error is not Error.NONE:
            raise BrokerUnavailable(answer.error.name)
        self._sequences[partition] = sequence + 1
        on_delivery(None, Message(partition=partition, offset=answer.first_offset))

    def poll(self, timeout_s: float) -> None:
        pass


class _Storage:
    def __init__(self, world: World) -> None:
        self._world = world
        self._blocks = FetchedBlocks()
        self._blocks.at_once = world

    def of(self, _: str) -> _Storage:
        return self

    def fetch(self, refs: Iterable[BlockRef]) -> Iterable[tuple[BlockRef, Block]]:
        return self._blocks.fetch(refs)

    def begin(self, incarnation: int, attempt: int) -> BlockWriter:
        nonce = f"{self._world.rng.getrandbits(48):x}"
        producer = cast(Any, _Producer(self._world))
        return BlockWriter(producer, self._world.topic, incarnation, attempt, nonce)


def savepoint_to_restore(coordinator: SimulatedCoordinator, inputs: Any) -> Procedure[Restoring | None]:
    """The newest checkpoint, if it is a savepoint and somebody wants to begin from it; else None."""
    world = coordinator.world
    if world.rng.random() >= world.luck.restore_chance:
        return None
    look = DecisionLog("p", world.topic, world.clock).peek_at_stable
    history = yield from look()
    newest = history.latest
    if newest is None or not newest.is_savepoint:
        return None
    around = RestoreTarget(
        graph=world.graph, inputs=inputs, cluster_id="cluster", parallelism=coordinator.plan.parallelism,
        storages=cast(Storages, _Storage(world)), storage=newest.storage, note=world.note,
    )  # fmt: skip
    try:
        found = Restoring(Restoration(str(newest.checkpoint)), around, history)
    except (DamagedRecord, DamagedState) as error:
        now = (yield from look()).latest
        demand(now != newest, f"savepoint {newest.checkpoint} cannot be restored: {error}")
        raise Fenced("Somebody has gone on meanwhile.") from error
    coordinator.leader.config = replace(coordinator.leader.config, restores=found.origin)
    return found


def judge_behind_the_fence(coordinator: SimulatedCoordinator, found: Restoring) -> None:
    try:
        found.judge(coordinator.log.history)
    except ConfigError as error:
        raise Fenced(f"Somebody has gone on meanwhile: {error}") from error


def restored(coordinator: SimulatedCoordinator, found: Restoring, checkpoint: int) -> Restored:
    world = coordinator.world
    try:
        manifest = found.write(checkpoint, coordinator.log.incarnation.incarnation)
    except (DamagedRecord, DamagedState) as error:
        demand(not world.is_newest(coordinator), f"the savepoint cannot be restored: {error}")
        raise Fenced("Somebody has gone on meanwhile.") from error
    world.seen["savepoint restored"] += 1
    world.seen["savepoint restored with records on their way"] += bool(manifest.channel_logs)
    world.note(f"{coordinator} restores {manifest.origin} as checkpoint {checkpoint}")
    return manifest
