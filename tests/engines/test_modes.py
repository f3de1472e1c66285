"""Checkpoints exactly once and at least once: what is behind a barrier that another input has yet to deliver."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from running import Run, assert_totals, visible
from waiting import until

from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.state.key_groups import subtask_of
from exactlyonce.testing.cluster import KafkaCluster

CUSTOMERS = [f"c{i}" for i in range(20) if subtask_of(key_group(canonical_key(f"c{i}"), 128), 2, 128) == 1]
"""Customers of the second worker: the first, which waits at the gate, takes nothing, so few others come past it."""


class Gated:
    """`pipelines.gated` at a checkpoint whose barrier one of two workers cannot pass on yet."""

    def __init__(self, run: Any, kafka: KafkaCluster, name: str, folder: Path, mode: str, interval: str) -> None:
        folder.mkdir()
        self._run, self._kafka, self._folder = run, kafka, folder
        self.topic, self.out = kafka.create_topic(f"{name}-in", 2), f"{name}-out"
        self.fed: list[tuple[str, str]] = []
        self._target = (
            *("pipelines:gated", "--param", f"name={name}", "--param", f"folder={folder}"),
            *("--parallelism", "2", "--mode", mode, "--checkpoint-interval", interval, "--checkpoint-timeout", "10m"),
        )
        self.job: Run = run(*self._target)

    def _feed(self, customers: list[str], partition: int) -> list[int]:
        numbers = list(range(len(self.fed), len(self.fed) + len(customers)))
        more = [
            (customer, json.dumps({"id": number, "customer": customer, "total": number + 1}))
            for number, customer in zip(numbers, customers, strict=True)
        ]
        self._kafka.produce(self.topic, more, partition)
        self.fed += more
        return numbers

    def _any_counted(self, numbers: list[int]) -> bool:
        return any((self._folder / f"counted-{number}").exists() for number in numbers)

    def reaches_the_gate(self) -> bool:
        """Hold the first worker at the gate until a checkpoint is triggered; False: an earlier one was in progress."""
        self.job.await_event(lambda event: event["event"] == "checkpoint")  # its sinks are ready for the next one
        self._feed(["gate"], partition=0)
        reached = self._folder / "reached"
        until(reached.exists, told=lambda: self.job.said)
        numbers = [(event.get("step", event["event"]), event.get("checkpoint")) for event in list(self.job.events)]
        if any(("triggered", n) in numbers and ("checkpoint", n) not in numbers for _, n in numbers):
            return False
        since_ms = reached.stat().st_mtime_ns // 1_000_000
        self.job.await_event(lambda event: event.get("step") == "triggered" and event["at_ms"] >= since_ms)
        return True

    def feed_behind_the_barrier(self, *, until_counted: bool) -> None:
        """Feeds the second worker, whose barrier is on its way, three times; after the first it has passed it on."""
        for _ in range(3):
            fed = self._feed(CUSTOMERS, partition=1)
            if until_counted:
                until(partial(self._any_counted, fed), told=lambda: self.job.said)

    def goes_on_from_there(self) -> bool:
        """Open the gate, kill the job once the checkpoint is complete, run to the end; False: another came before."""
        (self._folder / "open").touch()
        last = self.job.await_event(lambda event: event["event"] == "checkpoint")
        self.job.kill()
        rest = self._run(*self._target, "--until", "latest", "--parallelism", "1", "--inline")
        assert rest.wait() == 0, rest.said
        started = next(event for event in rest.events if event["event"] == "started")
        return bool(last["checkpoint"] == started["checkpoint"])


@pytest.fixture
def gated(run: Any, kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> Callable[[str], Gated]:
    def make(mode: str) -> Gated:
        for tried, interval in enumerate(("3s", "20s", "2m")):
            gated = Gated(run, kafka, f"{topic_name}-{tried}", tmp_path / str(tried), mode, interval)
            if gated.reaches_the_gate():
                gated.feed_behind_the_barrier(until_counted=mode == "at_least_once")
                if gated.goes_on_from_there():
                    return gated
            gated.job.kill()
        raise AssertionError("no job was killed between two checkpoints")

    return make


@pytest.mark.exhaustive
def test_at_least_once_counts_again_what_was_taken_before_the_last_barrier(
    gated: Callable[[str], Gated], kafka: KafkaCluster
) -> None:
    job = gated("at_least_once")
    seen = Counter(json.loads(each.value or b"")["id"] for each in visible(kafka, job.out, len(job.fed) + 1))
    assert seen.keys() == {json.loads(value)["id"] for _, value in job.fed}
    assert any(times > 1 for times in seen.values())


@pytest.mark.exhaustive
def test_exactly_once_holds_back_what_is_behind_a_barrier(gated: Callable[[str], Gated], kafka: KafkaCluster) -> None:
    job = gated("exactly_once")
    assert_totals(kafka, job.out, job.fed)
