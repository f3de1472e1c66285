"""The writers and committers of a lake sink "out" of pipeline "totals", each as in its own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from flushing import flushed
from waiting import until

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.writer import Opened, WriterContext
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.sink_contract.hooks import ORIGIN


class Total(msgspec.Struct):
    customer: str
    cents: int


class Clients:
    clock = SimulatedClock()

    def producers(self, topic: str) -> Any:
        raise AssertionError(topic)


class Hands:
    def __init__(self) -> None:
        self.type: Any = Total
        self.options: dict[str, Any] = {}
        self.notes: list[str] = []
        self.to_end: list[Callable[[], None]] = []

    def sink(self) -> Any:
        raise NotImplementedError

    def committer(self, pipeline: str = "totals") -> Committer:
        context = CommitterContext(pipeline=pipeline, sink="out", type=self.type, blocks=cast(Any, None))
        committer: Committer = self.sink().open_committer(context)
        self.to_end.append(committer.close)
        return committer

    def led(self, incarnation: int = 1) -> Committer:
        committer = self.committer()
        committer.check()
        committer.fence(incarnation, ORIGIN)
        return committer

    def opened(self, subtask: int = 0) -> Opened:
        context = WriterContext(
            pipeline="totals", sink="out", subtask=subtask, incarnation=1, attempt=1, type=self.type, slots=0,
            clients=Clients(), staging=cast(Any, None), prepared=lambda name: None, note=self.notes.append,
        )  # fmt: skip
        opened: Opened = self.sink().open_writer(context)
        self.to_end.append(opened.writer.abandon)
        return opened

    def staged(
        self, records: Sequence[Any], checkpoint: int, *, previous: int = 0, subtask: int = 0
    ) -> StoreCommittable:
        opened = self.opened(subtask)
        for start in range(0, len(records), 100):
            opened.writer.write(opened.encoder.encode(records[start : start + 100]))
        opened.writer.barrier(checkpoint)
        return self.flushed(opened, checkpoint, previous)

    def flushed(self, opened: Opened, checkpoint: int, previous: int = 0) -> StoreCommittable:
        staged = flushed(opened.writer, checkpoint).staged
        assert staged is not None
        return msgspec.structs.replace(staged.committable, previous=previous)

    def staged_while_away(self, records: Sequence[Any], checkpoint: int, mount: Path) -> StoreCommittable:
        """Records whose barrier comes while *mount* is empty: nothing is written there, and the barrier waits."""
        opened = self.opened()
        away = mount.rename(mount.with_name("away"))
        mount.mkdir()
        opened.writer.write(opened.encoder.encode(records))
        opened.writer.barrier(checkpoint)
        until(lambda: self.notes)
        assert "mounted?" in self.notes[0]
        opened.writer.poll()
        assert opened.writer.take_flushed(checkpoint) is None
        mount.rmdir()
        away.rename(mount)
        return self.flushed(opened, checkpoint)

    def end(self) -> None:
        for end in self.to_end:
            end()


def commit(committer: Committer, *committables: StoreCommittable) -> bool:
    return committer.commit(list(committables), 1, ORIGIN)
