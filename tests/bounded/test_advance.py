"""Backfill and catch-up with units run in this process, in turns with the local engine: one pipeline, one output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bounded import Fed, catch_up, run_local

pytestmark = pytest.mark.broker


@pytest.mark.exhaustive
def test_both_engines_in_turns(fed: Fed, loaded: Any, tmp_path: Path) -> None:
    """Backfill at 1, run locally at 3, catch up at 2, run at 1: outputs and state are those of one fold over all."""
    pipeline = loaded("broad")
    fed.feed(6_000)
    summary = catch_up(fed, pipeline, 1, tmp_path, chunk_records=4_000)
    assert (summary.records, summary.checkpoints) == (9_000, 3)
    fed.assert_output()
    fed.assert_state(pipeline, summary.manifest)
    fed.feed(3_000)
    run_local(fed, 3)
    fed.assert_output()
    fed.feed(3_000)
    summary = catch_up(fed, pipeline, 2, tmp_path)
    assert summary.records == 4_500
    fed.assert_output()
    fed.assert_state(pipeline, summary.manifest)
    fed.feed(900)
    run_local(fed, 1)
    fed.assert_output()
    latest = fed.history().latest
    assert latest is not None
    fed.assert_state(pipeline, latest)
    fed.assert_nothing_left()
    assert not list(tmp_path.iterdir()), "nothing is left of what was staged"


@pytest.mark.exhaustive
def test_blocks_outside_of_the_topic(fed: Fed, loaded: Any, tmp_path: Path) -> None:
    """Units of both engines read and write state as files: outputs are those of one fold, and no file is left over."""
    pipeline, root, staging = loaded("broad"), tmp_path / "blocks", tmp_path / "staging"
    root.mkdir()
    staging.mkdir()
    fed.storage = f"file://{root}"
    fed.feed(2_000)
    summary = catch_up(fed, pipeline, 2, staging, chunk_records=1_500)
    fed.assert_state(pipeline, summary.manifest)
    fed.feed(1_000)
    run_local(fed, 2)
    fed.feed(500)
    summary = catch_up(fed, pipeline, 1, staging)
    fed.assert_output()
    fed.assert_state(pipeline, summary.manifest)
    assert summary.manifest.storage == fed.storage
    fed.assert_nothing_left()
