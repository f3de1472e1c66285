"""A deployment that is rolled back: code of before goes on from the state of newer code."""

from __future__ import annotations

from collections.abc import Callable

from running import QUICK, Job, run_here


def finish(job: Job, code: str, *arguments: str, ends: int = 0) -> str:
    """Run to the end of what was fed; what was said."""
    given = ("--param", f"name={job.name}", "--param", f"code={code}", "--until", "latest", "--inline", *QUICK)
    ended = run_here(job.kafka.bootstrap_servers, "pipelines:tallied", *given, *arguments)
    assert ended.code == ends, ended.said
    return ended.said


def test_a_rollback(job_of: Callable[..., Job]) -> None:
    """A new field with its default goes with a note. Any other is refused before a fence, unless it is given up."""
    job = job_of("linear", partitions=1)
    job.feed(20, customers=5)
    finish(job, "after")
    job.feed(2, customers=5)
    assert "Tally.count; 5 keys have their defaults there" in finish(job, "before")
    job.feed(3, customers=3)
    assert "Tally.count" not in finish(job, "counting")
    history = job.history()
    said = finish(job, "before", ends=2)
    assert "Tally.count. In 3 of 5 keys they do not have their defaults" in said
    assert "--allow-dropped-fields" in said
    assert job.history().incarnations == history.incarnations
    job.feed(10, customers=5)
    assert "3 of 5 keys had other values there" in finish(job, "before", "--allow-dropped-fields")
    job.assert_totals()
