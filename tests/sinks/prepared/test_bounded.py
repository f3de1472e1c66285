"""Prepared transactions in bounded work: units prepare them, and what a failed attempt of one has left goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from bounded import Silent, load_pipeline, twice
from prepared_job import PreparedJob
from preparing import on_mariadb

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.options import RunOptions

pytestmark = pytest.mark.broker


def catch_up(job: PreparedJob, folder: Path) -> None:
    loaded = load_pipeline("prepared_totals", "totals", job.name, store=job.preparing.name)
    options = RunOptions(ClientConfig({"bootstrap.servers": job.kafka.bootstrap_servers}), parallelism=2)
    CatchUp(loaded, options, Silent()).lead(twice, folder)


@on_mariadb
@pytest.mark.exhaustive(matrix=True)
def test_a_unit_that_is_tried_again(job: PreparedJob, tmp_path: Path) -> None:
    """One of its two transactions is named, and committed; the other is rolled back as soon as the interval is done."""
    for _ in range(2):
        catch_up(job, tmp_path)
        job.assert_exact()
        job.feed(500)
    job.finish()
    job.assert_exact()
