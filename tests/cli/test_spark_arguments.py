"""The line of progress of a long command."""

from __future__ import annotations

import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from exactlyonce.cli.spark_arguments import LineOfProgress
from tests.cli.conftest import manifest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def advanced(records: int) -> Any:
    return SimpleNamespace(manifest=manifest(), records=records, records_out=records, elapsed_ms=0, skipped=[])


@pytest.mark.parametrize("rounds", [[(100, 110)], [(100, 110), (5_000, 5_010)]], ids=["once", "followed"])
def test_the_rate_counts_from_where_the_work_begins(
    rounds: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the start of Spark nor the time in which there was nothing to read is a part of it."""
    terminal, now_s = Terminal(), 0
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("exactlyonce.cli.spark_arguments.time.monotonic", lambda: float(now_s))
    progress = LineOfProgress("p", json=False)
    for began_s, now_s in rounds:
        done_s, now_s = now_s, began_s
        progress.began(manifest(), 2_000)
        now_s = done_s
        progress.advanced(advanced(1_000), 1_000)
    assert terminal.getvalue().endswith("1,000 of 2,000 offsets  100 records/s  10.0 s left")
