"""Every store at least once, through a kill: none is missing, and without a failure none is doubled."""

from __future__ import annotations

import pytest
from jobs import Job
from running import assert_once
from servers import FORMATS, STORES, Row
from together import table
from waiting import until

pytestmark = pytest.mark.slow

PLACES = (*STORES, *FORMATS)


@pytest.mark.exhaustive
def test_through_a_kill(job: Job) -> None:
    target = "together:weaker"
    job.feed()
    first = job.start("--parallelism", "2", target=target)
    until(lambda: all(rows_of(job, place) for place in PLACES), told=lambda: first.said, pause_s=0.05)
    job.feed()
    first.await_event(lambda event: event["event"] == "checkpoint")
    assert "restarting" not in first.said
    first.kill()
    fed_before = len(job.fed)
    job.finish(target=target)
    job.feed(500)
    job.finish("--parallelism", "3", target=target)
    for place in PLACES:
        ids = [row.id for row in rows_of(job, place)]
        assert {*ids} == {*range(len(job.fed))}, place
        assert_once([each for each in ids if each >= fed_before], job.fed[fed_before:], place)


def rows_of(job: Job, place: str) -> list[Row]:
    if place in FORMATS:
        return job.servers.filed(job.name, place)
    return job.servers.appended(place, f"{job.name}:totals" if place == "redis" else table(job.name, "append"))
