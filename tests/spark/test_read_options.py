"""The options of a read. No session is needed."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from exactlyonce.engines.spark.source.read_options import Bound, parse_read_options
from exactlyonce.pipeline.errors import ConfigError

GIVEN = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "orders"}
CANARY = "canary-90ab"


def test_defaults() -> None:
    """A batch reads all that there is, a stream what comes; lost data is an error."""
    batch, stream = (parse_read_options(GIVEN, streaming=streaming) for streaming in (False, True))
    assert (batch.start, stream.start, batch.end) == (
        Bound("startingOffsets", -2),
        Bound("startingOffsets", -1),
        Bound("endingOffsets", -1),
    )
    assert (batch.topics, batch.fail_on_data_loss, batch.include_headers, batch.partitions_min) == (
        ("orders",),
        True,
        False,
        1,
    )


def test_everything() -> None:
    """All options are understood, whatever the case of their names, and topics are separated by commas."""
    found = parse_read_options(
        {
            "KAFKA.bootstrap.servers": "a:1,b:2",
            "SUBSCRIBE": "orders, refunds,orders",
            "startingoffsets": '{"orders": {"0": 23, "1": -2}, "refunds": {"0": -2}}',
            "endingTimestamp": "1700000000000",
            "FAILONDATALOSS": "False",
            "includeHeaders": "true",
            "minPartitions": "8",
            "kafka.fetch.wait.max.ms": "5",
        },
        streaming=False,
    )
    assert (found.topics, found.fail_on_data_loss, found.include_headers) == (("orders", "refunds"), False, True)
    assert found.start == Bound("startingOffsets", each={"orders": {0: 23, 1: -2}, "refunds": {0: -2}})
    assert found.end == Bound("endingTimestamp", 1_700_000_000_000, timestamps=True)
    assert found.partitions_min == 8
    assert found.client().settings == {"bootstrap.servers": "a:1,b:2", "fetch.wait.max.ms": "5"}
    assert parse_read_options({**GIVEN, "maxOffsetsPerTrigger": "9"}, streaming=True).offsets_per_trigger_max == 9


WRONG = [
    ({"kafka.bootstrap.servers": None}, "kafka.bootstrap.servers is not set"),
    ({"subscribe": " , "}, "subscribe is not set"),
    (
        {"subscribePattern": "o.*"},
        "no option 'subscribepattern'.* Options are: subscribe, startingOffsets, .*kafka.NAME",
    ),
    ({"startingOffsets": "first"}, "startingOffsets is 'first'.* Write earliest, latest or JSON"),
    ({"startingOffsets": '{"orders": {"zero": 1}}'}, "startingOffsets is .*cannot be read"),
    ({"startingOffsets": '{"orders": {"0": -3}}'}, "offsets are -2 "),
    ({"startingOffsets": '{"refunds": {"0": 3}}'}, "names the topics refunds, but subscribe orders"),
    ({"startingOffsets": "latest"}, "a batch cannot begin at the latest offset"),
    ({"endingOffsets": "earliest"}, "a range cannot end at the earliest"),
    ({"startingTimestamp": "yesterday"}, "startingTimestamp is 'yesterday': write a whole number"),
    ({"startingOffsetsByTimestamp": '{"orders": {"0": -1}}'}, "times from 0 on"),
    ({"endingTimestamp": "1", "endingOffsets": "latest"}, "endingOffsets and endingTimestamp contradict each other"),
    ({"failOnDataLoss": "no"}, "failOnDataLoss is 'no': write true or false"),
    ({"minPartitions": "0"}, "minPartitions is 0: it must be at least 1"),
    ({"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is not for spark.read: it is for streams"),
    ({"kafka.auto.offset.reset": "earliest"}, "auto.offset.reset: set by exactlyonce itself"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong(change: dict[str, Any], message: str) -> None:
    """Each mistake is told with what to write instead."""
    options = {name: value for name, value in {**GIVEN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        parse_read_options(options, streaming=False)


def test_a_stream_has_no_end() -> None:
    """Ends are for batches: a stream refuses them."""
    with pytest.raises(
        ConfigError, match=r"endingOffsets is not for streams, which have no end: it is for spark\.read"
    ):
        parse_read_options({**GIVEN, "endingOffsets": "latest"}, streaming=True)


def test_references_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that was looked up for a client is not in what goes to the tasks; the reference is."""
    monkeypatch.setenv("KAFKA_PASSWORD", CANARY)
    security = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "ann"}
    given = {**GIVEN, "kafka.sasl.password": "env:KAFKA_PASSWORD", **{f"kafka.{k}": v for k, v in security.items()}}
    found = parse_read_options(given, streaming=False)
    assert found.client().confluent()["sasl.password"] == CANARY
    travelling = pickle.dumps(found)
    assert CANARY.encode() not in travelling
    assert b"env:KAFKA_PASSWORD" in travelling
    assert "KAFKA_PASSWORD" not in repr(found)
