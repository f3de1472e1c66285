"""Sources with a script of records and crashes: `[1, 2, CRASH, 3]`.

`script_topic` writes the script into a topic; `crash_once` is the step of the pipeline that reads it. The first process
that meets a `CRASH` is killed by SIGKILL; after the restart it is skipped. A file keeps the crashes that have fired, so
that a test can assert that they took place.

```python
# numbers.py
def pipeline(name: str) -> Pipeline:
    pipeline = Pipeline(name)
    script = pipeline.source("numbers", KafkaSource(f"{name}-in", value=bytes))
    numbers = script.flat_map(crash_once(f"{name}.fired", int))
    numbers.key_by(lambda number: number % 2).stateful_map("sums", add).sink("out", KafkaSink(f"{name}-out"))
    return pipeline

# the test
script_topic(kafka, f"{name}-in", [1, 2, CRASH, 3])
...
assert fired(f"{name}.fired") == [2]
```
Do not use it with `--inline`, where the test's own process would be killed.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from exactlyonce.testing.cluster import KafkaCluster

T = TypeVar("T")

_MARK = b"CRASH "


class Crash(enum.Enum):
    """The type of `CRASH`."""

    CRASH = "crash"


CRASH = Crash.CRASH
"""A place in a script where a process is killed."""


def script_topic(kafka: KafkaCluster, topic: str, script: Sequence[Any]) -> str:
    """Create *topic* with one partition that holds *script*, values as JSON; returns its name."""
    kafka.create_topic(topic)
    kafka.produce(topic, [_encoded(step, position) for position, step in enumerate(script)], partition=0)
    return topic


def crash_once(path: str | os.PathLike[str], type_: type[T]) -> Callable[[bytes], list[T]]:
    """A function for `flat_map` that decodes a script's values as *type_*; each CRASH kills the process once.

    *path* is the file of the crashes that have fired; it must be the same in every process.
    """

    def crash(record: bytes) -> list[T]:
        if not record.startswith(_MARK):
            return [msgspec.json.decode(record, type=type_)]
        position = int(record.removeprefix(_MARK))
        if position not in fired(path):
            _remember(path, position)
            os.kill(os.getpid(), signal.SIGKILL)
        return []

    crash.__annotations__ = {"record": bytes, "return": list[type_]}  # type: ignore[valid-type]  # known at run time
    return crash


def fired(path: str | os.PathLike[str]) -> list[int]:
    """The positions in the script of the crashes that have killed a process, in that order."""
    file = Path(path)
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def _encoded(step: Any, position: int) -> bytes:
    return _MARK + str(position).encode() if step is CRASH else msgspec.json.encode(step)


def _remember(path: str | os.PathLike[str], position: int) -> None:
    with open(path, "a") as file:
        file.write(f"{position}\n")
        file.flush()
        os.fsync(file.fileno())
