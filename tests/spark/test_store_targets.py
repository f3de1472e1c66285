"""`df.writeStream` and `df.write` of the format `exactlyonce` to PostgreSQL, MariaDB, Redis and files, on a session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from targets import TARGETS, Target, rows_of
from unreferenced import unreferenced_blocks

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.slow]
COLUMNS = "id long, customer string, total long"
CANARY = "canary-51c0"
LINES_MAX = 40
"""Of an error, with the frames that Spark shows."""


class Stream:
    """A query over files of JSON lines, one file a batch, to a target."""

    def __init__(self, spark: SparkSession, kafka: KafkaCluster, name: str, folder: Path, target: Target) -> None:
        self.spark, self.kafka, self.name, self.folder, self.target = spark, kafka, name, folder, target
        self.fed = 0
        (folder / "in").mkdir(exist_ok=True)

    def feed(self) -> None:
        """The file of one more batch."""
        lines = [json.dumps(row._asdict()) for row in rows_of(self.fed, 0, 40)]
        (self.folder / "in" / f"{self.fed}.json").write_text("\n".join(lines))
        self.fed += 1

    def rows(self) -> DataFrame:
        """What the files hold."""
        files = self.spark.readStream.schema(COLUMNS).format("json").option("maxFilesPerTrigger", 1)
        return files.load(str(self.folder / "in"))

    def given(self, **options: str) -> dict[str, str]:
        servers = self.kafka.bootstrap_servers
        return {"sinkId": self.name, "kafka.bootstrap.servers": servers, **self.target.options, **options}

    def run(self, rows: DataFrame, **options: str) -> None:
        """Write all that is there, and end."""
        writer = rows.writeStream.format("exactlyonce").options(**self.given(**options)).trigger(availableNow=True)
        writer.option("checkpointLocation", str(self.folder / "checkpoint")).start().awaitTermination(LIMIT_S)

    def write(self, rows: DataFrame, **options: str) -> None:
        """A batch write."""
        rows.write.format("exactlyonce").mode("append").options(**self.given(**options)).save()

    def assert_exact(self) -> None:
        """Every row that was fed is there once, and nothing is left that no decision names."""
        assert self.target.found() == [row for batch in range(self.fed) for row in rows_of(batch, 0, 40)]
        assert unreferenced_blocks(self.kafka, self.name) == set()
        assert self.target.hidden() == []


@pytest.fixture
def make_stream(
    spark: SparkSession, kafka: KafkaCluster, topic_name: str, servers: Any, tmp_path: Path
) -> Callable[[str], Stream]:
    """`make_stream(store)`: nothing was written yet."""
    return lambda store: Stream(
        spark, kafka, f"{topic_name}-{store}", tmp_path, Target(store, servers, topic_name, tmp_path)
    )


def tripping(mark: Path, wanted: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What fails once, behind a batch with the row *wanted*, which was handed on."""

    def trip(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            if wanted in batch.column(0).to_pylist() and not mark.exists():
                mark.touch()
                raise RuntimeError("tripped")

    return trip


@pytest.mark.exhaustive
@pytest.mark.parametrize("store", TARGETS)
def test_a_stream(store: str, make_stream: Callable[[str], Stream], tmp_path: Path) -> None:
    """Every row of every batch is in the store once, also where a task fails after it had rows; a query that is started
    again goes on, with speculation too."""
    stream = make_stream(store)
    for _ in range(3):
        stream.feed()
    mark = tmp_path / "tripped"
    stream.run(stream.rows().repartition(2).mapInArrow(tripping(mark, 10_007), COLUMNS))
    assert mark.exists()
    stream.assert_exact()
    stream.feed()
    stream.spark.sparkContext.setLocalProperty("spark.speculation", "true")  # as Spark tells its tasks of the setting
    try:
        stream.run(stream.rows())
    finally:
        stream.spark.sparkContext.setLocalProperty("spark.speculation", "false")
    stream.assert_exact()


@pytest.mark.exhaustive
def test_what_a_stream_is_refused_for(make_stream: Callable[[str], Stream]) -> None:
    """Wrong options, a table without a column and a row that does not fit end the query with what to do; the row is
    written nowhere, and no secret is told."""
    stream = make_stream("postgres")
    stream.feed()
    rows = stream.rows()
    for frame, options, said in (
        (rows, {"mode": "upsert"}, "needs the columns by which it finds a row"),
        (rows, {"dsn": f"postgresql://me:{CANARY}@127.0.0.1/db"}, "has a password written out"),
        (rows.withColumn("more", rows.id), {}, "no column 'more'"),
        (rows.withColumn("customer", rows.id), {}, "its column 'customer' is character varying"),
    ):
        with pytest.raises(StreamingQueryException, match=said) as refused:
            stream.run(frame, **options)
        assert CANARY not in str(refused.value)
        assert len(str(refused.value).splitlines()) < LINES_MAX
    long = rows.selectExpr("id", "repeat('x', 21) as customer", "total")
    with pytest.raises(StreamingQueryException, match=r"row 1 of task 0 of batch 0 .*customer.*Filter such rows"):
        stream.run(long)
    assert stream.target.found() == []
    stream.run(rows)
    stream.assert_exact()


@pytest.mark.exhaustive
def test_a_batch_that_only_the_server_refuses(make_stream: Callable[[str], Stream]) -> None:
    """The commit's halt is what Spark raises, though its abort halts as well: the choices are the last that is said."""
    stream = make_stream("postgres")
    rows = stream.spark.range(0, 3, 1, 1).selectExpr("id", "'ann' as customer", "-1L as total")
    with pytest.raises(PySparkException, match=r"(?s)refuses its 3 records.*total_check") as refused:
        stream.write(rows)
    lines = [line for line in str(refused.value).splitlines() if not line.startswith(" SQLSTATE")]
    assert lines[-1].endswith('accepts that by .option("acceptLoss", "1").')
    assert len(lines) < LINES_MAX


@pytest.mark.exhaustive
def test_a_function_of_foreach_batch(make_stream: Callable[[str], Stream], tmp_path: Path) -> None:
    """It writes each batch to a table and to a stream of Redis, and raises between them once: all is there once."""
    table, entries = make_stream("postgres"), make_stream("redis")
    for _ in range(3):
        table.feed()
    entries.fed = table.fed
    mark = tmp_path / "raised"

    def write(rows: DataFrame, batch: int) -> None:
        table.write(rows)
        if batch == 1 and not mark.exists():
            mark.touch()
            raise RuntimeError("between")
        entries.write(rows)

    writer = table.rows().writeStream.foreachBatch(write).trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(StreamingQueryException, match="between"):
        writer.start().awaitTermination(LIMIT_S)
    writer.start().awaitTermination(LIMIT_S)
    assert mark.exists()
    table.assert_exact()
    entries.assert_exact()


@pytest.mark.exhaustive
def test_a_batch_write_of_every_type(make_stream: Callable[[str], Stream]) -> None:
    """With a writeId it happens once; columns of all types, nested ones and odd names are what they were in a file, and
    in a table that the sink creates; what a store has no type for is refused by the column's name."""
    stream = make_stream("files")
    moment = datetime(2026, 11, 22, 18, 0, 0, 123456, tzinfo=timezone.utc)
    schema = (
        "id long, `a name` string, flag boolean, small short, ratio double, price decimal(12,3), raw binary, day date, "
        "at timestamp, local timestamp_ntz, tags array<string>, sizes map<string,int>, place struct<x:int,y:string>"
    )
    values = (
        *(1, "ann", True, 7, 0.5, Decimal("12.345"), b"\x00\xff", date(2026, 11, 22), moment),
        *(moment.replace(tzinfo=None), ["a", None], {"m": 3}, {"x": 1, "y": None}),
    )
    rows = stream.spark.createDataFrame([values, (2, *[None] * 12)], schema)
    for _ in range(2):
        stream.write(rows, writeId="monday")
    import pyarrow.dataset as ds  # imports pandas, which takes a second of every process that only collects

    paths = [str(path) for path in stream.target.folder.glob("*.parquet")]
    found = sorted(ds.dataset(paths).to_table().to_pylist(maps_as_pydicts="strict"), key=lambda row: int(row["id"]))
    names = [field.name for field in rows.schema]
    assert [tuple(row[name] for name in names) for row in found] == [values, (2, *[None] * 12)]
    table = make_stream("postgres")
    for _ in range(2):
        table.write(rows.drop("local"), table=f"{table.target.table}_all", create="true", writeId="monday")
    seen = table.target.sql(f"SELECT * FROM {table.target.table}_all ORDER BY id")
    assert seen == [(*values[:9], *values[10:]), (2, *[None] * 11)]
    with pytest.raises(PySparkException, match=r"Column 'span' is of type interval year"):
        stream.write(rows.selectExpr("id", "interval 1 year as span"))
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        rows.write.format("exactlyonce").mode("overwrite").options(**stream.given()).save()
