"""The judge where barriers overtake, or records go round: what was on its way is in blocks, and nowhere else.

A record on its way to a count has come to it as far as Sn goes, and not as far as the state goes; so has what becomes
of it behind the count. From the words of the steps it works out to which states and sinks each one is still to come.
The last checkpoint before a clean end, but for a stop, has none on its way.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import msgspec
from oracle import Oracle
from topologies import CYCLE, Event
from watched import demand

from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, Manifest
from exactlyonce.pipeline.keys import canonical_key


class OracleUnaligned(Oracle):
    """See the module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._awaited: dict[str, Counter[str]] = {}
        """By count and key, how many records before Sn are still to come to it."""
        self._awaited_before: Counter[str] = Counter()
        self._awaited_by: Counter[str] = Counter()
        """By sink, how many are still to come: at the checkpoint before the newest, and at the newest."""

    def _advance(self, manifest: Manifest) -> None:
        super()._advance(manifest)
        self._awaited = {step: Counter() for step in self._arrived}
        self._awaited_before, self._awaited_by = self._awaited_by, Counter()
        seen: set[tuple[str, str, int, int, str]] = set()
        for log in manifest.channel_logs:
            records = 0
            for channel, event in self._frames(self._log(log)):
                records += 1
                self._await(channel.rpartition(":")[0].partition(">")[2], event, seen)
            what = f"{log.task} {log.subtask} of checkpoint {manifest.checkpoint} has {records} records on their way"
            demand(records == log.records, f"{what}, not {log.records}")
            self.met["record on its way"] += records
        self.met["unaligned checkpoint"] += bool(manifest.channel_logs)
        if (manifest.incarnation, manifest.attempt, manifest.checkpoint) in self.aligned:
            self.met["aligned among unaligned"] += 1
            demand(not manifest.channel_logs, f"checkpoint {manifest.checkpoint} is aligned")

    def _await(self, consumer: str, event: Event, seen: set[tuple[str, str, int, int, str]]) -> None:
        name = (consumer, event.source, event.partition, event.offset, event.way)
        it = f"record {event.offset} of {event.source}[{event.partition}]"
        demand(name not in seen, f"{it} is twice on its way to {consumer}")
        demand(event.offset < self.decided[event.source, event.partition], f"{it} is on its way before it is read")
        seen.add(name)
        ways = self._ways.of(consumer, event.offset, event.way)
        for step in self.topology.steps:
            if step.kind in ("count", "tally"):
                self._awaited[step.id][event.first if step.key == "first" else event.second] += len(ways[step.id])
            elif step.kind in ("sink", "store"):
                self._awaited_by[step.id] += len(ways[step.id])

    def _log(self, log: ChannelLog) -> bytes:
        refs = self._listed(log) if log.indexed else log.blocks
        return b"".join(zlib.decompress(self._body(ref)) for ref in refs)

    def _frames(self, log: bytes) -> list[tuple[str, Event]]:
        """Channel and record of each that is in a log."""
        found = []
        while log:
            name, size = int.from_bytes(log[:2], "big"), int.from_bytes(log[2:6], "big")
            channel, frame, log = log[6 : 6 + name].decode(), log[6 + name : 6 + name + size], log[6 + name + size :]
            demand(len(frame) == size, f"a log of what was on its way on {channel} is cut off")
            found += [(channel, event) for event in _decoder.decode(frame)[0]]
        return found

    def _on_their_way(self, manifest: Manifest) -> set[BlockRef]:
        return self._blocks_on_their_way(manifest)

    def _judge_records(self, checkpoint: int, sink: str, records: int, owed_before: int) -> None:
        wanted = self._owed[sink] - self._awaited_by[sink] - (owed_before - self._awaited_before[sink])
        demand(records == wanted, f"sink {sink} of checkpoint {checkpoint} has {records} records, not {wanted}")

    def _judge_state(self, checkpoint: int, step: str, found: dict[bytes, int]) -> None:
        come = self._arrived[step] - self._awaited[step]
        wanted = {canonical_key(key): count % CYCLE for key, count in come.items() if count % CYCLE}
        demand(found == wanted, f"the state of {step} at checkpoint {checkpoint} is not that of the input before Sn")

    def _judge_shown(self, sink: str) -> None:
        seen, owed = self.readers.seen[sink], self._owed[sink] - self._awaited_by[sink]
        demand(seen == owed, f"{sink} shows {seen} of {owed} decided records")

    def close(self) -> None:
        super().close()
        newest = self.manifests[max(self.manifests)]
        demand(not newest.channel_logs, "the last checkpoint before a clean end is aligned, and no record goes round")


_decoder = msgspec.msgpack.Decoder(tuple[list[Event], list[bytes] | None, list[str], bytes, bytes, bytes])
