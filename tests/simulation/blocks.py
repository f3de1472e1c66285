"""The block partitions of the checkpoint topic, as a simulated coordinator looks at them."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from typing import TYPE_CHECKING

from clients import TOPIC

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.store.storage import Scanned
from exactlyonce.testing.broker.interface import Isolation, Record

if TYPE_CHECKING:
    from world import World


def scanned(world: World, start_offsets: tuple[int, ...]) -> Generator[int | None, None, Scanned]:
    """Blocks are read uncommitted, tombstones committed."""
    found: dict[str, BlockRef] = {}
    ends = [0]
    for partition in range(1, world.block_partitions):
        place = (TOPIC, partition, start_offsets[partition])
        settled = yield from world.until_answered("fetch", *place, Isolation.READ_COMMITTED)
        everything = yield from world.until_answered("fetch", *place, Isolation.READ_UNCOMMITTED)
        known = settled.last_stable_offset
        open_ = [each for each in everything.records if each.offset >= known and each.value is not None]
        for each in [*(record for record in settled.records if record.offset < known), *open_]:
            found.pop(each.key, None)
            if each.value is not None:
                found[each.key] = _reference(partition, each)
        ends.append(everything.high_watermark)
    return Scanned(tuple(found.values()), tuple(ends))


def _reference(partition: int, record: Record) -> BlockRef:
    digest = hashlib.sha256(record.value).digest()
    return BlockRef(partition, record.offset, record.key, len(record.value), digest)
