"""Planted defects of loops: what comes round is captured, restored, dealt and waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import msgspec
from planting import COUNT, OPEN, STATE, STUCK, Table

from exactlyonce.checkpoint import leader
from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.engines import in_flight
from exactlyonce.engines.local.channels import Capture
from exactlyonce.engines.local.inputs import ChannelCapture
from exactlyonce.engines.local.loops import FeedbackInput, LoopChannel
from exactlyonce.engines.local.task import Subtask

LOOPS = Table()
"""By name."""
mutant = LOOPS.mutant
CYCLES = "cycles"
TWICE_ON_ITS_WAY = "is twice on its way to"


@mutant("what goes round is in no checkpoint", STATE + "|" + COUNT, "cycle", luck=CYCLES)
def _no_log() -> Iterable[Any]:
    def captures(self: Subtask, owing: Any, checkpoint: int) -> list[ChannelCapture]:
        return []

    yield patch.object(Subtask, "_captures", captures)


@mutant("what rests in a loop at a snapshot is not captured", STATE + "|" + COUNT, "cycle", luck=CYCLES)
def _resting() -> Iterable[Any]:
    real = FeedbackInput.capture

    def capture(self: FeedbackInput, checkpoint: int) -> ChannelCapture:
        found = real(self, checkpoint)
        found.behind.frames.clear()
        return found

    yield patch.object(FeedbackInput, "capture", capture)


@mutant("what comes round behind a snapshot is not captured", STATE + "|" + COUNT, "cycle", luck=CYCLES)
def _behind() -> Iterable[Any]:
    real = FeedbackInput.capture

    def capture(self: FeedbackInput, checkpoint: int) -> ChannelCapture:
        found = real(self, checkpoint)
        frames = Capture(checkpoint)
        frames.frames, frames.whole = list(found.behind.frames), True
        return ChannelCapture(found.name, found.begun, frames)

    yield patch.object(FeedbackInput, "capture", capture)


@mutant(
    "what is captured of a loop is restored twice", STATE + "|" + COUNT + "|" + TWICE_ON_ITS_WAY, "cycle", luck=CYCLES
)
def _restored_twice() -> Iterable[Any]:
    real = in_flight.restored

    def restored(*arguments: Any) -> Any:
        found = real(*arguments)
        return found + found

    yield patch.object(in_flight, "restored", restored)


@mutant("what went round is not restored", STATE + "|" + COUNT, "cycle", luck=CYCLES)
def _not_restored() -> Iterable[Any]:
    def restored(*_: Any) -> list[Any]:
        return []

    yield patch.object(in_flight, "restored", restored)


@mutant(
    "every subtask takes what went round", STATE + "|" + COUNT + "|" + TWICE_ON_ITS_WAY, "cycle", luck="rescaled cycles"
)
def _dealt_to_all() -> Iterable[Any]:
    real = in_flight.restored

    def restored(manifest: Manifest, graph: Any, subtask: int, parallelism: int, reader: Any) -> Any:
        logs = manifest.channel_logs
        if parallelism == manifest.parallelism:
            return real(manifest, graph, subtask, parallelism, reader)
        anew = tuple(msgspec.structs.replace(each, subtask=subtask) for each in logs)
        return real(msgspec.structs.replace(manifest, channel_logs=anew), graph, subtask, parallelism, reader)

    yield patch.object(in_flight, "restored", restored)


@mutant("a snapshot waits for feedback", STUCK, "cycle", luck=CYCLES)
def _awaited() -> Iterable[Any]:
    real = Alignment.__init__

    def init(self: Alignment, inputs: Any, *, feedback: Any = (), exactly_once: bool = True) -> None:
        real(self, [*inputs, *feedback], exactly_once=exactly_once)

    yield patch.object(Alignment, "__init__", init)


@mutant("feedback ahead of the snapshot is not held back", STATE + "|" + COUNT, "mutual", luck=CYCLES, first=12)
def _ahead() -> Iterable[Any]:
    real = Alignment.is_held

    def is_held(self: Alignment, source: Any) -> bool:
        return source in self._ordinary and real(self, source)

    yield patch.object(Alignment, "is_held", is_held)


@mutant("the end does not wait for loops", "ends while records go round", "cycle", luck=CYCLES)
def _early_end() -> Iterable[Any]:
    real = Coordinator.__init__

    def init(self: Coordinator, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options | {"loops": False})

    yield patch.object(Coordinator, "__init__", init)


@mutant(
    "a round that found records in a loop counts as the last",
    "ends while records go round",
    "cycle",
    luck=CYCLES,
    first=15,
)
def _any_round() -> Iterable[Any]:
    real = Coordinator._completed

    def completed(self: Coordinator, plan: Any, manifest: Manifest, now_ms: int) -> None:
        real(self, plan, msgspec.structs.replace(manifest, channel_logs=()), now_ms)
        self.manifest = manifest

    yield patch.object(Coordinator, "_completed", completed)


@mutant("loops go on behind the last barrier", OPEN, "cycle", luck=CYCLES)
def _after_the_last() -> Iterable[Any]:
    real = Subtask.triggered

    def triggered(self: Subtask, frame: Any, overtakes_s: float | None, *, final: bool = False) -> None:
        real(self, frame, overtakes_s)

    yield patch.object(Subtask, "triggered", triggered)


@mutant("the barrier does not go into the loop", STUCK, "cycle", luck=CYCLES)
def _no_barrier() -> Iterable[Any]:
    def send_barrier(self: LoopChannel, barrier: Any) -> None:
        pass

    yield patch.object(LoopChannel, "send_barrier", send_barrier)


@mutant("the manifest leaves out what went round", STATE + "|" + COUNT, "nested", luck=CYCLES)
def _left_out() -> Iterable[Any]:

    def manifest(*arguments: Any, channel_logs: Sequence[Any] = (), **fields: Any) -> Manifest:
        return Manifest(*arguments, channel_logs=tuple(channel_logs)[1:], **fields)

    yield patch.object(leader, "Manifest", manifest)
