"""Calls of a function with Arrow batches of records, as data: `Stream.map_batches`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from exactlyonce.pipeline import hints
from exactlyonce.pipeline.columns import columns_or_value
from exactlyonce.pipeline.shape import UnsupportedType
from exactlyonce.pipeline.sizes import counted, is_count

ROW = "row"
"""The column of a returned batch that has the place of the record, from 0, that each row stems from."""


@dataclass(frozen=True)
class BatchCalls:
    """How the function of `Stream.map_batches` is called."""

    max_rows: int
    """The most records of a call."""
    schema: Any = None
    """The `pyarrow.Schema` of the outputs; None: it follows from their type."""

    def problems(self, taken: Any, given: Any) -> Iterator[str]:
        """The mistakes, each with its remedy, where records of the type *taken* become others of the type *given*."""
        if not is_count(self.max_rows):
            yield f"max_rows={self.max_rows!r} must be 1 or more"
        for type_, subject in ((taken, "the records are columns of a batch"), (given, "schema= has the columns")):
            if type_ is hints.UNKNOWN:
                continue
            try:
                names = [column.field.name for column in columns_or_value(type_)]
            except UnsupportedType as error:
                yield f"{subject}, and {error}"
                continue
            if ROW in names:
                yield (
                    f"{subject}, and one is named {ROW!r}, as the column that says which record a row stems from: give "
                    f"the field another name"
                )

    def __str__(self) -> str:
        return f"{counted(self.max_rows, 'row')} a call"
