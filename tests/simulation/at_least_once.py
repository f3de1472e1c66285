"""The judge where no input is held back: nothing is missing at the end, and what was taken early may come again."""

from __future__ import annotations

from collections import Counter
from typing import Any

from oracle import Oracle
from readers import Readers
from topologies import Event
from watched import demand

from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest


class ReadersAtLeastOnce(Readers):
    """They demand of what is visible that it stems from the input, and is all there in the end."""

    def judge(self, sink: str, event: Event) -> None:
        name = (event.source, event.partition, event.offset, event.way)
        self.doubled += name in self._shown[sink]
        self._shown[sink].add(name)
        self.seen[sink] += 1

    def complete(self) -> None:
        """Everything that comes to a sink is visible in it."""
        for sink in self._shown:
            wanted = {
                (source, p, offset, way)
                for source, each in self._inputs.items()
                for p, records in enumerate(each.partitions)
                for offset in range(len(records))
                for way in self._ways.of(source, offset)[sink]
            }
            demand(self._shown[sink] == wanted, f"{sink} lacks {len(wanted - self._shown[sink])} records")


class OracleAtLeastOnce(Oracle):
    """See the module."""

    readers: ReadersAtLeastOnce
    readers_of = ReadersAtLeastOnce

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._found: Counter[str] = Counter()
        """By sink, how many records the manifests have."""
        self._rounds = 0
        """How many records went round at the newest."""

    def _on_their_way(self, manifest: Manifest) -> set[BlockRef]:
        self._rounds = sum(log.records for log in manifest.channel_logs)
        return self._blocks_on_their_way(manifest)

    def _judge_records(self, checkpoint: int, sink: str, records: int, owed_before: int) -> None:
        self._found[sink] += records
        there = bool(self.topology.loops) or self._found[sink] >= self._owed[sink]
        demand(there, f"sink {sink} has {self._found[sink]} of {self._owed[sink]} records by checkpoint {checkpoint}")

    def _judge_state(self, checkpoint: int, step: str, found: dict[bytes, int]) -> None:
        """It may have counted what comes again."""

    def _judge_shown(self, sink: str) -> None:
        there = self._rounds > 0 or self.readers.seen[sink] >= self._owed[sink]
        demand(there, f"{sink} shows {self.readers.seen[sink]} of {self._owed[sink]} decided records")

    def close(self) -> None:
        super().close()
        self.readers.complete()
