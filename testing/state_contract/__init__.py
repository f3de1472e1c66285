"""Contract tests, to inherit from, for a state backend: the behaviour that operators, snapshots and restarts rely on.

Each test is a history, told in its docstring, that has lost or changed state; its failure says what the backend does
wrong. Blocks are in memory, no Kafka is needed.

```python
from exactlyonce.testing.state_contract import StateBackendContract

class TestMyBackend(StateBackendContract):
    def backend(self):
        return MyBackend(budget_bytes=1 << 20)
```

May import what `testing` may import.
"""

from exactlyonce.testing.state_contract.backends import StateBackendContract

__all__ = ["StateBackendContract"]
