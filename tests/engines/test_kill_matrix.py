"""SIGKILL at every step of the protocol, in every process role: the output is exact all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, assert_copies, assert_totals, orders

from exactlyonce.pipeline.failpoints import NAMES
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker

ELSEWHERE = {
    name
    for name in NAMES
    if name.startswith(
        ("repair-", "unit-", "publication-", "advance-", "store-", "unaligned-", "savepoint-", "erasing-")
    )
}
"""What `exactlyonce run` meets only in a repair, beside another store, unaligned, from a savepoint, behind a cancelled
run, or not at all."""


def run_to_the_end(run: Callable[..., Any], name: str, target: str, *arguments: str, env: dict[str, str]) -> list[int]:
    """Run again after every kill until it ends cleanly; the exit codes."""
    codes: list[int] = []
    while 0 not in codes:
        assert len(codes) < 5, f"it does not end: {codes}"
        incarnation = run(target, "--param", f"name={name}", "--until", "latest", *QUICK, *arguments, env=env)
        codes.append(incarnation.wait())
        assert codes[-1] in (0, -9), incarnation.said
    return codes


@pytest.mark.exhaustive(but=["coordinator-decided"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - ELSEWHERE))
def test_linear(name: str, kafka: KafkaCluster, topic_name: str, run: Any, failpoint: Any, tmp_path: Path) -> None:
    """A running total is exact though a process was killed at the step."""
    kafka.create_topic(f"{topic_name}-in", 3)
    fed = orders(6000)
    kafka.produce(f"{topic_name}-in", fed)
    env = failpoint(name)
    codes = run_to_the_end(run, topic_name, "pipelines:linear", env=env)
    assert (tmp_path / "fired" / name).exists(), "the planned kill happened"
    assert codes == ([-9, 0] if name.startswith("coordinator") else [0])
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive(but=["coordinator-committed"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - ELSEWHERE))
def test_diamond(name: str, kafka: KafkaCluster, topic_name: str, run: Any, failpoint: Any, tmp_path: Path) -> None:
    """Two sources, a union, a shuffle and two sinks at parallelism 2 are exact though a process died at the step."""
    left, right = orders(4000), orders(4000, first=100_000)
    kafka.create_topic(f"{topic_name}-in", 3)
    kafka.create_topic(f"{topic_name}-more", 2)
    kafka.produce(f"{topic_name}-in", left)
    kafka.produce(f"{topic_name}-more", right)
    run_to_the_end(run, topic_name, "pipelines:diamond", "--parallelism", "2", env=failpoint(name))
    assert (tmp_path / "fired" / name).exists(), "the planned kill happened"
    assert_totals(kafka, f"{topic_name}-out", left + right)
    assert_copies(kafka, f"{topic_name}-copies", left + right)
