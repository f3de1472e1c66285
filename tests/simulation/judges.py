"""Judges of in-flight records at a checkpoint, and of records that may be processed again.

In-flight records are only in blocks, if barriers overtake or records go round a loop. Such a record is before Sn, but
not yet in the state of the counts after it, nor is its output. The judge derives from the words of the steps which
states and sinks each one has yet to reach. The last checkpoint before a clean end, unless it was stopped, has none.
Nothing is missing at the end with at_least_once.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import msgspec
from oracle import Oracle
from readers import Readers
from topologies import CYCLE, HOLDING, MAX_PARALLELISM, Event
from watched import demand

from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, Manifest, OperatorSnapshot
from exactlyonce.engines.runtime.batch import records_in
from exactlyonce.pipeline.joins import AsOf
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.pipeline.timers import kept_entry
from exactlyonce.state.chain import decode_index
from exactlyonce.state.hash_map import HashMapBackend


class OracleUnaligned(Oracle):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._awaited: dict[str, Counter[str]] = {}
        """Records before Sn that are still to come, by count and key."""
        self._awaited_before: Counter[str] = Counter()
        self._awaited_by: Counter[str] = Counter()
        """Numbers of records still to come, by sink: at the checkpoint before the newest, and at the newest."""

    def _advance(self, manifest: Manifest) -> None:
        super()._advance(manifest)
        self._awaited = {step: Counter() for step in self._arrived}
        self._awaited_before, self._awaited_by = self._awaited_by, Counter()
        seen: set[tuple[str, str, int, int, str]] = set()
        for log in manifest.channel_logs:
            records = 0
            for channel, event in self._frames(self._log(log)):
                records += 1
                _, consumer, *right = channel.rpartition(":")[0].split(">")
                demand("-rows>" not in channel, f"a row of all subtasks is on its way at {manifest.checkpoint}")
                if event is not None and not right:  # a version comes to no sink
                    self._await(consumer, event, seen)
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

    def _frames(self, log: bytes) -> list[tuple[str, Event | None]]:
        """The records by channel; None is a change of a row."""
        found: list[tuple[str, Event | None]] = []
        while log:
            name, size = int.from_bytes(log[:2], "big"), int.from_bytes(log[2:6], "big")
            channel, frame, log = log[6 : 6 + name].decode(), log[6 + name : 6 + name + size], log[6 + name + size :]
            demand(len(frame) == size, f"a log of what was on its way on {channel} is cut off")
            if "-rows>" in channel or channel.rpartition(":")[0].endswith("-rows"):
                found += [(channel, None)] * records_in(frame)
            else:
                found += [(channel, event) for event in _decoder.decode(frame).events]
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


class _Frame(msgspec.Struct, array_like=True):
    """The first of its columns."""

    events: list[Event]


_decoder = msgspec.msgpack.Decoder(_Frame)


HELD: dict[str, Any] = {
    "window": list[Event],
    "timer": kept_entry(list[Event], [Event], "time"),
    "clocked": kept_entry(list[Event], [Event], "arrival"),
    "as_of": AsOf().kept_state(Event, Event),
}
"""The types of states by the kind of the step."""


class OracleWindows(OracleUnaligned):
    """Records in windows that are not over are in flight, too: they are in a state, before they go on."""

    def _advance(self, manifest: Manifest) -> None:
        super()._advance(manifest)
        seen: set[tuple[str, str, int, int, str]] = set()
        self.held = 0
        for operator in manifest.operators:
            for step in self.topology.of(*HOLDING):
                if operator.operator == step.id:
                    for event in self._events(manifest.checkpoint, operator, step.kind):
                        self._await(step.id, event, seen)
                        self.held += 1
        self.met["record in a window"] += self.held

    def _events(self, checkpoint: int, operator: OperatorSnapshot, kind: str) -> list[Event]:
        """The held records."""
        stored = self._stored(checkpoint, operator, HELD[kind])
        times = [times for body in stored.indexes if (times := decode_index(body).head.times) is not None]
        table = stored.timed_table(HashMapBackend(), meaning="".join({written.meaning for written in times}))
        events: list[Event] = []
        for _, key, entry in table.items():
            match kind, entry:
                case "window", _:
                    events += entry
                case "as_of", (lefts, _):
                    over = table.watermark(key_group(key, MAX_PARALLELISM))
                    events += [record for time, *_, record in lefts if time > over]
                case _, (state, _, *held):
                    events += state or []
                    events += [record for *_, record in (held[0] if held else [])]
        return events


class OracleAlignedWindows(OracleWindows):
    """No record is in flight between operators."""

    def _on_their_way(self, manifest: Manifest) -> set[BlockRef]:
        return Oracle._on_their_way(self, manifest)


class ReadersAtLeastOnce(Readers):
    def judge(self, sink: str, event: Event) -> None:
        name = (event.source, event.partition, event.offset, event.way)
        self.doubled += name in self._shown[sink]
        self._shown[sink].add(name)
        self.seen[sink] += 1

    def complete(self) -> None:
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
    readers: ReadersAtLeastOnce
    readers_of = ReadersAtLeastOnce

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._found: Counter[str] = Counter()
        """The number of records that the manifests have, by sink."""
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
