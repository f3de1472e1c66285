"""The description of a write-ahead sink."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from exactlyonce.pipeline.sink import Sink
from exactlyonce.sinks.write_ahead.store import Store

T = TypeVar("T")


class WriteAheadSink(Sink[T]):
    """A sink whose rows wait in the checkpoint topic until their checkpoint is decided; see the package."""

    @abstractmethod
    def store(self, type_: Any) -> Store:
        """A connection for rows of this type, not open yet."""
