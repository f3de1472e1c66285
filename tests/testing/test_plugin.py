"""The fixtures of the pytest plugin."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from exactlyonce.testing.cluster import LIMIT_S


def test_topic_name(topic_name: str) -> None:
    assert topic_name.startswith("test-topic-name-")
    assert re.fullmatch(r"[A-Za-z0-9_-]+", topic_name)


def test_the_plugin_imports_no_client() -> None:
    code = (
        "import sys, exactlyonce.testing.plugin\n"
        "print([m for m in sys.modules if m.startswith(('confluent_kafka', 'kafka', 'exactlyonce.engines'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_no_warning_of_kafka_python_is_shown(tmp_path: Path) -> None:
    """Tests that import our clients, or whose conftest.py does, have no warning in their summary."""
    (tmp_path / "conftest.py").write_text("import exactlyonce.connectors.kafka.topics\n")
    test = tmp_path / "test_imports.py"
    test.write_text("def test_imports():\n    import exactlyonce.connectors.kafka.transactions\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir",
        str(tmp_path),
    ]
    done = subprocess.run([*command, str(test)], capture_output=True, text=True, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "warning" not in done.stdout


class TestCluster:
    def test_what_is_produced_is_read_back(self, kafka, topic_name):
        topic = kafka.create_topic(topic_name, partitions=2)
        kafka.produce(topic, [(f"k{n % 7}", str(n)) for n in range(1000)])
        records = kafka.read_committed(topic)
        assert sorted(int(record.value) for record in records) == list(range(1000))
        assert all(record.key == b"k%d" % (int(record.value) % 7) for record in records)
        for partition in (0, 1):
            values = [int(record.value) for record in records if record.partition == partition]
            assert values == sorted(values)

    def test_an_empty_topic(self, kafka, topic_name):
        assert kafka.read_committed(kafka.create_topic(topic_name, partitions=3)) == []

    def test_tombstones_and_partitions(self, kafka, topic_name):
        topic = kafka.create_topic(topic_name, partitions=2, cleanup_policy="compact")
        kafka.produce(topic, [("a", None)], partition=1)
        assert [(r.key, r.value, r.partition) for r in kafka.read_committed(topic)] == [(b"a", None, 1)]

    def test_only_committed_records_are_seen(self, kafka, topic_name):
        topic = kafka.create_topic(topic_name)
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic_name})
        producer.init_transactions(LIMIT_S)
        for value, end in [(b"aborted", producer.abort_transaction), (b"committed", producer.commit_transaction)]:
            producer.begin_transaction()
            producer.produce(topic, value)
            producer.flush(LIMIT_S)
            end(LIMIT_S)
        producer.begin_transaction()
        producer.produce(topic, b"open")
        producer.flush(LIMIT_S)
        assert [record.value for record in kafka.read_committed(topic)] == [b"committed"]
        producer.abort_transaction()


@pytest.mark.exhaustive
def test_an_own_broker_can_be_killed(own_broker, topic_name):
    own = own_broker({"num.partitions": "3"})
    topic = own.create_topic(topic_name)
    own.produce(topic, ["before"])
    own.broker.kill()
    assert not own.broker.status().running
    own.broker.start()
    own.produce(topic, ["after"])
    assert [record.value for record in own.read_committed(topic)] == [b"before", b"after"]
