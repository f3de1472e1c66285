"""The local engine and bounded units are one: the same outputs in order and the same state, for every operator."""

from __future__ import annotations

from pathlib import Path

import pytest
from auditing import audited
from bounded import Fed, catch_up, load_pipeline, run_local
from golden import compute_again, states_of

from exactlyonce.engines.bounded.stages import in_process


def assert_visible(fed: Fed, attribute: str, staging: Path) -> None:
    """Readers see exactly what the intervals give along their order logs: nothing less, more, other or otherwise."""
    loaded = load_pipeline("bounded_pipelines", attribute, fed.name)
    report = audited(loaded, fed.config, staging)
    assert (report.findings, report.unjudged) == ([], [])
    assert report.checkpoints


@pytest.mark.exhaustive(but=["every-1"])
@pytest.mark.parametrize(("attribute", "parallelism"), [("every", 1), ("rejoined", 2)])
def test_what_the_local_engine_did(attribute: str, parallelism: int, fed: Fed, tmp_path: Path) -> None:
    fed.feed(1_000)
    run_local(fed, parallelism, f"bounded_pipelines:{attribute}", interval="10m")
    loaded = load_pipeline("bounded_pipelines", attribute, fed.name)
    manifest = fed.history().latest
    assert manifest is not None
    again = compute_again(fed, loaded, manifest.checkpoint, in_process, tmp_path)
    assert again.states == states_of(fed, loaded, manifest)
    assert all(again.states.values()), "every operator has kept something"
    assert_visible(fed, attribute, tmp_path)


@pytest.mark.exhaustive
def test_what_bounded_work_did(fed: Fed, tmp_path: Path) -> None:
    fed.feed(4_000)
    loaded = load_pipeline("bounded_pipelines", "every", fed.name)
    summary = catch_up(fed, loaded, 3, tmp_path, chunk_records=5_000)
    again = compute_again(fed, loaded, summary.manifest.checkpoint, in_process, tmp_path)
    assert again.states == states_of(fed, loaded, summary.manifest)
    assert_visible(fed, "every", tmp_path)
