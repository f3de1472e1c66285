"""Rules that all subtasks have, in runs that are killed: each event has rules that were, at the end the last ones."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from rules_fed import Rules
from running import Job, visible

from exactlyonce.engines.savepoints.state_reader import StateReader

pytestmark = pytest.mark.broker


def rules_of(job: Job) -> Rules:
    return Rules(job.kafka, job.name)


def assert_last(job: Job, rules: Rules, *arguments: str, in_order: bool = True) -> None:
    """All rules are read; the events after that have the last ones."""
    job.finish(*arguments)
    before = len(rules.events)
    rules.feed(100, 0)
    job.finish(*arguments)
    rules.assert_explained(after=before, in_order=in_order)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("case", ["keyed", "plain"])
def test_kills_and_other_parallelism_make_no_difference(
    case: str, backend: str, job_of: Callable[..., Job], failpoint: Any
) -> None:
    params = ("--param", "keyed=yes") if case == "keyed" else ("--param", "timed=yes")
    job = job_of("broadcast_pipelines:ruled", *params, "--state-backend", backend)
    rules = rules_of(job)
    steps = ("worker-frozen", 2), ("worker-acknowledged", 2), ("coordinator-decided", 1), ("coordinator-committed", 1)
    for parallelism, (name, nth) in zip((2, 3, 1, 2), steps, strict=True):
        rules.feed(150, 40)
        job.run_killed(failpoint(name, nth=nth), parallelism)
    assert_last(job, rules, "--parallelism", "3", in_order=case == "plain")


@pytest.mark.exhaustive
def test_barriers_that_overtake_records_overtake_no_rules(job_of: Callable[..., Job], failpoint: Any) -> None:
    job = job_of(
        "broadcast_pipelines:ruled", "--param", "keyed=yes", "--unaligned", "--checkpoint-interval", "200ms",
        "--num-retained", "100",
    )  # fmt: skip
    rules = rules_of(job)
    for parallelism, name in ((3, "unaligned-captured"), (2, "worker-frozen"), (3, "coordinator-decided")):
        rules.feed(300, 60)
        job.run_killed(failpoint(name), parallelism, "--param", "pause_ms=4")
    assert any(manifest.channel_logs for manifest in job.history().manifests.values())
    assert_last(job, rules, "--parallelism", "2", in_order=False)


@pytest.mark.exhaustive
def test_a_run_that_is_killed_at_any_time_goes_on(job_of: Callable[..., Job]) -> None:
    job, chance = job_of("broadcast_pipelines:ruled", "--unaligned"), random.Random()
    rules = rules_of(job)
    for parallelism in (2, 3, 1, 4):
        incarnation = job.start("--parallelism", str(parallelism))
        for _ in range(chance.randint(1, 3)):
            rules.feed(80, 30)
            incarnation.await_checkpoint()
        time.sleep(chance.random() / 2)
        incarnation.kill()
    assert_last(job, rules, "--parallelism", "2")


def test_each_rule_is_kept_once_and_is_read_by_its_key(job_of: Callable[..., Job]) -> None:
    job = job_of("broadcast_pipelines:ruled")
    rules = rules_of(job)
    rules.feed(10, 30)
    job.finish_here()
    rules.assert_explained()
    with StateReader(job.name, bootstrap_servers=job.kafka.bootstrap_servers) as reader:
        assert {rule: reader.get("ruled-rows", rule) for rule in rules.versions} == {
            rule: rules.last.get(rule) for rule in rules.versions
        }
    shown = job.command("state", "show", job.name, "ruled-rows")
    assert all(rule in shown for rule in rules.last)


def test_an_event_on_which_the_function_raises_is_a_dead_letter(job_of: Callable[..., Job]) -> None:
    job = job_of("broadcast_pipelines:ruled", "--param", "dead=yes")
    job.kafka.create_topic(f"{job.name}-rules", 1)
    job.kafka.produce(f"{job.name}-in", [("", '{"id": 1, "kind": "wrong"}'), ("", '{"id": 2, "kind": "right"}')], 0)
    job.finish_here()
    (result,) = visible(job.kafka, f"{job.name}-out", 1)
    assert json.loads(result.value or b"") == {"id": 2, "kind": "right", "rules": {}, "count": 0}
    (letter,) = visible(job.kafka, f"{job.name}-dead", 1)
    assert json.loads(letter.value or b"") == {"id": 1, "kind": "wrong"}, "the input record as it was"


def test_an_event_on_which_the_function_raises_stops_the_run_and_is_named(job_of: Callable[..., Job]) -> None:
    job = job_of("broadcast_pipelines:ruled")
    job.kafka.create_topic(f"{job.name}-rules", 1)
    job.kafka.produce(f"{job.name}-in", [("", '{"id": 1, "kind": "wrong"}')], 0)
    said = job.finish_here(code=3)
    assert "Operator 'ruled' raised ValueError: no rule is for that" in said
    assert f"{job.name}-in[0] offset 0" in said
