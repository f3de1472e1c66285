"""The customers of a table of PostgreSQL as a table of Delta Lake, which follows each change once."""

import os

import msgspec

from exactlyonce import Change, Pipeline
from exactlyonce.connectors import PostgresChanges, Source
from exactlyonce.sinks import DeltaSink


class Customer(msgspec.Struct):
    id: int
    name: str
    city: str | None


LAKE = os.environ.get("CUSTOMERS_LAKE", os.path.abspath("customers"))
"""The folder of the table, or its address, as s3://lake/customers."""
table = PostgresChanges("customers", dsn="env:SHOP_DSN", key="id", value=Customer)


def make(customers: Source[Change[Customer]] = table) -> Pipeline:
    """The pipeline; a test gives it other customers."""
    pipeline = Pipeline("customers-to-lake")
    pipeline.source("customers", customers).sink("lake", DeltaSink(LAKE, mode="upsert", key="id", create=True))
    return pipeline


pipeline = make()
