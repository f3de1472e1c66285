"""The stores of a pipeline are not asked to commit what another sink has set aside."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from exactlyonce import Pipeline
from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.checkpoint.requests import CommitStaged, FenceStore
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.external_checks.stores import PipelineStores
from exactlyonce.pipeline.errors import ConfigError, Halt, StoreError
from exactlyonce.sinks import DuckDBSink, FileSink, MySQLSink, PostgresSink, RedisSink
from exactlyonce.testing.store import MemorySink, StoreModel

ORIGIN = "topic"


class Row(msgspec.Struct):
    customer: str


class NoBlocks:
    def fetch(self, refs: Any) -> list[Any]:
        assert list(refs) == []
        return []


@pytest.fixture
def stores() -> PipelineStores:
    pipeline = Pipeline("p")
    pipeline.source("in", KafkaSource("in", value=int)).sink("rows", MemorySink("m", StoreModel()))
    stores = PipelineStores(pipeline.build(), cast(Any, NoBlocks()))
    stores(FenceStore("rows", 1, ORIGIN))
    return stores


def staged(stores: PipelineStores, **fields: Any) -> CommitStaged:
    found = StoreCommittable(
        sink="rows", subtask=0, checkpoint=1, records=3, kind="rows", description=stores.staging["rows"].digest
    )
    return CommitStaged((msgspec.structs.replace(found, **fields),), 1, ORIGIN)


def test_a_kind_that_the_sink_does_not_commit(stores: PipelineStores) -> None:
    with pytest.raises(StoreError, match=r"of the kind 'files', .* now one of the kind 'rows': it was another"):
        stores(staged(stores, kind="files"))
    assert stores(staged(stores, kind="files", records=0)) is True


def test_rows_that_an_older_version_prepared(stores: PipelineStores) -> None:
    """They are never dropped silently: they are named, with what to do."""
    with pytest.raises(
        StoreError, match=r"wait in the transaction eo:p:0:1, prepared .* commit that transaction by hand"
    ):
        stores(staged(stores, kind="prepared", body=b"eo:p:0:1"))
    assert stores(staged(stores, kind="prepared", records=0)) is True


def test_an_address_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    pipeline = Pipeline("p")
    pipeline.source("in", KafkaSource("in", value=Row)).sink("rows", PostgresSink[Row]("t", dsn="env:NOWHERE"))
    with pytest.raises(ConfigError, match="Sink 'rows': dsn is env:NOWHERE, but the environment has no variable"):
        PipelineStores(pipeline.build(), cast(Any, NoBlocks())).check()


def test_the_ledger_of_each_sink_is_named_for_people() -> None:
    pipeline = Pipeline("p")
    stream = pipeline.source("in", KafkaSource("in", value=Row))
    sinks: dict[str, Any] = {
        "postgres": PostgresSink("shop.totals", dsn="env:NOWHERE"),
        "mysql": MySQLSink("totals", dsn="env:NOWHERE"),
        "redis": RedisSink("redis://cache.example", key=lambda each: each.customer),
        "cluster": RedisSink("env:NOWHERE", key=lambda each: each.customer, hash_tag="shop"),
        "files": FileSink("/data/totals", format="jsonl"),
        "duckdb": DuckDBSink("/data/shop.duckdb", table="totals"),
        "own": MemorySink("m", StoreModel()),
    }
    for name, sink in sinks.items():
        stream.sink(name, sink)
    staging = PipelineStores(pipeline.build(), cast(Any, NoBlocks())).staging
    assert {name: sink.ledger for name, sink in staging.items()} == {
        "postgres": "table exactlyonce_ledger in the schema of shop.totals, WHERE pipeline = 'p' AND sink = 'postgres'",
        "mysql": "table exactlyonce_ledger in the database of totals, WHERE pipeline = 'p' AND sink = 'mysql'",
        "redis": "the key exactlyonce_ledger:p:redis",
        "cluster": "the key exactlyonce_ledger:{shop}:p:cluster",
        "files": "the folder /data/totals/.exactlyonce/p.files",
        "duckdb": "table exactlyonce_ledger in /data/shop.duckdb, WHERE pipeline = 'p' AND sink = 'duckdb'",
        "own": "in its store, of pipeline 'p' and sink 'own'",
    }


def test_another_description(stores: PipelineStores) -> None:
    with pytest.raises(StoreError, match="set aside for another description of the sink"):
        stores(staged(stores, description="another"))


def test_a_sink_that_is_gone(stores: PipelineStores) -> None:
    with pytest.raises(Halt, match=r"3 records of sink 'gone', and the pipeline has no such sink any more"):
        stores(staged(stores, sink="gone"))
