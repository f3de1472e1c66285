"""The weaker deliveries of every store, through a kill: none is missing at least once, none is doubled at most once."""

from __future__ import annotations

import time

import pytest
from counting import Totals, count, exact
from jobs import Job
from servers import FORMATS, STORES, Row
from together import table

from exactlyonce.testing.cluster import LIMIT_S

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PLACES = (*STORES, *FORMATS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("delivery", "never"), [("at_least_once", "missing"), ("at_most_once", "doubled")])
def test_through_a_kill(job: Job, delivery: str, never: str) -> None:
    job.target = ("together:weaker", "--param", f"delivery={delivery}")
    job.feed()
    first = job.run("--parallelism", "2")
    deadline = time.monotonic() + LIMIT_S
    while any(not rows_of(job, place) for place in PLACES):
        assert time.monotonic() < deadline, first.said
        time.sleep(0.05)
    job.feed()
    first.await_event(lambda event: event["event"] == "checkpoint")
    assert "restarting" not in first.said
    first.kill()
    fed_before = len(job.fed)
    job.finish()
    job.feed(500)
    job.finish("--parallelism", "3")
    totals = Totals(job.fed)
    late = {number for number in totals.given if number >= fed_before}
    for place in PLACES:
        ids = [row.id for row in rows_of(job, place)]
        assert getattr(count(ids, totals.given), never) == 0, place
        assert count((each for each in ids if each in late), dict.fromkeys(late)) == exact(500), place


def rows_of(job: Job, place: str) -> list[Row]:
    if place in FORMATS:
        return job.servers.filed(job.name, place)
    return job.servers.appended(place, f"{job.name}:totals" if place == "redis" else table(job.name, "append"))
