"""The decision log on a real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from confluent_kafka import KafkaException, Producer
from waiting import until

from exactlyonce.checkpoint import decision_log
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.history import SILENCE_MS
from exactlyonce.checkpoint.records.manifest import coordinator_id
from exactlyonce.checkpoint.requests import Outcome, drive
from exactlyonce.checkpoint.transactions import transactional_writer
from exactlyonce.connectors.kafka.checkpoint_topic import log_reader
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import LogFollower, read_history
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import LogRequests
from exactlyonce.connectors.kafka.checkpoint_topic.topic import prepare_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable, Fenced, Halt, TopicError, Undetermined
from exactlyonce.testing.cluster import LIMIT_S

pytestmark = pytest.mark.broker


class TestLives:
    def test_the_first_incarnation(self, store: Any) -> None:
        log = store.opened()
        assert (log.history.latest, log.history.incarnation_latest) == (None, 0)
        assert log.do(log.begin("here", 1)) == store.incarnation(1)

    def test_what_an_incarnation_decided_is_what_the_next_one_reads(self, store: Any) -> None:
        first = store.living()
        assert first.appended(store.manifest(0), store.mark(0)) is Outcome.DONE
        assert first.appended(store.manifest(1)) is Outcome.DONE
        second = store.opened()
        assert second.history.manifests == {0: store.manifest(0), 1: store.manifest(1)}
        assert second.history.finalized == {0: store.mark(0)}
        assert second.history.unfinalized == store.manifest(1)
        assert second.history.damaged == {}
        assert second.do(second.begin("there", 2)).incarnation == 2
        assert first.history.manifests == second.history.manifests

    def test_an_incarnation_that_has_ended(self, store: Any) -> None:
        log = store.living()
        now_ms = store.clock.now_ms()
        read = read_history(store.client, store.pipeline)
        assert read.living(now_ms + SILENCE_MS - 1) == log.history.newest_incarnation
        assert read.living(now_ms + SILENCE_MS) is None
        assert log.beaten(ended=True) is Outcome.DONE
        read = read_history(store.client, store.pipeline)
        assert read.newest_incarnation == msgspec.structs.replace(store.incarnation(1), ended=True)
        assert read.living(now_ms) is None
        assert not store.living().history.newest_incarnation.ended

    def test_an_incarnation_goes_on_in_another_process(self, store: Any) -> None:
        first, second = store.living(), store.opened()
        assert second.resume(1) == store.incarnation(1)
        with pytest.raises(Fenced):
            first.appended(store.manifest(0))
        assert second.appended(store.manifest(0)) is Outcome.DONE
        seen = store.seen()
        assert seen is not None
        assert seen.manifests == {0: store.manifest(0)}
        assert second.appended(store.mark(0)) is Outcome.DONE
        store.living()
        with pytest.raises(Fenced, match="Incarnation 2"):
            store.opened().resume(1)

    def test_the_partition_count_is_frozen(self, store: Any) -> None:
        """Partitions that somebody adds later are not used: blocks stay where they are looked for."""
        store.living().appended(store.manifest(0))
        store.kafka.add_partitions(store.topic.name, 9)
        grown = prepare_topic(store.client, store.pipeline)
        log = DecisionLog(store.pipeline, grown, SystemClock())
        drive(log.open(), LogRequests(store.client, grown))
        assert (grown.partitions, log.topic.partitions) == (9, 5)


class TestFencing:
    def test_an_older_coordinator_is_fenced_by_name(self, store: Any) -> None:
        old = store.living("old", 1)
        old.appended(store.manifest(0), store.mark(0))
        new = store.living("new-host", 4711)
        with pytest.raises(Fenced, match=r"Incarnation 2 .*process 4711 on new-host.* from incarnation 1"):
            old.appended(store.manifest(1))
        with pytest.raises(Fenced):
            old.appended(store.manifest(1))
        assert new.appended(store.manifest(1, incarnation=2, parallelism=5)) is Outcome.DONE
        assert read_history(store.client, store.pipeline).manifests[1].parallelism == 5

    def test_a_coordinator_fenced_before_the_other_has_recorded_itself(self, store: Any) -> None:
        old = store.living()
        store.opened()
        with pytest.raises(Fenced, match="newer instance is starting"):
            old.beaten()

    @pytest.mark.exhaustive
    def test_a_coordinator_whose_transaction_timed_out(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transactional_writer, "DECISION_TIMEOUT_MS", 5_000)
        log, transactions = store.living(), Transactions(store.client)
        assert log.do(log.produce(store.manifest(0)))
        name = coordinator_id(store.pipeline)
        until(lambda: (state := transactions.describe([name])[name]) and state.state == "CompleteAbort", pause_s=0.1)
        with pytest.raises(Undetermined, match="took too long"):
            log.do(log.commit())
        assert store.living().history.manifests == {}

    def test_a_coordinator_that_was_stopped_within_an_append(self, store: Any) -> None:
        with within_an_append(store) as zombie:
            os.waitid(os.P_PID, zombie.pid, os.WSTOPPED | os.WNOWAIT)
            assert store.living("new", 2).history.manifests == {}
            zombie.send_signal(signal.SIGCONT)
            assert zombie.stdout is not None
            said = next(line for line in zombie.stdout if line != "produced\n")  # the end may be asked again
            assert said.startswith("Fenced: Incarnation 2")
        assert read_history(store.client, store.pipeline).manifests == {}


@contextmanager
def within_an_append(store: Any) -> Iterator[subprocess.Popen[str]]:
    """A coordinator that has produced and not committed yet, and is stopped; it is killed in the end."""
    command = [sys.executable, "-c", BROKEN_OFF_APPEND, store.config["bootstrap.servers"], store.pipeline]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "produced"
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)


BROKEN_OFF_APPEND = """
import os, signal, sys
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.requests import EndTransaction, Together, answered, drive
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import LogRequests
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import Fenced

config, pipeline = ClientConfig({"bootstrap.servers": sys.argv[1]}), sys.argv[2]
topic = find_topic(config, pipeline)
log, requests = DecisionLog(pipeline, topic, SystemClock()), LogRequests(config, topic)
interrupted = False

def perform(request):
    if isinstance(request, Together):
        return tuple(answered(each, perform) for each in request.requests)
    if interrupted and isinstance(request, EndTransaction):
        print("produced", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return requests(request)

drive(log.open(), perform)
drive(log.begin("victim", os.getpid()), perform)
interrupted = True
manifest = Manifest(
    pipeline=pipeline, checkpoint=0, incarnation=1, attempt=0, kind="initial", base=0, previous=0, triggered_at_ms=0,
    completed_at_ms=0, fingerprint="", max_parallelism=1, parallelism=1, block_partitions=5, block_end_offsets=(),
    written_bytes=0, offsets=(), operators=(), order_logs=(), committables=(), sinks=(),
)
try:
    print(drive(log.append(manifest), perform))
except Fenced as error:
    print("Fenced:", error, flush=True)
"""


class TestOutcomes:
    def test_what_the_broker_refuses_is_not_written(self, store: Any) -> None:
        log = store.living()
        store.kafka.configure_topic(store.topic.name, max_message_bytes="2000")
        with pytest.raises(KafkaException, match="MSG_SIZE_TOO_LARGE"):
            _write_on(store, bytes(3_000))
        wide = store.manifest(0, fingerprint="f" * 3_000)
        assert log.appended(wide) is Outcome.NOT_WRITTEN
        assert log.refusal
        assert log.appended(store.manifest(0), store.mark(0)) is Outcome.DONE
        assert read_history(store.client, store.pipeline).manifests == {0: store.manifest(0)}


class TestDamage:
    def test_an_orphaned_transaction_hides_nothing_silently(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store.living()
        orphan = Producer({**store.config, "transactional.id": store.pipeline})
        orphan.init_transactions(LIMIT_S)
        orphan.begin_transaction()
        orphan.produce(store.topic.name, b"x", b"x", 0)
        assert orphan.flush(LIMIT_S) == 0
        with monkeypatch.context() as patched:
            patched.setattr(decision_log, "STABLE_TIMEOUT_MS", 1_000)
            with pytest.raises(Halt, match="has an open transaction at offset 2"):
                store.opened()
        orphan.abort_transaction(LIMIT_S)
        assert store.opened().history.damaged == {}

    def test_deleted_first_records(self, store: Any) -> None:
        log = store.living()
        log.appended(store.manifest(0), store.mark(0))
        end = log.end_offsets[0]
        store.remove_before(0, end)
        with pytest.raises(Halt, match=f"begins at offset {end} and holds no manifest"):
            store.opened()


class TestLooking:
    def test_looking_fences_nobody(self, store: Any) -> None:
        log = store.living()
        log.appended(store.manifest(0), store.mark(0))
        assert read_history(store.client, store.pipeline).latest == store.manifest(0)
        assert log.appended(store.manifest(1)) is Outcome.DONE

    def test_looking_for_a_pipeline_that_is_not_there(self, kafka: Any, topic_name: str) -> None:
        with pytest.raises(TopicError, match=f"{topic_name} has no checkpoints"):
            read_history(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}), topic_name)

    def test_a_closed_log(self, store: Any) -> None:
        log = store.living()
        log.close()
        with pytest.raises(BrokerUnavailable, match="closed"):
            log.appended(store.manifest(0))


def _write_on(store: Any, value: bytes) -> None:
    """Write *value* again and again, until a changed setting of the topic is in force."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        store.write("again", value, partition=4)


class TestFollowing:
    def test_each_look_reads_what_came_since(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        starts: list[int | None] = []
        real = log_reader.read_log

        def read_log(config: Any, topic: str, end: int, start: int | None = None) -> Any:
            starts.append(start)
            return real(config, topic, end, start)

        monkeypatch.setattr(log_reader, "read_log", read_log)
        follower = LogFollower(store.client, store.pipeline)
        assert follower.look().newest_incarnation is None
        log = store.living()
        for checkpoint in range(3):
            assert log.appended(store.manifest(checkpoint)) is Outcome.DONE
            assert log.appended(store.mark(checkpoint)) is Outcome.DONE
            assert follower.look().manifests == read_history(store.client, store.pipeline).manifests
        starts.clear()
        follower.look()
        assert starts == [], "nothing is new"
        assert log.beaten(ended=True) is Outcome.DONE
        newest = follower.look().newest_incarnation
        assert newest is not None
        assert newest.ended
        (start,) = starts
        assert start, "what was read is not read again"

    def test_a_topic_that_is_gone_or_made_anew(self, store: Any) -> None:
        store.living()
        follower = LogFollower(store.client, store.pipeline)
        assert follower.look().incarnation_latest == 1
        admin, name = store.kafka.admin(), store.topic.name
        admin.delete_topics([name])[name].result(LIMIT_S)
        until(lambda: follower.look().incarnation_latest == 0)
        prepare_topic(store.client, store.pipeline)
        assert follower.look().newest_incarnation is None

    def test_the_first_look_connects(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(log_reader, "TIMEOUT_MS", 100)
        follower = LogFollower(ClientConfig({"bootstrap.servers": "127.0.0.1:1"}), "p")
        for _ in range(2):
            with pytest.raises(BrokerUnavailable):
                follower.look()
