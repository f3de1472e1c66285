"""The fixtures of the pytest plugin."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from confluent_kafka import Producer

from exactlyonce.testing.cluster import LIMIT_S


def test_topic_name(topic_name: str) -> None:
    assert topic_name.startswith("test-topic-name-")
    assert re.fullmatch(r"[A-Za-z0-9_-]+", topic_name)


def test_the_plugin_imports_no_client() -> None:
    code = (
        "import sys, exactlyonce.testing.plugin\n"
        "print([m for m in sys.modules if m.startswith(('confluent_kafka', 'kafka', 'exactlyonce.engines.local'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


class TestCluster:
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
