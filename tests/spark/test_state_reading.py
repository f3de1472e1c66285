"""The state of an operator as a DataFrame: of checkpoints of a real broker, and of exported savepoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from running import exactlyonce
from state_pipelines import make

from exactlyonce.checkpoint.block_storage import DamagedBlock
from exactlyonce.checkpoint.records.history import History
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.savepoints.exported import DamagedSavepoint
from exactlyonce.engines.spark.data_source import ExactlyOnceDataSource
from exactlyonce.engines.spark.source.state_reading import StateReader
from exactlyonce.pipeline.errors import ConfigError, TopicError
from exactlyonce.savepoints import write_state
from exactlyonce.state.errors import StateIncompatible
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.spark

PIPELINE = "state_pipelines:make"
RIG = Path(__file__).parent / "rig"
COUNT = 202


@dataclass
class Shop:
    kafka: KafkaCluster
    name: str
    first: int = 0

    def sell(self, count: int = COUNT) -> None:
        orders = [{"customer": f"c{n % 7}", "total": n % 3} for n in range(self.first, self.first + count)]
        self.first += count
        records: list[Any] = [(each["customer"], json.dumps(each)) for each in orders]
        self.kafka.produce(f"{self.name}-orders", records)

    def command(self, *words: str) -> str:
        return exactlyonce(self.kafka, *words, folder=RIG)

    def run(self, *options: str) -> None:
        inline = () if "--parallelism" in options else ("--inline",)
        self.command("run", PIPELINE, "--param", f"name={self.name}", "--until", "latest", *inline, *options)

    def history(self) -> History:
        return read_history(ClientConfig({"bootstrap.servers": self.kafka.bootstrap_servers}), self.name)

    def options(self, **options: Any) -> dict[str, str]:
        given = {"state": self.name, "operator": "totals", "kafka.bootstrap.servers": self.kafka.bootstrap_servers}
        given |= {name: str(value) for name, value in options.items()}
        return given

    def types(self, **params: str) -> dict[str, str]:
        return {"types": PIPELINE, "params": json.dumps({"name": self.name, **params})}

    def shown(self, operator: str, *options: str) -> list[tuple[Any, Any, int, int]]:
        lines = self.command("state", "show", self.name, operator, "--json", *options).splitlines()
        found = [json.loads(line) for line in lines]
        return sorted((each["key"], each["state"], each["key_group"], each["checkpoint"]) for each in found)


@pytest.fixture
def shop(kafka: KafkaCluster, topic_name: str) -> Shop:
    shop = Shop(kafka, topic_name)
    kafka.create_topic(f"{topic_name}-orders", partitions=2)
    shop.sell()
    return shop


def load(spark: Any, options: dict[str, str]) -> Any:
    return spark.read.format("exactlyonce").options(**options).load()


def rows(frame: Any) -> list[tuple[Any, Any, int, int]]:
    found = [(row.key, row.value, row.key_group, row.checkpoint) for row in frame.collect()]
    return sorted((key, value.asDict(recursive=True) if hasattr(value, "asDict") else value, *rest)
                  for key, value, *rest in found)  # fmt: skip


def direct(options: dict[str, str]) -> StateReader:
    """A reader as Spark makes it, to do something between its planning and its reading."""
    source = ExactlyOnceDataSource(options)
    reader = source.reader(source.schema())
    assert isinstance(reader, StateReader)
    return reader


def read(reader: StateReader) -> list[dict[str, Any]]:
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.exhaustive
def test_what_the_command_line_shows(spark: Any, shop: Shop) -> None:
    shop.run("--parallelism", "2", "--num-retained", "5")
    first = shop.history().checkpoint_latest
    shop.sell(70)
    shop.run("--parallelism", "3", "--num-retained", "5")
    assert shop.history().checkpoint_latest > first

    frame = load(spark, shop.options(keyType="str"))
    assert frame.schema.simpleString() == (
        "struct<key:string,value:struct<sum:bigint,last:array<bigint>>,key_group:int,checkpoint:bigint>"
    )
    expected = shop.shown("totals")
    assert len(expected) == 7
    assert rows(frame) == expected
    assert len(direct(shop.options()).partitions()) == 3
    assert rows(load(spark, shop.options(keyType="str", minPartitions=50))) == expected
    assert len(direct(shop.options(minPartitions=50)).partitions()) == len({group for _, _, group, _ in expected})
    assert frame.where("value.sum > 0").selectExpr("sum(value.sum)").collect()[0][0] == sum(
        n % 3 for n in range(COUNT + 70)
    )

    older = load(spark, shop.options(keyType="str", checkpoint=first))
    assert rows(older) == shop.shown("totals", "--at", str(first)) != expected
    assert rows(load(spark, shop.options(operator="counts", keyType="int"))) == shop.shown("counts")
    (one,) = rows(load(spark, shop.options(keyType="str", key="c3")))
    assert one in expected
    assert rows(load(spark, shop.options(key="c99"))) == []
    in_json = rows(load(spark, shop.options(json="true")))
    assert [(json.loads(key), json.loads(value), *rest) for key, value, *rest in in_json] == expected


def test_the_types_of_the_pipeline(spark: Any, shop: Shop) -> None:
    """Its module says the types of keys, by an annotation, and makes states of older versions today's."""
    shop.run()
    frame = load(spark, shop.options(**shop.types()))
    assert frame.schema.simpleString().startswith("struct<key:string,value:struct<sum:bigint,")
    assert rows(frame) == shop.shown("totals")
    assert {row["key"] for row in read(direct(shop.options(operator="counts", **shop.types())))} == {0, 1, 2}

    def cents(options: dict[str, str]) -> dict[str, int]:
        return {row["key"]: row["value"]["cents"] for row in read(direct(options))}

    for count in (COUNT, COUNT + 1):
        expected = {f"c{n}": sum(100 * (m % 3) for m in range(n, count, 7)) for n in range(7)}
        assert cents(shop.options(**shop.types(today="true"))) == expected
        if count == COUNT:
            shop.sell(1)
            shop.run("--param", "today=true")
    assert cents(shop.options(keyType="str")) == expected
    with pytest.raises(StateIncompatible, match="is of version 2, and the pipeline knows version 1"):
        direct(shop.options(**shop.types()))
    with pytest.raises(ConfigError, match="has no operator 'totals' with state; it has sums, counts"):
        direct(shop.options(**shop.types(totals="sums")))


def test_keys_have_the_type_that_the_blocks_say(shop: Shop, tmp_path: Path) -> None:
    """Texts are texts, and numbers numbers, whether the function of key_by says its type or not; JSON is asked for."""
    shop.run()
    url = json.loads(shop.command("savepoint", shop.name, "--to", f"file://{tmp_path}", "--json"))["url"]
    for options in (shop.options(), {"state": url, "operator": "totals"}):
        assert {row["key"] for row in read(direct(options))} == {f"c{n}" for n in range(7)}
        assert {row["key"] for row in read(direct({**options, "operator": "counts"}))} == {0, 1, 2}
    assert {row["key"] for row in read(direct(shop.options(json="true")))} == {f'"c{n}"' for n in range(7)}


@pytest.mark.exhaustive
def test_an_exported_savepoint(spark: Any, shop: Shop, tmp_path: Path) -> None:
    shop.run("--parallelism", "2")
    expected = shop.shown("totals")
    url = json.loads(shop.command("savepoint", shop.name, "--to", f"file://{tmp_path}", "--json"))["url"]
    options = {"state": url, "operator": "totals", "keyType": "str"}
    assert rows(load(spark, options)) == expected
    assert rows(load(spark, {**options, "key": "c3"})) == [each for each in expected if each[0] == "c3"]
    counts = {"state": url, "operator": "counts", "keyType": "int", **shop.types()}
    assert rows(load(spark, counts)) == shop.shown("counts")
    for wrong, message in (
        ({"operator": "total"}, "has no state of an operator 'total'. Its operators are: "),
        ({"operator": ""}, "operator is not set. Name the operator whose state is to be read, one of "),
        ({"state": f"{url}0"}, "There is no savepoint at"),
    ):
        with pytest.raises(ConfigError, match=message):
            direct({**options, **wrong})

    planned = direct(options)
    file = Path(url.removeprefix("file://")) / "totals-0.avro"
    content = file.read_bytes()
    for damaged, why in (
        (None, "it is missing"),
        (content[:-1], "bytes, and was written with"),
        (bytes([content[0] ^ 1]) + content[1:], "its bytes are not those that were written"),
    ):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(PySparkException, match=rf"totals-0.avro is damaged: .*{why}"):
            load(spark, options).collect()
    file.write_bytes(content)
    assert len(read(planned)) == len(expected)
    metadata = file.parent / "_metadata.json"
    metadata.write_bytes(metadata.read_bytes().replace(b"totals", b"totalz"))
    with pytest.raises(PySparkException, match=r"_metadata\.json is damaged"):
        load(spark, options).collect()
    shutil.rmtree(file.parent)
    shop.command("savepoint", shop.name, "--to", f"file://{tmp_path}")
    (other,) = tmp_path.iterdir()
    other.rename(file.parent)
    with pytest.raises(DamagedSavepoint, match="is another savepoint than when it was looked at"):
        read(planned)


@pytest.mark.exhaustive
def test_errors(spark: Any, shop: Shop) -> None:
    with pytest.raises(TopicError, match=f"{shop.name} has no checkpoints at .*: there is no topic"):
        direct(shop.options())
    shop.run()
    newest = shop.history().checkpoint_latest
    for options, message in (
        ({"operator": "total"}, "no state of an operator 'total'. Did you mean totals. Its operators with state are: "),
        ({"operator": ""}, "operator is not set. Name the operator whose state is to be read, one of "),
        ({"checkpoint": newest + 5}, f"has no checkpoint {newest + 5}. It has .*{newest}"),
        ({"checkpoint": 0}, "operator is not set|Checkpoint 0 has no state of an operator 'totals'"),
        ({"types": "no_such_module:make"}, "there is no module 'no_such_module'"),
        ({"keyType": "int"}, "the key of key 'c[0-6]' is no bigint: it is str, not int"),
    ):
        with pytest.raises(PySparkException, match=message):
            load(spark, shop.options(**options)).collect()
    with pytest.raises(PySparkException, match=r"The schema is struct<key:string,.*Leave \.schema"):
        spark.read.format("exactlyonce").schema("key int").options(**shop.options()).load().collect()


@pytest.mark.exhaustive
def test_a_checkpoint_that_expires(shop: Shop, tmp_path: Path) -> None:
    """A loaded state keeps its checkpoint; once its blocks are gone, the error says so, and it is no damage."""
    storage = ("--checkpoint-storage", f"file://{tmp_path}")
    shop.run("--num-retained", "1", *storage)
    reader = direct(shop.options())
    before = shop.history().checkpoint_latest
    assert {row["checkpoint"] for row in read(reader)} == {before}
    for _ in range(2):
        shop.sell()
        shop.run("--num-retained", "1", *storage)
    assert before not in shop.history().manifests
    with pytest.raises(ConfigError, match=f"Checkpoint {before} has expired while it was read"):
        read(reader)


def test_a_damaged_block(shop: Shop, tmp_path: Path) -> None:
    shop.run("--checkpoint-storage", f"file://{tmp_path}")
    reader = direct(shop.options())
    assert len(read(reader)) == 7
    damaged = 0
    for file in (tmp_path).rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        if b"EOS1" in content:
            file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
            damaged += 1
    assert damaged
    with pytest.raises(DamagedBlock, match="is damaged: its bytes are not those that were written"):
        read(reader)


@pytest.mark.exhaustive
def test_frames_become_state(spark: Any, shop: Shop, tmp_path: Path) -> None:
    """A savepoint of two operators, written from DataFrames, has their rows, and a run goes on from them. What is read
    of these can be written as it is, for another pipeline."""
    shop.kafka.create_topic(f"{shop.name}-2-orders", partitions=2)
    totals = spark.createDataFrame(
        [(f"c{number}", (number, [number])) for number in range(5)], "key string, state struct<sum:int,last:array<int>>"
    )
    counts = spark.range(3).selectExpr("id AS key", "id * 10 AS state")
    url = write_state(
        make(shop.name), {"totals": totals, "counts": counts}, to=str(tmp_path), offsets="latest",
        bootstrap_servers=shop.kafka.bootstrap_servers,
    )  # fmt: skip
    frame = load(spark, {"state": url, "operator": "totals"})
    assert [row[:2] for row in rows(frame)] == [(f"c{n}", {"sum": n, "last": [n]}) for n in range(5)]
    shop.kafka.produce(f"{shop.name}-orders", [("c4", '{"customer":"c4","total":2}')])
    shop.run("--from-savepoint", url)
    assert [state for key, state, *_ in shop.shown("totals") if key == "c4"] == [{"sum": 6, "last": [4, 2]}]
    assert [shown[:2] for shown in shop.shown("counts")] == [(0, 0), (1, 10), (2, 21)]
    before = shop.shown("totals")
    read = {name: load(spark, shop.options(operator=name, keyType="str" if name == "totals" else "int"))
            for name in ("totals", "counts")}  # fmt: skip
    again = write_state(
        make(f"{shop.name}-2"), read, to=str(tmp_path), offsets=json.dumps({f"{shop.name}-2-orders": {"0": 0, "1": 0}}),
        bootstrap_servers=shop.kafka.bootstrap_servers,
    )  # fmt: skip
    found = rows(load(spark, {"state": again, "operator": "totals"}))
    assert [row[:3] for row in found] == [row[:3] for row in before], "a read of state becomes that state"
