"""Planted defects of in-flight records: those that barriers overtake, and those that go round a loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import msgspec
from planting import (
    DISORDER,
    LOST_OR_TWICE,
    OPEN,
    REPEATED,
    STUCK,
    TOMBSTONED,
    TWICE_ON_ITS_WAY,
    WRONG,
    in_place_of,
    mutant,
    replaced,
    unchecked,
    unfitting,
)

from exactlyonce.checkpoint import decision_log, leader, references
from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.events import Trigger
from exactlyonce.checkpoint.records.manifest import ChannelLog, Manifest
from exactlyonce.engines.local.channels import Capture, SocketChannel
from exactlyonce.engines.local.inputs import ChannelCapture, ChannelInput, RestoredInput
from exactlyonce.engines.local.loops import FeedbackInput, LoopChannel
from exactlyonce.engines.local.task import Subtask
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.signals import Barrier
from exactlyonce.state.errors import DamagedState

UNALIGNED, REPLAYS, CYCLES = "unaligned", "unaligned replays", "cycles"


# --- what is captured -----------------------------------------------------------------------------------------------


@mutant("what comes before the barrier is not captured", WRONG, luck=UNALIGNED, first=7)
@in_place_of(Capture, "arrived")
def _dropped(real: Any, self: Capture, frame: Any) -> None:
    real(self, frame)
    self.frames.clear()


@mutant("what comes before the barrier is captured twice", TWICE_ON_ITS_WAY, luck=UNALIGNED, first=2)
@in_place_of(Capture, "arrived")
def _twice(real: Any, self: Capture, frame: Any) -> None:
    real(self, frame)
    if isinstance(frame, bytes):
        real(self, frame)


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


@mutant("what was taken last is captured too", LOST_OR_TWICE, luck=UNALIGNED)
def _taken() -> Iterable[Any]:
    taken: dict[int, Any] = {}

    def following(real: Any, self: ChannelInput, *arguments: Any, **options: Any) -> Any:
        item = real(self, *arguments, **options)
        if item is not None:
            taken[id(self)] = item
        return item

    def capture(real: Any, self: ChannelInput, checkpoint: int) -> Any:
        found, last = real(self, checkpoint), taken.get(id(self))
        if last is not None and not isinstance(last, Barrier):
            found.begun.insert(0, self.codec.encode(last))
        return found

    yield replaced(ChannelInput, "next", following)
    yield replaced(ChannelInput, "capture", capture)


@mutant("a capture ends at whichever barrier comes", WRONG, luck="crowded", first=102)
@in_place_of(Capture, "arrived")
def _any_barrier(real: Any, self: Capture, frame: Any) -> None:
    if isinstance(frame, bytes):
        self.frames.append(frame)
    else:
        self.whole = True


mutant(
    "a subtask acknowledges before its captures are whole", WRONG, patch.object(ChannelCapture, "whole", True),
    luck=UNALIGNED,
)  # fmt: skip


@mutant("the capture of an aborted checkpoint leaks into the next", LOST_OR_TWICE, luck="crowded")
def _leaking() -> Iterable[Any]:
    captured: dict[int, ChannelCapture] = {}
    bases: list[int] = []

    def overtake(real: Any, self: Subtask, frame: Barrier) -> None:
        bases[:] = [frame.base]
        real(self, frame)

    def capture(real: Any, self: ChannelInput, checkpoint: int) -> Any:
        found, before = real(self, checkpoint), captured.get(id(self))
        if before is not None and before.behind.checkpoint > bases[0]:
            found.begun[:0] = [each.frame for each in before.frames()]
        captured[id(self)] = found
        return found

    yield replaced(Subtask, "_overtake", overtake)
    yield replaced(ChannelInput, "capture", capture)


@mutant("what is restored and not yet taken is not captured again", WRONG, luck="crowded", first=20)
@in_place_of(RestoredInput, "left")
def _restored_once(real: Any, self: RestoredInput) -> Any:
    return []


@mutant("the last barrier before a clean end overtakes", r"checkpoint \d+ is aligned|" + OPEN, luck="unaligned stops")
@in_place_of(Coordinator, "_trigger")
def _final(real: Any, self: Coordinator, now_ms: int) -> Any:
    effects = real(self, now_ms)
    hasty = [msgspec.structs.replace(each, overtakes_after_ms=0) for each in effects if isinstance(each, Trigger)]
    return hasty or effects


@mutant("a barrier that must be aligned overtakes", r"checkpoint \d+ is aligned|" + OPEN, luck="savepoints between")
@in_place_of(Subtask, "triggered")
def _never_aligned(real: Any, self: Subtask, frame: Barrier, overtakes_s: float | None, *, final: bool = False) -> None:
    real(self, frame, 0.0, final=final)


@mutant("blocks of what was on its way are not kept", TOMBSTONED, luck=UNALIGNED, first=2)
@in_place_of(references, "named_by", unchecked(decision_log, "A block that a manifest names"))
def _unnamed(real: Any, manifest: Manifest) -> Any:
    return real(msgspec.structs.replace(manifest, channel_logs=()))


@mutant("blocks that a list of what was on its way has are not kept", TOMBSTONED, luck=UNALIGNED, first=7)
@in_place_of(references, "listed_by")
def _unlisted(real: Any, plan: Any) -> Any:
    acks = {who: msgspec.structs.replace(ack, on_their_way=()) for who, ack in plan.acks.items()}
    return real(cast(Any, SimpleNamespace(acks=acks, staged=plan.staged)))


@mutant("only the first of several lists of what was on its way is read", WRONG, luck=UNALIGNED, first=13)
def _first_list() -> Iterable[Any]:
    def blocks_of(real: Any, log: ChannelLog, reader: Any) -> Any:
        return real(msgspec.structs.replace(log, blocks=log.blocks[:1]) if log.indexed else log, reader)

    def decode(real: Any, bodies: Iterable[bytes]) -> Any:
        with suppress(DamagedState):  # a frame that is cut off would be noticed
            yield from real(bodies)

    yield replaced(in_flight, "blocks_of", blocks_of)
    yield replaced(in_flight, "decode", decode)


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


@mutant("what is dealt anew is dealt twice", LOST_OR_TWICE, luck=UNALIGNED, first=2)
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
    found.behind.frames.clear()
    return found


@mutant("what comes round behind a snapshot is not captured", WRONG, shape="cycle", luck=CYCLES)
@in_place_of(FeedbackInput, "capture")
def _behind(real: Any, self: FeedbackInput, checkpoint: int) -> Any:
    found = real(self, checkpoint)
    frames = Capture(checkpoint)
    frames.frames, frames.whole = list(found.behind.frames), True
    return ChannelCapture(found.name, found.begun, frames)


@mutant("what is captured of a loop is restored twice", LOST_OR_TWICE, shape="cycle", luck=CYCLES)
@in_place_of(in_flight, "restored")
def _restored_twice(real: Any, *arguments: Any) -> Any:
    found = real(*arguments)
    return found + found


@mutant("what went round is not restored", WRONG, shape="cycle", luck=CYCLES)
@in_place_of(in_flight, "restored")
def _not_restored(real: Any, *_: Any) -> Any:
    return []


@mutant("every subtask takes what went round", LOST_OR_TWICE, shape="cycle", luck="rescaled cycles")
@in_place_of(in_flight, "restored")
def _dealt_to_all(real: Any, manifest: Manifest, graph: Any, subtask: int, parallelism: int, *arguments: Any) -> Any:
    logs = manifest.channel_logs
    if parallelism == manifest.parallelism:
        return real(manifest, graph, subtask, parallelism, *arguments)
    anew = tuple(msgspec.structs.replace(each, subtask=subtask) for each in logs)
    return real(msgspec.structs.replace(manifest, channel_logs=anew), graph, subtask, parallelism, *arguments)


@mutant("a snapshot waits for feedback", STUCK, shape="cycle", luck=CYCLES)
@in_place_of(Alignment, "__init__")
def _awaited(real: Any, self: Alignment, inputs: Any, *, feedback: Any = (), exactly_once: bool = True) -> None:
    real(self, [*inputs, *feedback], exactly_once=exactly_once)


@mutant("feedback ahead of the snapshot is not held back", WRONG, shape="mutual", luck=CYCLES, first=20)
@in_place_of(Alignment, "is_held")
def _ahead(real: Any, self: Alignment, source: Any) -> Any:
    return source in self._ordinary and real(self, source)


@mutant("the end does not wait for loops", "ends while records go round", shape="cycle", luck=CYCLES)
@in_place_of(Coordinator, "__init__")
def _early_end(real: Any, self: Coordinator, *arguments: Any, **options: Any) -> None:
    real(self, *arguments, **options | {"loops": False})


@mutant(
    "a round that found records in a loop counts as the last", "ends while records go round", shape="cycle",
    luck=CYCLES, first=15,
)  # fmt: skip
@in_place_of(Coordinator, "_completed")
def _any_round(real: Any, self: Coordinator, plan: Any, manifest: Manifest, now_ms: int) -> None:
    real(self, plan, msgspec.structs.replace(manifest, channel_logs=()), now_ms)
    self.manifest = manifest


@mutant("loops go on behind the last barrier", OPEN, shape="cycle", luck=CYCLES)
@in_place_of(Subtask, "triggered")
def _after_the_last(real: Any, self: Subtask, frame: Any, overtakes_s: float | None, *, final: bool = False) -> None:
    real(self, frame, overtakes_s)


@mutant("the barrier does not go into the loop", STUCK, shape="cycle", luck=CYCLES)
@in_place_of(LoopChannel, "send_signal")
def _no_barrier(real: Any, self: LoopChannel, barrier: Any) -> None:
    pass


@mutant("the manifest leaves out what went round", WRONG, shape="nested", luck=CYCLES)
@in_place_of(leader, "Manifest")
def _left_out(real: Any, *arguments: Any, channel_logs: Sequence[Any] = (), **fields: Any) -> Manifest:
    return Manifest(*arguments, channel_logs=tuple(channel_logs)[1:], **fields)
