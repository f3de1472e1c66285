"""Runs whose blocks are files outside of the checkpoint topic."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Job, stop

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.connectors.block_files import name_of, reference
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.engines.blocks import block_storage, references


class Stored:
    def __init__(self, job_of: Callable[..., Job], root: Path) -> None:
        self.root, self.url = root, f"file://{root}"
        root.mkdir()
        self.job = job_of("linear", "--checkpoint-storage", self.url)
        self.job.feed(3000)

    def files(self) -> set[str]:
        return {each.name for each in self.root.rglob("*") if each.is_file()}

    def referred(self) -> set[str]:
        """The names of those that retained manifests stand on, each of which can be read."""
        config = self.job.config
        history = self.job.history()
        topic = find_topic(config, self.job.name)
        assert history.storage == self.url
        storage = block_storage(config, topic, history.storage)
        refs: set[BlockRef] = set()
        for manifest in history.retained:
            refs |= references(manifest, storage)
        assert {ref for ref, _ in storage.fetch(refs)} == refs
        storage.close()
        return {name for ref in refs if (name := name_of(ref)) is not None}

    def check(self) -> None:
        self.job.assert_totals()
        assert self.files() == self.referred()


@pytest.fixture
def stored(job_of: Callable[..., Job], tmp_path: Path) -> Stored:
    return Stored(job_of, tmp_path / "checkpoints")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("place", "nth"), [("worker-blocks", 2), ("coordinator-finalized", 3)])
def test_a_process_that_dies(place: str, nth: int, stored: Stored, failpoint: Any, tmp_path: Path) -> None:
    first = stored.job.start("--parallelism", "2", env=failpoint(place, nth=nth))
    if place.startswith("coordinator"):
        assert first.wait() == -9, first.said
    else:
        first.await_event(lambda event: event["event"] == "note" and "restarting" in event["text"])
        first.await_event(lambda event: event["event"] == "checkpoint")
        first.kill()
    assert (tmp_path / "fired" / place).exists()
    stored.job.feed(1000)
    stored.job.finish_here()
    stored.check()


@pytest.mark.exhaustive
def test_another_storage_than_the_manifests(stored: Stored, tmp_path: Path) -> None:
    under_way = stored.job.start("--parallelism", "2")
    under_way.await_checkpoint()
    said = stored.job.finish_here("--checkpoint-storage", "topic", code=2)
    assert f"To go on as before: --checkpoint-storage {stored.url}" in said
    assert "--from-savepoint N --checkpoint-storage topic`" in said
    (tmp_path / "other").mkdir()
    said = stored.job.finish_here("--checkpoint-storage", f"file://{tmp_path / 'other'}", code=2)
    assert "Nothing was changed" in said
    stored.job.feed(500)
    under_way.await_checkpoint()
    stop(under_way)
    stored.job.finish_here()  # what it had not read when it was stopped
    assert list((tmp_path / "other").iterdir()) == []
    stored.check()


@pytest.mark.exhaustive
def test_what_zombies_have_written(stored: Stored) -> None:
    """A file that comes late, whole or in part, goes with the next run; others' files stay."""
    stored.job.finish_here()
    whole = next(each for each in stored.root.rglob("1.0.*.totals.*") if reference(each.name, 0) is not None)
    incarnation, attempt, checkpoint, operator, group, part, nonce, digest = whole.name.split(".")
    late = ".".join([incarnation, attempt, checkpoint, operator, group, part, f"{nonce}ff", digest])
    partial = ".".join([incarnation, attempt, str(int(checkpoint) + 7), operator, group, part, f"{nonce}00", digest])
    (whole.parent / late).write_bytes(whole.read_bytes())
    (whole.parent / partial).write_bytes(whole.read_bytes()[:10])
    foreign = stored.root / stored.job.name / "another-topic" / late
    foreign.parent.mkdir()
    foreign.write_bytes(b"of another cluster")
    stored.job.feed(500)
    stored.job.finish_here()
    assert foreign.exists()
    foreign.unlink()
    stored.check()


@pytest.mark.exhaustive
def test_a_folder_that_goes_away_and_comes_back(stored: Stored) -> None:
    run = stored.job.start("--parallelism", "2", "--checkpoint-timeout", "5s")
    run.await_checkpoint()
    unmounted = stored.root.with_name("unmounted")
    os.rename(stored.root, unmounted)
    stored.job.feed(1000)
    run.await_event(lambda event: "checkpoint storage file://" in event.get("text", ""))
    run.await_event(lambda event: "was not acknowledged within" in event.get("text", ""))
    os.rename(unmounted, stored.root)
    run.await_checkpoint()
    stop(run)
    stored.job.finish_here()
    stored.check()


AWAY_S = 60.0
"""Longer than what a library, a checkpoint or a reader waits."""


@pytest.mark.exhaustive
def test_a_server_that_is_silent_for_a_minute(job_of: Callable[..., Job], block_server: Any) -> None:
    url, env = f"{block_server.url}/prod", block_server.env
    job = job_of("linear", "--parallelism", "2", "--checkpoint-storage", url, "--checkpoint-timeout", "20s")
    job.feed(3000)
    run = job.start(env=env)
    run.await_checkpoint()
    with block_server.silent():
        began_s = time.monotonic()
        job.feed(1000)
        run.await_event(lambda event: f"checkpoint storage {url}" in event.get("text", ""))
        run.await_event(lambda event: "was not acknowledged within" in event.get("text", ""))
        time.sleep(max(0.0, began_s + AWAY_S - time.monotonic()))
        assert run.process.poll() is None, run.said
    run.await_checkpoint()
    run.kill()
    job.feed(500)
    job.finish(env=env)
    job.assert_totals()
