"""Planted defects of joins of tables by a foreign key: versions, and the answers to them."""

from __future__ import annotations

from typing import Any

import msgspec
from planting import in_place_of, mutant

from exactlyonce.engines.runtime.foreign_key_operators import Resolver
from exactlyonce.pipeline.keys import key_groups

JOIN = r"is not the join of the rows before Sn|is of a row"
"""A result of other rows, or one too few or too many."""


@mutant("a late answer of a foreign key of before counts", JOIN, luck="joins", shape="foreign-key-left")
@in_place_of(Resolver, "right")
def _late_answers(real: Any, self: Resolver, batch: Any) -> None:
    states = self._read(batch.keys, key_groups(batch.keys, self.max_parallelism))
    present = [
        answer if (state := states[row]) is None or state[1] is None or answer.version > state[0]
        else msgspec.structs.replace(answer, version=state[0])
        for row, answer in zip(batch.keys, batch.records, strict=True)
    ]  # fmt: skip
    real(self, batch.of(present))
