"""A store with a ledger in bounded work: the same rows as the local engine writes, once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from auditing import Quiet
from bounded import Fed, Silent, catch_up, load_pipeline, run_local
from running import assert_totals
from stored import assert_rows
from unreferenced import unreferenced_blocks

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.audit.audit import Audit
from exactlyonce.engines.bounded.submit import in_process, perform

pytestmark = pytest.mark.broker


@pytest.mark.exhaustive
def test_both_engines_in_turns(fed: Fed, tmp_path: Path) -> None:
    """Bounded work, in chunks, and the local engine go on after one another; units that ran twice give rows once."""
    database = tmp_path / "rows.db"
    loaded = load_pipeline("stored", "totals", fed.name, database=str(database))
    fed.feed(600)

    def twice(stage: str, work: Sequence[bytes]) -> list[bytes]:
        for each in work:
            perform(each, f"{stage}-0")
        return [perform(each, f"{stage}-1") for each in work]

    progress = Silent()
    catch_up(fed, loaded, 2, tmp_path, progress=progress, chunk_records=300)
    assert len(progress.checkpoints) > 1
    fed.feed(300)
    run_local(fed, 2, "stored:totals", database=str(database))
    fed.feed(300)
    catch_up(fed, loaded, 3, tmp_path, submit=twice)
    fed.feed(300)
    run_local(fed, 1, "stored:totals", database=str(database))
    assert_rows(database, fed.left)
    assert_totals(fed.kafka, f"{fed.name}-out", fed.left)
    assert unreferenced_blocks(fed.kafka, fed.name) == set()
    client = ClientConfig({"bootstrap.servers": fed.kafka.bootstrap_servers})
    report = Audit(loaded, client, in_process, tmp_path, Quiet()).run()
    assert report.findings == []
    assert any("records of sink 'rows' are in a store" in each for each in report.unjudged)
