"""The contract of a block storage, as a test class to inherit from: what checkpoints and restarts rely upon.

Each test is a case that has lost a checkpoint or kept what nobody needs; its docstring tells it, and what it says when
it fails is what the storage's author did wrong.

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
