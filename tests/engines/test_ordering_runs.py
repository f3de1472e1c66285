"""Sorting and deduplication in runs that are killed, at any parallelism: what comes out is what the topic says."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Job, visible
from window_clicks import DISORDER_MS, Clicks

from exactlyonce.testing.cluster import Committed

pytestmark = pytest.mark.broker

HOW = ["hashmap", "rocksdb", "unaligned"]


def floored(job: Job) -> Iterator[tuple[Committed, dict[str, Any], int]]:
    """The records and clicks of each partition in order, with the floor before each."""
    greatest: dict[int, int] = {}
    for record in sorted(job.kafka.read_committed(job.topic), key=lambda record: (record.partition, record.offset)):
        click = json.loads(record.value or b"")
        before = greatest.get(record.partition, click["at"])
        greatest[record.partition] = max(before, click["at"])
        yield record, click, before - DISORDER_MS - 1


def accepted(job: Job) -> tuple[dict[str, list[Any]], list[int]]:
    """(time, id) of the clicks above their floors by user, in order; and the ids of late ones."""
    taken: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    late: list[int] = []
    for record, click, floor in floored(job):
        if click["at"] <= floor:
            late.append(click["id"])
        elif click["user"] != "end":  # the watermark has not passed the last clicks
            taken[click["user"]].append((click["at"], record.partition, record.offset, click["id"]))
    return {user: [(at, id) for at, _, _, id in sorted(clicks)] for user, clicks in taken.items()}, sorted(late)


def deduplicated(clicks: list[Any]) -> list[Any]:
    given: list[Any] = []
    for at, id in clicks:
        if not given or at >= given[-1][0] + 3_000:
            given.append((at, id))
    return given


def run_killed(clicks: Clicks, failpoint: Any, kills: int) -> None:
    """A run to its end, and up to three that are killed with something to read, at another parallelism each."""
    clicks.feed(300)
    clicks.job.finish_here()
    steps = (2, "timed-fired", 2), (3, "worker-frozen", 2), (2, "coordinator-committed", 1)
    for parallelism, name, nth in steps[:kills]:
        clicks.feed(300)
        clicks.job.run_killed(failpoint(name, nth=nth), parallelism)


@pytest.mark.exhaustive(but=["once-hashmap-0"])
@pytest.mark.parametrize(
    ("what", "how", "kills"), [("once", "hashmap", 0), *((what, how, 3) for what in ("sorted", "once") for how in HOW)]
)
def test_kills_and_other_parallelism_make_no_difference(
    what: str, how: str, kills: int, job_of: Callable[..., Job], failpoint: Any
) -> None:
    options = ["--unaligned", "--checkpoint-interval", "100ms"] if how == "unaligned" else ["--state-backend", how]
    job = job_of("ordering_pipelines:ordered", "--param", f"what={what}", *options)
    clicks = Clicks(job, what)
    run_killed(clicks, failpoint, kills)
    clicks.end()
    job.finish_here()
    taken, late = accepted(job)
    wanted = {user: deduplicated(of) if what == "once" else of for user, of in taken.items()}
    given: dict[str, list[Any]] = defaultdict(list)
    for record in visible(job.kafka, f"{job.name}-out", sum(map(len, wanted.values()))):
        click = json.loads(record.value or b"")
        given[click["user"]].append((click["at"], click["id"]))
    assert given == wanted, "each key's records in order, each once"
    assert len(late) > 5
    assert sorted(json.loads(r.value or b"")["id"] for r in visible(job.kafka, f"{job.name}-late", len(late))) == late


def counts_since_pauses(job: Job) -> list[tuple[int, int]]:
    """(id, number of clicks of its user in its partition since a pause of 3 s), by definition."""
    states: dict[tuple[int, str], tuple[int, int]] = {}
    counts: list[tuple[int, int]] = []
    for record, click, floor in floored(job):
        now = max(click["at"], floor)
        last, count = states.get((record.partition, click["user"]), (now, 0))
        count = 1 if now >= last + 3_000 else count + 1
        states[record.partition, click["user"]] = max(last, now), count
        counts.append((click["id"], count))
    return sorted(counts)


@pytest.mark.exhaustive(but=["hashmap-0"])
@pytest.mark.parametrize(("backend", "kills"), [("hashmap", 0), ("hashmap", 3), ("rocksdb", 3)])
def test_states_expire_alike_whatever_is_killed_also_from_a_savepoint(
    backend: str, kills: int, job_of: Callable[..., Job], failpoint: Any, tmp_path: Path
) -> None:
    job = job_of("ordering_pipelines:expiring", "--state-backend", backend)
    clicks = Clicks(job, "expiring")
    run_killed(clicks, failpoint, kills)
    job.finish_here()
    url = json.loads(job.command("savepoint", job.name, "--to", f"file://{tmp_path}", "--json"))["url"]
    job.command("reset", job.name, "--yes", "--force")
    clicks.feed(300)
    clicks.end()
    job.finish("--parallelism", "2", "--from-savepoint", url)
    wanted = counts_since_pauses(job)
    assert len({count for _, count in wanted}) > 5
    given = [json.loads(record.value or b"") for record in visible(job.kafka, f"{job.name}-out", len(wanted))]
    assert sorted((of["id"], of["count"]) for of in given) == wanted
    shown = job.command("state", "show", job.name, "counts", "--json")
    keys = [json.loads(line)["key"] for line in shown.splitlines()]
    assert {key.split()[0] for key in keys} == {"end"}, "those of the last clicks alone are left"
