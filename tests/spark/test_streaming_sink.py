"""`df.writeStream.format("exactlyonce")` on a session: columns, retried tasks, a failed batch, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.slow]
CANARY = "canary-7d21"


class Stream:
    """A query over text files, one file a batch."""

    def __init__(self, spark: SparkSession, kafka: KafkaCluster, folder: Path, sink_id: str, topic: str) -> None:
        self.spark, self.kafka, self.folder, self.sink_id, self.topic = spark, kafka, folder, sink_id, topic
        (folder / "in").mkdir()

    def feed(self, number: int, lines: list[str]) -> None:
        """The file of one more batch."""
        (self.folder / "in" / f"{number}.txt").write_text("\n".join(lines))

    def rows(self) -> DataFrame:
        """What the files hold."""
        files = self.spark.readStream.format("text").option("maxFilesPerTrigger", 1)
        return files.load(str(self.folder / "in"))

    def run(self, rows: DataFrame, checkpoint: str = "checkpoint", **options: str) -> StreamingQuery:
        """Write all that is there, and end."""
        given = {
            "sinkId": self.sink_id,
            "topic": self.topic,
            "kafka.bootstrap.servers": self.kafka.bootstrap_servers,
            "checkpointLocation": str(self.folder / checkpoint),
            **options,
        }
        writer = rows.writeStream.format("exactlyonce").options(**given).trigger(availableNow=True)
        query = writer.start()
        query.awaitTermination(LIMIT_S)
        return query

    def assert_settled(self) -> None:
        """Readers get to the end of the topic."""
        topics = Topics(ClientConfig({"bootstrap.servers": self.kafka.bootstrap_servers}))
        assert topics.end_offsets(self.topic, committed=True) == topics.end_offsets(self.topic, committed=False)
        topics.close()


@pytest.fixture
def stream(spark: SparkSession, kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> Stream:
    """Nothing was written yet."""
    kafka.create_topic(f"{topic_name}-out", 3)
    return Stream(spark, kafka, tmp_path, topic_name, f"{topic_name}-out")


@pytest.mark.exhaustive
def test_a_stream(stream: Stream, tmp_path: Path) -> None:
    """Rows arrive once with key, partition and headers, also where a task fails after other rows of it were written; a
    batch that fails for good leaves nothing, and is written by the next run; another checkpoint location is refused."""
    for number in range(3):
        stream.feed(number, [f"{number}-{each}" for each in range(100)])
    tripped = tmp_path / "tripped"

    def trip(batches: Iterator[Any]) -> Iterator[Any]:
        """Fail once, behind a batch that was handed on."""
        for batch in batches:
            yield batch
        if "1-0" in batch.column(0).to_pylist() and not tripped.exists():
            tripped.touch()
            raise RuntimeError("tripped")

    rows = stream.rows().mapInArrow(trip, "value string").selectExpr(
        "split(value, '-')[1] as key",
        "value",
        "case when value like '%-7' then 2 end as partition",
        "case when value like '%-8' then array(named_struct('key', 'a', 'value', cast('b' as binary))) end as headers",
        "1 as ignored",
    )  # fmt: skip
    query = stream.run(rows)
    assert query.exception() is None
    assert tripped.exists()
    seen = stream.kafka.read_committed(stream.topic)
    assert sorted(record.value or b"" for record in seen) == sorted(
        f"{n}-{e}".encode() for n in range(3) for e in range(100)
    )
    assert {record.key for record in seen if record.value == b"1-42"} == {b"42"}
    assert {record.partition for record in seen if (record.value or b"").endswith(b"-7")} == {2}
    assert {record.partition for record in seen if record.key == b"42"} == {key_groups([b"42"], 3)[0]}, (
        "as Java's clients do"
    )
    stream.assert_settled()
    stream.feed(3, ["3-0", "3-1"])
    strange = rows.selectExpr("key", "value", "9 as partition")
    with pytest.raises(StreamingQueryException, match=r"out 9: .*Unknown partition"):
        stream.run(strange)
    stream.assert_settled()
    stream.run(rows)
    with pytest.raises(StreamingQueryException, match="adoptQuery"):
        stream.run(rows, "another")
    assert len(stream.kafka.read_committed(stream.topic)) == 302
    stream.assert_settled()


@pytest.mark.exhaustive
def test_what_is_refused(stream: Stream) -> None:
    """Wrong options and columns, a secret that is written out, and speculation end the query before it writes; the
    error names what to do and no secret."""
    stream.feed(0, ["a"])
    rows = stream.rows()
    for frame, options, said in (
        (rows, {"sinkId": "no.dots"}, "sinkId 'no.dots' must be made of letters"),
        (rows, {"topicc": "x"}, "no option 'topicc' for a stream"),
        (rows, {"topic": "nowhere-at-all"}, "nowhere-at-all"),
        (rows, {"kafka.ssl.key.password": CANARY}, "ssl.key.password is written out"),
        (rows.selectExpr("value as text"), {}, "no column 'value'"),
        (rows.selectExpr("1 as value"), {}, "Column 'value' is of type int"),
    ):
        with pytest.raises(StreamingQueryException, match=said) as refused:
            stream.run(frame, **options)
        assert CANARY not in str(refused.value)
    assert stream.kafka.read_committed(stream.topic) == []


@pytest.mark.exhaustive
def test_a_checkpoint_location_that_is_one_batch_behind(stream: Stream, tmp_path: Path) -> None:
    """With an older copy of its checkpoint location, and new input, a query plans other rows under a number that is
    decided: it halts and says so, no row is lost or doubled, and with the right location all of them arrive."""
    every = stream.spark.readStream.format("text").load(str(tmp_path / "in"))
    stream.feed(0, [f"0-{each}" for each in range(100)])
    stream.run(every)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    stream.feed(1, [f"1-{each}" for each in range(100)])
    stream.run(every)
    stream.feed(2, [f"2-{each}" for each in range(100)])
    with pytest.raises(StreamingQueryException, match=r"(?s)with 100 rows.*gives 200 others.*older copy"):
        stream.run(every, checkpoint="copy")
    stream.run(every)
    values = sorted((record.value or b"").decode() for record in stream.kafka.read_committed(stream.topic))
    assert values == sorted(f"{number}-{each}" for number in range(3) for each in range(100))
    stream.assert_settled()
