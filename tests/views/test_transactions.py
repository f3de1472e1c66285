"""The output that waits for stores, found where blocks are files, and how old it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.checkpoint.block_storage import AttemptBlocks
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, StoreCommittable, TopicInfo
from exactlyonce.connectors.block_files import file_storage, name_of
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.pending_output import WaitingOutput
from exactlyonce.engines.pipeline_resources import PipelineResources
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.views import transactions
from exactlyonce.views.transactions import find_staged
from tests.cli.conftest import manifest

TOPIC = TopicInfo("p.checkpoints", "id", 2, 1)
TRIGGERED_AT_MS = 5_000_000
Put = Callable[[int, int, int], BlockRef]


def decided(storage: str, *staged: StoreCommittable) -> Manifest:
    return manifest(
        triggered_at_ms=TRIGGERED_AT_MS, completed_at_ms=TRIGGERED_AT_MS + 10, block_partitions=2,
        block_end_offsets=(0, 0), staged=staged, storage=storage,
        ledger=tuple((each.sink, each.subtask, each.checkpoint) for each in staged),
    )  # fmt: skip


def waits(subtask: int, kind: str, *blocks: BlockRef) -> StoreCommittable:
    sink = "rows" if kind == "rows" else "other"
    return StoreCommittable(sink=sink, subtask=subtask, checkpoint=1, records=1, kind=kind, blocks=blocks)


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(transactions, "find_topic", lambda *_: TOPIC)
    return f"file://{tmp_path}"


@pytest.fixture
def put(storage: str, tmp_path: Path) -> Put:
    """`put(subtask, part, at_ms)`: rows of that time."""
    blocks: AttemptBlocks = file_storage(storage, TOPIC).begin(1, 0)

    def of_that_time(subtask: int, part: int, at_ms: int) -> BlockRef:
        ticket = blocks.write(Block("rows", 1, "rows", "none", "rows", b"rows"), subtask, part)
        blocks.wait(LIMIT_S)
        assert ticket.ref is not None
        file = tmp_path / "p" / "id" / str(name_of(ticket.ref))
        os.utime(file, ns=(at_ms * 1_000_000, at_ms * 1_000_000))
        return ticket.ref

    return of_that_time


def found(decision: Manifest) -> dict[str, WaitingOutput]:
    history = History("p")
    history.manifests[1] = decision
    resources = PipelineResources("p", TOPIC.name, history, "", ())
    config: Any = ClientConfig({"bootstrap.servers": "127.0.0.1:1"})
    return {f"{each.name} {each.decided_in}": each for each in find_staged(config, resources, None).waiting}


def test_the_age_of_rows(storage: str, put: Put) -> None:
    """Rows wait since their first block was written, decided or not."""
    decision = decided(storage, waits(0, "rows", put(0, 2, 3_000_000), put(0, 1, 2_000_000)))
    put(1, 1, 4_000_000)
    put(1, 2, 3_500_000)
    shown = found(decision)
    assert {name: each.started_at_ms for name, each in shown.items()} == {
        "rows:0:1 1": 2_000_000, "rows:1:1 None": 3_500_000,
    }  # fmt: skip
    assert {each.where.partition(", ")[0] for each in shown.values()} == {f"2 blocks of {storage}"}
    assert {each.open_ms(4_500_000) for each in shown.values()} == {2_500_000, 1_000_000}


def test_the_age_where_only_the_decision_tells(storage: str) -> None:
    """Without an answer of the store, the checkpoint's trigger tells it."""
    (shown,) = found(decided(storage, waits(0, "files"))).values()
    assert (shown.state, shown.started_at_ms) == ("unknown", TRIGGERED_AT_MS)
