"""Backfill and catch-up with units run in this process, in turns with the local engine: one pipeline, one output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bounded import Fed, Silent, catch_up, run_local

from exactlyonce.engines.bounded import advance as advancing
from exactlyonce.engines.bounded.stages import in_process, perform, stages
from exactlyonce.engines.plan import plan


@pytest.mark.exhaustive
def test_both_engines_in_turns(fed: Fed, loaded: Any, tmp_path: Path) -> None:
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


def test_what_is_staged(fed: Fed, loaded: Any, tmp_path: Path) -> None:
    """A file for each sender and edge or sink, and one for each stage; settings of the client are in none of them."""
    fed.feed(200)
    staged: list[Path] = []
    longest = 0

    def submit(stage: str, work: Sequence[bytes]) -> list[bytes]:
        nonlocal longest
        longest = max(longest, *map(len, work))
        staged[:] = [file for file in tmp_path.glob("*/*") if not file.name.startswith(".")]
        assert not any(fed.kafka.bootstrap_servers.encode() in file.read_bytes() for file in staged)
        return in_process(stage, work)

    pipeline = loaded("broad")
    catch_up(fed, pipeline, 5, tmp_path, submit=submit)
    physical = plan(pipeline.pipeline.build(), 5)
    edges, sinks = len(physical.shuffles), len(physical.graph.sinks)
    by_stage = [file for file in staged if file.name.startswith(("stage-", "publish-"))]
    assert len(by_stage) == len(stages(physical)) + sinks
    assert len(staged) - len(by_stage) <= 5 * (edges + sinks)
    assert longest < 1_000, "a unit is a place in a file"
    fed.assert_output()


class ComingBack:
    """Runs units here; the first attempts of the second publication come back at the end of the third."""

    def __init__(self) -> None:
        self.published = 0
        self.lost: Sequence[bytes] = ()

    def __call__(self, stage: str, work: Sequence[bytes]) -> list[bytes]:
        if not stage.endswith(", publish"):
            return in_process(stage, work)
        self.published += 1
        if self.published == 2:
            self.lost = work
            for number, each in enumerate(work):
                perform(each, f"first-{number}-0")
            return [perform(each, f"second-{number}-1") for number, each in enumerate(work)]
        answers = in_process(stage, work)
        for number, each in enumerate(self.lost):
            perform(each, f"late-{number}-0")
        self.lost = ()
        return answers


def test_a_failed_publication_meets_no_later_one(
    fed: Fed, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next checkpoint has other transactional ids, so that a late first attempt aborts nothing of it."""
    monkeypatch.setattr(advancing, "PUBLISHER_RECORDS", 1)
    fed.feed(240)
    progress, submit = Silent(), ComingBack()
    summary = catch_up(fed, loaded("broad"), 2, tmp_path, chunk_records=90, progress=progress, submit=submit)
    assert (summary.checkpoints, submit.published) == (4, 4)
    attempts = [{each.transactional_id.split(":")[4] for each in m.committables} for m in progress.checkpoints]
    assert attempts == [{"1.0-0"}, {"1.0-1"}, {"1.1-0"}, {"1.1-0"}]
    fed.assert_output()
    fed.assert_nothing_left()
