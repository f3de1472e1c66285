"""Contract tests, to inherit from, for a block storage: the behaviour that checkpoints and restarts rely on.

Each test is a case, told in its docstring, that has lost a checkpoint or leaked blocks; its failure says what the
storage does wrong.

```python
from exactlyonce.testing.storage_contract import BlockStorageContract

class TestMyStorage(BlockStorageContract):
    beginning = (0,)

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def storage(self):
        return FolderStorage(self.folder)
```

May import what `testing` may import.
"""

from exactlyonce.testing.storage_contract.storages import BlockStorageContract

__all__ = ["BlockStorageContract"]
