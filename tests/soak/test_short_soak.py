"""A short soak on real servers; `make soak ARGS=real` has long ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.servers.programs import require

COMMAND = (sys.executable, str(Path(__file__).parents[1] / "campaign.py"), "soak")
pytestmark = pytest.mark.broker


@pytest.mark.slow
@pytest.mark.exhaustive
def test_nothing_is_lost_or_doubled_though_anything_fails(tmp_path: Path) -> None:
    """In a process of its own, for it mounts disks. It may stand still for as long as a busy machine makes it."""
    require("deltalake", ".[delta]")
    options = ("--seed", "5", "--faults", "5", "--rate", "500", "--stall", str(LIMIT_S), "--evidence", str(tmp_path))
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "results.jsonl").read_text())
    assert result["found"] == {}
    assert result["faults"] >= 5
    assert all(result["rows_of"][view] for view in ("totals", "lake", "windows", "pairs", "pair-rows"))
