"""The common part of tests of the protocol: manifests to write, and a topic of one's own to write them to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from blank_manifest import blank_committable, blank_manifest

from exactlyonce.checkpoint.records.manifest import (
    BlockRef,
    Manifest,
    OperatorSnapshot,
    OrderLog,
    Output,
    SourceOffset,
    Written,
)

REF = BlockRef(1, 5, "block/1/1/totals/0/0/0-ab", 10, b"x" * 32)
COMMITTABLE = blank_committable(
    transactional_id="eo:p:out:0:1.0:0", producer_id=4001, epoch=7, checkpoint=4, written=(Written("totals", 0, 5, 6),)
)
MANIFEST = blank_manifest(
    checkpoint=0, base=0, previous=0, triggered_at_ms=1_000, completed_at_ms=1_100, fingerprint="f1", parallelism=2,
    block_end_offsets=(1, 2, 3, 4, 5), written_bytes=10, offsets=(SourceOffset("orders", "orders", "id", 0, 7),),
    operators=(OperatorSnapshot("totals", 2, 10, ((REF,), ())),), order_logs=(OrderLog("totals", 0, (REF,)),),
    committables=(COMMITTABLE,), sinks=(Output("out", "totals", 3),),
)  # fmt: skip


@pytest.fixture
def manifest() -> Callable[..., Manifest]:
    """`manifest(7, parallelism=4)` is a manifest of checkpoint 7."""
    return lambda checkpoint, **changes: msgspec.structs.replace(MANIFEST, checkpoint=checkpoint, **changes)


@pytest.fixture
def store(kafka: Any, topic_name: str) -> Any:
    """A checkpoint topic in a cluster."""
    from tests.connectors.kafka.checkpoint_topic.conftest import Store

    return Store(kafka.bootstrap_servers, topic_name)
