"""A pipeline with `map_batches`, which the tests run as `exactlyonce run batch_pipelines:...`."""

from __future__ import annotations

import msgspec
import pyarrow as pa

from exactlyonce import Context, DeadLetters, Operator, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink

PIECES_MAX = 4


class Order(msgspec.Struct):
    id: int
    customer: str
    total: int


class Piece(msgspec.Struct):
    """A part of an order: piece *number* of it."""

    id: int
    customer: str
    number: int
    cents: float


class Sum(msgspec.Struct):
    customer: str
    pieces: int
    cents: float


class Pieces(Operator):
    """An order has as many pieces as its id modulo `PIECES_MAX`; an order of an id that is 13 more than a multiple of
    97 has none, for it fails."""

    def open(self, context: Context) -> None:
        self.price = 100

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        ids = batch["id"].to_pylist()
        if any(id % 97 == 13 for id in ids):
            raise ValueError("one of the ids is refused")
        pieces = [(row, number) for row, id in enumerate(ids) for number in range(id % PIECES_MAX)]
        rows = pa.array([row for row, _ in pieces], pa.int64())
        parts = batch.select(["id", "customer", "total"]).take(rows)
        cents = [self.price * total / 4 for total in parts["total"].to_pylist()]
        return pa.record_batch(
            {
                "row": rows, "id": parts["id"], "customer": parts["customer"], "cents": pa.array(cents, pa.float64()),
                "number": pa.array([number for _, number in pieces], pa.int64()),
            }
        )  # fmt: skip


def added(sum: Sum | None, piece: Piece) -> tuple[Sum, Sum]:
    sum = sum or Sum(piece.customer, 0, 0)
    sum = Sum(sum.customer, sum.pieces + 1, sum.cents + piece.cents)
    return sum, sum


def pieces(name: str) -> Pipeline:
    """NAME-in in pieces to NAME-pieces, their running sums by customer to NAME-sums, refused orders to NAME-dead."""
    pipeline = Pipeline(name, max_parallelism=8)
    orders = pipeline.source("orders", KafkaSource(f"{name}-in", value=Order))
    dead = DeadLetters(f"{name}-dead")
    parts = orders.map_batches(Pieces, schema=Piece, max_rows=100, id="pieces", on_error=dead)
    parts.sink("pieces-out", KafkaSink(f"{name}-pieces", key=lambda piece: str(piece.id)))
    sums = parts.key_by(lambda piece: piece.customer).stateful_map("sums", added)
    sums.sink("sums-out", KafkaSink(f"{name}-sums", key=lambda sum: sum.customer))
    return pipeline
