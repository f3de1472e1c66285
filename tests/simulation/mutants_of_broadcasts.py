"""Planted defects of tables whose rows all subtasks have."""

from __future__ import annotations

from typing import Any

from planting import in_place_of, mutant

from exactlyonce.engines.local.task import Subtask
from exactlyonce.engines.runtime.assembler import Assembler
from exactlyonce.engines.runtime.operators import Shuffle, ToAll

OLD = r"was decided before it|is gone, which nothing has deleted|lacks .* before the manifest of its deletion"


@mutant("a subtask begins with the rows of its own keys", OLD, shape="rules", luck="unaligned")
@in_place_of(Assembler, "_stored")
def _own_rows(real: Any, self: Assembler, node: Any, groups: Any = None) -> Any:
    return real(self, node)


@mutant("changes of rows go to the subtask of their key", OLD, shape="rules", luck="unaligned")
@in_place_of(ToAll, "__call__")
def _by_key(real: Any, self: ToAll, batch: Any) -> None:
    Shuffle.__call__(self, batch)


@mutant("barriers overtake changes of rows", "a row of all subtasks is on its way", shape="rules", luck="unaligned")
@in_place_of(Subtask, "_waits_for_all")
def _overtaken(real: Any, self: Subtask, checkpoint: int) -> bool:
    return False
