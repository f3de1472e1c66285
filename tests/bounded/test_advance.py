"""Backfill and catch-up with units run in this process, in turns with the local engine: one pipeline, one output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from bounded import Fed

from exactlyonce.checkpoint.history import History
from exactlyonce.checkpoint.manifest import Manifest
from exactlyonce.checkpoint.store import read_history
from exactlyonce.connectors.client_config import ClientConfig
from exactlyonce.connectors.transactions import Transactions
from exactlyonce.engines.bounded.advance import Advanced
from exactlyonce.engines.bounded.catching_up import CatchingUp, Summary
from exactlyonce.engines.bounded.submit import in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.pipeline.loading import Loaded

pytestmark = pytest.mark.broker
ENGINES = Path(__file__).parents[1] / "engines"


class Silent:
    """A `Progress` that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.checkpoints: list[Manifest] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def began(self, manifest: Manifest, offsets: int) -> None:
        pass

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        self.checkpoints.append(advanced.manifest)


def catch_up(fed: Fed, loaded: Loaded, parallelism: int, staging: Path, **options: Any) -> Summary:
    """Advance to the latest offsets, or as *options* say, with units run here."""
    submit: Callable[[str, Sequence[bytes]], list[bytes]] = options.pop("submit", in_process)
    client = ClientConfig({"bootstrap.servers": fed.kafka.bootstrap_servers})
    run = RunOptions(client, parallelism=parallelism)
    return CatchingUp(loaded, run, submit, staging, options.pop("progress", Silent()), **options).run()


def run_local(fed: Fed, parallelism: int, target: str = "bounded_pipelines:broad") -> None:
    """`exactlyonce run --until latest`, as its users do."""
    command = [sys.executable, "-m", "exactlyonce.cli.main", "run", target, "--param", f"name={fed.name}"]
    options = ["--bootstrap-servers", fed.kafka.bootstrap_servers, "--parallelism", str(parallelism)]
    path = os.pathsep.join([str(ENGINES), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *options, "--until", "latest", "--checkpoint-interval", "200ms"],
        cwd=Path(__file__).parent / "folds", env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def history(fed: Fed) -> History:
    """What is decided."""
    return read_history({"bootstrap.servers": fed.kafka.bootstrap_servers}, fed.name)


def assert_nothing_open(fed: Fed) -> None:
    """No transaction of the pipeline is open, the newest checkpoint is finalized."""
    assert history(fed).unfinalized is None
    transactions = Transactions(ClientConfig({"bootstrap.servers": fed.kafka.bootstrap_servers}))
    try:
        states = {each.transactional_id: each.state for each in transactions.list(f"eo:{fed.name}:")}
    finally:
        transactions.close()
    assert not [name for name, state in states.items() if state in ("Ongoing", "PrepareCommit", "PrepareAbort")], states


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
    latest = history(fed).latest
    assert latest is not None
    fed.assert_state(pipeline, latest)
    assert_nothing_open(fed)
    assert not list(tmp_path.iterdir()), "nothing is left of what was staged"
