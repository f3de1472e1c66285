"""`df.writeStream` and `df.write` of the format `exactlyonce`, on a session: to Kafka and to every store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from targets import Row, rows_of

from exactlyonce.pipeline.keys import key_groups
from exactlyonce.testing.cluster import LIMIT_S

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
COLUMNS = "id long, customer string, total long"
KAFKA = pytest.mark.parametrize("target", ["kafka"], indirect=True)
AS_VALUES = "to_json(struct(id, customer, total)) as value"
CANARY = "canary-51c0"
LINES_MAX = 40
"""The lines of an error, with the frames that Spark shows."""


class Stream:
    def __init__(self, spark: SparkSession, target: Any, folder: Path) -> None:
        self.spark, self.target, self.folder = spark, target, folder
        self.fed = 0
        (folder / "in").mkdir(exist_ok=True)

    def feed(self, count: int = 40) -> None:
        lines = [json.dumps(row._asdict()) for row in rows_of(self.fed, 0, count)]
        (self.folder / "in" / f"{self.fed}.json").write_text("\n".join(lines))
        self.fed += 1

    def rows(self, files_max: int = 1) -> DataFrame:
        files = self.spark.readStream.schema(COLUMNS).format("json").option("maxFilesPerTrigger", files_max)
        return files.load(str(self.folder / "in"))

    def given(self, **options: str) -> dict[str, str]:
        servers = self.target.kafka.bootstrap_servers
        return {"sinkId": self.target.name, "kafka.bootstrap.servers": servers, **self.target.options, **options}

    def run(self, rows: DataFrame, checkpoint: str = "checkpoint", **options: str) -> None:
        writer = rows.writeStream.format("exactlyonce").options(**self.given(**options)).trigger(availableNow=True)
        assert writer.option("checkpointLocation", str(self.folder / checkpoint)).start().awaitTermination(LIMIT_S)

    def write(self, rows: DataFrame, mode: str = "append", **options: str) -> None:
        rows.write.format("exactlyonce").mode(mode).options(**self.given(**options)).save()

    def expected(self) -> list[Row]:
        return [row for batch in range(self.fed) for row in rows_of(batch, 0, 40)]

    def assert_exact(self) -> None:
        assert self.target.found() == self.expected()
        self.target.assert_settled()


@pytest.fixture
def stream(spark: SparkSession, target: Any, tmp_path: Path) -> Stream:
    return Stream(spark, target, tmp_path)


@pytest.fixture
def speculation(spark: SparkSession) -> Iterator[None]:
    """Set it as Spark tells its tasks of the setting."""
    spark.sparkContext.setLocalProperty("spark.speculation", "true")
    yield
    spark.sparkContext.setLocalProperty("spark.speculation", "false")


def tripping(mark: Path, wanted: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def trip(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            if wanted in batch.column(0).to_pylist() and not mark.exists():
                mark.touch()
                raise RuntimeError("tripped")

    return trip


@pytest.mark.parametrize("target", ["postgres", "redis", "delta"], indirect=True)
def test_a_stream_to_a_store(stream: Stream, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for _ in range(3):
        stream.feed()
    mark = tmp_path / "tripped"
    stream.run(stream.rows().repartition(2).mapInArrow(tripping(mark, 10_007), COLUMNS))
    assert mark.exists()
    stream.assert_exact()
    stream.feed()
    request.getfixturevalue("speculation")
    stream.run(stream.rows())
    stream.assert_exact()


@KAFKA
def test_a_stream_to_kafka(stream: Stream, tmp_path: Path) -> None:
    for _ in range(3):
        stream.feed()
    mark = tmp_path / "tripped"
    rows = stream.rows().mapInArrow(tripping(mark, 10_007), COLUMNS).selectExpr(
        "customer as key",
        AS_VALUES,
        "case when total % 10 = 7 then 2 end as partition",
        "case when total = 0 then array(named_struct('key', 'a', 'value', cast('b' as binary))) end as headers",
        "1 as ignored",
    )  # fmt: skip
    stream.run(rows)
    assert mark.exists()
    stream.assert_exact()
    seen = [(each, json.loads(each.value or b"")) for each in stream.target.kafka.read_committed(stream.target.topic)]
    assert all(record.key == row["customer"].encode() for record, row in seen)
    assert {record.partition for record, row in seen if row["total"] % 10 == 7} == {2}
    assert {record.partition for record, row in seen if row["total"] == 14} == {key_groups([b"customer 2"], 3)[0]}, (
        "as Java's clients do"
    )
    stream.feed()
    strange = rows.selectExpr("key", "value", "9 as partition")
    with pytest.raises(StreamingQueryException, match=r"out\[9\] could not .*Unknown partition"):
        stream.run(strange)
    stream.target.assert_settled()
    stream.run(rows)
    with pytest.raises(StreamingQueryException, match="adoptQuery"):
        stream.run(rows, "another")
    stream.assert_exact()


@pytest.mark.parametrize("target", ["kafka", "postgres"], indirect=True)
def test_what_a_stream_is_refused_for(stream: Stream) -> None:
    stream.feed()
    rows = stream.rows()
    refusals: dict[str, list[tuple[DataFrame, dict[str, str], str]]] = {
        "kafka": [
            (rows, {"sinkId": "no.dots"}, "sinkId 'no.dots' must be made of letters"),
            (rows, {"topicc": "x"}, "no option 'topicc' for a stream"),
            (rows.selectExpr(AS_VALUES), {"topic": "nowhere-at-all"}, "nowhere-at-all"),
            (rows, {"kafka.ssl.key.password": CANARY}, "ssl.key.password is written out"),
            (rows, {}, "no column 'value'"),
            (rows.selectExpr("1 as value"), {}, "Column 'value' is of type int"),
        ],
        "postgres": [
            (rows, {"mode": "upsert"}, "needs the columns by which it finds a row"),
            (rows, {"dsn": f"postgresql://me:{CANARY}@127.0.0.1/db"}, "has a password written out"),
            (rows.withColumn("more", rows.id), {}, "no column 'more'"),
            (rows.withColumn("customer", rows.id), {}, "its column 'customer' is character varying"),
            (rows.selectExpr("id", "repeat('x', 21) as customer", "total"), {},
             r"row 1 of task 0 of batch 0 .*customer.*Filter such rows"),
        ],
    }  # fmt: skip
    for frame, options, said in refusals[stream.target.store]:
        with pytest.raises(StreamingQueryException, match=said) as refused:
            stream.run(frame, **options)
        assert CANARY not in str(refused.value)
        assert len(str(refused.value).splitlines()) < LINES_MAX
    assert stream.target.found() == []
    stream.run(rows.selectExpr(AS_VALUES) if stream.target.store == "kafka" else rows)
    stream.assert_exact()


@KAFKA
def test_a_batch_write_to_kafka(stream: Stream, request: pytest.FixtureRequest) -> None:
    kafka, topics = stream.target.kafka, [f"{stream.target.name}-{name}" for name in "ab"]
    for topic in topics:
        kafka.create_topic(topic, 1)
    rows = stream.spark.range(0, 1000, 1, 4).selectExpr(
        f"if(id % 2 = 0, '{topics[0]}', '{topics[1]}') as topic",
        "cast(id as string) as value",
        "cast(null as binary) as key",
    )

    def failing(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
        if "999" in batch.column(1).to_pylist():
            raise RuntimeError("the last task fails")

    with pytest.raises(PySparkException, match="the last task fails"):
        stream.write(rows.mapInArrow(failing, rows.schema), topic="", writeId="monday")
    assert kafka.read_committed(topics[0]) == []
    with pytest.raises(PySparkException, match="has no writeId"):
        stream.write(rows, topic="")
    for _ in range(2):
        stream.write(rows, topic="", writeId="monday")
    for first, topic in enumerate(topics):
        values = [int(record.value or b"") for record in kafka.read_committed(topic)]
        assert sorted(values) == list(range(first, 1000, 2))
        for start in range(0, 1000, 250):
            task = [value for value in values if start <= value < start + 250]
            assert task == sorted(task)
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        stream.write(rows, "overwrite", topic="")
    request.getfixturevalue("speculation")
    with pytest.raises(PySparkException, match=r"spark\.speculation is on"):
        stream.write(rows, topic="", writeId="tuesday")


@KAFKA
def test_a_write_of_another_thread(stream: Stream) -> None:
    """Spark finds the format there, but says of no batch: without an id the write is refused, and with one it is done
    once, however often the batch is run."""
    stream.feed()
    failed: list[str] = []

    def write(rows: DataFrame, batch: int) -> None:
        options = {"writeId": f"orders-{batch}"} if failed else {}
        with ThreadPoolExecutor(1) as pool:
            try:
                pool.submit(stream.write, rows.selectExpr(AS_VALUES), **options).result()
            finally:
                failed.append("once")
        if len(failed) == 2:
            raise RuntimeError("behind the write")

    writer = stream.rows().writeStream.foreachBatch(write).trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(stream.folder / "checkpoint"))
    for said in ("has no writeId", "behind the write"):
        with pytest.raises(StreamingQueryException, match=said):
            writer.start().awaitTermination(LIMIT_S)
    assert writer.start().awaitTermination(LIMIT_S)
    stream.assert_exact()


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_a_batch_that_only_the_server_refuses(stream: Stream) -> None:
    """The commit's halt is what Spark raises, though its abort halts as well: the choices are the last that is said."""
    rows = stream.spark.range(0, 3, 1, 1).selectExpr("id", "'ann' as customer", "-1L as total")
    with pytest.raises(PySparkException, match=r"(?s)refuses its 3 records.*total_check") as refused:
        stream.write(rows, writeId="none")
    lines = [line for line in str(refused.value).splitlines() if not line.startswith(" SQLSTATE")]
    assert lines[-1].endswith('accepts that by .option("acceptLoss", "1").')
    assert len(lines) < LINES_MAX


MOMENT = datetime(2026, 11, 22, 18, 0, 0, 123456, tzinfo=timezone.utc)
TYPES: dict[str, Any] = {
    "id long": 1, "`a name` string": "ann", "flag boolean": True, "small short": 7, "ratio double": 0.5,
    "price decimal(12,3)": Decimal("12.345"), "raw binary": b"\x00\xff", "day date": date(2026, 11, 22),
    "at timestamp": MOMENT, "tags array<string>": ["a", None], "sizes map<string,int>": {"m": 3},
    "place struct<x:int,y:string>": {"x": 1, "y": None}, "local timestamp_ntz": MOMENT.replace(tzinfo=None),
}  # fmt: skip


def test_a_batch_write_of_every_type(spark: SparkSession, make_target: Callable[..., Any], tmp_path: Path) -> None:
    files = Stream(spark, make_target("files"), tmp_path)
    values = [tuple(TYPES.values()), (2, *[None] * (len(TYPES) - 1))]
    rows = spark.createDataFrame(values, ", ".join(TYPES))
    for _ in range(2):
        files.write(rows, writeId="monday")
    import pyarrow.dataset as ds  # imports pandas, which takes a second of every process that only collects

    paths = [str(path) for path in files.target.folder.glob("*.parquet")]
    found = sorted(ds.dataset(paths).to_table().to_pylist(maps_as_pydicts="strict"), key=lambda row: int(row["id"]))
    assert [tuple(row[field.name] for field in rows.schema) for row in found] == values
    table = Stream(spark, make_target("postgres", "-table"), tmp_path)
    for _ in range(2):
        table.write(rows.drop("local"), table=f"{table.target.table}_all", create="true", writeId="monday")
    seen = table.target.sql(f"SELECT * FROM {table.target.table}_all ORDER BY id")
    assert seen == [row[:-1] for row in values]
    with pytest.raises(PySparkException, match=r"Column 'span' is of type interval year"):
        files.write(rows.selectExpr("id", "interval 1 year as span"), writeId="tuesday")
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        files.write(rows, "overwrite")
