"""The pages about Spark are done as they say: commands one after the other, functions on a session of Spark."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.exhaustive]

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "\n".join((DOCS / name).read_text() for name in ("spark.md", "spark-checks.md", "spark-jobs.md"))


def blocks(kind: str) -> list[str]:
    """Code blocks of the pages, but for the one about clusters, which `test_local_cluster.py` tests."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGES, re.DOTALL | re.MULTILINE)


@pytest.fixture
def kafka_of_the_page(own_broker: Callable[..., KafkaCluster]) -> KafkaCluster:
    kafka = own_broker()
    for topic in ("orders", "order-totals", "large-orders"):
        kafka.create_topic(topic, partitions=2)
    return kafka


def feed(kafka: KafkaCluster, first: int, last: int) -> None:
    orders = [{"id": n, "customer": f"customer {n % 7}", "total": n} for n in range(first, last)]
    kafka.produce("orders", [(str(order["customer"]), json.dumps(order)) for order in orders])


def totals(kafka: KafkaCluster, topic: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in kafka.read_committed(topic):
        total = json.loads(record.value or b"")
        found[total["customer"]] = max(total["sum"], found.get(total["customer"], 0))
    return found


def commands() -> Iterator[list[str]]:
    for block in blocks("sh"):
        yield from (shlex.split(line)[1:] for line in block.splitlines() if line.startswith("exactlyonce "))


def run(kafka: KafkaCluster, folder: Path, *words: str) -> None:
    line = [sys.executable, "-m", "exactlyonce.cli.main", *words]
    environment = {**os.environ, "EXACTLYONCE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers}
    ended = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr


def test_the_commands_run(kafka_of_the_page: KafkaCluster, tmp_path: Path) -> None:
    kafka = kafka_of_the_page
    done: list[str] = []
    for module in ("orders", "orders_before"):
        (tmp_path / f"{module}.py").write_text(blocks("python")[0])
    for words in commands():
        if words[0] in ("backfill", "catch-up"):
            feed(kafka, 1000 * len(done), 1000 * len(done) + 1000)
        run(kafka, tmp_path, *words, *(() if done else ("--on", "spark")))
        done.append(words[0])
    assert done == ["backfill", "catch-up", "backfill", "replay", "replay", "audit", "diff"]
    assert len(kafka.read_committed("order-totals")) == 2000
    assert len(kafka.read_committed("order-totals-again")) == 1000
    assert len(kafka.read_committed("order-totals-v2")) == 3000
    assert totals(kafka, "order-totals") == totals(kafka, "order-totals-again")


def test_the_functions_run(spark: Any, kafka_of_the_page: KafkaCluster, tmp_path: Path) -> None:
    kafka, names = kafka_of_the_page, dict[str, Any](__name__="page")
    exec(compile(blocks("python")[1], "jobs.py", "exec", dont_inherit=True), names)
    feed(kafka, 0, 1000)
    rows = names["revenue"](spark, kafka.bootstrap_servers).collect()
    assert {row[0]: row[1] for row in rows} == {f"customer {n}": sum(range(n, 1000, 7)) for n in range(7)}
    for first, last in ((1000, 1001), (1001, 1200)):
        feed(kafka, first, last)
        names["large_orders"](spark, kafka.bootstrap_servers, str(tmp_path)).awaitTermination()
    ids = sorted(json.loads(record.value or b"")["id"] for record in kafka.read_committed("large-orders"))
    assert ids == list(range(100, 1200))


def test_writing_to_a_store(spark: Any, servers: Any, kafka_of_the_page: KafkaCluster, tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text(servers.addresses()["TOGETHER_POSTGRES"])
    servers.sql("postgres", "DROP TABLE IF EXISTS order_totals")
    servers.sql("postgres", "CREATE TABLE order_totals (customer text PRIMARY KEY, sum bigint)")
    source, names = blocks("python")[3].replace("env:ORDERS_DSN", f"file:{tmp_path / 'dsn'}"), dict[str, Any]()
    exec(compile(source, "jobs.py", "exec", dont_inherit=True), names)
    (tmp_path / "in").mkdir()
    rows = spark.readStream.schema("customer string, sum long").format("json").load(str(tmp_path / "in"))
    for run in range(2):
        lines = [json.dumps({"customer": f"customer {n}", "sum": 10 * run + n}) for n in range(run, 7)]
        (tmp_path / "in" / f"{run}.json").write_text("\n".join(lines))
        names["totals_table"](rows, kafka_of_the_page.bootstrap_servers, str(tmp_path)).awaitTermination()
    found = dict(servers.sql("postgres", "SELECT customer, sum FROM order_totals"))
    assert found == {"customer 0": 0, **{f"customer {n}": 10 + n for n in range(1, 7)}}


def test_the_functions_that_read_a_checkpoint_run(spark: Any, kafka_of_the_page: KafkaCluster, tmp_path: Path) -> None:
    """State has each customer's sum; input and output are as they were then, though the pipeline has gone on."""
    kafka, names = kafka_of_the_page, dict[str, Any]()
    for block in blocks("python")[4:7]:
        exec(compile(block, "jobs.py", "exec", dont_inherit=True), names)
    feed(kafka, 0, 1000)
    (tmp_path / "orders.py").write_text(blocks("python")[0])
    run(kafka, tmp_path, "run", "orders:pipeline", "--until", "latest")
    rows = names["kept"](spark, kafka.bootstrap_servers).collect()
    assert {row.key: row.value for row in rows} == {f"customer {n}": sum(range(n, 1000, 7)) for n in range(7)}
    feed(kafka, 1000, 1500)
    run(kafka, tmp_path, "catch-up", "orders:pipeline")
    orders, sums = names["one_cut"](spark, kafka.bootstrap_servers, rows[0].checkpoint)
    assert (orders.count(), sums.count()) == (1000, 1000)
    assert names["new_totals"](spark, kafka.bootstrap_servers, rows[0].checkpoint).count() == 500


def test_going_on_after_another_query(spark: Any, kafka_of_the_page: KafkaCluster, tmp_path: Path) -> None:
    """It begins after the last batch with a commit; the files are as Spark's own source has them, but shorter."""
    kafka, names = kafka_of_the_page, dict[str, Any]()
    exec(compile(blocks("python")[8], "jobs.py", "exec", dont_inherit=True), names)
    for folder in ("commits", "offsets"):
        (tmp_path / "old" / folder).mkdir(parents=True)
    ends = []
    for batch in range(12):
        feed(kafka, 100 * batch, 100 * batch + 100)
        ends.append(Counter(record.partition for record in kafka.read_committed("orders")))
        offsets = json.dumps({"orders": {str(partition): end for partition, end in sorted(ends[-1].items())}})
        (tmp_path / "old" / "offsets" / str(batch)).write_text(f'v1\n{{"batchWatermarkMs":0,"conf":{{}}}}\n{offsets}')
        if batch < 11:
            (tmp_path / "old" / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    rows = names["orders_after"](spark, kafka.bootstrap_servers, str(tmp_path / "old"))
    query = rows.writeStream.format("memory").queryName("orders_after").trigger(availableNow=True).start()
    assert query.awaitTermination(LIMIT_S)
    found = spark.sql("select partition, offset from orders_after order by 1, 2").collect()
    expected = [(record.partition, record.offset) for record in kafka.read_committed("orders")]
    assert list(map(tuple, found)) == [
        (partition, offset) for partition, offset in expected if offset >= ends[10][partition]
    ]


def test_reading_typed_records(spark: Any, kafka_of_the_page: KafkaCluster, tmp_path: Path) -> None:
    kafka, module, names = kafka_of_the_page, "orders_of_the_page", dict[str, Any]()
    (tmp_path / f"{module}.py").write_text(blocks("python")[0])
    spark.addArtifacts(str(tmp_path / f"{module}.py"), pyfile=True)
    source = blocks("python")[7].replace("orders:pipeline", f"{module}:pipeline")
    exec(compile(source, "jobs.py", "exec", dont_inherit=True), names)
    feed(kafka, 0, 1000)
    rows = names["spent"](spark, kafka.bootstrap_servers).collect()
    assert {row[0]: row[1] for row in rows} == {f"customer {n}": sum(range(n, 1000, 7)) for n in range(7)}
