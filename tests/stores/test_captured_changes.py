"""The changes of a table of PostgreSQL in pipelines that are killed: joined as a table, and copied by key."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import captured
import pyarrow as pa
import pytest
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]  # it has them
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from running import Job, visible

from exactlyonce import KafkaSink
from exactlyonce.connectors.changes import logs_of
from exactlyonce.pipeline.changes import Change
from exactlyonce.testing.servers.mariadb import MariaDB
from exactlyonce.testing.servers.postgres import PostgresServer

CUSTOMERS = [f"c{number}" for number in range(17)]


class Customers:
    """The table of a pipeline, with a row for each of 17 customers."""

    def __init__(self, server: PostgresServer, table: str) -> None:
        self.table, self.sql = table, server.execute
        self.sql(f"CREATE TABLE {self.table} (customer text PRIMARY KEY, tier int NOT NULL)")
        for customer in CUSTOMERS:
            self.sql(f"INSERT INTO {self.table} VALUES (%s, 1)", customer)

    def change(self, chance: random.Random, transactions: int) -> None:
        """Transactions of one to five changes of a few keys, some of which come back, or become another."""
        for number in range(transactions):
            statements = []
            for _ in range(chance.randint(1, 5)):
                key, other = chance.choices(CUSTOMERS, k=2)
                there = f"(SELECT FROM {self.table} WHERE customer = '{other}')"
                statements.append(chance.choice([
                    f"DELETE FROM {self.table} WHERE customer = '{key}'",
                    f"INSERT INTO {self.table} VALUES ('{key}', {number}) "
                    f"ON CONFLICT (customer) DO UPDATE SET tier = {number}",
                    f"UPDATE {self.table} SET customer = '{other}' WHERE customer = '{key}' AND NOT EXISTS {there}",
                ]))  # fmt: skip
            self.sql(f"DO $$ BEGIN {'; '.join(statements)}; END $$")

    def rows(self) -> dict[str, int]:
        return dict(self.sql(f"SELECT customer, tier FROM {self.table}"))


@pytest.fixture
def customers(postgres_server: PostgresServer, topic_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Customers]:
    monkeypatch.setenv("CAPTURED_DSN", postgres_server.dsn())
    path = [str(Path(__file__).parent / "rig"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    customers = Customers(postgres_server, captured.customers(topic_name).table)
    (slot,) = logs_of(captured.copied(topic_name).build())
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


STEPS = ["coordinator-decided", "worker-flushed", "store-committing", "store-committed"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_store_has_the_rows_of_the_table(
    customers: Customers, kafka: Any, redis_server: Any, topic_name: str, run: Any, tmp_path: Path,
    failpoint: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Killed at each step, among changes of the same keys: deletes, returns, and other keys for a row."""
    monkeypatch.setenv("CAPTURED_REDIS", redis_server.url)
    stores = ("--param", "redis=env:CAPTURED_REDIS", "--param", f"lakes={tmp_path}")
    job = Job(run, kafka, topic_name, "captured:copied", *stores)
    chance, catalog = random.Random(7), {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}"}

    def require_equal() -> None:
        rows = customers.rows()
        assert dict(customers.sql(f"SELECT customer, tier FROM {captured.TARGET}")) == rows
        cached = {key: redis_server.client.get(f"{topic_name}:{key}") for key in CUSTOMERS}
        assert {key: json.loads(value)["tier"] for key, value in cached.items() if value} == rows
        iceberg = load_catalog("default", type="sql", **catalog).load_table("shop.customers").scan().to_arrow()
        for lake in (iceberg, pa.table(DeltaTable(tmp_path / "delta").to_pyarrow_table())):
            assert sorted((row["customer"], row["tier"]) for row in lake.to_pylist()) == sorted(rows.items())
        newest = {record.key: record.value for record in kafka.read_committed(f"{topic_name}-out")}
        assert {key.decode(): json.loads(value)["tier"] for key, value in newest.items() if key and value} == rows

    try:
        for number, step in enumerate([*STEPS, STEPS[2]]):
            customers.change(chance, 60)
            customers.sql("SELECT pg_logical_emit_message(true, %s, %s)", topic_name, f"note {number}")
            job.run_killed(failpoint(step), 1 + number % 2)
        customers.change(chance, 60)
        job.finish_here()
        require_equal()
        customers.sql(f"DELETE FROM {customers.table}")
        job.finish_here()
        require_equal()
        notes = [record.value for record in kafka.read_committed(f"{topic_name}-notes")]
        assert notes == [f"note {number}".encode() for number in range(len(STEPS) + 1)]
    finally:
        customers.sql(f"DROP TABLE IF EXISTS {captured.TARGET}, exactlyonce_ledger")


def test_a_topic_of_changes_is_compacted_and_has_each_key_in_order(
    customers: Customers, kafka: Any, topic_name: str, run: Any
) -> None:
    """A source that cannot begin leaves no topic behind."""
    (slot,) = logs_of(captured.copied(topic_name).build())
    slot.drop()
    job = Job(run, kafka, topic_name, "captured:copied")
    assert "changes setup" in job.finish_here(code=2)
    assert f"{topic_name}-out" not in kafka.topics()
    slot.setup()
    for tier in range(2, 60):
        customers.sql(f"UPDATE {customers.table} SET tier = %s", tier)
    job.finish("--parallelism", "2")
    admin, resource = kafka.admin(), ConfigResource(ResourceType.TOPIC, f"{topic_name}-out")
    settings = admin.describe_configs([resource])[resource].result(30)
    assert settings["cleanup.policy"].value == "compact"
    tiers: dict[bytes, list[int]] = {}
    for record in kafka.read_committed(f"{topic_name}-out"):
        tiers.setdefault(record.key, []).append(json.loads(record.value)["tier"])
    assert len(tiers) == len(CUSTOMERS)
    assert all(found == sorted(set(found)) and found[-1] == 59 for found in tiers.values())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_kill_within_a_transaction(customers: Customers, kafka: Any, topic_name: str, run: Any) -> None:
    """A part of its changes is in a finalized checkpoint: the others come after it, each once."""
    job, count = Job(run, kafka, topic_name, "captured:copied"), 40_000
    job.finish_here()
    sql = f"INSERT INTO {customers.table} SELECT 'n' || i, i FROM generate_series(1, {count}) i"
    customers.sql(sql)
    begun = job.start()
    begun.await_event(lambda event: event["event"] == "checkpoint" and event["records_committed"] > 0)
    begun.kill()
    tiers = [tier for key, tier in copies(kafka, topic_name) if key.startswith("n")]
    assert 0 < len(tiers) < count
    job.finish_here()
    tiers = [tier for key, tier in copies(kafka, topic_name) if key.startswith("n")]
    assert sorted(tiers) == list(range(1, count + 1))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_slot_that_was_not_told_of_a_finalized_checkpoint(
    customers: Customers, kafka: Any, topic_name: str, run: Any, failpoint: Callable[..., dict[str, str]]
) -> None:
    """The worker dies before it tells the slot, which is behind then: no change comes twice."""
    job = Job(run, kafka, topic_name, "captured:copied")
    job.finish_here()
    for tier in range(2, 40):
        customers.sql(f"UPDATE {customers.table} SET tier = {tier} WHERE customer = 'c{tier % 3}'")
    job.run_killed(failpoint("worker-finalized"), 1)
    for number in range(3):
        tiers = [tier for key, tier in copies(kafka, topic_name) if key == f"c{number}"]
        assert tiers == [1, *(tier for tier in range(2, 40) if tier % 3 == number)]


def copies(kafka: Any, name: str) -> list[tuple[str, int]]:
    """The customers and tiers of the topic, in the order of each."""
    records = kafka.read_committed(f"{name}-out")
    return [(record.key.decode(), json.loads(record.value)["tier"]) for record in records]


def test_tables_of_mariadb_are_copied_by_runs_that_are_killed(
    kafka: Any, topic_name: str, run: Any, failpoint: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rows that were there, and each change once, in its order."""
    path = [str(Path(__file__).parent / "rig"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    server, tables = MariaDB(), ("customers", "partners")
    try:
        server.start("--log-bin=bin", "--binlog-format=ROW", "--binlog-row-metadata=FULL")
        monkeypatch.setenv("CAPTURED_DSN", server.dsn)
        for table in tables:
            server.sql(f"CREATE TABLE {table} (customer varchar(9) PRIMARY KEY, tier int NOT NULL)")
            server.sql(f"INSERT INTO {table} SELECT concat('c', seq), 1 FROM seq_1_to_9")
        job = Job(run, kafka, topic_name, "captured:copied_from_mariadb")
        for tier, step in enumerate(STEPS[:2], 2):
            job.run_killed(failpoint(step), 1)
            for table in tables:
                server.sql(f"UPDATE {table} SET tier = {tier}")
                server.sql(f"DELETE FROM {table} WHERE customer = 'c{tier}'")
        job.finish_here()
        for table in tables:
            tiers: dict[bytes, list[Any]] = {}
            for record in kafka.read_committed(f"{topic_name}-{table}"):
                tiers.setdefault(record.key, []).append(json.loads(record.value)["tier"] if record.value else None)
            newest = {key.decode(): found[-1] for key, found in tiers.items() if found[-1] is not None}
            assert newest == dict(server.sql(f"SELECT customer, tier FROM {table}"))
            assert all(found == sorted(set(found)) for found in tiers.values() if None not in found)
    finally:
        server.remove()


def test_what_has_no_place_in_a_sink_says_what_to_write_instead() -> None:
    truncated: Change[Any] = Change("truncate", None, None, None, "customers", 1, 1)
    with pytest.raises(ValueError, match="TRUNCATE has deleted all rows of customers"):
        KafkaSink[Any]("out").encoder(Change[captured.Customer]).encode([truncated])
