"""The judge of stores that keep a ledger: it sees every request that a store carries out, and the decisions.

The possible contents of a store follow from the manifests alone: each row is in a block that the judge has read, and
the committables of a sink subtask are applied once, in the order of their checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from watched import demand

from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, StoreCommittable
from exactlyonce.sinks.ledger import LedgerEntry
from exactlyonce.sinks.write_ahead.writer import INDEXED, decode_index
from exactlyonce.testing.store import StoreContents, StoreModel, decode_rows

PIPELINE = "p"
Of = tuple[str, int]
"""A sink and its subtask."""


class Decided(NamedTuple):
    committable: StoreCommittable
    rows: list[bytes]


class Ledgers:
    def __init__(self, body: Callable[[BlockRef], bytes], read: Callable[[str, bytes], None]) -> None:
        """*body* reads a block; *read* is told of every row that a sink shows."""
        self._body, self._read = body, read
        self.positions: dict[Of, int] = {}
        """The newest checkpoint that is decided; of subtasks that rescaling has taken away, too."""
        self.finalized: dict[Of, int] = {}
        """Likewise, of what is finalized."""
        self.applied: set[str] = set()
        """Rows in the store, by name."""
        self.put_back = False
        """Whether the store was restored from a backup."""
        self.made_anew = ""
        """The id of the checkpoint topic, if it was made anew."""
        self._decided: dict[str, Decided] = {}
        self._order: dict[Of, list[str]] = {}
        """The names of decided rows by sink subtask, in the order of the checkpoints that cut them."""
        self._fenced: dict[str, int] = {}
        """The newest incarnation that has fenced, by sink."""
        self._shown: dict[str, int] = {}
        """The number of rows that were read, by sink."""

    # --- decisions

    def decided(self, manifest: Manifest) -> None:
        n = manifest.checkpoint
        demand(not self.made_anew, f"checkpoint {n} is decided in a topic that was made anew under an old ledger")
        for each in manifest.staged:
            demand(each.name not in self._decided, f"{each.name} is decided twice")
            newest = self.positions.get(each.writer, 0)
            demand(each.checkpoint > newest, f"{each.name} is decided after checkpoint {newest} of its subtask")
            rows = list(decode_rows(self._body(ref) for ref in self.blocks_of(each)))
            demand(len(rows) == each.records, f"{each.name} has {len(rows)} rows set aside, not {each.records}")
            self._decided[each.name] = Decided(each, rows)
        for each in sorted(manifest.staged, key=lambda each: each.checkpoint):
            self._order.setdefault(each.writer, []).append(each.name)
            self.positions[each.writer] = each.checkpoint
        found = {(sink, subtask): checkpoint for sink, subtask, checkpoint in manifest.ledger}
        demand(found == self.positions, f"checkpoint {n} says that the ledgers have {found}, not {self.positions}")

    def blocks_of(self, committable: StoreCommittable) -> list[BlockRef]:
        if committable.body != INDEXED:
            return list(committable.blocks)
        return [ref for index in committable.blocks for ref in decode_index(self._body(index))]

    def stood_on(self, manifest: Manifest) -> set[BlockRef]:
        return {ref for each in manifest.staged for ref in (*each.blocks, *self.blocks_of(each))}

    def finished(self, manifest: Manifest) -> None:
        for each in manifest.staged:
            there = self.put_back or each.name in self.applied
            demand(there, f"{each.name} is finalized though it is not in the store")
        self.finalized = dict(self.positions)

    # --- requests

    def fenced(self, sink: str, incarnation: int, origin: str) -> None:
        demand(origin != self.made_anew, f"the ledger of {sink} is taken over by a topic that was made anew")
        self._fenced[sink] = max(incarnation, self._fenced.get(sink, 0))

    def applied_now(self, entry: LedgerEntry, rows: Sequence[bytes]) -> None:
        of, name = (entry.sink, entry.subtask), f"{entry.sink}:{entry.subtask}:{entry.checkpoint}"
        demand(name in self._decided, f"{name} is applied though no durable manifest names it")
        demand(entry.incarnation >= self._fenced.get(entry.sink, 0), f"{name} is applied by who was fenced")
        demand(name not in self.applied, f"{name} is applied twice")
        order = self._order[of]
        missing = [each for each in order[: order.index(name)] if each not in self.applied]
        demand(not missing, f"{name} is applied before {missing}")
        demand(list(rows) == self._decided[name].rows, f"{name} is applied with other rows than were set aside")
        self.applied.add(name)

    # --- readers

    def look(self, contents: StoreContents) -> None:
        if self.put_back:
            return
        for (_, sink), rows in contents.rows.items():
            begin = self._shown.get(sink, 0)
            for row in rows[begin:]:
                self._read(sink, row)
            self._shown[sink] = len(rows)

    # --- what people do

    def restored(self, contents: StoreContents) -> None:
        has = positions_of(contents)
        self.put_back = True
        self._fenced = {sink: ledger.incarnation for (_, sink), ledger in contents.ledgers.items()}
        self.applied = {name for name in self.applied if self._is_in(name, has)}

    @property
    def lacks(self) -> list[str]:
        """Finalized rows that are missing. Rows sent before the store was restored may bring it again."""
        every = (name for names in self._order.values() for name in names)
        return [name for name in every if self._is_in(name, self.finalized) and name not in self.applied]

    def lost(self, contents: StoreContents) -> set[Of]:
        has = positions_of(contents)
        return {of for of, checkpoint in self.finalized.items() if has.get(of, 0) < checkpoint}

    def _is_in(self, name: str, has: Mapping[Of, int]) -> bool:
        committable = self._decided[name].committable
        return committable.checkpoint <= has.get(committable.writer, 0)


def positions_of(contents: StoreContents) -> dict[Of, int]:
    return {
        (sink, subtask): checkpoint
        for (_, sink), ledger in contents.ledgers.items()
        for subtask, checkpoint in ledger.checkpoints.items()
    }


class WatchedStore(StoreModel):
    def __init__(self) -> None:
        super().__init__()
        self.ledgers: Ledgers
        """The judge."""
        self.before: Callable[[], None]
        """A function to call before anything is judged."""

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        found = super().fence(pipeline, sink, incarnation, origin)
        self.ledgers.fenced(sink, incarnation, origin)
        return found

    def apply(self, rows: Sequence[bytes], entry: LedgerEntry) -> bool:
        self.before()
        old = positions_of(self.contents)
        sizes = {target: len(found) for target, found in self.contents.rows.items()}
        applied = super().apply(rows, entry)
        new = positions_of(self.contents)
        grown = any(len(found) > sizes.get(target, 0) for target, found in self.contents.rows.items())
        key = (entry.sink, entry.subtask)
        if applied or grown:
            self.ledgers.applied_now(entry, rows)
        demand(all(new.get(each, 0) >= had for each, had in old.items()), f"the ledger goes back at {entry}")
        demand(new.get(key, 0) >= entry.checkpoint, f"the ledger does not have {entry}")
        demand(applied or new == old, f"the ledger changes without rows at {entry}")
        return applied
