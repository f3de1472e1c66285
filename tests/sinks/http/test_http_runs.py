"""Runs that send to a service over HTTP, killed at every step: a service that remembers keys has each record once."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_receiver import Service
from jobs import records_of
from running import Job, await_stopped, exactlyonce, visible, workers_of
from waiting import until

from exactlyonce.pipeline.dead_letters import Reason
from exactlyonce.sinks.http.requests import WINDOW_REQUESTS
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]

HERE = Path(__file__).parent
TOKEN = "hunter2-of-the-hook"
MODULUS = 50
FENCED = 5
STEPS = ["worker-flushed", "coordinator-decided", "store-committing", "request-answered", "store-committed"]


class HookJob(Job):
    """Orders to a service that refuses those whose id MODULUS divides."""

    service: Service

    def assert_exact(self) -> None:
        """Each order was taken once, in the order of its customer, or is a dead letter, once."""
        given = {order["id"]: order for order in (json.loads(value) for _, value in self.fed)}
        refused = {id for id in given if id % MODULUS == 0}
        letters = visible(self.kafka, f"{self.name}-dead", len(refused))
        assert sorted(json.loads(letter.value or b"")["id"] for letter in letters) == sorted(refused)
        reasons = [Reason.of(letter.headers) for letter in letters]
        assert {reason and (reason.operator, reason.error) for reason in reasons} == {("hook", "HTTP 422")}
        counted = self.service.counted()
        assert sorted(order["id"] for order in counted) == sorted(given.keys() - refused)
        by_customer: defaultdict[str, list[int]] = defaultdict(list)
        for order in counted:
            by_customer[order["customer"]].append(order["id"])
        assert all(ids == sorted(ids) for ids in by_customer.values())

    def assert_no_secret(self) -> None:
        """No byte of the topics, and no line that was said, has the token, which the service has sent back."""
        for topic, part in (("checkpoints", self.name), ("hook.deliveries", "incarnation")):
            written = list(records_of(self.kafka, f"{self.name}.{topic}"))
            assert any(part.encode() in record for record in written), "it is the right topic, in plain"
            assert not any(TOKEN.encode() in record for record in written)
        assert TOKEN not in repr(self.kafka.read_committed(f"{self.name}-dead"))
        for incarnation in self.incarnations:
            assert TOKEN not in incarnation.said
            assert TOKEN not in json.dumps(incarnation.events)


@pytest.fixture
def job(
    kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HookJob]:
    path = [str(HERE.parent / "rig"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    job = HookJob(run, kafka, topic_name, "http_pipelines:hooked")
    job.service = Service(tmp_path / "service")
    monkeypatch.setenv("HOOK_URL", job.service.url)
    monkeypatch.setenv("HOOK_TOKEN", f"Bearer {TOKEN}")
    job.service.behave(modulus=MODULUS)
    yield job
    job.service.kill()


@pytest.mark.exhaustive(but=["worker-flushed"])
@pytest.mark.parametrize("name", STEPS)
def test_a_process_is_killed_at_each_step(job: HookJob, failpoint: Callable[..., dict[str, str]], name: str) -> None:
    job.feed(600, by_customer=True)
    job.run_killed(failpoint(name), 2)
    job.feed(200, by_customer=True)
    job.finish("--parallelism", "2")
    job.assert_exact()
    job.assert_no_secret()
    assert job.service.repeated() <= WINDOW_REQUESTS
    if name == "request-answered":
        assert job.service.repeated() > 0
        listed = exactlyonce(job.kafka, "dead-letters", "list", f"{job.name}-dead")
        assert "HTTP 422" in listed
        said = job.incarnations[-1].said
        assert "has refused " in said
        assert f"dead-letters list {job.name}-dead" in said


@pytest.mark.exhaustive
def test_the_service_and_a_worker_are_killed(job: HookJob) -> None:
    """The run goes on by itself once the service is back."""
    incarnation = job.start("--parallelism", "2")
    job.feed(500, by_customer=True)
    incarnation.await_checkpoint()
    job.service.kill()
    job.feed(500, by_customer=True)
    until(
        lambda: "cannot be reached" in incarnation.said or "was cut" in incarnation.said, told=lambda: incarnation.said
    )
    job.service.start()
    until(lambda: len(job.service.taken()) >= 980)
    os.kill(workers_of(incarnation)[0], signal.SIGKILL)
    job.feed(500, by_customer=True)
    until(lambda: len(job.service.taken()) >= 1470)
    incarnation.process.terminate()
    assert incarnation.wait() == 0, incarnation.said
    job.finish("--parallelism", "3")
    job.assert_exact()


@pytest.mark.exhaustive
def test_a_zombie_leader_wakes_up(job: HookJob, failpoint: Callable[..., dict[str, str]]) -> None:
    """It was stopped with answers in hand: its successor has sent them again, and has written their letters."""
    job.feed(600, by_customer=True)
    zombie = job.start(env=failpoint("request-answered", "stop"))
    await_stopped(zombie.process.pid)
    job.feed(400, by_customer=True)
    job.finish()
    job.assert_exact()
    os.kill(zombie.process.pid, signal.SIGCONT)
    assert zombie.wait() == FENCED, zombie.said
    job.assert_exact()
