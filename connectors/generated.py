"""Sources without anything outside: records made by a function, at a rate, and the items of an iterable, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import RangeContext, ReaderContext
from exactlyonce.connectors.splits import (
    OpenSplit,
    SplitDecoder,
    SplitRange,
    SplitSource,
    SplitsReader,
    require_reached,
)
from exactlyonce.pipeline import hints, shape
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.pipeline.sizes import is_count

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
ENDLESS = 1 << 62
COUNTED_MAX = 1_000_000
"""The items that bounded work counts of an iterable."""


class FixedSource(SplitSource[T]):
    """A source that always has the same splits, each of which may have more records at the next start."""

    def open_reader(self, context: ReaderContext) -> SplitsReader:
        """A split that has ended is looked at again: it ends at once unless it goes further now."""
        unended = [msgspec.structs.replace(position, ended=False) for position in context.positions]
        return super().open_reader(replace(context, positions=unended))

    def open_range(self, context: RangeContext) -> SplitRange:
        """A split that has ended is looked at again, too."""
        return super().open_range(replace(context, start=msgspec.structs.replace(context.start, ended=False)))


@dataclass(frozen=True, eq=False)
class GeneratorSource(FixedSource[T]):
    """Makes records: ``GeneratorSource(order, rate=100)`` calls ``order(number)`` for 0, 1, 2 ..., a hundred a second.

    - *make*: gives the record of a number, always the same one; its type is the annotation. It is called again for the
      same number after a restart.
    - *count*: the source ends after so many records. None: it never ends by itself. With a larger one the next run goes
      further; a smaller one than the records that were read is an error.
    - *rate*: records a second, of all splits; None: as fast as they are taken.
    - *splits*: they are made in parallel; split *i* has the numbers *i*, *i + splits*, *i + 2 splits* ...
    - *name*: its name in checkpoints and errors, where there are several.
    - *on_error*, *time*: as of `KafkaSource`.
    """

    make: Callable[[int], T]
    _: KW_ONLY
    count: int | None = None
    rate: float | None = None
    splits: int = 1
    name: str = ""

    @property
    def type(self) -> Any:
        return hints.declared(self.make, {}).get("return", hints.UNKNOWN)

    @property
    def place(self) -> str:
        return f"generator:{self.name or getattr(self.make, '__name__', 'records')}"

    def finder(self, source: str, topics: Any = None) -> FixedSplits:
        return FixedSplits(source, self.place, [f"numbers-{split}" for split in range(self.splits)])

    def left(self, position: SourceOffset) -> int:
        if self.count is None:
            raise ConfigError(
                f"Source {position.source!r} makes records without end, and bounded work has one: set count=, or use "
                f"`exactlyonce run`."
            )
        return max(0, self._end(position.partition) - position.offset)

    def open_range(self, context: RangeContext) -> SplitRange:
        """A range is not paced."""
        return FixedSource.open_range(replace(self, rate=None), context)

    def _end(self, split: int) -> int:
        return ENDLESS if self.count is None else len(range(split, self.count, self.splits))

    def open_split(self, position: SourceOffset) -> OpenNumbers:
        rate = None if self.rate is None else self.rate / self.splits
        require_reached(position, self.place, self._end(position.partition))
        numbers = range(position.partition, ENDLESS if self.count is None else self.count, self.splits)
        return OpenNumbers(self.place, numbers[position.offset :], rate)

    def decoder(self) -> SplitDecoder:
        return SplitDecoder(self.make, lambda number: str(number).encode(), lambda number, error: f"{number}: {error}")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not callable(self.make):
            yield f"{self.make!r} must be a function of a number, as order(number: int) -> Order"
        if self.count is not None and not is_count(self.count, 0):
            yield f"count={self.count!r} must be an integer from 0 on, or None"
        if self.rate is not None and not (isinstance(self.rate, int | float) and self.rate > 0):
            yield f"rate={self.rate!r} must be a number of records a second above 0, or None"
        if not is_count(self.splits):
            yield f"splits={self.splits!r} must be an integer from 1 on"

    def describe(self) -> dict[str, Any]:
        """The place and the numbering; a pipeline may go on at another rate, and further."""
        return {"source": "generator", "place": self.place, "splits": self.splits, **self.describe_time()}


@dataclass(frozen=True, eq=False)
class IterableSource(FixedSource[T]):
    """The items of an iterable, for tests: ``IterableSource([1, 2, 3], value=int)``. It ends with the last one.

    - *items*: a list, a range or what else gives the same items again; or a function that returns such an iterable.
      Each restart iterates anew, and leaves out the items that were read: items at the end of a longer list are new.
    - *value*: the type of an item.
    - *name*: its name in checkpoints and errors, where there are several.
    - *on_error*, *time*: as of `KafkaSource`.
    """

    items: Iterable[T] | Callable[[], Iterable[T]]
    _: KW_ONLY
    value: TypeForm[T]
    name: str = ""

    @property
    def type(self) -> Any:
        return self.value

    @property
    def place(self) -> str:
        return f"iterable:{self.name}"

    def finder(self, source: str, topics: Any = None) -> FixedSplits:
        return FixedSplits(source, self.place, [self.place])

    def left(self, position: SourceOffset) -> int:
        return sum(1 for _ in islice(self._anew(), position.offset, position.offset + COUNTED_MAX))

    def open_split(self, position: SourceOffset) -> OpenIterable:
        return OpenIterable(position, self.place, self._anew())

    def _anew(self) -> Iterator[T]:
        return iter(self.items() if callable(self.items) else self.items)

    def decoder(self) -> SplitDecoder:
        return SplitDecoder(lambda item: item, _as_json, lambda _, error: str(error))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if isinstance(self.items, Iterator):
            yield "an iterator gives its items once, and a restart needs them again: give a list, or a function"

    def describe(self) -> dict[str, Any]:
        return {"source": "iterable", "place": self.place, "value": shape.describe(self.value), **self.describe_time()}


def _as_json(item: Any) -> bytes:
    return item if isinstance(item, bytes) else msgspec.json.encode(item, enc_hook=str)


class FixedSplits:
    """The `SplitFinder` of a source that always has the same splits, with these *identities*."""

    def __init__(self, source: str, place: str, identities: Sequence[str]) -> None:
        self._splits = [SourceOffset(source, place, identity, number, 0) for number, identity in enumerate(identities)]

    def find(self, known: Sequence[SourceOffset]) -> list[SourceOffset]:
        if known and len(known) != len(self._splits):
            raise Halt(
                f"Source {known[0].source!r} had {len(known)} splits, and has {len(self._splits)} now: their records "
                f"would be others.\n  Choices: give it as many as before; or `exactlyonce reset` and begin anew."
            )
        return [] if known else self._splits

    def close(self) -> None:
        """Nothing is connected."""


class OpenNumbers(OpenSplit):
    """The numbers of a generator, *rate* records a second from now on."""

    def __init__(self, name: str, numbers: range, rate: float | None) -> None:
        self.name, self._numbers, self._rate = name, numbers, rate
        self._began_s, self._made = time.monotonic(), 0

    def read(self, records_max: int) -> range:
        count = records_max
        if self._rate is not None:
            due = int((time.monotonic() - self._began_s) * self._rate) + 1
            count = min(count, due - self._made)
        read = self._numbers[:count]
        self._numbers, self._made = self._numbers[len(read) :], self._made + len(read)
        return read

    @property
    def ended(self) -> bool:
        return not self._numbers


class OpenIterable(OpenSplit):
    """The items of an iterable."""

    def __init__(self, position: SourceOffset, name: str, items: Iterator[Any]) -> None:
        self.name, self._items = name, items
        skipped = sum(1 for _ in islice(items, position.offset))
        require_reached(position, name, skipped)
        self._next = list(islice(items, 1))

    def read(self, records_max: int) -> list[Any]:
        """The item after the last is taken, too, so that the end is known."""
        items = [*self._next, *islice(self._items, records_max)]
        read, self._next = items[:records_max], items[records_max:]
        return read

    @property
    def ended(self) -> bool:
        return not self._next

    def buffered(self) -> int:
        return len(self._next)
