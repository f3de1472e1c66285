"""Planted defects of unaligned checkpoints: what is captured, what is restored first, and how it is counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import msgspec
from planting import COUNT, DISORDER, OPEN, STATE, TOMBSTONED, TWICE, Table, unchecked, unfitting

from exactlyonce.checkpoint import decision_log, references
from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.events import Trigger
from exactlyonce.checkpoint.records.manifest import ChannelLog, Manifest
from exactlyonce.engines import in_flight
from exactlyonce.engines.local.channels import BarrierFrame, Capture, SocketChannel
from exactlyonce.engines.local.inputs import ChannelCapture, ChannelInput, RestoredInput
from exactlyonce.engines.local.task import Subtask
from exactlyonce.state.errors import DamagedState

OVERTAKING = Table()
"""By name."""
mutant = OVERTAKING.mutant
TWICE_ON_ITS_WAY = "is twice on its way to"
UNALIGNED, REPLAYS = "unaligned", "unaligned replays"


# --- what is captured -----------------------------------------------------------------------------------------------


@mutant("what comes before the barrier is not captured", STATE + "|" + COUNT, luck=UNALIGNED)
def _dropped() -> Iterable[Any]:
    real = Capture.arrived

    def arrived(self: Capture, frame: Any) -> None:
        real(self, frame)
        self.frames.clear()

    yield patch.object(Capture, "arrived", arrived)


@mutant("what comes before the barrier is captured twice", TWICE_ON_ITS_WAY, luck=UNALIGNED)
def _twice() -> Iterable[Any]:
    real = Capture.arrived

    def arrived(self: Capture, frame: Any) -> None:
        real(self, frame)
        if isinstance(frame, bytes):
            real(self, frame)

    yield patch.object(Capture, "arrived", arrived)


@mutant("what its sender had not sent is not captured", STATE + "|" + COUNT, luck=UNALIGNED)
def _unsent() -> Iterable[Any]:
    real = SocketChannel.send_barrier

    def send_barrier(self: SocketChannel, barrier: BarrierFrame) -> None:
        unsent = [self._outbox.pop() for _ in range(len(self._outbox) - 1)]  # of the first, some may be sent
        real(self, barrier)
        self._outbox.extend(reversed(unsent))

    yield patch.object(SocketChannel, "send_barrier", send_barrier)


@mutant("the rest of a frame that is being taken is not captured", STATE + "|" + COUNT, luck=UNALIGNED)
def _rest() -> Iterable[Any]:
    real = ChannelInput.capture

    def capture(self: ChannelInput, checkpoint: int) -> ChannelCapture:
        found = real(self, checkpoint)
        found.begun.clear()
        return found

    yield patch.object(ChannelInput, "capture", capture)


@mutant("what was taken last is captured too", STATE + "|" + COUNT + "|" + TWICE_ON_ITS_WAY, luck=UNALIGNED)
def _taken() -> Iterable[Any]:
    real, real_next = ChannelInput.capture, ChannelInput.next
    taken: dict[int, Any] = {}

    def following(self: ChannelInput, *arguments: Any, **options: Any) -> Any:
        item = real_next(self, *arguments, **options)
        if item is not None:
            taken[id(self)] = item
        return item

    def capture(self: ChannelInput, checkpoint: int) -> ChannelCapture:
        found, last = real(self, checkpoint), taken.get(id(self))
        if last is not None and not isinstance(last, BarrierFrame):
            found.begun.insert(0, self.codec.encode(last))
        return found

    yield patch.object(ChannelInput, "next", following)
    yield patch.object(ChannelInput, "capture", capture)


@mutant("a capture ends at whichever barrier comes", STATE + "|" + COUNT, luck="crowded", first=102)
def _any_barrier() -> Iterable[Any]:
    def arrived(self: Capture, frame: Any) -> None:
        if isinstance(frame, bytes):
            self.frames.append(frame)
        else:
            self.whole = True

    yield patch.object(Capture, "arrived", arrived)


@mutant("a subtask acknowledges before its captures are whole", STATE + "|" + COUNT, luck=UNALIGNED)
def _early() -> Iterable[Any]:
    yield patch.object(ChannelCapture, "whole", True)


@mutant(
    "the capture of an aborted checkpoint leaks into the next",
    STATE + "|" + COUNT + "|" + TWICE_ON_ITS_WAY,
    luck="crowded",
)
def _leaking() -> Iterable[Any]:
    real, real_overtake = ChannelInput.capture, Subtask._overtake
    captured: dict[int, ChannelCapture] = {}
    bases: list[int] = []

    def overtake(self: Subtask, frame: BarrierFrame) -> None:
        bases[:] = [frame.base]
        real_overtake(self, frame)

    def capture(self: ChannelInput, checkpoint: int) -> ChannelCapture:
        found, before = real(self, checkpoint), captured.get(id(self))
        if before is not None and before.behind.checkpoint > bases[0]:
            found.begun[:0] = [each.frame for each in before.frames()]
        captured[id(self)] = found
        return found

    yield patch.object(Subtask, "_overtake", overtake)
    yield patch.object(ChannelInput, "capture", capture)


@mutant("what is restored and not yet taken is not captured again", STATE + "|" + COUNT, luck="crowded", first=20)
def _restored_once() -> Iterable[Any]:
    def left(self: RestoredInput) -> list[Any]:
        return []

    yield patch.object(RestoredInput, "left", left)


@mutant("the last barrier before a clean end overtakes", r"checkpoint \d+ is aligned|" + OPEN, luck="unaligned stops")
def _final() -> Iterable[Any]:
    real = Coordinator._trigger

    def trigger(self: Coordinator, now_ms: int) -> list[Any]:
        effects = real(self, now_ms)
        hasty = [msgspec.structs.replace(each, overtakes_after_ms=0) for each in effects if isinstance(each, Trigger)]
        return hasty or effects

    yield patch.object(Coordinator, "_trigger", trigger)


@mutant("a barrier that must be aligned overtakes", r"checkpoint \d+ is aligned|" + OPEN, luck="savepoints between")
def _never_aligned() -> Iterable[Any]:
    real = Subtask.triggered

    def triggered(self: Subtask, frame: BarrierFrame, overtakes_s: float | None, *, final: bool = False) -> None:
        real(self, frame, 0.0, final=final)

    yield patch.object(Subtask, "triggered", triggered)


@mutant("blocks of what was on its way are not kept", TOMBSTONED, luck=UNALIGNED)
def _unnamed() -> Iterable[Any]:
    real = references.named_by

    def named_by(manifest: Manifest) -> Iterator[Any]:
        return real(msgspec.structs.replace(manifest, channel_logs=()))

    yield patch.object(references, "named_by", named_by)
    yield unchecked(decision_log, "A block that a manifest names")


@mutant("blocks that a list of what was on its way has are not kept", TOMBSTONED, luck=UNALIGNED)
def _unlisted() -> Iterable[Any]:
    real = references.listed_by

    def listed_by(plan: Any) -> Iterator[Any]:
        acks = {who: msgspec.structs.replace(ack, on_their_way=()) for who, ack in plan.acks.items()}
        return real(cast(Any, SimpleNamespace(acks=acks, staged=plan.staged)))

    yield patch.object(references, "listed_by", listed_by)


@mutant("only the first of several lists of what was on its way is read", STATE + "|" + COUNT, luck=UNALIGNED)
def _first_list() -> Iterable[Any]:
    real, real_decode = in_flight.blocks_of, in_flight.decode

    def blocks_of(log: ChannelLog, reader: Any) -> Any:
        return real(msgspec.structs.replace(log, blocks=log.blocks[:1]) if log.indexed else log, reader)

    def decode(bodies: Iterable[bytes]) -> Iterator[Any]:
        with suppress(DamagedState):  # a frame that is cut off would be noticed
            yield from real_decode(bodies)

    yield patch.object(in_flight, "blocks_of", blocks_of)
    yield patch.object(in_flight, "decode", decode)


# --- what is restored -----------------------------------------------------------------------------------------------


@mutant("what was on its way is taken after what is new", DISORDER, luck=UNALIGNED, first=7)
def _late() -> Iterable[Any]:
    real = Subtask.step

    def step(self: Subtask) -> bool:
        restored, self.restored = self.restored, None
        moved = real(self)
        self.restored = restored
        return moved or (restored is not None and real(self))

    yield patch.object(Subtask, "step", step)


@mutant("a subtask restores only what was on its way to the one of its number", STATE + "|" + COUNT, luck=UNALIGNED)
def _own_number() -> Iterable[Any]:
    real = in_flight.restored

    def restored(manifest: Manifest, graph: Any, subtask: int, *arguments: Any) -> Any:
        logs = tuple(each for each in manifest.channel_logs if each.subtask == subtask)
        return real(msgspec.structs.replace(manifest, channel_logs=logs), graph, subtask, *arguments)

    yield patch.object(in_flight, "restored", restored)


@mutant("what is dealt anew is dealt twice", STATE + "|" + COUNT + "|" + TWICE_ON_ITS_WAY, luck=UNALIGNED)
def _dealt_twice() -> Iterable[Any]:
    real = in_flight.restored

    def restored(manifest: Manifest, graph: Any, subtask: int, parallelism: int, reader: Any) -> Any:
        found = real(manifest, graph, subtask, parallelism, reader)
        return found if parallelism == manifest.parallelism else found + found

    yield patch.object(in_flight, "restored", restored)


@mutant("what was on its way is taken from the sources on", DISORDER, "shuffles", luck=UNALIGNED)
def _upstream_first() -> Iterable[Any]:
    real = in_flight.restored

    def restored(manifest: Any, graph: Any, *arguments: Any) -> Any:
        places = {node.id: place for place, node in enumerate(graph.nodes)}
        found = real(manifest, graph, *arguments)
        return sorted(found, key=lambda each: places[each.edge.partition(">")[2]])

    yield patch.object(in_flight, "restored", restored)


@mutant("the order log does not count what was on its way", DISORDER + "|" + TWICE, "union", luck=REPLAYS, first=13)
def _uncounted() -> Iterable[Any]:
    real = Subtask._process

    def process(self: Subtask, source: Any, batch: Any) -> None:
        order = self.order
        if isinstance(source, RestoredInput):
            self.order = None
        real(self, source, batch)
        self.order = order

    yield patch.object(Subtask, "_process", process)
    yield unfitting()
