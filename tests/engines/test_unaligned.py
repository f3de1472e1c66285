"""Unaligned checkpoints on a real broker: killed while channels are full, at another parallelism, at every step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaging import damage
from running import QUICK, Run, assert_totals, orders

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster, OwnCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]
COUNT = 6_000
HALT = 6


def newest(kafka: KafkaCluster, name: str) -> Manifest | None:
    """The newest checkpoint."""
    return read_history({"bootstrap.servers": kafka.bootstrap_servers}, name).latest


class Job:
    """Incarnations of one pipeline, whose channels are full."""

    def __init__(self, run: Callable[..., Run], kafka: KafkaCluster, name: str, target: str, *arguments: str) -> None:
        self._run, self._kafka, self._name = run, kafka, name
        self._target = (f"pipelines:{target}", "--param", f"name={name}", "--param", "pause_ms=1")
        self._arguments = (*QUICK, *(arguments or ("--unaligned",)))
        kafka.create_topic(f"{name}-in", 3)
        self.fed: list[tuple[str, str]] = []
        self.feed()

    def start(self, parallelism: int, *arguments: str, env: dict[str, str] | None = None) -> Run:
        """One incarnation."""
        options = ("--parallelism", str(parallelism), *self._arguments, *arguments)
        return self._run(*self._target, *options, env=env, servers=self._kafka.bootstrap_servers)

    def kill_with_records_on_their_way(self, parallelism: int) -> Manifest:
        """The checkpoint that the next incarnation goes on from: one that was not aligned."""
        job, deadline = self.start(parallelism), time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            job.await_event(lambda event: event["event"] == "checkpoint")
            found = newest(self._kafka, self._name)
            if found is not None and found.records_in_flight:
                job.kill()
                left = newest(self._kafka, self._name)
                if left is not None and left.records_in_flight:
                    return left
                job = self.start(parallelism)
        raise AssertionError(f"no checkpoint had anything on its way; {job.said}")

    def save(self, job: Run, *options: str) -> Manifest:
        """A savepoint that *job* is asked for behind a checkpoint that was not aligned."""
        self.feed()
        while not ((found := self._awaited(job)) and found.records_in_flight):
            self.feed()
        line = [sys.executable, "-m", "exactlyonce.cli.main", "savepoint", self._name, "--json", *options]
        asked = [*line, "--bootstrap-servers", self._kafka.bootstrap_servers]
        said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
        return self._history().manifests[json.loads(said)["checkpoint"]]

    def overtook(self, checkpoint: int) -> bool:
        """Whether *checkpoint*, which is retained, was not aligned."""
        return self._history().manifests[checkpoint].records_in_flight > 0

    def _awaited(self, job: Run) -> Manifest | None:
        job.await_event(lambda event: event["event"] == "checkpoint")
        return newest(self._kafka, self._name)

    def _history(self) -> History:
        return read_history({"bootstrap.servers": self._kafka.bootstrap_servers}, self._name)

    def feed(self) -> None:
        """As many orders again."""
        more = orders(COUNT, first=len(self.fed))
        self._kafka.produce(f"{self._name}-in", more)
        self.fed += more

    def finish(self, parallelism: int, *arguments: str) -> None:
        """To the end, by a last incarnation, whose last checkpoint is aligned."""
        last = self.start(parallelism, "--until", "latest", *arguments)
        assert last.wait() == 0, last.said
        found = newest(self._kafka, self._name)
        assert found is not None
        assert (found.kind, found.records_in_flight) == ("final", 0)


@pytest.fixture
def job(run: Any, kafka: KafkaCluster, topic_name: str) -> Callable[..., Job]:
    """`job("two_shuffles")`."""

    def made(target: str, *arguments: str) -> Job:
        return Job(run, kafka, topic_name, target, *arguments)

    return made


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["slow_behind_a_shuffle", "two_shuffles", "parting"])
def test_records_on_their_way_are_dealt_anew_with_the_parallelism(
    target: str, job: Callable[..., Job], kafka: KafkaCluster, topic_name: str
) -> None:
    """Killed with full channels at parallelism 3, gone on with at 2, killed again, then at 1, at 3 and at 2 to the end:
    every order counts once, and each total follows from the one before."""
    kafka.create_topic(f"{topic_name}-more", 2)
    running = job(target)
    assert running.kill_with_records_on_their_way(3).parallelism == 3
    assert running.kill_with_records_on_their_way(2).parallelism == 2
    single = running.start(1)
    single.await_checkpoint()
    single.kill()
    assert running.kill_with_records_on_their_way(3).parallelism == 3
    running.finish(2)
    assert_totals(kafka, f"{topic_name}-out", running.fed)


@pytest.mark.exhaustive(but=["unaligned-captured"])
@pytest.mark.parametrize(
    "name", ["unaligned-overtaken", "unaligned-captured", "worker-frozen", "worker-restored", "coordinator-decided"]
)
def test_killed_at_a_step(
    name: str, job: Callable[..., Job], failpoint: Any, kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """A process that dies while a barrier overtakes, while records are captured or restored costs nothing."""
    running = job("slow_behind_a_shuffle")
    running.kill_with_records_on_their_way(2)
    codes: list[int] = []
    while 0 not in codes:
        assert len(codes) < 4, codes
        incarnation = running.start(2, "--until", "latest", env=failpoint(name))
        codes.append(incarnation.wait())
        assert codes[-1] in (0, -9), incarnation.said
    assert (tmp_path / "fired" / name).exists()
    assert_totals(kafka, f"{topic_name}-out", running.fed)


@pytest.mark.exhaustive
def test_with_several_in_flight_and_a_timeout_of_the_alignment(
    job: Callable[..., Job], kafka: KafkaCluster, topic_name: str
) -> None:
    """Three at once, each aligned for 50 ms before it overtakes."""
    running = job("slow_behind_a_shuffle", "--unaligned", "--aligned-timeout", "50ms", "--max-concurrent", "3")
    running.kill_with_records_on_their_way(3)
    running.kill_with_records_on_their_way(2)
    running.finish(3)
    assert_totals(kafka, f"{topic_name}-out", running.fed)


@pytest.mark.exhaustive
def test_a_stop_leaves_an_aligned_checkpoint(job: Callable[..., Job], kafka: KafkaCluster, topic_name: str) -> None:
    """SIGTERM with full channels ends cleanly, with nothing on its way; what is visible is in order, and a changed
    parallelism goes on from there."""
    running = job("slow_behind_a_shuffle")
    first = running.start(2)
    first.await_checkpoint()
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 0, first.said
    left = newest(kafka, topic_name)
    assert left is not None
    assert not left.channel_logs
    running.finish(1)
    assert_totals(kafka, f"{topic_name}-out", running.fed)


@pytest.mark.exhaustive
def test_a_savepoint_while_channels_are_full(job: Callable[..., Job], kafka: KafkaCluster, topic_name: str) -> None:
    """It is aligned though barriers overtake before it and behind it, completes, and is gone on from at another
    parallelism: every order counts once."""
    running = job("slow_behind_a_shuffle", "--unaligned", "--num-retained", "1000")
    first = running.start(2)
    while not running.overtook((taken := running.save(first)).previous):
        pass  # channels ran empty before it came
    assert (taken.kind, taken.channel_logs) == ("savepoint", ())
    while not running.overtook((last := running.save(first, "--stop")).previous):
        assert first.wait() == 0, first.said
        first = running.start(2)
    assert first.wait() == 0, first.said
    assert (last.kind, last.channel_logs, last.parallelism) == ("savepoint", (), 2)
    left = newest(kafka, topic_name)
    assert left is not None
    assert left.checkpoint == last.checkpoint
    running.finish(3, "--from-savepoint", str(last.checkpoint))
    assert_totals(kafka, f"{topic_name}-out", running.fed)


@pytest.mark.exhaustive
def test_a_damaged_block_of_what_was_on_its_way_is_a_halt(stoppable: OwnCluster, run: Any, topic_name: str) -> None:
    """Nothing is guessed: the run ends with the block's name and the choices."""
    left = Job(run, stoppable, topic_name, "slow_behind_a_shuffle").kill_with_records_on_their_way(2)
    ref = left.channel_logs[0].blocks[0]
    damage(stoppable, checkpoint_topic(topic_name), ref.partition, ref.key.encode(), known_checksum=True)
    target = ("pipelines:slow_behind_a_shuffle", "--param", f"name={topic_name}", "--param", "pause_ms=1")
    incarnation = run(*target, "--parallelism", "2", servers=stoppable.bootstrap_servers)
    assert incarnation.wait() == HALT, incarnation.said
    assert ref.key in incarnation.said
    assert "Choices:" in incarnation.said


def test_what_is_on_its_way_is_listed(
    job: Callable[..., Job], kafka: KafkaCluster, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`exactlyonce checkpoints` says how many records are between operators, and so does its JSON."""
    from exactlyonce.cli.main import main

    left = job("slow_behind_a_shuffle").kill_with_records_on_their_way(2)
    where = ("--bootstrap-servers", kafka.bootstrap_servers)
    assert main(["checkpoints", topic_name, *where]) == 0
    assert f"{left.records_in_flight:,} record" in capsys.readouterr().out
    assert main(["checkpoints", topic_name, "--json", *where]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert listed[-1]["records_in_flight"] == left.records_in_flight
