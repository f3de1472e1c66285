"""The expected output of a sink: the outputs of intervals, computed again and staged, for any reader.

Invariant: it is the output of committed checkpoints alone, whatever their sink has kept of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import RESTORED
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.replay.recompute import CheckpointInterval, interval_of, recomputation, recompute
from exactlyonce.engines.bounded.submit import Executors, WorkListener
from exactlyonce.engines.bounded.unit.staging import StagedFile, stage_messages
from exactlyonce.engines.bounded.workplace import workplace
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.loading import Loaded


class ExpectedLane(msgspec.Struct, frozen=True):
    """The outputs of a lane of one checkpoint."""

    checkpoint: int
    lane: int
    by_partition: bool
    """Whether the lane is a partition; see `unit.lanes`."""
    outputs: StagedFile
    """A message with the `OutputFile` of each subtask, in order."""


class ExpectedOutput:
    """The expected output of a sink. Its constructor refuses a hopeless one before executors start."""

    def __init__(
        self,
        loaded: Loaded,
        client: ClientConfig,
        sink: str | None = None,
        *,
        first: int | None = None,
        last: int | None = None,
    ) -> None:
        """The output of the checkpoints from *first* to *last*, by default of all that can be computed. *sink* is
        optional in a pipeline with one."""
        self._loaded, self._client = loaded, client
        self.sink = _chosen(loaded, sink)
        self._intervals = list(_intervals(read_history(client, loaded.pipeline.name), first, last))

    @property
    def offsets(self) -> int:
        """The offsets that are read; there may be fewer records."""
        return sum(interval.offsets for interval in self._intervals)

    @contextmanager
    def computed(self, executors: Executors, progress: WorkListener) -> Iterator[list[ExpectedLane]]:
        """Compute it. The staged files exist until the end of the block."""
        name, sink = self._loaded.pipeline.name, self.sink
        progress.began(self._intervals[-1].manifest, self.offsets)
        with workplace(executors.staging, f"expected-{name}") as files:
            recomputations = []
            for interval in self._intervals:
                own = f"{files}{interval.manifest.checkpoint}-"
                recomputations.append(
                    recomputation(self._loaded, self._client, interval, own, origins=True, store_rows=True)
                )
            lanes = []
            for again in recompute(recomputations, self._client, executors.submit):
                number = again.manifest.checkpoint
                outputs = stage_messages(f"{files}outputs-{number}", [[*again.files.get(sink, ())]])
                lanes += [
                    ExpectedLane(number, lane, again.is_by_partition(sink), outputs)
                    for lane in again.lanes(sink)
                    if again.count(sink, lane)
                ]
            yield lanes


def _chosen(loaded: Loaded, sink: str | None) -> str:
    sinks = [node.id for node in loaded.pipeline.build().sinks]
    if sink is None and len(sinks) == 1:
        return sinks[0]
    if sink not in sinks:
        raise ConfigError(f"Say whose output is meant, by sink: one of {', '.join(sinks)}.")
    return str(sink)


def _intervals(history: History, first: int | None, last: int | None) -> Iterator[CheckpointInterval]:
    """The intervals of committed checkpoints, oldest first; ConfigError without one, or without *first* or *last*."""
    if first is not None:
        interval_of(history, first)
    if last is not None and last > history.checkpoint_latest:
        raise ConfigError(
            f"Checkpoint {last} of {history.pipeline} was not taken yet: the newest is {history.checkpoint_latest}. "
            f"Name that one, or leave last out."
        )
    found = False
    for number, manifest in sorted(history.manifests.items()):
        wanted = (first is None or number >= first) and (last is None or number <= last)
        if not wanted or number not in history.finalized:
            continue
        if manifest.kind != RESTORED and manifest.previous in history.manifests and manifest.previous != number:
            found = True
            yield interval_of(history, number)
    if not found:
        raise ConfigError(
            f"{history.pipeline} has no checkpoint there whose interval can be computed again: it needs the checkpoint "
            f"before it. --num-retained of `exactlyonce run` says how many are kept."
        )
