"""SIGKILL to a driver at every step: whoever comes next goes on, and nothing is lost, doubled or left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from bounded import DRIVER_STEPS, Fed, catch_up, drive, load_pipeline


@pytest.mark.exhaustive
@pytest.mark.parametrize("failpoint", DRIVER_STEPS)
def test_a_killed_driver(failpoint: str, fed: Fed, tmp_path: Path) -> None:
    fed.feed(3_000)
    assert drive(fed, tmp_path / "staging", failpoint, tmp_path / "fired") == -9
    assert (tmp_path / "fired" / failpoint).exists(), "the planned kill happened"
    pipeline = load_pipeline("bounded_pipelines", "broad", fed.name)
    summary = catch_up(fed, pipeline, 3, tmp_path / "staging")
    fed.assert_output()
    fed.assert_state(pipeline, summary.manifest)
    fed.assert_nothing_left()
    assert not list((tmp_path / "staging").iterdir()), "what the killed one had staged is gone, too"
