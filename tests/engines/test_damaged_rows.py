"""Damaged rows of a decided checkpoint: a halt with choices; a loss that is accepted is that of these rows alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaging import damage
from running import Job
from stored import rows_of

from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.testing.cluster import OwnCluster

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_a_halt_and_an_accepted_loss(
    stoppable: OwnCluster, tmp_path: Path, job_of: Callable[..., Job], failpoint: Any
) -> None:
    database, count = tmp_path / "rows.db", 300
    one_checkpoint = ("--checkpoint-interval", "10m")
    job = job_of("stored:totals", "--param", f"database={database}", *one_checkpoint, cluster=stoppable)
    job.feed(count)
    job.finish(env=failpoint("store-committing"), code=-9)
    unfinalized = job.history().unfinalized
    assert unfinalized is not None
    (staged,) = unfinalized.staged
    lost, checkpoint = staged.blocks[0], staged.checkpoint
    damage(stoppable, checkpoint_topic(job.name), lost.partition, lost.key.encode(), known_checksum=True)
    for _ in range(2):
        said = job.finish_here(code=6)
        for part in (f"the {count} records", "sink 'rows', of subtask 0", lost.key, f"--accept-loss {checkpoint}`"):
            assert part in said
    job.finish_here("--accept-loss", str(checkpoint))
    job.feed(100)
    job.finish_here()
    assert sorted(row.id for row in rows_of(database)) == list(range(count, count + 100))
    job.assert_output()
