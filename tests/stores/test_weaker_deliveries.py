"""The weaker deliveries of every store, through a kill: none is missing at least once, none is doubled at most once."""

from __future__ import annotations

from collections import Counter

import pytest
from jobs import Job
from running import assert_once
from servers import FORMATS, STORES, Row
from together import table
from waiting import until

pytestmark = pytest.mark.slow

PLACES = (*STORES, *FORMATS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("delivery", "never"), [("at_least_once", "missing"), ("at_most_once", "doubled")])
def test_through_a_kill(job: Job, delivery: str, never: str) -> None:
    target, weaker = "together:weaker", ("--param", f"delivery={delivery}")
    job.feed()
    first = job.start(*weaker, "--parallelism", "2", target=target)
    until(lambda: all(rows_of(job, place) for place in PLACES), told=lambda: first.said, pause_s=0.05)
    job.feed()
    first.await_event(lambda event: event["event"] == "checkpoint")
    assert "restarting" not in first.said
    first.kill()
    fed_before = len(job.fed)
    job.finish(*weaker, target=target)
    job.feed(500)
    job.finish(*weaker, "--parallelism", "3", target=target)
    for place in PLACES:
        ids = [row.id for row in rows_of(job, place)]
        wrong = {"missing": {*range(len(job.fed))} - {*ids}, "doubled": Counter(ids) - Counter({*ids})}
        assert not wrong[never], place
        assert_once([each for each in ids if each >= fed_before], job.fed[fed_before:], place)


def rows_of(job: Job, place: str) -> list[Row]:
    if place in FORMATS:
        return job.servers.filed(job.name, place)
    return job.servers.appended(place, f"{job.name}:totals" if place == "redis" else table(job.name, "append"))
