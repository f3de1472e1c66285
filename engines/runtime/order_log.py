"""Order logs: the order in which a subtask took the batches of its inputs, for a replay.

    part = msgpack array: inputs as (name, partition), then flat: input, count, input, count ...

Each part is a block of at most `PART_SIZE_MAX` bytes. A source's counts are of messages, with skipped ones; a
channel's are of records. If the batches matter (see `engines.plan.rejoins`), each ends with a count of 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from exactlyonce.engines.plan import ShuffleEdge, Task, rejoins

PART_SIZE_MAX = 512 * 1024
INEXACT = ("", -2)

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(tuple[list[tuple[str, int]], list[int]])


@dataclass
class OrderRuns:
    """The order of a subtask's batches as run lengths, cut at every barrier."""

    batches: bool = False
    """Whether to note the end of each batch."""
    inputs: dict[tuple[str, int], int] = field(default_factory=dict)
    runs: list[int] = field(default_factory=list)
    """Flat: input, count, input, count ..."""

    def note(self, name: str, partition: int, count: int) -> None:
        """*count* records were taken from *partition* of input *name*."""
        place = self.inputs.setdefault((name, partition), len(self.inputs))
        if self.runs and self.runs[-2] == place and self.runs[-1]:
            self.runs[-1] += count
        elif count:
            self.runs += (place, count)

    def end_batch(self) -> None:
        """Everything noted since the last call was one batch."""
        if self.batches and self.runs and self.runs[-1]:
            self.runs += (self.runs[-2], 0)

    def cut(self, *, exact: bool = True) -> tuple[bytes, ...]:
        """The encoded runs since the last cut: one part at least. *exact*: they are those between two barriers."""
        runs, self.runs = self.runs, []
        return tuple(_parts(list(self.inputs), runs) if exact else _parts([INEXACT], [0, 1]))


def _parts(inputs: list[tuple[str, int]], runs: list[int]) -> Iterator[bytes]:
    part = _encode((inputs, runs))
    if len(part) <= PART_SIZE_MAX or len(runs) <= 2:
        yield part
        return
    middle = len(runs) // 4 * 2
    yield from _parts(inputs, runs[:middle])
    yield from _parts(inputs, runs[middle:])


def order_runs(task: Task, shuffles: Iterable[ShuffleEdge], *, several: bool) -> OrderRuns | None:
    """The `OrderRuns` of a subtask; None if only one order is possible. *several*: it may have several inputs."""
    batches = rejoins(task, shuffles)
    return OrderRuns(batches) if batches or several else None


def runs_of(logs: Iterable[bytes]) -> Iterator[tuple[tuple[str, int], int]]:
    """((input, partition), count) of consecutive *logs*; a count of 0 ends a batch."""
    for log in logs:
        inputs, flat = _decoder.decode(log)
        for place, count in zip(flat[::2], flat[1::2], strict=True):
            yield inputs[place], count
