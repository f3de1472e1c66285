"""Contract tests, to inherit from, for a source: the behaviour that barriers, restarts and bounded work rely on.

Each test is a way, told in its docstring, in which some source has lost or doubled records; its failure says what the
source does wrong. A test has one place to read, with `SPLITS` splits that are empty at first, and any number of
readers, each as in its own process. Records are texts: their split and number.

```python
from exactlyonce.testing.source_contract import SourceContract

class TestMySource(SourceContract):
    def source(self):
        return MySource(self.place, value=str)

    def append(self, split, texts):
        self.place.write(split, texts)
```

May import what `testing` may import.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import (
    Divide,
    RangeContext,
    Readable,
    ReaderClients,
    ReaderContext,
    SourceReader,
    SplitFinder,
)
from exactlyonce.engines.runtime.source_decoder import SourceDecoder
from exactlyonce.pipeline.errors import Halt, RecordError
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.contract import Contract, refused

SOURCE = "contract"
SPLITS = 2
EXACT = "Positions are exactly behind what was handed out: not behind what was fetched, nor before the last batch."
NO_RESET = (
    "A position that is not there any more is an error that stops the pipeline: whoever goes on elsewhere loses or "
    "doubles records in silence."
)


def texts(split: int, begin: int, end: int) -> list[str]:
    """Records *begin* to *end* of a split."""
    return [f"{split}:{number}" for number in range(begin, end)]


class SourceContract(Contract):
    """See the package."""

    def source(self) -> Any:
        """The description of the source, with records of type str, or see `text_of`; all of one test have one place."""
        raise NotImplementedError

    def text_of(self, record: Any) -> str:
        """The text of a decoded record, if it is more than that."""
        text: str = record
        return text

    def append(self, split: int, records: Sequence[str]) -> None:
        """Append records to a split; readers see them once it returns."""
        raise NotImplementedError

    grows = True
    """Whether `append` may add to a split that is being read; else all of it is there before, and it ends."""

    finds_splits = True
    """Whether it finds its splits by `identity`, in their order; False: a cluster does, or a server divides them."""

    repeats = True
    """Whether an offset has the same record ever after; else a range cannot be read."""

    divide: Divide | None = None
    """Divides a batch among splits, of which the reader may have fetched records; None: they come as they are read."""

    def identity(self, split: int) -> str:
        """The identity of a split: of a topic its id, which changes if it is recreated under its name."""
        raise NotImplementedError

    def found(self, known: Sequence[SourceOffset] = ()) -> Sequence[SourceOffset]:
        """The splits that a new leader finds, which knows others from a checkpoint."""
        finder: SplitFinder = self.source().finder(SOURCE, None)
        try:
            return finder.find(known)
        finally:
            finder.close()

    def clients(self) -> ReaderClients:
        """The clients that a worker gives to its readers. Override it if `open_reader` needs any."""
        return _NoClients()

    client: Mapping[str, Any] = {}
    """The client configuration of bounded work."""

    def add_split(self) -> int:
        """Add a split to the place; returns its number. May be left out."""
        self.left_out("add_split", "a split that is added")

    def remove(self, split: int, before: int) -> None:
        """Remove the records of a split before an offset, as retention does. May be left out."""
        self.left_out("remove", "a position that was removed")

    def append_damaged(self, split: int) -> None:
        """Append a record that is no text. May be left out."""
        self.left_out("append_damaged", "a record that does not decode")

    def readable(self) -> Readable:
        """The description, as engines see it."""
        readable: Readable = self.source()
        return readable

    def beginning(self, splits: Iterable[int] = range(SPLITS)) -> tuple[SourceOffset, ...]:
        """The positions before the first records."""
        return tuple(SourceOffset(SOURCE, self.readable().place, self.identity(split), split, 0) for split in splits)

    def reader(
        self, positions: Sequence[SourceOffset] | None = None, targets: Iterable[SourceOffset] = ()
    ) -> Following:
        """A reader open at *positions*; None: at the beginning."""
        context = ReaderContext(
            source=SOURCE,
            positions=self.beginning() if positions is None else positions,
            targets={target.partition: target.offset for target in targets} or None,
            clients=self.clients(),
            divide=self.divide,
        )
        reader = self.readable().open_reader(context)
        self._to_close.append(reader)
        reader.open()
        return Following(reader, SourceDecoder(SOURCE, self.readable()), self.text_of)

    def filled(self, count: int = 20) -> None:
        """Append *count* records to every split."""
        for split in range(SPLITS):
            self.append(split, texts(split, 0, count))

    # --- records and positions ----------------------------------------------------------------------------------------

    def test_the_description_is_data(self) -> None:
        """A description made twice describes the same, as JSON, and finds nothing wrong with itself."""
        one, two = self.source().describe(), self.source().describe()
        assert json.loads(json.dumps(one)) == two, (
            f"describe() is part of the pipeline's fingerprint, and differs from one process to the next, or is no "
            f"JSON: {one}. After a restart the pipeline would count as changed."
        )
        assert not list(self.source().problems())

    def test_records_come_in_order(self) -> None:
        """A reader returns the records of each split once and in order, also those appended meanwhile."""
        self.filled()
        reader = self.reader()
        reader.read(SPLITS * 20)
        count = 20
        if self.grows:
            for split in range(SPLITS):
                self.append(split, texts(split, 20, 25))
            count = 25
            reader.read(SPLITS * count)
        for split in range(SPLITS):
            assert reader.of(split) == texts(split, 0, count), "Records of one split come in its order, and each once."

    def test_runs(self) -> None:
        """The runs of a batch give the order of its splits, which a replay follows."""
        self.filled()
        reader = self.reader()
        while len(reader.records) < SPLITS * 20:
            batch = reader.poll(7)
            runs = [split for split, count in reader.reader.runs for _ in range(count)]
            assert runs == [int(text.split(":")[0]) for text in batch], f"The runs say {runs}, of the batch {batch}."

    def test_a_batch_is_as_long_as_it_may_be(self) -> None:
        """A batch has at most as many records as were asked for, however many were fetched."""
        self.filled()
        reader = self.reader()
        while len(reader.records) < SPLITS * 20:
            batch = reader.poll(3)
            assert len(batch) <= 3, f"3 records were asked for, {len(batch)} came: a barrier waits for all of them."

    def test_positions_are_exact(self) -> None:
        """Another process that begins at the positions after any batch gets exactly the records that follow."""
        self.filled()
        for sizes in ((1,), (7, 2), (5, 30)):
            reader = self.reader()
            for size in sizes:
                reader.read(len(reader.records) + size, size)
                rest = self.reader(reader.reader.positions())
                rest.read(SPLITS * 20 - len(reader.records), why=EXACT)
                for split in range(SPLITS):
                    records = reader.of(split) + rest.of(split)
                    assert records == texts(split, 0, 20), f"{EXACT} In all, split {split} gave {records}."

    def test_positions_say_what_they_are_of(self) -> None:
        """A position names source, place, identity and split, as in a manifest; there is one per split, in order."""
        self.filled(3)
        reader = self.reader()
        reader.read(SPLITS * 3)
        positions = reader.reader.positions()
        assert msgspec.convert(msgspec.to_builtins(positions), tuple[SourceOffset, ...]) == positions, "It is data."
        named = [(position.source, position.topic, position.topic_id, position.partition) for position in positions]
        assert named == [(SOURCE, self.readable().place, self.identity(split), split) for split in range(SPLITS)]

    def test_positions_stand_still(self) -> None:
        """A position moves with returned records only, not with fetched ones."""
        self.filled()
        reader = self.reader()
        assert reader.reader.positions() == self.beginning(), f"Before the first batch: {EXACT}"
        reader.read(5, 5)
        stood = reader.reader.positions()
        if self.grows:
            for split in range(SPLITS):
                self.append(split, texts(split, 20, 40))
        assert reader.reader.positions() == stood, EXACT

    def test_every_position_can_be_gone_to(self) -> None:
        """A restart may begin at the position after any record."""
        self.append(0, texts(0, 0, 12))
        reader = self.reader(self.beginning([0]))
        noted = [reader.reader.positions()]
        for _ in range(12):
            reader.read(len(reader.records) + 1, 1)
            noted.append(reader.reader.positions())
        for number, positions in enumerate(noted[:-1]):
            again = self.reader(positions)
            again.read(1, 1)
            assert again.of(0) == [f"0:{number}"], f"{EXACT} Behind {number} records comes {again.of(0)}."

    def test_nothing_is_remembered_elsewhere(self) -> None:
        """Only manifests keep positions: another reader that begins at the beginning gets all records again."""
        self.filled(5)
        why = "A reader went on where another had been, by something that is in no manifest."
        for _ in range(2):
            reader = self.reader()
            reader.read(SPLITS * 5, why=why)
            reader.reader.close()
            assert reader.of(0) == texts(0, 0, 5), why

    def test_nothing_to_read(self) -> None:
        """A poll without records returns empty; a reader without splits is idle."""
        reader = self.reader()
        assert (reader.poll(10), reader.reader.idle) == ([], False)
        none = self.reader([])
        assert (none.poll(10), none.reader.idle, none.reader.positions()) == ([], True, ())

    # --- ends ---------------------------------------------------------------------------------------------------------

    def test_targets(self) -> None:
        """A reader has finished once all splits have reached their targets; one without targets never finishes."""
        self.filled()
        whole = self.reader()
        whole.read(SPLITS * 20)
        if self.grows:
            assert not whole.reader.finished, "A source without an end never finishes."
        else:
            whole.until(lambda: whole.reader.finished, "All splits have ended, and the source has not finished.")
        targets = whole.reader.positions()
        bounded = self.reader(targets=targets)
        while len(bounded.records) < SPLITS * 20:
            assert not bounded.reader.finished, (
                "It has finished before it had handed out all that lies before its targets."
            )
            bounded.poll(7)
        bounded.until(lambda: bounded.reader.finished, "All has been handed out, and the source has not finished.")
        assert bounded.reader.positions() == targets
        assert self.reader(targets, targets).reader.finished, "What has reached its targets before has finished."
        assert self.reader([], targets).reader.finished, "A subtask without splits has finished in a bounded run."

    def test_lag(self) -> None:
        """The lag is the number of records not yet returned, and goes to zero."""
        self.filled()
        reader = self.reader()
        lags: list[tuple[int, int]] = []
        while len(reader.records) < SPLITS * 20:
            reader.poll(2)
            lags.append((SPLITS * 20 - len(reader.records), sum(reader.reader.lags().values())))
        assert all(lag <= left for left, lag in lags), (
            f"More is said to be left than there is: (left, lag) were {lags}."
        )
        assert any(lag == left > 0 for left, lag in lags), f"The lag never said what was left: (left, lag) were {lags}."
        reader.until(lambda: not any(reader.reader.lags().values()), "All has been handed out, and the lag is not 0.")
        assert reader.reader.waiting == "", "Nothing is waited for that does not answer."

    def test_quiet(self) -> None:
        """A split is quiet once all its records were returned, unless it has ended."""
        self.filled()
        reader = self.reader()
        while len(reader.records) < SPLITS * 20:
            reader.poll(2)
            early = {split: reader.of(split)[-1:] for split in reader.reader.quiet() if len(reader.of(split)) < 20}
            assert not early, f"Splits are said to be quiet after these records, and others are unread: {early}."

        def all_quiet() -> bool:
            ended = {position.partition for position in reader.reader.positions() if position.ended}
            return {*reader.reader.quiet(), *ended} == {*range(SPLITS)}

        reader.until(all_quiet, "All has been handed out, and not all splits are quiet.")

    # --- splits that come, records that go ----------------------------------------------------------------------------

    def test_splits_are_found(self) -> None:
        """A leader finds each split once, with a number that no other has had, also after a restart."""
        if not self.finds_splits:
            pytest.skip("its splits are found elsewhere")
        self.filled(3)
        splits = self.found()
        assert tuple(splits) == self.beginning(), f"It finds {splits}, not one split after the other at offset 0."
        assert self.found(splits) == [], "A split that a checkpoint has is found anew: its records would be doubled."
        added = self.add_split()
        self.append(added, texts(added, 0, 3))
        (start,) = self.beginning([added])
        assert list(self.found(splits)) == [start], f"After {splits} it finds {self.found(splits)}."
        ended = [msgspec.structs.replace(split, ended=True) for split in (*splits, start)]
        assert self.found(ended) == [], "A split that has ended is found anew: its records would be doubled."

    def test_a_split_is_added(self) -> None:
        """A split added while others are read begins at its first record; the others continue."""
        self.filled(10)
        reader = self.reader()
        reader.read(8, 4)
        added = self.add_split()
        self.append(added, texts(added, 0, 10))
        before = reader.reader.positions()
        (start,) = self.beginning([added])
        reader.reader.add(start)
        positions = reader.reader.positions()
        wanted = (*before, start)
        assert positions == wanted, f"At the barrier that a split is added at, it stands at its beginning: {positions}."
        reader.read(5 + len(reader.records), 5)
        stood = reader.reader.positions()
        reader.reader.add(start)
        assert reader.reader.positions() == stood, (
            "A split that is read already does not go back when it is added again."
        )
        reader.read(SPLITS * 10 + 10)
        for split in (*range(SPLITS), added):
            assert reader.of(split) == texts(split, 0, 10), f"Split {split} gave {reader.of(split)}."

    def test_a_position_that_was_removed(self) -> None:
        """The next records are gone: Halt, and no later record of that split is returned."""
        self.filled()
        self.remove(0, before=7)
        (noted,) = self.beginning([0])
        for offset in (0, 3, 6):
            self._halts(msgspec.structs.replace(noted, offset=offset))
        there = self.reader([msgspec.structs.replace(noted, offset=7)])
        there.read(13)
        assert there.of(0) == texts(0, 7, 20), "From the first record on that is there, all is read."

    def test_a_position_behind_the_end(self) -> None:
        """A position after the end belongs to another history: Halt, and no start elsewhere."""
        if not self.repeats:
            pytest.skip("an offset finds no record")
        self.filled()
        (noted,) = self.beginning([0])
        self._halts(msgspec.structs.replace(noted, offset=1_000_000))

    def _halts(self, position: SourceOffset) -> None:
        got: list[str] = []

        def read_on() -> None:
            reader = self.reader([position])
            deadline = time.monotonic() + LIMIT_S
            while not got:
                got.extend(reader.poll(10))
                assert time.monotonic() < deadline, f"From offset {position.offset} on nothing comes, and no error."

        error = refused(read_on, Halt, f"{NO_RESET} From offset {position.offset} on it gave {got[:3]}.")
        assert str(position.offset) in str(error), f"The error says which offset was to come next: {error}"

    # --- decoding -----------------------------------------------------------------------------------------------------

    def test_a_record_that_does_not_decode(self) -> None:
        """The error names the coordinates of the record; records that decode have theirs."""
        self.append(0, texts(0, 0, 3))
        self.append_damaged(0)
        raw = self._raw(4)
        offsets = [record.offset() for record in raw]
        assert offsets == sorted(set(offsets)), f"Every record says where it lies; these say {offsets}."
        decoder = SourceDecoder(SOURCE, self.readable())
        error = refused(lambda: decoder.decode(raw), RecordError, "A record that is no text was taken.")
        place = f"{raw[3].topic()}[{raw[3].partition()}] offset {raw[3].offset()}"
        assert place in str(error), f"The error says where the record lies, {place}: {error}"
        batch = decoder.decode(raw[:3])
        assert (list(map(self.text_of, batch.records)), list(batch.origins)) == (texts(0, 0, 3), raw[:3])
        assert (raw[0].topic(), raw[0].partition()) == (self.readable().place, 0)

    def test_times(self) -> None:
        """A record has its time in milliseconds, by which backfilled splits are kept in step."""
        self.append(0, texts(0, 0, 2))
        times_ms = [*self.readable().decoder().times_ms(self._raw(2))]
        valid = all(isinstance(time_ms, int) and time_ms >= 0 for time_ms in times_ms)
        assert valid, f"Times are milliseconds since 1970: {times_ms}"

    def _raw(self, count: int) -> list[Any]:
        """The first records of split 0, undecoded."""
        reader = self.reader(self.beginning([0]))
        raw: list[Any] = []
        while len(raw) < count:
            raw += reader.raw(10)
        return raw

    # --- bounded work -------------------------------------------------------------------------------------------------

    def test_ranges(self) -> None:
        """A range has exactly the records from its start to its end, and its position is then the end; or it is
        refused."""
        self.append(1, texts(1, 0, 20))
        if not self.repeats:
            refused(lambda: self._range(self.beginning([1])[0], 20, 6), Halt, "Other records may be read as those.")
            return
        for start, end in ((0, 20), (0, 1), (5, 9), (19, 20), (7, 7)):
            (position,) = self.beginning([1])
            position = msgspec.structs.replace(position, offset=start)
            ended, records = self._range(position, end, 6)
            assert records == texts(1, start, end), f"The range {start} to {end} gave {records}."
            noted = (ended.source, ended.topic, ended.topic_id, ended.partition, ended.offset)
            assert noted == (SOURCE, position.topic, position.topic_id, 1, end), (
                f"Once it is read it stands at {ended}."
            )
            rest = self.reader([ended])
            rest.read(20 - end)
            assert rest.of(1) == texts(1, end, 20), "The local engine goes on exactly where bounded work ended."

    def _range(self, start: SourceOffset, end: int, records_max: int) -> tuple[SourceOffset, list[str]]:
        reader = self.readable().open_range(RangeContext(start=start, end=end, client=self.client, kilobytes=4_096))
        self._to_close.append(reader)
        decoder, records = SourceDecoder(SOURCE, self.readable()), list[str]()
        while raw := reader.read(records_max):
            assert len(raw) <= records_max, f"{records_max} records were asked for, {len(raw)} came."
            records += map(self.text_of, decoder.decode(raw).records)
        position = reader.position()
        reader.close()
        return position, records

    def test_a_range_that_is_not_all_there(self) -> None:
        """A range whose first records are gone is an error and does not begin later."""
        self.append(1, texts(1, 0, 20))
        self.remove(1, before=7)
        (position,) = self.beginning([1])
        refused(lambda: self._range(position, 15, 100), Halt, NO_RESET)


class Following:
    """A reader and the records that it has returned."""

    def __init__(self, reader: SourceReader, decoder: SourceDecoder, text_of: Callable[[Any], str]) -> None:
        self.reader, self._decoder, self._text_of = reader, decoder, text_of
        self.records: list[str] = []

    def raw(self, records_max: int) -> Sequence[Any]:
        """One batch, undecoded."""
        return self.reader.poll(records_max, 0.05)

    def poll(self, records_max: int) -> list[str]:
        """One batch."""
        raw = self.raw(records_max)
        batch = list(map(self._text_of, self._decoder.decode(raw).records)) if raw else []
        self.records += batch
        return batch

    def read(self, total: int, records_max: int = 1_000, why: str = "Records do not come.") -> None:
        """Read until it has returned *total* records in all; fail with *why* if no more come."""
        self.until(lambda: len(self.records) >= total, f"{why} {total} were to come.", records_max)

    def until(self, condition: Callable[[], bool], otherwise: str, records_max: int = 1_000) -> None:
        """Poll until *condition* holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            self.poll(records_max)
            assert time.monotonic() < deadline, f"{otherwise} {len(self.records)} came."

    def of(self, split: int) -> list[str]:
        """The records of *split* so far."""
        return [record for record in self.records if record.startswith(f"{split}:")]


class _NoClients:
    def consumers(self, topic: str, client: Any = None) -> Any:
        """Refuse: a source that reads no topic needs no consumers."""
        raise NotImplementedError(f"consumers of {topic}: write `clients` in the test class")
