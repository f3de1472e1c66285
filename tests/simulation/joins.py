"""The judge of tables joined by a foreign key: the results that stand are the join of the rows before Sn.

Which results are given between two checkpoints is a matter of luck; which of them stand at one is not. So there is no
number of records that a sink must have, and each of them is judged by itself: its rows are in the input before Sn, and
the rows of a key come in their order.
"""

from __future__ import annotations

import msgspec
from oracle import Oracle
from readers import Place, Readers, Ways
from topologies import GONE, JOINING, Event, Input, Topology, is_gone
from watched import demand

from exactlyonce.checkpoint.records.manifest import BlockRef, Finalized, Manifest, OperatorSnapshot

Results = dict[str, tuple[int, tuple[int, ...]]]
"""By left key: the offset of the left row, and the partition and offset of the right one; empty: there is none."""


class JoinReaders(Readers):
    def __init__(self, topology: Topology, inputs: dict[str, Input], ways: Ways, decided: dict[Place, int]) -> None:
        super().__init__(topology, inputs, ways, decided)
        (self._join,) = topology.of(*JOINING)
        self.lefts, self.rights = self._join.inputs
        self.standing: dict[str, Results] = {sink: {} for sink in topology.sinks}
        self._lefts_seen: dict[tuple[str, str], int] = {}
        """The offset of the left row of the newest result, by sink and left key."""
        self.gone = 0

    def read(self, sink: str, value: bytes) -> None:
        event = _decode(value)
        key, standing = event.first, self.standing[sink]
        self.seen[sink] += 1
        if event.way == GONE:
            demand(key in standing, f"a result of {key} is gone in {sink}, where none stands")
            del standing[key]
            self.gone += 1
            return
        it = f"the result of {key} in {sink}, of row {event.offset},"
        self._row(it, (event.source, event.partition), event.offset, (event.first, event.second))
        demand(event.source == self.lefts, f"{it} is of {event.source}")
        if event.totals:
            partition, offset = event.totals
            self._row(it, (self.rights, partition), offset, (event.second, ""))
        before = self._lefts_seen.get((sink, key), -1)
        demand(event.offset >= before, f"{it} comes after that of row {before}")
        self._lefts_seen[sink, key] = event.offset
        standing[key] = event.offset, event.totals

    def _row(self, it: str, place: Place, offset: int, keys: tuple[str, str]) -> None:
        demand(place in self._decided and offset < self._decided[place], f"{it} is of a row that is not before Sn")
        there = self._inputs[place[0]].partitions[place[1]][offset]
        demand(there == keys and not is_gone(offset), f"{it} is of a row {there}")

    def joined(self) -> Results:
        """The join of the rows before Sn."""
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


class OracleJoins(Oracle):
    readers: JoinReaders
    readers_of = JoinReaders

    def _kept(self) -> set[str]:
        return {f"{step.id}{part}" for step in self.topology.of(*JOINING) for part in ("-subscribe", "-answer", "")}

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

    def _judge_join(self, checkpoint: int) -> None:
        """Unless records are in flight between the steps, or not all of the output is visible yet."""
        if self.manifests[checkpoint].channel_logs or any(self.readers.seen[s] != self._owed[s] for s in self.sinks):
            return
        joined = self.readers.joined()
        for sink in self.sinks:
            differing = {
                key: (self.readers.standing[sink].get(key), joined.get(key))
                for key in sorted(self.readers.standing[sink].keys() | joined.keys())
                if self.readers.standing[sink].get(key) != joined.get(key)
            }
            demand(
                not differing, f"{sink} at checkpoint {checkpoint} is not the join of the rows before Sn: {differing}"
            )
        self.met["join judged"] += 1
        self.met["result gone"] = self.readers.gone

    def close(self) -> None:
        super().close()
        newest = max(self.manifests)
        demand(not self.manifests[newest].channel_logs, "the last checkpoint before a clean end is aligned")
        self._judge_join(newest)


_decode = msgspec.json.Decoder(Event).decode
