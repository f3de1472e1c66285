"""Order logs: in which order a subtask took the batches of its inputs, so that a replay takes them likewise.

    part = msgpack array: inputs as (name, partition), then flat: input, count, input, count ...

A log is as many parts as it takes to keep each under `PART_SIZE_MAX` bytes; each is a block, read in their order.
A source's counts are of messages, also of those that are skipped; a channel's are of records. Where it matters what
was taken together (see `engines.plan.rejoins`), each batch ends with a count of 0.
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
    """In which order a subtask took its inputs' batches: run lengths, cut at every barrier."""

    batches: bool = False
    """Whether to tell where each batch ends."""
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
        """What was noted since the last call was taken together."""
        if self.batches and self.runs and self.runs[-1]:
            self.runs += (self.runs[-2], 0)

    def cut(self, *, exact: bool = True) -> tuple[bytes, ...]:
        """The runs since the last cut, encoded: the parts of the log, one at least.

        *exact*: whether they are of what lies between two barriers.
        """
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
    """For a subtask that has, or may get, *several* channels and partitions; None where there is only one order."""
    batches = rejoins(task, shuffles)
    return OrderRuns(batches) if batches or several else None


def runs_of(logs: Iterable[bytes]) -> Iterator[tuple[tuple[str, int], int]]:
    """((input, partition), count) of the parts of logs that follow each other; a count of 0 ends a batch."""
    for log in logs:
        inputs, flat = _decoder.decode(log)
        for place, count in zip(flat[::2], flat[1::2], strict=True):
            yield inputs[place], count
