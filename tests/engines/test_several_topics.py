"""A source of several topics, and a sink that chooses one for each record, in every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from running import Job, assert_once, ids_in

COUNT = 200


@pytest.mark.slow
@pytest.mark.exhaustive
def test_each_record_is_in_the_topic_that_is_chosen_once(
    job_of: Callable[..., Job], failpoint: Callable[..., Any]
) -> None:
    """Also after a kill between the commits of two topics, and where bounded work goes on."""
    job = job_of("several_topics", "--parallelism", "2", "--num-retained", "50")
    kafka = job.kafka
    kafka.create_topic(f"{job.name}-in.more", 2)

    def feed() -> None:
        job.feed(COUNT)
        job.feed(COUNT, to="in.more")

    feed()
    job.finish(env=failpoint("coordinator-decided"), code=-9)
    job.finish()
    feed()
    target = ("pipelines:several_topics", "--param", f"name={job.name}", "--on", "driver")
    job.command("catch-up", *target, "--num-retained", "50")
    assert job.audited()["unjudged"] == []

    even, odd = ids_in(kafka, f"{job.name}-even", 2 * COUNT), ids_in(kafka, f"{job.name}-odd.ids", 2 * COUNT)
    assert {id % 2 for id in even} == {0}
    assert {id % 2 for id in odd} == {1}
    assert_once([*even, *odd], job.fed)
