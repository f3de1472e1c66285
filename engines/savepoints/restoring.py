"""A savepoint becomes the state that a pipeline goes on from: its states are written anew, by today's operators.

Invariants: whatever does not fit is found before anything is fenced or written, and named by operator and field; no run
is fenced that goes on, as far as the last look shows it, and what was taken until the fence is judged behind
it; states are written with the version that they have, and migrated when they are read; nothing of the savepoint is
referred to afterwards. It is restored once: while runs are told of it, the origin goes from manifest to manifest, so
that the same command, repeated, goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TypeVar

import msgspec

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    RESTORED,
    BlockRef,
    ChannelLog,
    Manifest,
    OperatorSnapshot,
    Restored,
    SourceOffset,
)
from exactlyonce.checkpoint.records.storage_url import storage_url
from exactlyonce.engines.options import Restoration
from exactlyonce.engines.runtime.blocks import SubtaskBlocks, WorkerBlocks
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.runtime.steps import Steps, finish
from exactlyonce.engines.savepoints.contents import Saved, SavedOperator, Savepoint, TopicSavepoint, origin_in_topic
from exactlyonce.engines.savepoints.exported import ExportedSavepoint
from exactlyonce.engines.savepoints.fitting import (
    Surroundings,
    fitting,
    judge_dropped,
    loops_fitting,
    offsets_now,
    refuse_by_partition,
    state_type_of,
)
from exactlyonce.engines.savepoints.kept_state import KeptEntry
from exactlyonce.engines.savepoints.loops import frames_of_loop, require_same
from exactlyonce.engines.savepoints.retained import require_savepoint
from exactlyonce.pipeline.errors import ConfigError, require
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.state.blocks import IMAGE, BlockEncoder, BlockHeader, EncodedBlock, encode_keys
from exactlyonce.state.chain import Chain
from exactlyonce.state.index import IndexHead, encode_index
from exactlyonce.state.key_groups import subtask_of

SECTION_BYTES = 64 * 1024
DURABLE_TIMEOUT_S = 600.0
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


def _sought(asked: Restoration, newest: Manifest | None) -> tuple[str, ExportedSavepoint | None]:
    """`Manifest.origin` of what goes on from it, and the savepoint itself, if it was exported. ConfigError where there
    is none, `DamagedSavepoint`.

    An export that *newest* goes on from is known by its URL, and need not be there any more.
    """
    if asked.number is not None:
        return origin_in_topic(asked.number), None
    known, place = newest.origin if newest is not None else "", f" at {storage_url(asked.source)}"
    if known.endswith(place):
        return known, None
    exported = ExportedSavepoint.at(asked.source)
    if known.partition(" at ")[0] == exported.origin:  # it lay elsewhere
        return known, exported
    return exported.origin + place, exported


def is_restored(asked: Restoration, newest: Manifest | None) -> bool:
    """Whether *newest* goes on from it already: the same command, repeated, restores nothing. Raises ConfigError where
    there is none, `DamagedSavepoint`."""
    origin, _ = _sought(asked, newest)
    return newest is not None and newest.origin == origin


class Restoring:
    """What is to be restored, found and checked; `write` does it."""

    def __init__(self, asked: Restoration, around: Surroundings, history: History | None) -> None:
        """Raises what stands in the way. *history* is that of the pipeline, if it has a topic."""
        self._asked, self._around = asked, around
        newest = history.latest if history is not None else None
        self._next = _next(newest)
        self.origin, exported = _sought(asked, newest)
        self._savepoint: Savepoint
        self._is_restored = newest is not None and newest.origin == self.origin
        if newest is not None and self._is_restored:
            around.note(f"the savepoint was restored before: the run goes on from checkpoint {newest.checkpoint}")
            return
        self._savepoint = self._found(history or History(around.graph.pipeline_id), exported)
        saved = self._savepoint.saved
        self._operators = fitting(saved, around.graph, asked, drops_fields=around.drops_fields)
        for new, operator in self._operators.items():
            if operator.schema is not None:
                state_type = state_type_of(around.graph.node(new), drops_fields=around.drops_fields)
                states = partial(self._savepoint.entries, operator.operator)
                judge_dropped(state_type, operator.schema, operator.version, states, around.note)
        refuse_by_partition(self._operators, around)
        self._loops = loops_fitting(saved, around.graph, asked)
        for new, loop in self._loops.items():
            entries = self._savepoint.going_round(loop.loop)
            require_same(new, around.graph.node(new).type, entries, self._savepoint.name, loop.schema)
        self._offsets = offsets_now(saved, around, asked)
        around.inputs.check_continuity(_as_manifest(saved, around.graph.pipeline_id, self._offsets))

    def require_alone(self, history: History, now_ms: int) -> None:
        """ConfigError if a run goes on, by *history*, which was read right before the fence.

        One that has not recovered is taken over as by any run: it has begun just now, or died while it restored this.
        """
        living, newest = history.living(now_ms), history.latest
        if living is None or newest is None or newest.origin == self.origin:
            return
        if living.incarnation in (newest.incarnation, living.fenced_below):
            raise ConfigError(
                f"{history.pipeline} runs: process {living.process} on {living.host} goes on from checkpoint "
                f"{newest.checkpoint}. Nothing was changed: stop it, by `exactlyonce savepoint {history.pipeline} "
                f"--stop` say, and begin from that savepoint. If it has died, run this again in half a minute."
            )

    def judge(self, history: History) -> None:
        """Whether it may be restored still, by *history*, which was read behind the fence: ConfigError if not.

        A checkpoint that was taken since the first look stands in the way unless it is to be rewound.
        """
        newest = history.latest
        if newest is None or _next(newest) == self._next or newest.origin == self.origin:
            return
        try:
            found = self._found(history, None if self._is_restored else self._savepoint)
            if self._is_restored:
                raise ConfigError("It does not go on from the savepoint: run this again.")
        except ConfigError as error:
            taken = history.incarnations.get(newest.incarnation)
            who = f"Process {taken.process} on {taken.host}" if taken is not None else "Another instance"
            raise ConfigError(
                f"{who} has taken checkpoint {newest.checkpoint} while this run began. This run has taken over, so "
                f"that the other one ends; nothing is lost, and nothing was restored. {error}"
            ) from None
        self._savepoint, self._next = found, _next(newest)

    def _found(self, history: History, exported: Savepoint | None) -> Savepoint:
        """The savepoint, if *history* lets the pipeline begin from it."""
        newest = history.latest
        if self._asked.number is not None:
            return self._in_topic(self._asked.number, history)
        if newest is not None:
            raise ConfigError(
                f"{newest.pipeline} has checkpoints here, the newest is {newest.checkpoint}: an exported savepoint "
                f"begins a pipeline that has none. Leave --from-savepoint out, to go on; or `exactlyonce reset "
                f"{newest.pipeline}` first; or give the pipeline another name."
            )
        assert exported is not None, "it would have been restored before"
        return exported

    def _in_topic(self, number: int, history: History) -> TopicSavepoint:
        found, newest = require_savepoint(history, number), max(history.manifests)
        if newest != number and not self._asked.rewind:
            raise ConfigError(
                f"Savepoint {number} is not the newest checkpoint, that is {newest}: output since then is visible, and "
                f"would be written again. Leave --from-savepoint out, to go on from checkpoint {newest}; or add "
                f"--rewind, if that is what you want; or export the savepoint, and restore it under another name."
            )
        blocks = self._around.storages.of(found.storage)
        return TopicSavepoint(found, blocks, self._around.cluster_id)

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, checkpoint: int, incarnation: int, raise_if_fenced: Callable[[], None] = lambda: None) -> Restored:
        """Write all states as blocks of *checkpoint*; what its manifest says of them.

        *raise_if_fenced*, which is called with each entry and while blocks are waited for, may raise what ends it.
        """
        require(checkpoint == self._next, "what is restored was judged behind the fence")
        blocks = self._around.storages.of(self._around.storage).begin(incarnation, 0)
        schemas = {new: loop.schema for new, loop in self._loops.items() if loop.schema is not None}
        writing = _Writing(WorkerBlocks(blocks, schemas), checkpoint, raise_if_fenced)
        snapshots = tuple(self._written(writing, new, saved) for new, saved in sorted(self._operators.items()))
        logs = self._going_round(writing)
        self._around.note(f"restored from {self._savepoint.name}")
        return Restored(self._offsets, snapshots, self.origin, logs)

    def _going_round(self, writing: _Writing) -> tuple[ChannelLog, ...]:
        """Write what goes round the loops, subtask by subtask; all of it is in memory at once, as in the workers."""
        frames: dict[int, list[InFlightFrame]] = {}
        for new, loop in sorted(self._loops.items()):
            entries = _checked(self._savepoint.going_round(loop.loop), writing.raise_if_fenced)
            for subtask, frame in frames_of_loop(new, entries, self._around.parallelism):
                frames.setdefault(subtask, []).append(frame)
        logs = []
        for subtask, own in sorted(frames.items()):
            if (log := writing.in_flight(subtask, own)) is not None:
                logs.append(log)
        return tuple(logs)

    def _written(self, writing: _Writing, operator: str, saved: SavedOperator) -> OperatorSnapshot:
        graph, parallelism = self._around.graph, self._around.parallelism
        head = IndexHead(
            operator, writing.checkpoint, graph.max_parallelism, saved.schema, 0.0, saved.version, saved.keys
        )
        indexes: list[tuple[BlockRef, ...]] = [()] * parallelism
        size = 0
        entries = self._by_group(_checked(self._savepoint.entries(saved.operator), writing.raise_if_fenced))
        for subtask, own in groupby(entries, lambda each: subtask_of(each.group, parallelism, graph.max_parallelism)):
            require(not indexes[subtask], "the states of a savepoint lie by key group")
            chain = Chain().extended(writing.state(operator, subtask, own))
            indexes[subtask] = writing.index(operator, subtask, encode_index(chain, head))
            size += chain.size
        return OperatorSnapshot(operator, parallelism, size, tuple(indexes))

    def _by_group(self, entries: Iterator[KeptEntry]) -> Iterator[KeptEntry]:
        """All states, key group by key group."""
        max_parallelism = self._around.graph.max_parallelism
        if self._savepoint.saved.max_parallelism == max_parallelism:
            return entries  # they lie so
        found = list(entries)
        groups = key_groups([each.key for each in found], max_parallelism)
        return iter(sorted((each._replace(group=group) for each, group in zip(found, groups, strict=True))))


def _next(newest: Manifest | None) -> int:
    return newest.checkpoint + 1 if newest is not None else 0


class _Writing:
    """Writes the blocks of *checkpoint*, and waits until they are durable."""

    def __init__(self, blocks: WorkerBlocks, checkpoint: int, raise_if_fenced: Callable[[], None]) -> None:
        self._blocks, self.checkpoint, self.raise_if_fenced = blocks, checkpoint, raise_if_fenced

    def _of(self, subtask: int) -> SubtaskBlocks:
        return SubtaskBlocks(self._blocks, self.checkpoint, RESTORED, subtask)

    def _finish(self, steps: Steps[T]) -> T:
        """Take all *steps*. `BrokerUnavailable` if blocks are waited for too long."""
        return finish(steps, lambda: self._blocks.attempt.wait(DURABLE_TIMEOUT_S, self.raise_if_fenced))

    def state(self, operator: str, subtask: int, entries: Iterable[KeptEntry]) -> list[tuple[BlockRef, BlockHeader]]:
        """Write images of all key groups in *entries*; where they lie."""
        headers: list[BlockHeader] = []

        def encoded() -> Iterator[EncodedBlock]:
            for block in _images(operator, self.checkpoint, entries):
                headers.append(block.header)
                yield block

        return list(zip(self._finish(self._of(subtask).state(operator, encoded())), headers, strict=True))

    def index(self, operator: str, subtask: int, parts: Iterable[bytes]) -> tuple[BlockRef, ...]:
        """Write the parts of an index."""
        blocks = self._of(subtask)
        return tuple(self._finish(blocks.durable(blocks.index(operator, parts))))

    def in_flight(self, subtask: int, frames: Sequence[InFlightFrame]) -> ChannelLog | None:
        """Write what goes round the loops of a subtask; None if that is nothing."""
        log, _ = self._finish(self._of(subtask).in_flight(frames))
        return log


def _images(operator: str, checkpoint: int, entries: Iterable[KeptEntry]) -> Iterator[EncodedBlock]:
    """Blocks of one version each: states that were written by several are read by their own."""
    encoders: dict[int, BlockEncoder] = {}
    for (group, version), same in groupby(entries, lambda each: (each.group, each.version)):
        encoder = encoders.setdefault(version, BlockEncoder(operator, checkpoint, version))
        for some in _sections(same):
            states = _encode([msgspec.Raw(each.state) for each in some])
            keys = encode_keys([each.key for each in some], [])
            if (block := encoder.add(group, IMAGE, keys, states, len(some))) is not None:
                yield block
    for encoder in encoders.values():
        if (last := encoder.flush()) is not None:
            yield last


def _checked(entries: Iterable[T], raise_if_fenced: Callable[[], None]) -> Iterator[T]:
    """*entries*, and *raise_if_fenced* is called before each."""
    for entry in entries:
        raise_if_fenced()
        yield entry


def _sections(entries: Iterable[KeptEntry]) -> Iterator[list[KeptEntry]]:
    some: list[KeptEntry] = []
    size = 0
    for entry in entries:
        if some and size + len(entry.key) + len(entry.state) > SECTION_BYTES:
            yield some
            some, size = [], 0
        some.append(entry)
        size += len(entry.key) + len(entry.state)
    if some:
        yield some


def _as_manifest(saved: Saved, pipeline: str, offsets: tuple[SourceOffset, ...]) -> Manifest:
    """As much of a manifest as the check of the inputs looks at."""
    return Manifest(
        pipeline=pipeline, checkpoint=saved.checkpoint, incarnation=0, attempt=0, kind=saved.kind, base=0, previous=0,
        triggered_at_ms=0, completed_at_ms=saved.completed_at_ms, fingerprint=saved.fingerprint,
        max_parallelism=saved.max_parallelism, parallelism=1, block_partitions=1, block_end_offsets=(),
        written_bytes=0, offsets=offsets, operators=(), order_logs=(), committables=(), sinks=(),
    )  # fmt: skip
