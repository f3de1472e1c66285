"""Planted defects of what may wait: rules without which more and more records wait somewhere, or checkpoints do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

from planting import CROWDED, LATE, OVERLOADED, in_place_of, mutant

from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.engines.local.inputs import ChannelInput, Outlet, PacedInput
from exactlyonce.engines.local.task import Subtask
from exactlyonce.sinks.kafka.writer import ProducingWriter

LOAD = "constant load"
RESTARTED = r"attempt \d+ begins, and \d+ crashes were caused"
MANY = 1_000_000


def _granted(self: ChannelInput, window: int) -> None:
    self.window = window
    self.channel.took(0, 0 if self.closed else window)


@mutant("a channel holds what its writer has", OVERLOADED, shape="two-shuffles", luck=LOAD)
@in_place_of(ChannelInput, "processed")
def _unbounded(real: Any, self: ChannelInput) -> None:
    real(self)
    _granted(self, MANY)


@mutant("a window counts only the work of its reader", OVERLOADED, shape="two-shuffles", luck=LOAD, first=3)
@in_place_of(ChannelInput, "processed")
def _own_work(real: Any, self: ChannelInput) -> None:
    real(self)
    cost_s = self.slices.pace._cost_s
    _granted(self, int(self.bounds.in_flight_s / cost_s) if cost_s else MANY)


@mutant("a checkpoint is late after a tenth of its timeout", RESTARTED, shape="two-shuffles", luck=LOAD, first=9)
@in_place_of(Coordinator, "__init__")
def _soon_late(real: Any, self: Coordinator, *given: Any, **named: Any) -> None:
    real(self, *given, **named)
    self.timeout_ms //= 10


mutant(
    "a sink takes what there is", OVERLOADED, patch.object(ProducingWriter, "room", MANY), shape="one-shuffle",
    luck=LOAD, first=6,
)  # fmt: skip
mutant(
    "a subtask does not ask what is behind it for room", OVERLOADED, patch.object(Outlet, "room", MANY),
    shape="two-shuffles", luck=LOAD,
)  # fmt: skip
mutant(
    "the head of a crowded loop leaves its channels open", CROWDED,
    patch.object(ChannelInput, "close", lambda self, closed: None), shape="retry", luck=LOAD,
)  # fmt: skip
mutant(
    "the head of a crowded loop takes what is new", CROWDED, patch.object(Subtask, "_has_too_much", False),
    shape="retry", luck=LOAD,
)  # fmt: skip


@mutant("the head of a crowded loop takes nothing before a barrier", LATE, shape="retry", luck=LOAD)
@in_place_of(Subtask, "_in_turn")
def _shut(real: Any, self: Subtask, rounds: Sequence[PacedInput], *, crowded: bool) -> Iterable[PacedInput]:
    return rounds if crowded else real(self, rounds, crowded=crowded)
