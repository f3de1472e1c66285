"""How a simulated life writes lost records again: copied from the output log, or computed again by a replay.

A replay knows only what a real one knows: the base's blocks, the input between the two Sn, and the order logs. It runs
the sources and the running totals of all subtasks again, each taking its inputs as the log says.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import msgspec

from exactlyonce.checkpoint.records.committable import Committable, Written, shares
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.testing.broker.interface import Error, Isolation

if TYPE_CHECKING:
    from exactlyonce.testing.simulated_coordinator import Life
    from exactlyonce.testing.simulation import World

Steps = Generator[int | None, None, Any]
Records = list[tuple[str, Any]]
"""Key and (total, partition, offset)."""
Orders = dict[int, tuple[list[int], list[int]]]
"""By index, of which partition each record was read, and from which source subtask each was taken."""


def copied(life: Life, lost: Committable, name: str) -> Steps:
    """The same records, as they are in the log."""
    found: dict[tuple[str, int], Records] = {}
    for each in lost.written:
        place = (each.topic, each.partition)
        log = yield from life.world.until_answered("fetch", *place, each.first_offset, Isolation.READ_UNCOMMITTED)
        ours = (lost.producer_id, lost.epoch)
        found[place] = [(r.key, r.value) for r in log.records if (r.producer_id, r.epoch) == ours][: each.count]
        if len(found[place]) != each.count:
            return f"{each.topic}[{each.partition}] holds {len(found[place])} of {each.count} records"
    life.world.seen["copy"] += 1
    return (yield from _produced(life, lost, name, found))


def replayed(life: Life, manifest: Manifest, lost: Committable, name: str) -> Steps:
    """The same records, computed again."""
    base = life.log.history.manifests[manifest.previous]
    totals = yield from base_totals(life, base)
    orders = yield from order_of(life, manifest)
    outputs = outputs_of(life.world, base, manifest, totals, orders)[lost.subtask]
    share = shares(manifest.committables)[lost.transactional_id]
    found: dict[tuple[str, int], Records] = {place: [] for place in lost.counts}
    for key, update in outputs[share.start : share.stop]:
        place = (lost.sink, life.world.output_partition(key))
        if place in found:
            found[place].append((key, update))
    life.world.seen["replay"] += 1
    life.world.seen["replay of a part"] += len(outputs) != len(share)
    return (yield from _produced(life, lost, name, found))


def base_totals(life: Life, base: Manifest) -> Generator[int | None, None, dict[str, int]]:
    """The state that the interval began with."""
    totals: dict[str, int] = {}
    for ref in [ref for operator in base.operators for index in operator.index for ref in index]:
        for part in (yield from life.block(ref)):
            totals.update((yield from life.block(part)))
    return totals


def order_of(life: Life, manifest: Manifest) -> Generator[int | None, None, Orders]:
    """The order logs of the interval, those of aborted checkpoints too."""
    orders: Orders = defaultdict(lambda: ([], []))
    for log in manifest.order_logs:
        for ref in log.blocks:
            read, taken = yield from life.block(ref)
            orders[log.subtask][0].extend(read)
            orders[log.subtask][1].extend(taken)
    return orders


def outputs_of(
    world: World, base: Manifest, manifest: Manifest, totals: dict[str, int], orders: Orders
) -> dict[int, Records]:
    """By subtask of the running totals, everything that it puts out over the interval, in order."""
    channels: dict[tuple[int, int], deque[tuple[int, int, str]]] = defaultdict(deque)
    positions = {each.partition: each.offset for each in base.offsets}
    for index, (read, _) in orders.items():
        for partition in read:
            offset = positions[partition]
            key = world.inputs[partition][offset]
            channels[index, world.owner(key)].append((partition, offset, key))
            positions[partition] += 1
    outputs: dict[int, Records] = {index: [] for index in range(manifest.parallelism)}
    for index, (_, taken) in orders.items():
        for source in taken:
            partition, offset, key = channels[source, index].popleft()
            totals[key] = totals.get(key, 0) + 1
            outputs[index].append((key, (totals[key], partition, offset)))
    return outputs


def _produced(life: Life, lost: Committable, name: str, found: dict[tuple[str, int], Records]) -> Steps:
    """A new transaction with the records that were *found* for each partition."""
    world = life.world
    answer = yield from world.until_answered(
        "init_transactions", name, world.transaction_timeout_ms, again=(Error.CONCURRENT_TRANSACTIONS,)
    )
    written = []
    for place, records in found.items():
        world.faults.before_request(life)
        yield None
        produced = yield from world.until_answered(
            "produce", name, answer.producer_id, answer.epoch, *place, records, sequence=0
        )
        if produced.error is not Error.NONE:
            raise BrokerUnavailable(f"the repair was refused: {produced.error.name}")
        written.append(Written(*place, produced.first_offset, len(records)))
    producer = {"transactional_id": name, "producer_id": answer.producer_id, "epoch": answer.epoch}
    return msgspec.structs.replace(lost, **producer, written=tuple(written))
