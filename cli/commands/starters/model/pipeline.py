"""The risk of each payment by a model of scikit-learn, which gets many payments at a time."""

from pathlib import Path

import joblib
import msgspec
import numpy as np
import pyarrow as pa

from exactlyonce import Context, DeadLetters, KafkaSink, KafkaSource, Operator, Pipeline

MODEL = Path(__file__).with_name("model.joblib")
"""Written by train.py."""


class Payment(msgspec.Struct):
    id: int
    cents: int
    abroad: bool


class Scored(msgspec.Struct):
    id: int
    risk: float


class Model(Operator):
    def open(self, context: Context) -> None:
        """Load the model, on the worker, before its first payment."""
        self.model = joblib.load(MODEL)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        features = np.column_stack([batch["cents"], batch["abroad"]])
        risk = self.model.predict_proba(features)[:, 1]
        return pa.record_batch({"id": batch["id"], "risk": risk.round(3)})


pipeline = Pipeline("payments-scored")
(
    pipeline
    .source("payments", KafkaSource("payments", value=Payment))
    .map_batches(Model, schema=Scored, id="model", on_error=DeadLetters("payments-dead"))
    .sink("scored", KafkaSink("payments-scored", key=lambda scored: str(scored.id)))
)  # fmt: skip
