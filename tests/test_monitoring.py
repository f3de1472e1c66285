"""The board and the alert rules of docker/monitoring/ ask for metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.engines.local.monitoring.metrics import METRICS

FOLDER = Path(__file__).parents[1] / "docker" / "monitoring"
LABELS = {
    f"{metric.name}{suffix}": {"pipeline", "le", *metric.labels}
    for metric in METRICS
    for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}


def expressions() -> Iterator[str]:
    yield from re.findall(r"expr: (.+)", (FOLDER / "alerts.yml").read_text())

    def within(board: Any) -> Iterator[str]:
        if isinstance(board, dict):
            yield from (value for key, value in board.items() if key in ("expr", "query") and "exactlyonce_" in value)
        for each in board.values() if isinstance(board, dict) else board if isinstance(board, list) else ():
            yield from within(each)

    yield from within(json.loads((FOLDER / "grafana.json").read_text()))


def test_every_metric_that_is_asked_for_is_there() -> None:
    asked = [*expressions()]
    assert len(asked) > 20
    for expression in asked:
        for name, labels in re.findall(r"(exactlyonce_\w+)(?:\{([^}]*)\})?", expression):
            assert name in LABELS, expression
            assert set(re.findall(r"(\w+)=", labels)) <= LABELS[name], expression


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_rules() -> None:
    checked = subprocess.run(
        ["promtool", "check", "rules", str(FOLDER / "alerts.yml")], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
