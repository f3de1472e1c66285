"""The table of errors: each code has one meaning, and each meaning an error of ours."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter

import pytest
from confluent_kafka import KafkaError, KafkaException
from kafka.errors import RetriableError, for_code

from exactlyonce.checkpoint.block_storage import DamagedBlock
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.connectors.kafka.client import settings
from exactlyonce.connectors.kafka.errors import (
    _CODES,
    Again,
    Meaning,
    explained,
    meaning_of,
    raise_unless_passing,
    refuse,
)
from exactlyonce.pipeline.errors import BrokerRefused, BrokerUnavailable, ConfigError, ExactlyOnceError, TopicError

NEVER_ASKED = {KafkaError.ELECTION_NOT_NEEDED, 122, 123}
"""Answers to requests that nobody here makes: elections of leaders, sessions of share groups."""


def test_a_code_has_one_meaning() -> None:
    counts = Counter(code for codes in _CODES.values() for code in codes)
    assert [code for code, count in counts.items() if count > 1] == []


def test_what_kafka_calls_retriable_passes() -> None:
    """A missing topic alone is an error for a person."""
    retriable = {code for code in range(1, 200) if issubclass(for_code(code), RetriableError)} - NEVER_ASKED
    meanings = {code: meaning_of(code) for code in retriable}
    assert {code for code, meaning in meanings.items() if meaning is not Meaning.PASSING} == {3, 100}
    assert {meanings[3], meanings[100]} == {Meaning.MISSING}


def test_error_codes() -> None:
    refuse(0, "Asking")
    for code, error, message in (
        (3, TopicError, "no such topic"),
        (100, TopicError, "no such topic"),
        (53, ConfigError, "ACL"),
        (29, ConfigError, "ACL"),
        (16, Again, "NotCoordinator"),
        (6, Again, "NotLeader"),
        (-1, Again, "UnknownError"),
        (32, BrokerRefused, r"Asking failed: .*clock is ahead .*message\.timestamp\.after\.max\.ms.*Nothing is lost"),
        (42, BrokerRefused, r"Asking failed: the broker answers InvalidRequestError \(42\).*run the same again"),
    ):
        with pytest.raises(error, match=message):
            refuse(code, "Asking")


@pytest.mark.parametrize(
    ("code", "expected", "text"),
    [
        (KafkaError._TRANSPORT, BrokerUnavailable, "No answer from the broker at a:1 while testing"),
        (KafkaError._AUTHENTICATION, BrokerUnavailable, "security settings"),
        (KafkaError.NOT_ENOUGH_REPLICAS, BrokerUnavailable, "NOT_ENOUGH_REPLICAS"),
        (KafkaError._NOENT, BrokerUnavailable, "while testing"),  # a broker that has just restarted leads nothing yet
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, ConfigError, "did not allow testing"),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, ConfigError, "Grant the missing permission"),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, TopicError, "was missing while testing"),
        (KafkaError.INVALID_REPLICATION_FACTOR, TopicError, "refused testing"),
    ],
)
def test_what_the_broker_says_becomes_our_error(code: int, expected: type[ExactlyOnceError], text: str) -> None:
    with pytest.raises(expected, match=text), explained({"bootstrap.servers": "a:1"}, "testing"):
        raise KafkaException(KafkaError(code, "because"))


def test_a_reader_stops_at_what_is_not_known_to_pass() -> None:
    raise_unless_passing(KafkaError(KafkaError._TRANSPORT), "orders[0]", 7, "away", "totals")
    for code, text in (
        (KafkaError._UNDERFLOW, "damaged at offset 7"),
        (KafkaError._AUTHENTICATION, "Grant Read on the topic and on group totals"),
        (KafkaError.INVALID_REQUEST, "not known to be transient"),
    ):
        with pytest.raises(ExactlyOnceError, match=text):
            raise_unless_passing(KafkaError(code), "orders[0]", 7, "because", "totals")


def test_a_worker_starts_without_kafka_python() -> None:
    """Its modules would be half of the start, and a worker asks nothing by them."""
    code = "import sys, exactlyonce.engines.local.worker; sys.exit('kafka' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_way_to_the_broker_is_taken_over() -> None:
    connection = {
        "bootstrap.servers": "a:1", "client.id": "me", "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN",
        "ssl.ca.location": "/ca.pem", "enable.ssl.certificate.verification": "true", "socket.timeout.ms": "5000",
        "metadata.max.age.ms": "1000",
    }  # fmt: skip
    tuning = {
        "acks": "0", "auto.offset.reset": "earliest", "compression.type": "lz4", "delivery.timeout.ms": "1",
        "group.id": "mine", "linger.ms": "500", "message.max.bytes": "1000", "queue.buffering.max.messages": "1",
        "transactional.id": "mine",
    }  # fmt: skip
    assert settings(connection | tuning, linger_ms=0) == connection | {"linger.ms": 0}


def test_damage_travels_between_processes() -> None:
    ref = BlockRef(1, 2, "block/1/1/totals/0/0/0-ab", 3, b"x" * 32)
    told = copy.copy(DamagedBlock("Block is gone.", ref))  # as pickling does it
    assert (type(told), str(told), told.ref) == (DamagedBlock, "Block is gone.", ref)
