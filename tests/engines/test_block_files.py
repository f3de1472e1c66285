"""Runs whose blocks are files outside of the checkpoint topic."""

from __future__ import annotations

import getpass
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, assert_totals, orders

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.store.files.names import name_of, reference
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.checkpoint.store.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import block_storage, references
from exactlyonce.testing.cluster import KafkaCluster

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint" / "store" / "files" / "rig"))
BUCKET = "checkpoints"

pytestmark = [pytest.mark.broker, pytest.mark.slow]


class Stored:
    """A folder for a pipeline's blocks, and its topics."""

    def __init__(self, kafka: KafkaCluster, name: str, root: Path) -> None:
        self.kafka, self.name, self.root = kafka, name, root
        self.url = f"file://{root}"
        root.mkdir()
        kafka.create_topic(f"{name}-in", 3)
        self.fed: list[tuple[str, str]] = []
        self.arguments = (
            "pipelines:linear", "--param", f"name={name}", "--parallelism", "2", "--checkpoint-storage", self.url,
            *QUICK,
        )  # fmt: skip

    def feed(self, count: int) -> None:
        """So many more orders."""
        more = orders(count, first=len(self.fed))
        self.kafka.produce(f"{self.name}-in", more)
        self.fed += more

    def files(self) -> set[str]:
        """The names of all files below the folder."""
        return {each.name for each in self.root.rglob("*") if each.is_file()}

    def referred(self) -> set[str]:
        """The names of those that retained manifests stand on, each of which can be read."""
        config = ClientConfig({"bootstrap.servers": self.kafka.bootstrap_servers})
        history = read_history(config.confluent(), self.name)
        topic = find_topic(config.confluent(), self.name)
        assert history.storage == self.url
        storage = block_storage(config, topic, history.storage)
        refs: set[BlockRef] = set()
        for manifest in history.retained:
            refs |= references(manifest, storage)
        assert {ref for ref, _ in storage.fetch(refs)} == refs
        storage.close()
        return {name for ref in refs if (name := name_of(ref)) is not None}

    def check(self) -> None:
        """Exactly once, and every file is needed."""
        assert_totals(self.kafka, f"{self.name}-out", self.fed)
        assert self.files() == self.referred()


@pytest.fixture
def stored(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> Stored:
    """With 6,000 orders to read."""
    made = Stored(kafka, topic_name, tmp_path / "checkpoints")
    made.feed(6000)
    return made


PLACES = [
    ("worker-blocks", 2), ("worker-flushed", 3), ("coordinator-triggered", 3), ("coordinator-decided", 3),
    ("coordinator-committed", 1), ("coordinator-finalized", 3),
]  # fmt: skip


@pytest.mark.exhaustive(but=["coordinator-decided"])
@pytest.mark.parametrize(("place", "nth"), PLACES, ids=[place for place, _ in PLACES])
def test_a_process_that_dies(
    place: str, nth: int, stored: Stored, run: Callable[..., Any], failpoint: Any, tmp_path: Path
) -> None:
    """Wherever it dies: output comes once, state is restored from the files, and none is left that nobody needs."""
    first = run(*stored.arguments, env=failpoint(place, nth=nth))
    if place.startswith("coordinator"):
        assert first.wait() == -9, first.said
    else:
        first.await_event(lambda event: event["event"] == "note" and "restarting" in event["text"])
        first.await_event(lambda event: event["event"] == "checkpoint")
        first.kill()
    assert (tmp_path / "fired" / place).exists()
    stored.feed(1000)
    last = run(*stored.arguments, "--until", "latest")
    assert last.wait() == 0, last.said
    stored.check()


@pytest.mark.exhaustive
def test_another_storage_than_the_manifests(stored: Stored, run: Callable[..., Any], tmp_path: Path) -> None:
    """It is refused before anything is fenced, with what to do: the run that is under way goes on."""
    under_way = run(*stored.arguments)
    under_way.await_checkpoint()
    in_topic = run(*stored.arguments[:5], *QUICK)
    assert in_topic.wait() == 2
    assert f"To go on as before: --checkpoint-storage {stored.url}" in in_topic.said
    assert "--from-savepoint N --checkpoint-storage topic`" in in_topic.said
    (tmp_path / "other").mkdir()
    elsewhere = run(*stored.arguments[:5], "--checkpoint-storage", f"file://{tmp_path / 'other'}")
    assert elsewhere.wait() == 2
    assert "Nothing was changed" in elsewhere.said
    stored.feed(500)
    under_way.await_checkpoint()
    under_way.process.send_signal(signal.SIGTERM)
    assert under_way.wait() == 0, under_way.said
    assert list((tmp_path / "other").iterdir()) == []
    stored.check()


@pytest.mark.exhaustive
def test_what_zombies_have_written(stored: Stored, run: Callable[..., Any]) -> None:
    """A file that an older incarnation writes late, whole or in part, goes with the next run; others' files stay."""
    first = run(*stored.arguments, "--until", "latest")
    assert first.wait() == 0, first.said
    whole = next(each for each in stored.root.rglob("1.0.*.totals.*") if reference(each.name, 0) is not None)
    incarnation, attempt, checkpoint, operator, group, part, nonce, digest = whole.name.split(".")
    late = ".".join([incarnation, attempt, checkpoint, operator, group, part, f"{nonce}ff", digest])
    partial = ".".join([incarnation, attempt, str(int(checkpoint) + 7), operator, group, part, f"{nonce}00", digest])
    (whole.parent / late).write_bytes(whole.read_bytes())
    (whole.parent / partial).write_bytes(whole.read_bytes()[:10])
    foreign = stored.root / stored.name / "another-topic" / late
    foreign.parent.mkdir()
    foreign.write_bytes(b"of another cluster")
    stored.feed(500)
    last = run(*stored.arguments, "--until", "latest")
    assert last.wait() == 0, last.said
    assert foreign.exists()
    foreign.unlink()
    stored.check()


@pytest.mark.exhaustive
def test_a_folder_that_goes_away_and_comes_back(stored: Stored, run: Callable[..., Any]) -> None:
    """A storage that is away for more than a checkpoint's timeout is waited for by name; nothing is lost, and the next
    checkpoint goes through."""
    job = run(*stored.arguments, "--checkpoint-timeout", "5s")
    job.await_checkpoint()
    unmounted = stored.root.with_name("unmounted")
    os.rename(stored.root, unmounted)
    stored.feed(1000)
    job.await_event(lambda event: "checkpoint storage file://" in event.get("text", ""))
    job.await_event(lambda event: "was not acknowledged within" in event.get("text", ""))
    os.rename(unmounted, stored.root)
    job.await_checkpoint()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    last = run(*stored.arguments, "--until", "latest")
    assert last.wait() == 0, last.said
    stored.check()


# --- storages that are away for a minute ------------------------------------------------------------------------------

AWAY_S = 60.0
"""Longer than what a library, a checkpoint or a reader waits."""


@pytest.fixture
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """`servers("s3")` is one that can be killed or silenced; it ends with the test."""
    from hdfs_server import HdfsServer
    from s3_server import S3Server

    made: list[Any] = []

    def start(kind: str) -> Any:
        made.append(S3Server() if kind == "s3" else HdfsServer(tmp_path_factory.mktemp("hdfs")))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["away", "silent"])
@pytest.mark.parametrize("kind", ["s3", "hdfs"])
def test_a_server_that_is_gone_for_a_minute(
    kind: str, fault: str, kafka: KafkaCluster, topic_name: str, run: Callable[..., Any], servers: Any
) -> None:
    """The job waits for it and says for which; a checkpoint in flight is aborted, a later one goes through; each order
    counts once, also for a run that begins anew from what is there."""
    server = servers(kind)
    url = f"s3://{BUCKET}/prod" if kind == "s3" else f"hdfs://{server.host}/checkpoints"
    env = server.env if kind == "s3" else {"HADOOP_USER_NAME": getpass.getuser()}
    kafka.create_topic(f"{topic_name}-in", 3)
    fed = orders(3000)
    kafka.produce(f"{topic_name}-in", fed)
    arguments = (
        "pipelines:linear", "--param", f"name={topic_name}", "--parallelism", "2", "--checkpoint-storage", url,
        "--checkpoint-timeout", "20s", *QUICK,
    )  # fmt: skip
    job = run(*arguments, env=env)
    job.await_checkpoint()
    with server.silent() if fault == "silent" else server.away():
        began_s = time.monotonic()
        more = orders(1000, first=len(fed))
        kafka.produce(f"{topic_name}-in", more)
        fed += more
        job.await_event(lambda event: f"checkpoint storage {url}" in event.get("text", ""))
        job.await_event(lambda event: "was not acknowledged within" in event.get("text", ""))
        time.sleep(max(0.0, began_s + AWAY_S - time.monotonic()))
        assert job.process.poll() is None, job.said
    job.await_checkpoint()
    job.kill()
    more = orders(500, first=len(fed))
    kafka.produce(f"{topic_name}-in", more)
    fed += more
    last = run(*arguments, "--until", "latest", env=env)
    assert last.wait() == 0, last.said
    assert_totals(kafka, f"{topic_name}-out", fed)
