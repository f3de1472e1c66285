"""The restore of a savepoint: its states are written anew, by today's operators.

Invariants: misfits are found before anything is fenced or written, and named by operator and field; a living run is not
fenced, and checkpoints taken until the fence are judged after it; states keep their version, and migrate when they are
read; nothing refers to the savepoint afterwards. Manifests carry the origin on, so that the same command, repeated,
goes on instead of restoring again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, groupby
from typing import TypeVar

import msgspec

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    RESTORED,
    BlockRef,
    ChannelLog,
    Manifest,
    OperatorSnapshot,
    Output,
    Restored,
    SourceOffset,
)
from exactlyonce.checkpoint.records.storage_url import storage_url
from exactlyonce.engines.options import Restoration
from exactlyonce.engines.runtime.cut import Steps, SubtaskBlocks, WorkerBlocks, finish
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.savepoints.contents import (
    Saved,
    SavedOperator,
    Savepoint,
    TopicSavepoint,
    frames_of_loop,
    origin_in_topic,
    require_same,
)
from exactlyonce.engines.savepoints.exported import ExportedSavepoint
from exactlyonce.engines.savepoints.fitting import (
    RestoreTarget,
    fitting,
    judge_dropped,
    loops_fitting,
    offsets_now,
    refuse_by_partition,
    state_type_of,
)
from exactlyonce.engines.savepoints.kept_state import KeptEntry
from exactlyonce.engines.savepoints.retained import require_savepoint
from exactlyonce.pipeline.errors import ConfigError, require
from exactlyonce.pipeline.event_time import NO_WATERMARK
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.state.blocks import IMAGE, BlockEncoder, BlockHeader, EncodedBlock, encode_keys
from exactlyonce.state.chain import Chain, IndexHead, encode_index
from exactlyonce.state.key_groups import group_range, subtask_of
from exactlyonce.state.slots import TableTimes, unpacked_slot

SECTION_BYTES = 64 * 1024
DURABLE_TIMEOUT_S = 600.0
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


def _sought(asked: Restoration, newest: Manifest | None) -> tuple[str, ExportedSavepoint | None]:
    """`Manifest.origin` of a restore of it, and the savepoint, if it was exported.

    ConfigError where there is none, `DamagedSavepoint`. An export from which *newest* was restored need not exist.
    """
    if asked.number is not None:
        return origin_in_topic(asked.number), None
    known, place = newest.origin if newest is not None else "", f" at {storage_url(asked.source)}"
    if known.endswith(place):
        return known, None
    exported = ExportedSavepoint.at(asked.source)
    if known.partition(" at ")[0] == exported.origin:  # it was restored from another place
        return known, exported
    return exported.origin + place, exported


def is_restored(asked: Restoration, newest: Manifest | None) -> bool:
    """Whether *newest* goes on from it already. ConfigError where there is no savepoint, `DamagedSavepoint`."""
    origin, _ = _sought(asked, newest)
    return newest is not None and newest.origin == origin


class Restoring:
    """A restore, found and checked; `write` does it."""

    def __init__(self, asked: Restoration, around: RestoreTarget, history: History | None) -> None:
        """Raises what stands in the way. *history* is the pipeline's, if it has a topic."""
        self._asked, self._around = asked, around
        newest = history.latest if history is not None else None
        self._next = _next(newest)
        self.origin, exported = _sought(asked, newest)
        self._savepoint: Savepoint
        self.manifest: Manifest | None = None
        """The savepoint as far as checks read it; None: it was restored before."""
        self._is_restored = newest is not None and newest.origin == self.origin
        if newest is not None and self._is_restored:
            around.note(f"the savepoint was restored before: the run goes on from checkpoint {newest.checkpoint}")
            return
        self._savepoint = self._savepoint_in(history or History(around.graph.pipeline_id), exported)
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
            entries = self._savepoint.loop_entries(loop.loop)
            require_same(new, around.graph.node(new).type, entries, self._savepoint.name, loop.schema)
        self._offsets = offsets_now(saved, around, asked)
        self.manifest = _as_manifest(saved, around.graph.pipeline_id, self._offsets)
        around.inputs.check_continuity(self.manifest)

    def require_alone(self, history: History, now_ms: int) -> None:
        """ConfigError if a run lives, by *history*, which was read right before the fence.

        A run that has not recovered is taken over as usual: it has just begun, or died while it restored this.
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
        """ConfigError if *history*, read after the fence, forbids the restore.

        A checkpoint taken since the first look does, unless it is to be rewound.
        """
        newest = history.latest
        if newest is None or _next(newest) == self._next or newest.origin == self.origin:
            return
        try:
            savepoint = self._savepoint_in(history, None if self._is_restored else self._savepoint)
            if self._is_restored:
                raise ConfigError("It does not go on from the savepoint: run this again.")
        except ConfigError as error:
            taken = history.incarnations.get(newest.incarnation)
            who = f"Process {taken.process} on {taken.host}" if taken is not None else "Another instance"
            raise ConfigError(
                f"{who} has taken checkpoint {newest.checkpoint} while this run began. This run has taken over, so "
                f"that the other one ends; nothing is lost, and nothing was restored. {error}"
            ) from None
        self._savepoint, self._next = savepoint, _next(newest)

    def _savepoint_in(self, history: History, exported: Savepoint | None) -> Savepoint:
        """The savepoint, if *history* lets the pipeline begin from it."""
        newest, number = history.latest, self._asked.number
        if number is not None:
            manifest, latest = require_savepoint(history, number), max(history.manifests)
            if latest != number and not self._asked.rewind:
                raise ConfigError(
                    f"Savepoint {number} is not the newest checkpoint, that is {latest}: output since then is visible, "
                    f"and would be written again. Leave --from-savepoint out, to go on from checkpoint {latest}; or "
                    f"add --rewind, if that is what you want; or export the savepoint, and restore it under another "
                    f"name."
                )
            blocks = self._around.storages.of(manifest.storage)
            return TopicSavepoint(manifest, blocks, self._around.cluster_id)
        if newest is not None:
            raise ConfigError(
                f"{newest.pipeline} has checkpoints here, the newest is {newest.checkpoint}: an exported savepoint "
                f"begins a pipeline that has none. Leave --from-savepoint out, to go on; or `exactlyonce reset "
                f"{newest.pipeline}` first; or give the pipeline another name."
            )
        assert exported is not None, "it would have been restored before"
        return exported

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, checkpoint: int, incarnation: int, raise_if_fenced: Callable[[], None] = lambda: None) -> Restored:
        """Write all states as blocks of *checkpoint*; return their part of its manifest.

        *raise_if_fenced* is called with each entry and while blocks are written, and may raise.
        """
        require(checkpoint == self._next, "what is restored was judged after the fence")
        blocks = self._around.storages.of(self._around.storage).begin(incarnation, 0)
        schemas = {new: loop.schema for new, loop in self._loops.items() if loop.schema is not None}
        writing = _Writing(WorkerBlocks(blocks, schemas), checkpoint, raise_if_fenced)
        snapshots = tuple(self._write_operator(writing, new, saved) for new, saved in sorted(self._operators.items()))
        logs = self._write_loops(writing)
        self._around.note(f"restored from {self._savepoint.name}")
        return Restored(self._offsets, snapshots, self.origin, logs)

    def _write_loops(self, writing: _Writing) -> tuple[ChannelLog, ...]:
        """Write the in-flight records of the loops by subtask; all are in memory at once, as in the workers."""
        frames: dict[int, list[InFlightFrame]] = {}
        for new, loop in sorted(self._loops.items()):
            entries = _checked(self._savepoint.loop_entries(loop.loop), writing.raise_if_fenced)
            for subtask, frame in frames_of_loop(new, entries, self._around.parallelism):
                frames.setdefault(subtask, []).append(frame)
        logs = [writing.finish(writing.blocks(subtask).in_flight(own)) for subtask, own in sorted(frames.items())]
        return tuple(log for log, _ in logs if log is not None)

    def _write_operator(self, writing: _Writing, operator: str, saved: SavedOperator) -> OperatorSnapshot:
        groups, parallelism = self._around.graph.max_parallelism, self._around.parallelism
        indexes: dict[int, tuple[BlockRef, ...]] = {}
        size = 0
        entries = self._by_group(_checked(self._savepoint.entries(saved.operator), writing.raise_if_fenced))
        with_states = groupby(entries, lambda entry: subtask_of(entry.group, parallelism, groups))
        others = (
            (subtask, iter(())) for subtask in range(parallelism) if subtask not in indexes
        )  # is read after those
        for subtask, own in chain(with_states, others if saved.times is not None else ()):
            require(subtask not in indexes, "the states of a savepoint lie by key group")
            times = self._times(saved, group_range(subtask, parallelism, groups))
            blocks, headers = writing.blocks(subtask), list[BlockHeader]()
            images = _images(operator, writing.checkpoint, own, headers, times)
            refs = writing.finish(blocks.state(operator, images))
            states = Chain().extended(list(zip(refs, headers, strict=True)))
            head = IndexHead(
                operator, writing.checkpoint, groups, saved.schema, 0.0, saved.version, saved.keys,
                None if times is None else times.written(),
            )  # fmt: skip
            parts = encode_index(states, head)
            indexes[subtask] = tuple(writing.finish(blocks.durable(blocks.index(operator, parts))))
            size += states.size
        return OperatorSnapshot(operator, parallelism, size, tuple(indexes.get(n, ()) for n in range(parallelism)))

    def _times(self, saved: SavedOperator, groups: range) -> TableTimes | None:
        """The times of a timed table of *groups*: no state is put where a window has fired."""
        if saved.times is None:
            return None
        watermarks, begun = saved.times.watermarks, saved.times.begun
        if self._savepoint.saved.max_parallelism != self._around.graph.max_parallelism:
            watermarks = dict.fromkeys(groups, max(watermarks.values(), default=NO_WATERMARK))  # all are the same
        own = {group: watermarks[group] for group in groups if group in watermarks}
        own_begun = {group: begun[group] for group in groups if group in begun}
        return TableTimes(groups, watermarks=own, meaning=saved.times.meaning, begun=own_begun)

    def _by_group(self, entries: Iterator[KeptEntry]) -> Iterator[KeptEntry]:
        """All states by key group of today's pipeline."""
        max_parallelism = self._around.graph.max_parallelism
        if self._savepoint.saved.max_parallelism == max_parallelism:
            return entries
        old = list(entries)
        groups = key_groups([entry.key for entry in old], max_parallelism)
        return iter(sorted(entry._replace(group=group) for entry, group in zip(old, groups, strict=True)))


def _next(newest: Manifest | None) -> int:
    return newest.checkpoint + 1 if newest is not None else 0


class _Writing:
    """Writes blocks of *checkpoint* durably."""

    def __init__(self, blocks: WorkerBlocks, checkpoint: int, raise_if_fenced: Callable[[], None]) -> None:
        self._blocks, self.checkpoint, self.raise_if_fenced = blocks, checkpoint, raise_if_fenced

    def blocks(self, subtask: int) -> SubtaskBlocks:
        return SubtaskBlocks(self._blocks, self.checkpoint, RESTORED, subtask)

    def finish(self, steps: Steps[T]) -> T:
        """Take all *steps*. `BrokerUnavailable` if a block takes too long."""
        return finish(steps, lambda: self._blocks.attempt.wait(DURABLE_TIMEOUT_S, self.raise_if_fenced))


def _images(
    operator: str, checkpoint: int, entries: Iterable[KeptEntry], headers: list[BlockHeader], times: TableTimes | None
) -> Iterator[EncodedBlock]:
    """Blocks of one version each, because a state is read by its own version; their headers go to *headers*.

    Places are noted in *times*, those of a timed table.
    """
    encoders: dict[int, BlockEncoder] = {}
    for (group, version), own in groupby(entries, lambda entry: (entry.group, entry.version)):
        encoder = encoders.setdefault(version, BlockEncoder(operator, checkpoint, version))
        for section in _sections(own):
            states = _encode([msgspec.Raw(entry.state) for entry in section])
            places = [entry.place for entry in section]
            if times is not None:
                for slot in set(map(unpacked_slot, places)):
                    times.note(slot, group)
            keys = encode_keys(places, [], [entry.key for entry in section])
            if (block := encoder.add(group, IMAGE, keys, states, len(section))) is not None:
                headers.append(block.header)
                yield block
    for encoder in encoders.values():
        if (last := encoder.flush()) is not None:
            headers.append(last.header)
            yield last


def _checked(entries: Iterable[T], raise_if_fenced: Callable[[], None]) -> Iterator[T]:
    """*entries*, and *raise_if_fenced* is called before each."""
    for entry in entries:
        raise_if_fenced()
        yield entry


def _sections(entries: Iterable[KeptEntry]) -> Iterator[list[KeptEntry]]:
    section: list[KeptEntry] = []
    size = 0
    for entry in entries:
        if section and size + len(entry.key) + len(entry.state) > SECTION_BYTES:
            yield section
            section, size = [], 0
        section.append(entry)
        size += len(entry.key) + len(entry.state)
    if section:
        yield section


def _as_manifest(saved: Saved, pipeline: str, offsets: tuple[SourceOffset, ...]) -> Manifest:
    """The part of a manifest that the checks of inputs and outputs read."""
    return Manifest(
        pipeline=pipeline, checkpoint=saved.checkpoint, incarnation=0, attempt=0, kind=saved.kind, base=0, previous=0,
        triggered_at_ms=0, completed_at_ms=saved.completed_at_ms, fingerprint=saved.fingerprint,
        max_parallelism=saved.max_parallelism, parallelism=1, block_partitions=1, block_end_offsets=(),
        written_bytes=0, offsets=offsets, operators=(), order_logs=(), committables=(),
        sinks=tuple(Output(sink, topic, 0, partitioner=partitioner) for sink, topic, partitioner in saved.outputs),
    )  # fmt: skip
