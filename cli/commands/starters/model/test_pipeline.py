"""The pipeline on a broker in memory, with a crash at every step: `pytest`, of `pip install pytest`."""

import pyarrow as pa
from train import train

from exactlyonce import Context
from exactlyonce.testing import assert_exactly_once
from pipeline import Model, Payment, Scored, pipeline


def test_each_payment_is_scored_once() -> None:
    train()
    model = Model()
    model.open(Context("model", 0, 1))
    scores = model(pa.record_batch({"id": [1, 2], "cents": [2_000, 90_000], "abroad": [False, True]}))
    small, large = scores["risk"].to_pylist()
    assert small < 0.5 < large
    assert_exactly_once(
        pipeline,
        inputs={"payments": [Payment(1, 2_000, False), Payment(2, 90_000, True)]},
        expected={"scored": [Scored(1, small), Scored(2, large)]},
    )
