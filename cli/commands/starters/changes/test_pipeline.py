"""The pipeline on a broker and a store in memory, with a crash at every step: `pytest`, of `pip install pytest`."""

from exactlyonce import Change, DebeziumCodec, KafkaSource
from exactlyonce.testing import assert_exactly_once
from pipeline import Customer, make

ANN, MOVED, BOB = Customer(1, "ann", "Ulm"), Customer(1, "ann", "Oslo"), Customer(2, "bob", None)
CHANGES = [
    Change("read", 1, ANN, None, "customers", 0, 1, None),
    Change("insert", 2, BOB, None, "customers", 7, 2, 2),
    Change("update", 1, MOVED, None, "customers", 8, 3, 3),
    Change("delete", 2, None, None, "customers", 9, 4, 4),
]


def test_each_change_comes_once() -> None:
    captured = KafkaSource("customers", value=DebeziumCodec(Customer, key="id"))
    assert_exactly_once(make(captured), inputs={"customers": CHANGES}, expected={"lake": CHANGES})
