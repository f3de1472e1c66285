"""Planted defects of in-flight records: those that barriers overtake, and those that go round a loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
from planting import (
    DISORDER,
    OPEN,
    REPEATED,
    STUCK,
    TOMBSTONED,
    TWICE_ON_ITS_WAY,
    WRONG,
    in_place_of,
    mutant,
    unchecked,
    unfitting,
)

from exactlyonce.checkpoint import decision_log, events
from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.engines.local.channels import LoopChannel, SocketChannel
from exactlyonce.engines.local.inputs import ChannelInput, FeedbackInput, RestoredInput
from exactlyonce.engines.local.task import Subtask
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.cut import InFlightCapture
from exactlyonce.engines.runtime.watermarks import Barrier

UNALIGNED, REPLAYS, CYCLES = "unaligned", "unaligned replays", "cycles"


# --- what is captured -----------------------------------------------------------------------------------------------


@mutant("what comes before the barrier is not captured", WRONG, luck=UNALIGNED, first=7)
@in_place_of(InFlightCapture, "arrived")
def _dropped(real: Any, self: InFlightCapture, frame: Any) -> None:
    real(self, frame)
    self.sent.clear()


@mutant("what its sender had not sent is not captured", WRONG, luck=UNALIGNED, first=11)
@in_place_of(SocketChannel, "send_signal")
def _unsent(real: Any, self: SocketChannel, barrier: Barrier) -> None:
    unsent = [self._outbox.pop() for _ in range(len(self._outbox) - 1)]  # of the first, some may be sent
    real(self, barrier)
    self._outbox.extend(reversed(unsent))


@mutant("the rest of a frame that is being taken is not captured", WRONG, luck=UNALIGNED)
@in_place_of(ChannelInput, "capture")
def _rest(real: Any, self: ChannelInput, checkpoint: int) -> Any:
    found = real(self, checkpoint)
    found.begun.clear()
    return found


@mutant("a capture ends at whichever barrier comes", WRONG, luck="crowded", first=102)
@in_place_of(InFlightCapture, "arrived")
def _any_barrier(real: Any, self: InFlightCapture, frame: Any) -> None:
    if isinstance(frame, bytes):
        self.sent.append(frame)
    else:
        self.whole = True


@mutant("a subtask acknowledges before its captures are whole", WRONG, luck=UNALIGNED)
@in_place_of(Subtask, "_captures")
def _acknowledged_early(real: Any, self: Subtask, owing: Any, checkpoint: int) -> Any:
    return [SimpleNamespace(whole=True, frames=each.frames) for each in real(self, owing, checkpoint)]


@mutant("what is restored and not yet taken is not captured again", WRONG, luck="crowded", first=20)
@in_place_of(RestoredInput, "left")
def _restored_once(real: Any, self: RestoredInput) -> Any:
    return []


@mutant("a barrier that must be aligned overtakes", r"checkpoint \d+ is aligned|" + OPEN, luck="savepoints between")
@in_place_of(Subtask, "triggered")
def _never_aligned(real: Any, self: Subtask, frame: Barrier, overtakes_s: float | None, **how: bool) -> None:
    real(self, frame, 0.0, **how)


@mutant("blocks of what was on its way are not kept", TOMBSTONED, luck=UNALIGNED, first=2)
@in_place_of(events, "named_by", unchecked(decision_log, "A block that a manifest names"))
def _unnamed(real: Any, manifest: Manifest) -> Any:
    return real(msgspec.structs.replace(manifest, channel_logs=()))


# --- what is restored -----------------------------------------------------------------------------------------------


@mutant("what was on its way is taken after what is new", DISORDER, luck=UNALIGNED, first=11)
@in_place_of(Subtask, "step")
def _late(real: Any, self: Subtask, **options: Any) -> Any:
    restored, self.restored = self.restored, None
    moved = real(self, **options)
    self.restored = restored
    return moved or (restored is not None and real(self, **options))


@mutant("a subtask restores only what was on its way to the one of its number", WRONG, luck=UNALIGNED, first=2)
@in_place_of(in_flight, "restored")
def _own_number(real: Any, manifest: Manifest, graph: Any, subtask: int, *arguments: Any) -> Any:
    logs = tuple(each for each in manifest.channel_logs if each.subtask == subtask)
    return real(msgspec.structs.replace(manifest, channel_logs=logs), graph, subtask, *arguments)


@mutant("what is dealt anew is dealt twice", f"{WRONG}|{TWICE_ON_ITS_WAY}", luck=UNALIGNED, first=2)
@in_place_of(in_flight, "restored")
def _dealt_twice(real: Any, manifest: Manifest, graph: Any, subtask: int, parallelism: int, *arguments: Any) -> Any:
    found = real(manifest, graph, subtask, parallelism, *arguments)
    return found if parallelism == manifest.parallelism else found + found


@mutant("what was on its way is taken from the sources on", DISORDER, shape="shuffles", luck=UNALIGNED)
@in_place_of(in_flight, "restored")
def _upstream_first(real: Any, manifest: Any, graph: Any, *arguments: Any) -> Any:
    places = {node.id: place for place, node in enumerate(graph.nodes)}
    found = real(manifest, graph, *arguments)
    return sorted(found, key=lambda each: places[each.edge.split(">")[1]])


@mutant("the order log does not count what was on its way", REPEATED, shape="union", luck=REPLAYS, first=13)
@in_place_of(Subtask, "_process", unfitting())
def _uncounted(real: Any, self: Subtask, source: Any, batch: Any) -> None:
    order = self.operators.order
    if isinstance(source, RestoredInput):
        self.operators.order = None
    real(self, source, batch)
    self.operators.order = order


# --- loops ------------------------------------------------------------------------------------------------------------


@mutant("what goes round is in no checkpoint", WRONG, shape="cycle", luck=CYCLES)
@in_place_of(Subtask, "_captures")
def _no_log(real: Any, self: Subtask, owing: Any, checkpoint: int) -> Any:
    return []


@mutant("what rests in a loop at a snapshot is not captured", WRONG, shape="cycle", luck=CYCLES)
@in_place_of(FeedbackInput, "capture")
def _resting(real: Any, self: FeedbackInput, checkpoint: int) -> Any:
    found = real(self, checkpoint)
    found.sent.clear()
    return found


@mutant("what comes round behind a snapshot is not captured", WRONG, shape="cycle", luck=CYCLES)
@in_place_of(FeedbackInput, "capture")
def _behind(real: Any, self: FeedbackInput, checkpoint: int) -> Any:
    found = real(self, checkpoint)
    return InFlightCapture(found.name, checkpoint, found.begun, [*found.sent], whole=True)


@mutant(
    "feedback ahead of the snapshot is not held back", f"{WRONG}|is on its way before it is read", shape="mutual",
    luck=CYCLES, first=20,
)  # fmt: skip
@in_place_of(Alignment, "is_held")
def _ahead(real: Any, self: Alignment, source: Any) -> Any:
    return source in self._ordinary and real(self, source)


@mutant("the end does not wait for loops", "ends while records go round", shape="cycle", luck=CYCLES)
@in_place_of(Coordinator, "__init__")
def _early_end(real: Any, self: Coordinator, *arguments: Any, **options: Any) -> None:
    real(self, *arguments, **options | {"loops": False})


@mutant("loops go on behind the last barrier", OPEN, shape="cycle", luck=CYCLES)
@in_place_of(Subtask, "triggered")
def _after_the_last(real: Any, self: Subtask, frame: Any, overtakes_s: float | None, **how: bool) -> None:
    real(self, frame, overtakes_s)


@mutant("the barrier does not go into the loop", STUCK, shape="cycle", luck=CYCLES)
@in_place_of(LoopChannel, "send_signal")
def _no_barrier(real: Any, self: LoopChannel, barrier: Any) -> None:
    pass
