"""Manifests of many subtasks and partitions."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.manifest import (
    BlockRef,
    Manifest,
    OperatorSnapshot,
    OrderLog,
    SourceOffset,
    Written,
)
from tests.checkpoint.conftest import MANIFEST


def reference(subtask: int, operator: str, random: Random) -> BlockRef:
    """To a block that another process has written than the one before: neither its nonce nor its digest repeats."""
    key = BlockKey(12, 1234, operator, subtask, 0, 3, f"{random.getrandbits(48):012x}")
    offset, size = 5_000_000 + 23 * subtask + random.randrange(20), random.randrange(300, 9_000)
    return BlockRef(1 + subtask % 8, offset, str(key), size, random.randbytes(32))


def wide(subtasks: int, partitions: int) -> Manifest:
    """The manifest of two operators with state, in two tasks with order logs, and a transaction a partition."""
    random, names = Random(subtasks), ("totals-by-customer", "totals-by-day")
    return replace(
        MANIFEST,
        offsets=tuple(
            SourceOffset("orders", "orders-of-all-shops-of-the-day", "T" * 22, partition, random.randrange(1 << 30), 7)
            for partition in range(partitions)
        ),
        operators=tuple(
            OperatorSnapshot(name, subtasks, 1 << 40, tuple((reference(n, name, random),) for n in range(subtasks)))
            for name in names
        ),
        order_logs=tuple(OrderLog(name, n, (reference(n, name, random),)) for name in names for n in range(subtasks)),
        committables=tuple(
            replace(
                MANIFEST.committables[0], transactional_id=f"eo:orders:out:{partition}:12.3:0", subtask=partition,
                producer_id=70_000 + partition, cluster_id="M" * 22,
                written=(Written("totals-of-the-orders-of-the-day", partition, random.randrange(1 << 30), 5_000),),
            )
            for partition in range(partitions)
        ),
    )  # fmt: skip
