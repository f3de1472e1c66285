"""The writers and committers of a lake sink "out" of pipeline "totals", each as in its own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

NOBODY = 65534


class Total(msgspec.Struct):
    customer: str
    cents: int


class Clients:
    clock = SimulatedClock()

    def producers(self, topic: str) -> Any:
        raise AssertionError(topic)


class Hands:
    folder: Path

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


def assert_swept(hands: Hands, totals: Callable[..., list[Total]], live: Callable[[], set[Path]]) -> None:
    """Files of attempts that never committed are removed, and nothing else: committed ones, which the next snapshot
    replaces, those of this attempt, of another pipeline, and of other programs. *live*: the table's data files."""
    hands.options["roll_bytes"] = 1
    committer = hands.led(1)
    commit(committer, hands.staged(totals(1), 1))
    committed = live()
    decided = hands.staged(totals(2), 2, previous=1)
    before = files_below(hands.folder)
    hands.staged(totals(3), 3, previous=2)
    cut_off = hands.opened()
    cut_off.writer.write(cut_off.encoder.encode(totals(4)))
    until(lambda: cut_off.writer.poll() or len(files_below(hands.folder) - before) > 3)
    other = hands.committer("others")
    other.fence(1, ORIGIN)
    committer.clean(1, 1)
    assert commit(committer, decided), "nothing of this attempt was removed"
    foreign = hands.folder / "data" / "part-1.parquet"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(b"of another program")

    other.clean(9, 9)
    seen = files_below(hands.folder)
    hands.committer().clean(1, 2)
    removed = seen - files_below(hands.folder)
    assert removed, "of the third interval, and of the one that was cut off"
    assert not removed & (committed | live() | {foreign})
    assert [path for path in files_below(hands.folder) if "totals.out" in path.parts] == []
    rest = {path for path in files_below(hands.folder) if path.suffix == ".parquet" and "totals.out" in path.name}
    assert rest <= committed | live()


@contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """This process may not look into *folder* meanwhile: root becomes another user, whose folder it is not."""
    mode = folder.stat().st_mode
    folder.chmod(0o700 if os.geteuid() == 0 else 0)
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(uid)
        folder.chmod(mode)


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}
