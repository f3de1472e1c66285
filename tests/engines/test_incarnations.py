"""A run of several incarnations has one restart strategy: what any incarnation completes is progress to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from running import Job, no_decision_counts, stop


@pytest.mark.exhaustive
@pytest.mark.slow
def test_incarnations_that_complete_checkpoints_never_use_up_the_strategy(job_of: Callable[..., Job]) -> None:
    job = job_of("linear", "--restart", "fixed_delay:attempts=2,delay=1s")
    run = job.start()
    for _ in range(4):
        job.feed(200)
        run.await_checkpoint()
        if len(job.fed) < 800:
            with no_decision_counts(job.kafka, job.name):
                run.await_event(lambda event: "A new incarnation begins" in event.get("text", ""))
    stop(run)
    assert [event["incarnation"] for event in run.events if event["event"] == "started"] == [1, 2, 3, 4]
    job.finish_here()  # a stop may come before all that was fed is read
    job.assert_totals()
