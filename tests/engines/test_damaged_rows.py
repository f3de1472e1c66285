"""Damaged rows of a decided checkpoint: a halt with choices; a loss that is accepted is that of these rows alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaging import damage
from running import assert_copies, assert_totals, orders
from stored import rows_of

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.sinks.write_ahead.writer import INDEXED
from exactlyonce.testing.cluster import OwnCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]

AT_ITS_END = ("--until", "latest", "--checkpoint-interval", "10m")
"""All that was fed makes one checkpoint."""


def staged_by(kafka: OwnCluster, name: str) -> StoreCommittable:
    """What the newest checkpoint, which is decided and not finalized, has set aside."""
    unfinalized = read_history({"bootstrap.servers": kafka.bootstrap_servers}, name).unfinalized
    assert unfinalized is not None
    (found,) = unfinalized.staged
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(("what", "count"), [("rows", 300), ("index", 60_000)], ids=["rows", "index"])
def test_a_halt_and_an_accepted_loss(
    what: str, count: int, stoppable: OwnCluster, topic_name: str, tmp_path: Path, run: Any,
    failpoint: Callable[..., dict[str, str]],
) -> None:  # fmt: skip
    """Also where the index of many blocks is damaged: nothing says any more which these are."""
    database, fed = tmp_path / "rows.db", orders(count)
    arguments = ("--param", f"name={topic_name}", "--param", f"database={database}", *AT_ITS_END)

    def ended(*more: str, **options: Any) -> Any:
        job = run("stored:totals", *arguments, *more, servers=stoppable.bootstrap_servers, **options)
        job.wait()
        return job

    stoppable.create_topic(f"{topic_name}-in", 3)
    stoppable.produce(f"{topic_name}-in", fed)
    assert ended(env=failpoint("store-committing")).process.returncode == -9
    committable = staged_by(stoppable, topic_name)
    assert (committable.body == INDEXED) == (what == "index")
    lost, checkpoint = committable.blocks[0], committable.checkpoint
    damage(stoppable, checkpoint_topic(topic_name), lost.partition, lost.key.encode(), known_checksum=True)
    for _ in range(2):
        halted = ended()
        assert halted.process.returncode == 6, halted.said
        for part in (f"the {count} records", "sink 'rows', of subtask 0", lost.key, f"--accept-loss {checkpoint}`"):
            assert part in halted.said
    accepted = ended("--accept-loss", str(checkpoint))
    assert accepted.process.returncode == 0, accepted.said
    more = orders(100, first=count)
    stoppable.produce(f"{topic_name}-in", more)
    assert ended().process.returncode == 0
    assert sorted(row.id for row in rows_of(database)) == list(range(count, count + 100))
    assert_totals(stoppable, f"{topic_name}-out", fed + more)
    assert_copies(stoppable, f"{topic_name}-copies", fed + more)
