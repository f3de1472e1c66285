"""The judges of joins: the results that stand at a checkpoint are the join of the records before Sn.

Of tables joined by a foreign key it is a matter of luck which results are given between two checkpoints; which of them
stand at one is not. So there is no number of records that a sink must have, and each of them is judged by itself: its
rows are in the input before Sn, the rows of a key come in their order, and no result comes again while it stands. Of a
join within an interval, all pairs of records before Sn are there, and no other; a record comes alone if it has no
partner in the whole input.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec
from oracle import Oracle
from readers import Place, Readers, Ways
from topologies import (
    EARLIER_MS,
    GONE,
    JOINING,
    LATER_MS,
    LEFT,
    PAIR,
    PAIRING,
    RIGHT,
    Event,
    Input,
    Topology,
    is_gone,
    is_late,
    time_at,
)
from watched import demand

from exactlyonce.checkpoint.records.manifest import BlockRef, Finalized, Manifest, OperatorSnapshot

Results = dict[str, tuple[int, tuple[int, ...]]]
"""By left key: the offset of the left row, and the partition and offset of the right one; empty: there is none."""

Row = tuple[int, int]
"""The partition and offset of a record."""
SOURCES = "in", "more"
"""Of the left and of the right records of an interval."""


class JoinReaders(Readers):
    def __init__(self, topology: Topology, inputs: dict[str, Input], ways: Ways, decided: dict[Place, int]) -> None:
        super().__init__(topology, inputs, ways, decided)
        (self._join,) = topology.of(*JOINING)
        self.lefts, self.rights = self._join.inputs
        self.met: Counter[str] = Counter()
        """How often what was judged."""
        self.standing: dict[str, Results] = {sink: {} for sink in topology.sinks}
        self._again: Counter[tuple[str, str, int]] = Counter()
        """How often results without a right row came again, by sink, left key and offset of the left row."""
        self._lefts_seen: dict[tuple[str, str], int] = {}
        """The offset of the left row of the newest result, by sink and left key."""

    def read(self, sink: str, value: bytes) -> None:
        event = _decode(value)
        key, standing = event.first, self.standing[sink]
        self.seen[sink] += 1
        if event.way == GONE:
            demand(key in standing, f"a result of {key} is gone in {sink}, where none stands")
            del standing[key]
            self.met["result gone"] += 1
            return
        it = f"the result of {key} in {sink}, of row {event.offset},"
        self._row(it, (event.source, event.partition), event.offset, (event.first, event.second))
        demand(event.source == self.lefts, f"{it} is of {event.source}")
        if event.totals:
            partition, offset = event.totals
            self._row(it, (self.rights, partition), offset, (event.second, ""))
        before = self._lefts_seen.get((sink, key), -1)
        demand(event.offset >= before, f"{it} comes after that of row {before}")
        if standing.get(key) == (event.offset, event.totals):
            self._again[sink, key, event.offset] += 1
            may = 0 if event.totals else self._deletions(event.second)
            demand(self._again[sink, key, event.offset] <= may, f"{it} comes again while it stands")
        self._lefts_seen[sink, key] = event.offset
        standing[key] = event.offset, event.totals

    def _deletions(self, right: str) -> int:
        """How many messages before Sn delete the *right* row: each, also if there is none, gives results anew."""
        return sum(
            first == right and is_gone(offset)
            for partition, records in enumerate(self._inputs[self.rights].partitions)
            for offset, (first, _) in enumerate(records[: self._decided[self.rights, partition]])
        )

    def _row(self, it: str, place: Place, offset: int, keys: tuple[str, str]) -> None:
        demand(place in self._decided and offset < self._decided[place], f"{it} is of a row that is not before Sn")
        there = self._inputs[place[0]].partitions[place[1]][offset]
        demand(there == keys and not is_gone(offset), f"{it} is of a row {there}")

    def judge_at(self, checkpoint: int, *, is_last: bool) -> None:
        """The results that stand in each sink are the join of the rows before Sn."""
        joined = self._joined()
        for sink, standing in self.standing.items():
            differing = {
                key: (standing.get(key), joined.get(key))
                for key in sorted(standing.keys() | joined.keys())
                if standing.get(key) != joined.get(key)
            }
            demand(
                not differing, f"{sink} at checkpoint {checkpoint} is not the join of the rows before Sn: {differing}"
            )

    def _joined(self) -> Results:
        lefts, rights = self._rows(self.lefts), self._rows(self.rights)
        found: Results = {}
        for key, (_, offset, second) in lefts.items():
            right = rights.get(second)
            if right is not None or self._join.kind == "left_join":
                found[key] = offset, () if right is None else right[:2]
        return found

    def _rows(self, source: str) -> dict[str, tuple[int, int, str]]:
        """Partition, offset and second key of each row that is there."""
        rows: dict[str, tuple[int, int, str]] = {}
        for partition, records in enumerate(self._inputs[source].partitions):
            for offset, (first, second) in enumerate(records[: self._decided[source, partition]]):
                if is_gone(offset):
                    rows.pop(first, None)
                else:
                    rows[first] = partition, offset, second
        return rows


class PairReaders(Readers):
    def __init__(self, topology: Topology, inputs: dict[str, Input], ways: Ways, decided: dict[Place, int]) -> None:
        super().__init__(topology, inputs, ways, decided)
        (self._join,) = topology.of(*PAIRING)
        self.met: Counter[str] = Counter()
        self._results: dict[str, set[tuple[Row | None, Row | None]]] = {sink: set() for sink in topology.sinks}
        """The left and the right record of each visible result, by sink."""
        everything = {(name, p): len(r) for name, each in inputs.items() for p, r in enumerate(each.partitions)}
        self._paired = {row for pair in self._pairs(everything) for row in zip("lr", pair, strict=True)}
        """The records with a partner, each with its side."""

    def read(self, sink: str, value: bytes) -> None:
        event = _decode(value)
        self.seen[sink] += 1
        own = event.partition, event.offset
        left, right = (None, own) if event.way == RIGHT else (own, None)
        if event.way == PAIR:
            partition, offset = event.totals[-2:]
            right = partition, offset
        it = f"the result of {left} and {right} in {sink}"
        demand(event.way in (PAIR, LEFT, RIGHT), f"{it} is none of a join")
        for source, row in zip(SOURCES, (left, right), strict=True):
            if row is not None:
                self._record(it, source, *row, event.first)
        if left is not None and right is not None:
            apart_ms = time_at(right[1]) - time_at(left[1])
            demand(-EARLIER_MS <= apart_ms <= LATER_MS, f"{it} are {apart_ms} ms apart")
        else:
            demand(self._join.kind == "full_pairs", f"{it} is of one record alone")
            demand(("l", left) not in self._paired and ("r", right) not in self._paired, f"{it} has a partner")
            self.met["record without a partner"] += 1
        demand((left, right) not in self._results[sink], f"{it} is visible twice")
        self._results[sink].add((left, right))

    def _record(self, it: str, source: str, partition: int, offset: int, first: str) -> None:
        demand(offset < self._decided.get((source, partition), 0), f"{it} is of a record that is not before Sn")
        there = self._inputs[source].partitions[partition][offset]
        demand(there[0] == first and not is_late(offset), f"{it} is of {there}, which is late or has another key")

    def judge_at(self, checkpoint: int, *, is_last: bool) -> None:
        """All pairs of records before Sn are there; and in the end all records that have no partner."""
        pairs = {*self._pairs(self._decided)}
        for sink, given in self._results.items():
            lacking = pairs - given
            demand(not lacking, f"{sink} at checkpoint {checkpoint} lacks {len(lacking)} pairs: {sorted(lacking)[:3]}")
            if is_last and self._join.kind == "full_pairs":
                left_out = self._alone() - given
                demand(not left_out, f"{sink} lacks {len(left_out)} records without a partner")
        self.met["pairs judged"] += len(pairs)

    def _alone(self) -> set[tuple[Row | None, Row | None]]:
        lefts, rights = (
            {row for rows in self._in_time(source, self._decided).values() for _, row in rows} for source in SOURCES
        )
        return {(row, None) for row in lefts if ("l", row) not in self._paired} | {
            (None, row) for row in rights if ("r", row) not in self._paired
        }

    def _pairs(self, ends: dict[Place, int]) -> Iterator[tuple[Row, Row]]:
        """Those of records before *ends*."""
        lefts, rights = (self._in_time(source, ends) for source in SOURCES)
        for key, rows in lefts.items():
            for time, left in rows:
                for at, right in rights[key]:
                    if -EARLIER_MS <= at - time <= LATER_MS:
                        yield left, right

    def _in_time(self, source: str, ends: dict[Place, int]) -> dict[str, list[tuple[int, Row]]]:
        """The records that are not late, by key, each with its time."""
        found: dict[str, list[tuple[int, Row]]] = defaultdict(list)
        for partition, records in enumerate(self._inputs[source].partitions):
            for offset, (first, _) in enumerate(records[: ends[source, partition]]):
                if not is_late(offset):
                    found[first].append((time_at(offset), (partition, offset)))
        return found


class OracleJoins(Oracle):
    readers: JoinReaders | PairReaders
    readers_of: type[JoinReaders | PairReaders] = JoinReaders

    def _kept(self) -> set[str]:
        steps = {f"{step.id}{part}" for step in self.topology.of(*JOINING) for part in ("-subscribe", "-answer", "")}
        return super()._kept() | steps

    def _arrive(self, place: Place, offset: int) -> None:
        """A row gives any number of results."""

    def _state(self, manifest: Manifest, operator: OperatorSnapshot) -> None:
        """It is judged by the results that it gives."""

    def _judge_records(self, checkpoint: int, sink: str, records: int, owed_before: int) -> None:
        self._owed[sink] += records

    def _on_their_way(self, manifest: Manifest) -> set[BlockRef]:
        self.met["record on its way"] += sum(log.records for log in manifest.channel_logs)
        return self._blocks_on_their_way(manifest)

    def _finalized(self, mark: Finalized) -> None:
        super()._finalized(mark)
        self.look()
        self._judge_join(mark.checkpoint)

    def _judge_join(self, checkpoint: int, *, is_last: bool = False) -> None:
        """Unless records are in flight between the steps, or not all of the output is visible yet."""
        if self.manifests[checkpoint].channel_logs or any(self.readers.seen[s] != self._owed[s] for s in self.sinks):
            return
        self.readers.judge_at(checkpoint, is_last=is_last)
        self.met["join judged"] += 1
        self.met |= self.readers.met

    def close(self) -> None:
        super().close()
        newest = max(self.manifests)
        demand(not self.manifests[newest].channel_logs, "the last checkpoint before a clean end is aligned")
        self._judge_join(newest, is_last=True)


class OraclePairs(OracleJoins):
    readers_of = PairReaders


_decode = msgspec.json.Decoder(Event).decode
