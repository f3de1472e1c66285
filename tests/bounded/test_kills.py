"""SIGKILL to a driver at every step: whoever comes next goes on, and nothing is lost, doubled or left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bounded import HERE, Fed, catch_up, load_pipeline

from exactlyonce.pipeline.failpoints import NAMES
from exactlyonce.testing.cluster import LIMIT_S

pytestmark = pytest.mark.broker

STEPS = [name for name in NAMES if name.startswith(("unit-", "publication-", "advance-", "coordinator-"))]
ONCE = ("coordinator-opened", "coordinator-swept")
"""Met once by a driver; the others are met in each of its checkpoints."""
DRIVING = """
import sys
from pathlib import Path
from bounded import *
from exactlyonce.connectors.kafka.client_config import ClientConfig
options = RunOptions(ClientConfig({"bootstrap.servers": sys.argv[1]}), parallelism=2)
loaded = load_pipeline("bounded_pipelines", "broad", sys.argv[2])
CatchUp(loaded, options, Silent(), chunk_records=1500).lead(in_process, Path(sys.argv[3]))
"""


def drive(fed: Fed, staging: Path, failpoint: str, fired: Path) -> int:
    """The exit code of a driver of its own, at parallelism 2, that dies in its second checkpoint, or as it begins."""
    fired.mkdir()
    nth = 1 if failpoint in ONCE else 2
    armed = {"EXACTLYONCE_FAILPOINTS": f"{failpoint}=kill@{nth}", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
    path = os.pathsep.join([str(HERE), str(HERE.parents[1] / "engines")])
    line = [sys.executable, "-c", DRIVING, fed.kafka.bootstrap_servers, fed.name, str(staging)]
    environment = {**os.environ, "PYTHONPATH": path, **armed}
    return subprocess.run(line, env=environment, capture_output=True, timeout=LIMIT_S).returncode


@pytest.mark.exhaustive
@pytest.mark.parametrize("failpoint", [name for name in STEPS if name != "coordinator-triggered"])
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
