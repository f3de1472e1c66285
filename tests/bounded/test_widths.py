"""The widest checkpoint for which there is said to be room has room."""

from __future__ import annotations

import pytest
from bounded import load_pipeline
from msgspec.structs import replace
from wide_manifest import wide

from exactlyonce.checkpoint.records.encoding import LAYOUTS, pack
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.engines.bounded import catch_up


@pytest.mark.parametrize("partitions", [1, 200, 2_000])
def test_the_widest_checkpoint_has_room(monkeypatch: pytest.MonkeyPatch, partitions: int) -> None:
    """The bytes that are reckoned with are an upper bound, and no more than three times what there is."""
    limit = 1 << 20
    monkeypatch.setattr(catch_up, "COLUMNS_SIZE_MAX", limit)
    graph = load_pipeline("bounded_pipelines", "fine", "totals").pipeline.build()
    counted = [("orders", "x" * 30, partitions)]
    most = catch_up.subtasks_max(graph, counted, counted)
    assert 1_000 < most < 10_000
    manifest = wide(most, partitions)
    manifest = replace(manifest, operators=manifest.operators[: len(graph.stateful)])
    assert limit / 3 < len(pack(LAYOUTS[Manifest][-1], manifest)) < limit
