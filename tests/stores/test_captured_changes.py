"""The changes of a table of PostgreSQL in pipelines that are killed: joined as a table, and copied by key."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import captured
import pytest
from running import Job, visible

from exactlyonce import KafkaSink
from exactlyonce.connectors.postgres.changes import slots_of
from exactlyonce.pipeline.changes import Change
from exactlyonce.sinks import PostgresSink
from exactlyonce.testing.servers.postgres import PostgresServer

CUSTOMERS = [f"c{number}" for number in range(17)]


class Customers:
    """The table of a pipeline, with a row for each of 17 customers."""

    def __init__(self, server: PostgresServer, table: str) -> None:
        self.table, self.sql = table, server.execute
        self.sql(f"CREATE TABLE {self.table} (customer text PRIMARY KEY, tier int NOT NULL)")
        for customer in CUSTOMERS:
            self.sql(f"INSERT INTO {self.table} VALUES (%s, 1)", customer)

    def rows(self) -> dict[str, int]:
        return dict(self.sql(f"SELECT customer, tier FROM {self.table}"))


@pytest.fixture
def customers(postgres_server: PostgresServer, topic_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Customers]:
    monkeypatch.setenv("CAPTURED_DSN", postgres_server.dsn())
    path = [str(Path(__file__).parent / "rig"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    customers = Customers(postgres_server, captured.customers(topic_name).table)
    (slot,) = slots_of(captured.copied(topic_name).build())
    slot.setup()
    yield customers
    slot.drop()
    customers.sql(f"DROP TABLE {customers.table}")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("join", ["lookup", "as_of"])
def test_each_order_is_joined_once_with_a_row_of_its_time(
    join: str, customers: Customers, kafka: Any, topic_name: str, run: Any, failpoint: Callable[..., dict[str, str]]
) -> None:
    job = Job(run, kafka, topic_name, "captured:joined", "--param", f"join={join}", partitions=1)
    job.finish_here()
    job.feed(500)
    job.run_killed(failpoint("coordinator-decided"), 2)
    customers.sql(f"DELETE FROM {customers.table} WHERE customer = 'c3'")
    customers.sql(f"UPDATE {customers.table} SET tier = 2")
    job.finish("--parallelism", "2")
    job.feed(200)
    job.run_killed(failpoint("worker-flushed"), 1)
    job.finish_here("--drain")
    found = [json.loads(record.value or b"") for record in visible(kafka, f"{topic_name}-out", 700)]
    assert sorted(order["id"] for order in found) == list(range(700))
    for order in found:
        after = None if order["customer"] == "c3" else 2
        assert order["tier"] in ({1, after} if order["id"] < 500 else {after}), order
    if join == "as_of":
        assert {order["tier"] for order in found if order["id"] < 500} == {1}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_topic_and_a_cache_have_the_rows_by_key(
    customers: Customers, kafka: Any, redis_server: Any, topic_name: str, run: Any,
    failpoint: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("CAPTURED_REDIS", redis_server.url)
    job = Job(run, kafka, topic_name, "captured:copied", "--param", "redis=env:CAPTURED_REDIS")
    job.run_killed(failpoint("coordinator-decided"), 1)
    for number, customer in enumerate(CUSTOMERS[:9]):
        customers.sql(f"UPDATE {customers.table} SET tier = %s WHERE customer = %s", number, customer)
    customers.sql(f"DELETE FROM {customers.table} WHERE customer IN ('c3', 'c16')")
    job.run_killed(failpoint("store-committing"), 2)
    job.finish_here()
    records = visible(kafka, f"{topic_name}-out", len(CUSTOMERS) + 9 + 2)
    assert len(records) == len(CUSTOMERS) + 9 + 2
    newest = {record.key: record.value for record in records}
    rows = customers.rows()
    written = {key.decode(): json.loads(value)["tier"] for key, value in newest.items() if key and value}
    assert (written, newest[b"c3"]) == (rows, None)
    cached = {key: redis_server.client.get(f"{topic_name}:{key}") for key in CUSTOMERS}
    assert {key: json.loads(value)["tier"] for key, value in cached.items() if value} == rows


def test_what_has_no_place_in_a_sink_says_what_to_write_instead() -> None:
    truncated: Change[Any] = Change("truncate", None, None, None, "customers", 1, 1)
    with pytest.raises(ValueError, match="TRUNCATE has deleted all rows of customers"):
        KafkaSink[Any]("out").encoder(Change[captured.Customer]).encode([truncated])
    table = PostgresSink[Any]("customers", dsn="env:CAPTURED_DSN", mode="upsert", key=("customer",))
    (problem,) = table.problems(Change[captured.Customer])
    assert "deleted=change.op == 'delete'" in problem
