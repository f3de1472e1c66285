"""The pipeline on a broker in memory, with a crash at every step: `pytest`, of `pip install pytest`."""

from exactlyonce.testing import assert_exactly_once
from pipeline import Order, Total, pipeline


def test_each_order_counts_once() -> None:
    assert_exactly_once(
        pipeline,
        inputs={"orders": [Order(1, "ann", 3), Order(2, "bob", 5), Order(3, "ann", 0), Order(4, "ann", 4)]},
        expected={"out": [Total("ann", 3), Total("bob", 5), Total("ann", 7)]},
    )
