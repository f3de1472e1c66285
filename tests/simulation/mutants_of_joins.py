"""Planted defects of joins: versions of rows, and the answers to them; entries of an interval, and their partners."""

from __future__ import annotations

from typing import Any

import msgspec
from planting import in_place_of, mutant

from exactlyonce.engines.runtime.foreign_key_operators import Resolver
from exactlyonce.engines.runtime.join_operators import IntervalJoiner
from exactlyonce.pipeline.keys import key_groups

JOIN = r"is not the join of the rows before Sn|is of a row"
"""A result of other rows, or one too few or too many."""
PAIRS = r"lacks \d+ pairs"
ALONE = r"has a partner|without a partner"
AGAIN = r"comes again while it stands"
IN_TIME = r"which is late or has another key"


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


@mutant("each result of a foreign key is given twice", AGAIN, luck="joins", shape="foreign-key")
@in_place_of(Resolver, "_push")
def _twice(real: Any, self: Resolver, batch: Any, pairs: Any, places: Any) -> None:
    given = [(pair, place) for pair, place in zip(pairs, places, strict=True) for _ in range(2 if pair else 1)]
    real(self, batch, [pair for pair, _ in given], [place for _, place in given])


@mutant("a barrier leaves entries of an interval in memory alone", PAIRS, luck="windows", shape="pairs")
@in_place_of(IntervalJoiner, "settle")
def _unsettled(real: Any, self: IntervalJoiner) -> None:
    """As if they would still be there."""


@mutant("an entry of an interval goes while its partners may come", PAIRS, luck="windows", shape="pairs")
@in_place_of(IntervalJoiner, "_over")
def _over_too_soon(real: Any, self: IntervalJoiner, side: int) -> int:
    return int(real(self, side)) + 2 * self._after[side]


@mutant("an entry with a partner is written without", ALONE, luck="windows", shape="pairs-full")
@in_place_of(IntervalJoiner, "_write")
def _partner_forgotten(real: Any, self: IntervalJoiner, side: int, keys: Any, times: Any, records: Any, _: Any) -> None:
    real(self, side, keys, times, records, ())


@mutant("late records are joined with what is there", IN_TIME, luck="windows", shape="pairs")
@in_place_of(IntervalJoiner, "in_time")
def _late_pairs(real: Any, self: IntervalJoiner, batch: Any, **_: Any) -> Any:
    return batch
