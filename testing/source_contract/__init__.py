"""The contract of a source, as a test class to inherit from: what barriers, restarts and bounded work rely upon.

Each test is a way in which somebody's source has lost or doubled records; its docstring tells it, and what it says when
it fails is what the source's author did wrong. Records are texts; what else the source needs the hooks say.

```python
from exactlyonce.testing.source_contract import SourceContract

class TestMySource(SourceContract):
    def source(self):
        return MySource(self.place, value=str)

    def append(self, split, texts):
        self.place.write(split, texts)
```

May import what `testing` may import.
"""

from exactlyonce.testing.source_contract.sources import SourceContract

__all__ = ["SourceContract"]
