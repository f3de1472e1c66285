"""Contract tests, to inherit from, for a source: the behaviour that barriers, restarts and bounded work rely on.

Each test is a way, told in its docstring, in which some source has lost or doubled records; its failure says what the
source does wrong. Records are texts.

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
