"""The options of a read of state. No session is needed."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable

import pytest
from pyspark.sql.types import StructType

from exactlyonce.engines.spark.data_source import ExactlyOnceDataSource
from exactlyonce.engines.spark.source.state_options import KEY_TYPES, OPTIONS, is_of_state, parse_state_options
from exactlyonce.pipeline.errors import ConfigError

GIVEN = {"state": "order-totals", "operator": "totals", "kafka.bootstrap.servers": "127.0.0.1:9092"}
URL = {"state": "file:///backups/order-totals-1-00", "operator": "totals"}
CANARY = "canary-17cd"


def test_everything() -> None:
    """All options are understood, whatever the case of their names."""
    given = {
        **GIVEN, "CHECKPOINT": "41", "keytype": "str, int", "Types": "orders:make", "params": '{"name": "v2"}',
        "json": "TRUE", "minpartitions": "4", "key": "ann",
    }  # fmt: skip
    found = parse_state_options(given)
    assert is_of_state(given)
    assert not is_of_state({"subscribe": "orders"})
    assert (found.pipeline, found.url, found.operator, found.checkpoint) == ("order-totals", "", "totals", 41)
    assert (found.key, found.key_schema, found.partitions_min) == ("ann", {"tuple": ["str", "int"]}, 4)
    assert (found.types, found.params, found.in_json) == ("orders:make", {"name": "v2"}, True)
    plain = parse_state_options(URL)
    assert (plain.pipeline, plain.url, plain.checkpoint, plain.key_schema) == ("", URL["state"], None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**GIVEN, "operators": "totals"}, "There is no option 'operators' for a read of state. Options are: state, "),
        ({"state": "order-totals"}, "kafka.bootstrap.servers is not set"),
        ({**GIVEN, "state": "orders:pipeline"}, "state: the name of a pipeline, .*the option types names the module"),
        ({**GIVEN, "state": ""}, "state: the name of a pipeline"),
        ({**GIVEN, "checkpoint": "newest"}, "checkpoint is 'newest': write a whole number"),
        ({**GIVEN, "keyType": "string"}, "'string' is no type of a key. Write one of bool, bytes, "),
        ({**GIVEN, "params": "{}"}, "params is for a function that types names"),
        ({**GIVEN, "types": "a:b", "params": "name=v2"}, "params is 'name=v2', which is not read"),
        ({**GIVEN, "json": "yes"}, "json is 'yes': write true or false"),
        ({**GIVEN, "minPartitions": "0"}, "minPartitions is 0: it must be at least 1"),
        ({**URL, "state": "gs://backups/x"}, r"^state: there is no storage gs://\. Write /folder, hdfs://"),
        ({**URL, "checkpoint": "3"}, "checkpoint is not for an exported savepoint"),
        ({**URL, "kafka.bootstrap.servers": "a:1"}, "kafka.bootstrap.servers is not for an exported savepoint"),
    ],
)
def test_what_is_wrong(options: dict[str, str], message: str) -> None:
    """Each is named, with what to do."""
    with pytest.raises(ConfigError, match=message):
        parse_state_options(options)


def test_no_secret_is_shown() -> None:
    """Options survive pickling, and their text has no setting of a client."""
    security = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "ann"}
    given = {f"kafka.{name}": value for name, value in {**security, "sasl.password": CANARY}.items()}
    found = parse_state_options({**GIVEN, **given})
    assert CANARY not in repr(found)
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_stream_of_state_is_refused() -> None:
    """The state at a checkpoint does not go on."""
    source = ExactlyOnceDataSource({**GIVEN})
    with pytest.raises(ConfigError, match=r"state is for spark\.read"):
        source.streamReader(StructType())


def test_every_option_is_documented(table: Callable[..., list[dict[str, str]]]) -> None:
    """The page has a row for each, and for no other; and every word for a type of keys."""
    described = table("docs/spark.md", "option of a read of state", "values", "default")
    assert [row["option of a read of state"].strip("`") for row in described] == [*OPTIONS, "kafka.NAME"]
    (words,) = [row["values"] for row in described if row["option of a read of state"] == "`keyType`"]
    assert set(KEY_TYPES) <= set(re.findall(r"`(\w+)`", words))
