"""SIGKILL at every step of the protocol, in every process role: the output is exact all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Job

from exactlyonce.pipeline.failpoints import NAMES

OTHERS = {
    "repair", "unit", "publication", "advance", "store", "unaligned", "savepoint", "erasing", "timed", "enrich",
    "request",
}  # fmt: skip
ELSEWHERE = {name for name in NAMES if name.split("-")[0] in OTHERS}
"""Failpoints that a plain `exactlyonce run` does not meet, but a repair, another store, a savepoint or windows may."""
STEPS = sorted(set(NAMES) - ELSEWHERE)


def run_to_the_end(job: Job, *arguments: str, env: dict[str, str]) -> list[int]:
    codes: list[int] = []
    while 0 not in codes:
        assert len(codes) < 5, f"it does not end: {codes}"
        incarnation = job.start("--until", "latest", *arguments, env=env)
        codes.append(incarnation.wait())
        assert codes[-1] in (0, -9), incarnation.said
    fired = Path(env["EXACTLYONCE_FAILPOINTS_FIRED"], env["EXACTLYONCE_FAILPOINTS"].partition("=")[0])
    assert fired.exists(), "the planned kill happened"
    return codes


@pytest.mark.exhaustive(but=["coordinator-committed"])
@pytest.mark.parametrize("name", STEPS)
def test_diamond(name: str, job_of: Callable[..., Job], failpoint: Any) -> None:
    job = job_of("diamond", "--parallelism", "2")
    job.kafka.create_topic(f"{job.name}-more", 2)
    job.feed(1500)
    job.feed(1500, "more")
    codes = run_to_the_end(job, env=failpoint(name))
    assert codes == ([-9, 0] if name.startswith("coordinator") else [0])
    job.assert_output()
