"""Order logs: in which order a subtask took the batches of its inputs, so that a replay takes them likewise."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

_encode = msgspec.msgpack.Encoder().encode


@dataclass
class OrderRuns:
    """In which order a subtask took its inputs' batches: run lengths, cut at every barrier."""

    inputs: dict[tuple[str, int], int] = field(default_factory=dict)
    runs: list[int] = field(default_factory=list)
    """Flat: input, count, input, count ..."""

    def note(self, name: str, partition: int, count: int) -> None:
        """*count* records were taken from *partition* of input *name*."""
        place = self.inputs.setdefault((name, partition), len(self.inputs))
        if self.runs and self.runs[-2] == place:
            self.runs[-1] += count
        else:
            self.runs += (place, count)

    def cut(self) -> bytes:
        """The runs since the last cut, encoded."""
        body = _encode((list(self.inputs), self.runs))
        self.runs = []
        return body
