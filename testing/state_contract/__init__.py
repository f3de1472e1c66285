"""The contract of a state backend, as a test class to inherit from: what operators, snapshots and restarts rely upon.

Each test is a history that has lost or changed somebody's state; its docstring tells it, and what it says when it fails
is what the backend's author did wrong. Blocks lie in memory, no Kafka is needed.

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
