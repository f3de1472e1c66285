"""Pipelines from Kafka into tables of a lake; every worker imports this module."""

from __future__ import annotations

import os

from pipelines import add, reading

from exactlyonce import Pipeline
from exactlyonce.sinks import DeltaSink, IcebergSink

LAKE = "LAKE_OF_TESTS"
"""The variable with the folder of the lake."""
BUCKET = "BUCKET_OF_TESTS"
"""The variable with the address in S3 of the tables, if they are not in the folder."""

CATALOG = "CATALOG_OF_TESTS"
"""The variable with the address of a REST catalog, if the tables are not in one of SQLite."""


def iceberg_properties(folder: str | os.PathLike[str]) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}


def into(name: str, lake: str) -> Pipeline:
    """The running totals of the orders in NAME-in, appended to a table of *lake*: "iceberg" or "delta"."""
    pipeline, orders = reading(name)
    totals = orders.key_by(lambda order: order.customer).stateful_map("totals", add)
    folder, bucket = os.environ[LAKE], os.environ.get(BUCKET)
    if lake == "delta":
        options = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"} if bucket else {}
        totals.sink("lake", DeltaSink(f"{bucket or folder}/totals", create=True, storage_options=options))
        return pipeline
    catalog = iceberg_properties(folder)
    if uri := os.environ.get(CATALOG):
        catalog = {"type": "rest", "uri": uri}
    if bucket:
        catalog |= {"warehouse": bucket, "s3.endpoint": os.environ["AWS_ENDPOINT_URL"], "s3.region": "us-east-1"}
    totals.sink("lake", IcebergSink("shop.totals", catalog=catalog, create=True))
    return pipeline
