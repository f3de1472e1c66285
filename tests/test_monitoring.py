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
import yaml

from exactlyonce.engines.local.monitoring.serving import METRICS

FOLDER = Path(__file__).parents[1] / "docker" / "monitoring"
LABELS = {
    f"{metric.name}{suffix}": {"pipeline", "le", *metric.labels}
    for metric in METRICS
    for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}


def expressions() -> Iterator[str]:
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])

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
@pytest.mark.parametrize(
    "asked", [["check", "rules", FOLDER / "alerts.yml"], ["test", "rules", Path(__file__).with_name("alert_cases.yml")]]
)
def test_promtool_takes_the_rules_and_their_cases(asked: list[Any]) -> None:
    """Somebody is woken for a pipeline that is dead, was never there, or has never completed a checkpoint."""
    checked = subprocess.run(["promtool", *map(str, asked)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
