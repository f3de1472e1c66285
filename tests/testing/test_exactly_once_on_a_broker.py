"""`assert_exactly_once` on a real cluster: processes that are killed at failpoints."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exactlyonce import Pipeline
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.testing import assert_exactly_once

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.exactlyonce_broker]
NUMBERS, SUMS = [*range(1, 7)], [[1, 1], [2, 2], [3, 4], [4, 6], [5, 9], [6, 12]]


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Pipeline]:
    """The function that makes the pipeline; it notes all numbers in tmp_path / "noted"."""
    monkeypatch.setenv("NOTED_NUMBERS", str(tmp_path / "noted"))
    spec = importlib.util.spec_from_file_location("scripted_pipeline", Path(__file__).with_name("scripted_pipeline.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "scripted_pipeline", module)
    spec.loader.exec_module(module)
    made: Callable[[str], Pipeline] = module.sums
    return made


def test_a_right_pipeline_passes_failpoints(sums: Callable[[str], Pipeline]) -> None:
    assert_exactly_once(sums, {"numbers": NUMBERS}, {"out": SUMS}, crashes_max=2)


def test_a_side_effect_written_twice_is_found(sums: Callable[[str], Pipeline], tmp_path: Path) -> None:
    def noted() -> list[str]:
        path = tmp_path / "noted"
        return path.read_text().split() if path.exists() else []

    message = r"(?s)^Not exactly once: a process is killed at \S+: .*\n  side effect notes: doubled: '4' \(2 times"
    with pytest.raises(AssertionError, match=message):
        assert_exactly_once(sums, {"numbers": NUMBERS}, {"out": SUMS}, side_effects={"notes": noted}, crashes_max=1)


def test_a_pipeline_without_a_name_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a function of a module, def orders"):
        assert_exactly_once(Pipeline("fixed"), {"numbers": NUMBERS})
