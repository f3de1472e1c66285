"""The contract of a store below a write-ahead sink: `SinkContract`, and tests of the `Store` itself.

Chunks are iterators, so that a test can raise, wait, read, cut connections or die in the middle of an apply.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from exactlyonce.pipeline.errors import Fenced, StoreUnavailable
from exactlyonce.sinks.ledger import LedgerEntry
from exactlyonce.sinks.write_ahead.store import Store
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.contract import refused
from exactlyonce.testing.sink_contract.hooks import (
    ORIGIN,
    PIPELINE,
    SINK,
    Forked,
    Row,
    again,
    known,
    stand_still,
    works,
)
from exactlyonce.testing.sink_contract.sinks import FIRST, SECOND, TWICE, SinkContract

HELD_S = 1.0
"""The time an older incarnation stays in the middle of an apply, unless a fence returns sooner."""
BLOCKED_S = 2.0
"""The time after which a blocked reader counts as seeing nothing."""
LIVES = 12
"""The number of processes that are killed."""
HALFWAY = (
    "Rows and their ledger row become visible together or not at all: one transaction, rolled back whatever is raised "
    "in it."
)
NOT_THE_STORES = "What the chunks raise is no fault of the store: let it through, once all is rolled back."
JOINED = "The rows of a batch are joined and cut between any two of them: an encoded row must show where it ends."


class _NotRead(Exception):
    """Reading the checkpoint topic failed."""


class StoreContract(SinkContract):
    """See the package."""

    def store(self) -> Store:
        """A new store, as in its own process."""
        self.make_ready()
        store: Store = self.sink().store(self.type)
        self._to_close.append(store)
        return store

    def fenced(self, incarnation: int = 1) -> Store:
        """The store of a leader that has fenced its predecessors."""
        store = self.store()
        again(lambda: store.fence(PIPELINE, SINK, incarnation, ORIGIN))
        return store

    def encoded(self, rows: Sequence[Row]) -> list[bytes]:
        """The entries of *rows*."""
        return self.store().encoder().encode([self.record(*row) for row in rows])

    def applies(self, store: Store, chunks: Sequence[bytes], entry: LedgerEntry) -> None:
        """Apply an entry for the first time."""
        failed = f"An apply of checkpoint {entry.checkpoint} is to work, however its rows were joined. {JOINED}"
        assert works(lambda: store.apply(iter(chunks), entry), failed) is True, (
            f"An apply of checkpoint {entry.checkpoint} says that it had been applied, but the transaction before it "
            f"failed, and must have left no ledger row: its rows are lost."
        )

    # --- apply is atomic ----------------------------------------------------------------------------------------------

    def test_blocks_that_cannot_be_read(self) -> None:
        """The chunks raise in the middle of an apply: the error propagates, no row stays, and a retry works."""
        store, chunks = self.fenced(), self.encoded(FIRST)
        for read in range(len(chunks)):
            refused(partial(store.apply, _breaks(chunks[:read]), entry(1)), _NotRead, NOT_THE_STORES)
            self.seen([], HALFWAY)
        self.applies(store, chunks, entry(1))
        self.seen(FIRST, HALFWAY)

    def test_a_process_that_dies_within_an_apply(self) -> None:
        """A process is killed in the middle of an apply: no row stays, and the next process applies it."""
        self._needs_processes()
        chunks = self.encoded(FIRST)
        self.fenced().close()

        def dies(tell: Callable[[], None]) -> None:
            def chunk_by_chunk() -> Iterator[bytes]:
                yield from chunks[:3]
                tell()
                stand_still()

            self.store().apply(chunk_by_chunk(), entry(1))

        child = Forked(dies)
        try:
            assert child.next_line() == "in the middle"
        finally:
            child.end()
        self.applies(self.store(), chunks, entry(1))
        self.seen(FIRST, HALFWAY)

    def test_processes_that_die_at_any_moment(self) -> None:
        """Processes apply checkpoints and are killed, each a little later in an apply: all rows come once."""
        self._needs_processes()
        encoded = self.encoded([(number, 0) for number in range(400)])
        self.fenced().close()

        def applies_all(tell: Callable[[], None]) -> None:
            store = self.store()
            done = known(again(lambda: store.fence(PIPELINE, SINK, 1, ORIGIN))).get(0, 0)
            for checkpoint in range(done + 1, 401):
                assert again(lambda: store.apply(iter([encoded[checkpoint - 1]]), entry(checkpoint)))  # noqa: B023 - now
                tell()

        for life in range(LIVES):
            child = Forked(applies_all)
            try:
                child.next_line()
                began = time.monotonic()
                child.next_line()
                took = time.monotonic() - began
                time.sleep(took * life / LIVES)  # noqa: TID251 - into the next apply, each time a little further
            finally:
                child.end()
        store = self.store()
        done = known(again(lambda: store.fence(PIPELINE, SINK, 1, ORIGIN))).get(0, 0)
        self.seen([(number, 0) for number in range(done)], f"{HALFWAY} By the ledger {done} checkpoints are there.")

    def test_a_connection_that_is_cut_within_an_apply(self) -> None:
        """The connection is lost in the middle: StoreUnavailable, no row stays, and the store reconnects."""
        store, chunks = self.fenced(), self.encoded(FIRST)

        def cut_off() -> Iterator[bytes]:
            yield from chunks[:3]
            self.cut()
            yield from chunks[3:]

        try:
            store.apply(cut_off(), entry(1))
        except StoreUnavailable:
            self.seen([], HALFWAY)
        again(lambda: store.apply(iter(chunks), entry(1)))
        self.seen(FIRST, "The connection was cut within an apply; it was applied again until it answered.")
        assert not again(lambda: store.apply(iter(chunks), entry(1))), TWICE

    def test_readers_never_see_a_part(self) -> None:
        """Readers see nothing of an apply that is under way; they may have to wait."""
        store, chunks = self.fenced(), self.encoded(FIRST)
        seen: list[list[Any]] = []

        def looked_at() -> Iterator[bytes]:
            yield from chunks[:3]
            reader = threading.Thread(target=lambda: seen.append(self.read()), daemon=True)
            reader.start()
            reader.join(BLOCKED_S)
            seen[1:] = []
            yield from chunks[3:]

        assert again(lambda: store.apply(looked_at(), entry(1)))
        assert seen in ([], [[]], [[self.record(*row) for row in FIRST]]), f"{HALFWAY} A reader saw {seen}."
        self.seen(FIRST, HALFWAY)

    # --- a fence while an apply is under way --------------------------------------------------------------------------

    def test_a_fence_while_a_zombie_applies(self) -> None:
        """A leader fences while an older one applies: the apply has ended by then, or it fails."""
        zombie, chunks = self.fenced(1), self.encoded(FIRST)
        inside, fenced, outcome = threading.Event(), threading.Event(), list[object]()

        def slow() -> Iterator[bytes]:
            yield from chunks[:3]
            inside.set()
            fenced.wait(HELD_S)
            yield from chunks[3:]

        def apply() -> None:
            try:
                outcome.append(zombie.apply(slow(), entry(1)))
            except Exception as error:
                outcome.append(error)
            inside.set()

        thread = threading.Thread(target=apply, daemon=True)
        thread.start()
        assert inside.wait(LIMIT_S)
        leader = self.store()
        ledger = known(again(lambda: leader.fence(PIPELINE, SINK, 2, ORIGIN)))
        fenced.set()
        thread.join(LIMIT_S)
        why = (
            "A fence returned while an older incarnation was in the middle of an apply, which then went through: let "
            "fence lock what apply reads the incarnation from, or look at it in the step that commits."
        )
        assert outcome, "The apply has not ended, although its chunks have."
        went_through = outcome[0] is True
        assert ledger == ({0: 1} if went_through else {}), f"{why} fence returned {ledger}; apply: {outcome[0]!r}."
        self.seen(FIRST if ledger else [], why)
        refused(lambda: self._again(zombie, chunks), Fenced, "The zombie goes on after the fence.")
        self.seen(FIRST if ledger else [], why)

    def _again(self, store: Store, chunks: Sequence[bytes]) -> bool:
        return again(lambda: store.apply(iter(chunks), entry(2, previous=1)))

    # --- rows ---------------------------------------------------------------------------------------------------------

    def test_rows_joined_in_any_way(self) -> None:
        """Rows joined into chunks of any length, with empty chunks, are all written."""
        rows = [(number, 0) for number in range(60)]
        store, encoded = self.fenced(), self.encoded(rows)
        written: list[Row] = []
        for checkpoint, size in enumerate((1, 7, 60), start=1):
            chunks = [b"".join(encoded[at : at + size]) for at in range(0, 60, size)]
            self.applies(store, [b"", *chunks, b""], entry(checkpoint))
            written += rows
            self.seen(written, JOINED)
        self.applies(store, [], entry(4))
        self.seen(written, "An apply of no chunks wrote rows.")

    def test_the_last_of_a_key_counts(self) -> None:
        """Rows keep the order in which they were written, within a chunk, across chunks and across checkpoints."""
        store = self.fenced()
        within = [(0, version) for version in (2, 3, 1)]
        for checkpoint, chunks in enumerate(([b"".join(self.encoded(within))], self.encoded(within[1:])), start=1):
            self.applies(store, chunks, entry(checkpoint))
        self.seen([*within, *within[1:]], "Rows were applied in another order: an older state of a key would stay.")

    def test_a_thousand_rows_of_many_keys(self) -> None:
        """A larger checkpoint in many chunks is written whole and in order."""
        rows = [(number % 700, number) for number in range(1_000)]
        store, encoded = self.fenced(), self.encoded(rows)
        self.applies(store, [b"".join(encoded[at : at + 90]) for at in range(0, 1_000, 90)], entry(1))
        self.seen(rows, "A thousand rows in twelve chunks.")

    def test_awkward_rows(self) -> None:
        """Line feeds, quotes, separators and other content are written unchanged."""
        if not self.awkward:
            self.left_out("awkward", "rows that are hard to write down")
        store = self.fenced()
        encoded = store.encoder().encode(list(self.awkward))
        self.applies(store, [b"".join(encoded)], entry(1))
        rows, wanted = list(self.read()), list(self.awkward)
        assert len(rows) == len(wanted), f"{JOINED} {rows}, and not {wanted}"
        assert all(row in rows for row in wanted), f"A row came out as another: {rows}, and not {wanted}"

    def test_encoding_is_pure(self) -> None:
        """Encoding has no side effect and gives the same bytes, one entry for each record."""
        self.fenced()
        records = [self.record(*row) for row in FIRST]
        encoder, other = self.store().encoder(), self.store().encoder()
        encoded = encoder.encode(records)
        assert len(encoded) == len(records), f"{len(encoded)} entries for {len(records)} records"
        assert all(isinstance(row, bytes) and row for row in encoded), "Each entry is bytes, and not empty."
        again_encoded = [*other.encode(records[:2]), *other.encode(records[2:])]
        assert encoded == again_encoded, (
            "The same records give other bytes in another batch, or at another time: a repeated task writes other rows."
        )
        assert records == [self.record(*row) for row in FIRST], "Encoding changed the records."
        assert encoder.encode([]) == [], "No records give no entries."
        self.seen([], "Encoding wrote to the target: what is encoded may never be decided.")

    def test_records_that_do_not_fit(self) -> None:
        """The encoder refuses records that the store would refuse, before their checkpoint is decided."""
        if not self.misfits:
            self.left_out("misfits", "records that the store does not take")
        encoder = self.store().encoder()
        for record in self.misfits:
            why = f"{record!r} was encoded: the store refuses it when its checkpoint is decided, and the run halts."
            error = refused(partial(encoder.encode, [record]), (ValueError, TypeError), why)
            assert str(error), f"The error for {record!r} says nothing."

    # --- without the ledger -------------------------------------------------------------------------------------------

    def test_writing_without_the_ledger(self) -> None:
        """Weaker delivery writes rows in one transaction, as often as they are given, without the ledger."""
        store, chunks = self.fenced(), self.encoded(FIRST)
        refused(partial(store.write, _breaks(chunks[:3])), _NotRead, NOT_THE_STORES)
        self.seen([], HALFWAY)
        for _ in range(2):
            store.write(iter(chunks))
        self.seen([*FIRST, *FIRST], "write gives what it is given each time; nothing is compared.")
        self.found(2, {}, "write moves no marker: an exact sink of that name would leave rows out.")
        self.applies(self.fenced(2), self.encoded(SECOND), entry(1, incarnation=2))
        self.seen([*FIRST, *FIRST, *SECOND], "apply after write gives its rows.")


def _breaks(chunks: Sequence[bytes]) -> Iterator[bytes]:
    yield from chunks
    raise _NotRead


def entry(checkpoint: int, *, previous: int | None = None, subtask: int = 0, incarnation: int = 1) -> LedgerEntry:
    """The ledger entry of a checkpoint; *previous* is the one before, unless given."""
    before = checkpoint - 1 if previous is None else previous
    return LedgerEntry(
        pipeline=PIPELINE, sink=SINK, subtask=subtask, checkpoint=checkpoint, previous=before, incarnation=incarnation,
        origin=ORIGIN,
    )  # fmt: skip
