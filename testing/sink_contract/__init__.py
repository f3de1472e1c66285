"""Contract tests, to inherit from, for a sink whose output the leader commits to a store with a ledger.

`StoreContract` is for a store below a `WriteAheadSink`; `SinkContract`, a part of it, for a sink with its own writer
and committer. Each test is a schedule, told in its docstring, that has lost or doubled records of some sink. Its
failure says what the store does wrong and what readers would see. No Kafka is needed.

```python
from exactlyonce.testing.sink_contract import StoreContract

class TestMyStore(StoreContract):
    type = Order

    @pytest.fixture(autouse=True)
    def _path(self, tmp_path):
        self.path = tmp_path / "orders.db"

    def sink(self):
        return SqliteSink(self.path)

    def record(self, number, version=0):
        return Order(number, "ann", version)

    def read(self):
        return [Order(*row) for row in sqlite3.connect(self.path).execute("SELECT * FROM orders")]
```

May import what `testing` may import.
"""

from exactlyonce.testing.sink_contract.sinks import SinkContract
from exactlyonce.testing.sink_contract.stores import StoreContract

__all__ = ["SinkContract", "StoreContract"]
