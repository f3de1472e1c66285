"""The contract of a source: a list of texts and the source of the documentation keep it; a test misses each rule that
is left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import msgspec
import pytest

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import RangeContext, ReaderContext
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.pipeline.source import Source
from exactlyonce.testing import source_contract
from exactlyonce.testing.source_contract import SPLITS, SourceContract
from tests.testing.conftest import Mutant


class Line(NamedTuple):
    split: int
    number: int
    data: bytes

    def topic(self) -> str:
        return "lists"

    def partition(self) -> int:
        return self.split

    def offset(self) -> int:
        return self.number


class Lists:
    """The place: splits, each with its records, and how many of the first were removed."""

    def __init__(self) -> None:
        self.lines: list[list[bytes]] = [[] for _ in range(SPLITS)]
        self.removed: dict[int, int] = {}

    def fetch(self, source: str, split: int, offset: int, end: int) -> list[Line]:
        lines = self.lines[split]
        if not self.removed.get(split, 0) <= offset <= len(lines):
            raise Halt(f"Source {source!r} must go on at lists[{split}] offset {offset}, which is not there.")
        return [Line(split, number, lines[number]) for number in range(offset, min(end, len(lines)))]


class ListReader:
    """The `SourceReader`: the splits take turns."""

    def __init__(self, lists: Lists, context: ReaderContext) -> None:
        self.lists, self.context = lists, context
        self.at = {each.partition: each.offset for each in context.positions}
        self.runs: list[tuple[int, int]] = []
        self.waiting = ""

    def open(self) -> None:
        """Nothing is connected."""

    def add(self, start: SourceOffset) -> None:
        self.at.setdefault(start.partition, start.offset)

    def poll(self, records_max: int, timeout_s: float) -> list[Line]:
        found: list[Line] = []
        for split in sorted(self.at, key=lambda each: self.at[each]):
            offset = self.at[split]
            some = self.lists.fetch(self.context.source, split, offset, offset + records_max - len(found))
            self.at[split] += len(some)
            found += some
        self.runs = [(split, len(list(run))) for split, run in groupby(line.split for line in found)]
        return found

    def positions(self) -> tuple[SourceOffset, ...]:
        return tuple(
            SourceOffset(self.context.source, "lists", "id-1", split, offset)
            for split, offset in sorted(self.at.items())
        )

    @property
    def idle(self) -> bool:
        return not self.at

    @property
    def finished(self) -> bool:
        targets = self.context.targets
        return targets is not None and all(offset >= targets.get(split, 0) for split, offset in self.at.items())

    def quiet(self, ask: Collection[int] = ()) -> list[int]:
        return [split for split, offset in self.at.items() if offset == len(self.lists.lines[split])]

    def finalized(self, positions: Sequence[SourceOffset]) -> None: ...

    def lags(self) -> dict[tuple[str, int], int]:
        return {("", split): len(self.lists.lines[split]) - offset for split, offset in self.at.items()}

    def close(self) -> None:
        """Nothing is held."""


class ListRange:
    def __init__(self, lists: Lists, context: RangeContext) -> None:
        self.lists, self.context, self.at = lists, context, context.start.offset

    def read(self, records_max: int) -> list[Line]:
        start = self.context.start
        end = min(self.context.end, self.at + records_max)
        found = self.lists.fetch(start.source, start.partition, self.at, end)
        self.at += len(found)
        return found

    def position(self) -> SourceOffset:
        return msgspec.structs.replace(self.context.start, offset=self.at)

    def close(self) -> None:
        """Nothing is held."""


class ListDecoder:
    """The `RecordDecoder`: texts in UTF-8."""

    decode: Callable[[Any], Any] = staticmethod(bytes.decode)

    def parts(self, records: list[Any]) -> Sequence[Any]:
        return [line.data for line in records]

    def problem(self, record: Line, error: BaseException) -> str:
        return f"{record.data!r} is no text: {error}"

    def times_ms(self, records: Sequence[Line]) -> Iterator[int]:
        return (record.number for record in records)


class ListSource(Source[str]):
    type = str
    topic = "lists"
    on_error: Literal["fail", "skip"] = "fail"

    def __init__(self, lists: Lists) -> None:
        self.lists = lists

    def describe(self) -> dict[str, Any]:
        return {"source": "lists"}

    def first_offsets(self, source: str, topics: Any) -> dict[int, int]:
        return {split: self.lists.removed.get(split, 0) for split in range(len(self.lists.lines))}

    def open_reader(self, context: ReaderContext) -> ListReader:
        return ListReader(self.lists, context)

    def open_range(self, context: RangeContext) -> ListRange:
        return ListRange(self.lists, context)

    def decoder(self) -> ListDecoder:
        return ListDecoder()


class TestListSource(SourceContract):
    finds_splits = False

    @pytest.fixture(autouse=True)
    def _lists(self) -> None:
        self.lists = Lists()

    def source(self) -> ListSource:
        return ListSource(self.lists)

    def identity(self, split: int) -> str:
        return "id-1"

    def append(self, split: int, records: Sequence[str]) -> None:
        self.lists.lines[split] += [text.encode() for text in records]

    def add_split(self) -> int:
        self.lists.lines.append([])
        return len(self.lists.lines) - 1

    def remove(self, split: int, before: int) -> None:
        self.lists.removed[split] = before

    def append_damaged(self, split: int) -> None:
        self.lists.lines[split].append(b"\xff")


PAGE = Path(__file__).parents[2] / "docs" / "writing-a-source.md"


def contract_of_the_page() -> Any:
    source, _, contract = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(source + contract, f"the code of {PAGE.name}", "exec", dont_inherit=True), names)
    return names["TestJournal"]


class TestSourceOfThePage(contract_of_the_page()):  # type: ignore[misc]  # the page's class has no type here
    def test_a_split_that_is_gone(self) -> None:
        """A leader halts, and names the split; one that has ended may go."""
        self.filled(3)
        gone, _ = self.found()
        self.remove(0, before=3)
        with pytest.raises(Halt, match="split 'amsterdam' up to record 0, and the split is gone"):
            self.found([gone])
        assert [start.identity for start in self.found([msgspec.structs.replace(gone, ended=True)])] == ["bern"]

    def test_the_end_of_a_bounded_run(self) -> None:
        """Splits without an end have finished, in a bounded run, once no more records are there."""
        self.filled(10)
        context = ReaderContext(source="contract", positions=self.beginning(), targets={}, clients=self.clients())
        reader = self.source().open_reader(context)
        reader.open()
        while records := reader.poll(7, 0.0):
            assert not reader.finished or len(records) < 7
        assert reader.finished

    def test_a_range_that_lacks_records(self) -> None:
        """A range is an error that ends after the records that are there, unless it goes to the end of the split."""
        self.append(1, ["1:0", "1:1"])
        with pytest.raises(Halt, match="has only 2 records"):
            self._range(self.beginning([1])[0], 3, 100)

    @pytest.mark.parametrize(
        ("owner", "name", "wrong", "message"),
        [
            ("OpenShop", "read", lambda self, most: [b"{}"] * (most + 1), r"read\(3\) of shop .* gave 4 records"),
            ("OpenShop", "ended", True, "has ended, and the source says grows = True"),
            ("OpenShop", "cursor", 7, "the cursor of shop .* is 7, and has to be text"),
            ("JournalSource", "grows", False, "OpenShop has no `ended`, and the source no grows = True"),
        ],
    )
    def test_a_mistake_that_would_lose_or_double_records(
        self, owner: str, name: str, wrong: object, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It stops runs and bounded work, before anything of it is taken."""
        monkeypatch.setattr(self.source.__globals__[owner], name, wrong)
        self.filled(10)
        reader = self.reader()
        with pytest.raises(Halt, match=message):
            reader.poll(3)
        assert reader.reader.positions() == self.beginning()
        with pytest.raises(Halt, match=message):
            self._range(self.beginning([1])[0], 6, 3)

    def test_an_identity_that_is_no_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.source.__globals__["JournalSource"], "find_splits", lambda self: [7])
        with pytest.raises(ConfigError, match=r"find_splits\(\) gives 7, and the identity of a split is text"):
            self.found()


POLL, OPEN, FETCH, POSITIONS = ListReader.poll, ListSource.open_reader, Lists.fetch, ListReader.positions


def _fetched(self: Any, records_max: int, timeout_s: float) -> list[Line]:
    found = POLL(self, records_max + 1, timeout_s)[:records_max]
    self.runs = [(split, len(list(run))) for split, run in groupby(line.split for line in found)]
    return found


def _one_behind(self: Any) -> tuple[SourceOffset, ...]:
    return tuple(msgspec.structs.replace(each, offset=max(0, each.offset - 1)) for each in POSITIONS(self))


def _reset(self: Any, source: str, split: int, offset: int, end: int) -> list[Line]:
    first = self.removed.get(split, 0)
    return FETCH(self, source, split, offset if first <= offset <= len(self.lines[split]) else first, end)


def _shuffled(self: Any, records_max: int, timeout_s: float) -> list[Line]:
    return POLL(self, records_max, timeout_s)[::-1]


def _from_a_commit(self: Any, context: ReaderContext) -> ListReader:
    reader = OPEN(self, context)
    reader.at = self.lists.__dict__.setdefault("committed", reader.at)
    return reader


def _anew(self: Any, start: SourceOffset) -> None:
    self.at[start.partition] = start.offset


MUTANTS = {
    "positions count what was fetched":
        Mutant(ListReader, "poll", _fetched, "positions_are_exact", "exactly behind what was handed out"),
    "positions are one behind": Mutant(
        ListReader, "positions", _one_behind, "every_position_can_be_gone_to", "exactly behind what was handed out"),
    "a removed position is reset":
        Mutant(Lists, "fetch", _reset, "a_position_that_was_removed", "loses or doubles records in silence"),
    "a position behind the end is reset":
        Mutant(Lists, "fetch", _reset, "a_position_behind_the_end", "loses or doubles records in silence"),
    "a range begins where it can":
        Mutant(Lists, "fetch", _reset, "a_range_that_is_not_all_there", "loses or doubles records in silence"),
    "records come as they come": Mutant(ListReader, "poll", _shuffled, "records_come_in_order", "in its order"),
    "runs are of the first split":
        Mutant(ListReader, "runs", property(lambda self: [(0, 1)], lambda self, runs: None), "runs", "The runs say"),
    "a reader goes on where another was":
        Mutant(ListSource, "open_reader", _from_a_commit, "nothing_is_remembered_elsewhere", "that is in no manifest"),
    "an added split goes back": Mutant(ListReader, "add", _anew, "a_split_is_added", "does not go back"),
    "targets are not looked at": Mutant(
        ListReader, "finished", property(lambda self: bool(self.context.targets)), "targets", "It has finished before"),
    "it never finishes": Mutant(ListReader, "finished", False, "targets", "has not finished"),
    "batches of any length": Mutant(
        ListReader, "poll", lambda self, most, wait: POLL(self, most + 1, wait),
        "a_batch_is_as_long_as_it_may_be", "a barrier waits"),
    "the identity is left out": Mutant(
        ListReader, "positions",
        lambda self: tuple(msgspec.structs.replace(each, topic_id="") for each in POSITIONS(self)),
        "positions_say_what_they_are_of", "id-1"),
    "a range reads on": Mutant(
        ListRange, "read",
        lambda self, most: self.lists.fetch("", self.context.start.partition, self.at, self.context.end + 1),
        "ranges", "records were asked for"),
    "the place of a record is lost":
        Mutant(Line, "offset", lambda self: 0, "a_record_that_does_not_decode", "says where it lies"),
    "the lag is what there is":
        Mutant(
            ListReader, "lags", lambda self: {("", 0): sum(map(len, self.lists.lines))}, "lag",
            "More is said to be left"),
}  # fmt: skip


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_rule_that_is_left_out_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()  # so that what never comes is waited for as often as it takes, however long that takes
    monkeypatch.setattr(source_contract, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    mutant = TestListSource()
    mutant.lists, mutant._to_close = Lists(), []
    MUTANTS[rule].is_missed_by(mutant, monkeypatch)
