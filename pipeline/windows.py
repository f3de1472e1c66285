"""Windows of event time: which records belong together, in milliseconds since 1970.

Invariants: windows include their start and exclude their end. A window is named by its last millisecond, and is over
once the watermark reaches that. All arithmetic is on whole numbers and floors, so that it is right before 1970.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cached_property
from math import gcd
from typing import Any, Generic, NamedTuple, TypeVar, get_args
from zoneinfo import ZoneInfo

import msgspec

from exactlyonce.pipeline.durations import Duration, duration_ms
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.event_time import EARLIEST_MS, LATEST_MS
from exactlyonce.pipeline.timed import Timed

K = TypeVar("K")
V = TypeVar("V")

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
PANES_MAX = 1_000
"""The most panes of a hopping window: each is read when the window ends."""
_MILLISECOND = timedelta(milliseconds=1)
_DAY_MS = 86_400_000
_CALENDAR = re.compile(r"([1-9]\d*)\s*(d|w|mo)\Z")
_DAYS = {"d": 1, "w": 7, "mo": 28}
"""The fewest days of each unit of a calendar."""
_MONDAY = 4
"""The first Monday, in days since 1970."""


class Windowed(msgspec.Struct, Generic[K, V], frozen=True):
    """The result of one window of one key; *start* is in the window, *end* is not. Both are in UTC."""

    key: K
    start: datetime
    end: datetime
    value: V
    revision: int = 0
    """0: the window's first result, and its only one unless the operator says otherwise."""


def moment(time_ms: int) -> datetime:
    """*time_ms*, in milliseconds since 1970, in UTC; at most the end of the calendar, the year 9999.

    >>> moment(-1).isoformat()
    '1969-12-31T23:59:59.999000+00:00'
    """
    return EPOCH + max(EARLIEST_MS, min(time_ms, LATEST_MS)) * _MILLISECOND


def _duration(duration: Duration, name: str, problems: list[str]) -> int:
    try:
        return duration_ms(duration, name)
    except ConfigError as error:
        problems.append(str(error).removesuffix("."))
        return 0


@dataclass(frozen=True)
class Tumbling(Timed):
    """Windows of one size, one after the other: ``Tumbling("10s")``.

    They begin at multiples of *size* since 1970 in UTC, moved by *offset*. With *zone*, an IANA name, *size* is in
    days, weeks or months of its calendar, as ``Tumbling("1d", zone="Europe/Paris")`` or
    ``Tumbling("1mo", zone="UTC")``: a day has 23 or 25 hours where the clocks change. Weeks begin on Monday. The offset
    then is one of the local clock: ``Tumbling("1w", zone="UTC", offset="6d")`` begins on Sunday, and
    ``Tumbling("1mo", zone="UTC", offset="14d")`` on the 15th.
    """

    size: Duration
    offset: Duration = "0s"
    zone: str | None = None

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        problems: list[str] = []
        offset_ms = _duration(self.offset, "offset", problems)
        if self.zone is None:
            if str(self.size).strip().endswith("mo"):
                return [f'size={self.size!r} is no fixed time: give the calendar of the months, as zone="UTC"']
            size_ms = _duration(self.size, "size", problems)
            if not problems and not 0 <= offset_ms < size_ms:
                problems.append(f"{self}: the size must be above 0, and the offset below the size")
            return problems
        if (sized := _CALENDAR.match(str(self.size).strip())) is None:
            problems.append(
                f"size={self.size!r}: with zone=, write whole days, weeks or months, as 1d, 1w or 1mo; for shorter "
                f'windows leave zone= out, and give an offset, as offset="30m"'
            )
        elif offset_ms >= (least := int(sized[1]) * _DAYS[sized[2]]) * _DAY_MS:
            problems.append(f"offset={self.offset!r}: it must be below the least size of the windows, {least}d")
        try:
            ZoneInfo(self.zone)
        except (ValueError, OSError, TypeError, KeyError):  # ZoneInfoNotFoundError is a KeyError
            problems.append(f'zone={self.zone!r} is unknown here: give an IANA name, as "Europe/Paris"')
        return problems

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"tumbling": self.size_ms if self.zone is None else self.size}
        described |= {"offset": self._offset_ms} if self._offset_ms else {}
        return described | ({"zone": self.zone} if self.zone is not None else {})

    def __str__(self) -> str:
        rest = [f"offset {self.offset}"] * (self.offset != "0s") + [self.zone] * (self.zone is not None)
        return ", ".join([f"tumbling {self.size}", *map(str, rest)])

    @cached_property
    def size_ms(self) -> int:
        """Without a zone, the size."""
        return duration_ms(self.size)

    @cached_property
    def _offset_ms(self) -> int:
        return duration_ms(self.offset)

    @cached_property
    def _calendar(self) -> _Calendar | None:
        if self.zone is None:
            return None
        matched = _CALENDAR.match(str(self.size).strip())
        assert matched is not None, "problems are found first"
        size, unit = int(matched[1]), matched[2]
        if unit == "w":
            return _Calendar(ZoneInfo(self.zone), 7 * size, False, self._offset_ms, _MONDAY)
        return _Calendar(ZoneInfo(self.zone), size, unit == "mo", self._offset_ms)

    def lasts(self, times: Sequence[int]) -> list[int]:
        """The last millisecond of the window of each of *times*.

        >>> Tumbling("10s").lasts([0, 9_999, 10_000, -1])
        [9999, 9999, 19999, -1]
        """
        if (calendar := self._calendar) is not None:
            return calendar.lasts(times)
        size, offset = self.size_ms, self._offset_ms
        last = size - 1
        return [time - (time - offset) % size + last for time in times]

    def start(self, last: int) -> int:
        """The start of the window that ends with *last*."""
        if (calendar := self._calendar) is not None:
            return calendar.around(last)[0]
        return last + 1 - self.size_ms


@dataclass(frozen=True)
class _Calendar:
    """Windows of days or months in a zone: n-th boundaries since 1970 by the local clock.

    The first and the last window of the calendar end with it, wherever the zone's boundaries are.
    """

    zone: ZoneInfo
    size: int
    months: bool
    offset_ms: int
    first_day: int = 0
    """The first boundary of windows of days, in days since 1970."""

    def around(self, time: int) -> tuple[int, int]:
        """The start and the end of the window with *time*.

        The local date gives the window, but for the hours around a change of the clocks at the boundary itself.
        """
        time = max(EARLIEST_MS, min(time, LATEST_MS))
        # A zone adds a day at most, and the guess need not be right.
        within = max(EARLIEST_MS + self.offset_ms + _DAY_MS, min(time, LATEST_MS - _DAY_MS))
        local = moment(within).astimezone(self.zone).replace(tzinfo=None) - timedelta(milliseconds=self.offset_ms)
        days = (local - datetime(1970, 1, 1)).days - self.first_day
        number = (12 * (local.year - 1970) + local.month - 1 if self.months else days) // self.size
        while time < (start := self._boundary(number)):
            number -= 1
        while time >= (end := self._boundary(number + 1)):
            start, number = end, number + 1
        return start, end

    def lasts(self, times: Sequence[int]) -> list[int]:
        start = end = 0
        lasts = []
        for time in times:
            if not start <= time < end:
                start, end = self.around(time)
            lasts.append(end - 1)
        return lasts

    def _boundary(self, number: int) -> int:
        count = number * self.size
        try:
            if self.months:
                day = datetime(1970 + count // 12, count % 12 + 1, 1)
            else:
                day = datetime(1970, 1, 1) + timedelta(days=count + self.first_day)
            local = day + timedelta(milliseconds=self.offset_ms)
            boundary = (local.replace(tzinfo=self.zone) - EPOCH) // _MILLISECOND
            return max(EARLIEST_MS - 1, min(boundary, LATEST_MS + 1))
        except (ValueError, OverflowError):  # beyond the calendar
            return LATEST_MS + 1 if number > 0 else EARLIEST_MS - 1


@dataclass(frozen=True)
class Hopping(Timed):
    """Windows of *size* that begin *every* so often, so that they overlap: ``Hopping("1m", every="10s")``.

    Records are kept once, in panes as wide as the greatest common divisor of both. *offset* moves all windows.
    """

    size: Duration
    every: Duration
    offset: Duration = "0s"

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        problems: list[str] = []
        size_ms, every_ms, offset_ms = (
            _duration(text, name, problems)
            for text, name in ((self.size, "size"), (self.every, "every"), (self.offset, "offset"))
        )
        if problems:
            return problems
        if not 0 < every_ms <= size_ms:
            return [f"{self}: every= must be above 0, and at most the size: else records between windows are lost"]
        if offset_ms >= every_ms:
            problems.append(f"offset={self.offset!r} must be below every={self.every!r}")
        if self.pane_ms <= self.overlap or size_ms // self.pane_ms > PANES_MAX:
            problems.append(
                f"{self}: its windows consist of {size_ms // self.pane_ms:,} panes of {self.pane_ms} ms, the greatest "
                f"common divisor of size and every: at most {PANES_MAX:,} are allowed, each of more milliseconds than "
                f"windows overlap. Choose every= as a larger part of the size, as a tenth"
            )
        return problems

    def describe(self) -> dict[str, Any]:
        described = {"hopping": self.size_ms, "every": self.every_ms}
        return described | ({"offset": self._offset_ms} if self._offset_ms else {})

    def __str__(self) -> str:
        return f"hopping {self.size} every {self.every}" + (f", offset {self.offset}" if self.offset != "0s" else "")

    @cached_property
    def size_ms(self) -> int:
        return duration_ms(self.size)

    @cached_property
    def every_ms(self) -> int:
        return duration_ms(self.every)

    @cached_property
    def _offset_ms(self) -> int:
        return duration_ms(self.offset)

    @cached_property
    def pane_ms(self) -> int:
        """The width of a pane."""
        return gcd(self.size_ms, self.every_ms)

    @property
    def overlap(self) -> int:
        """The number of windows that a record is in, at most."""
        return -(-self.size_ms // self.every_ms)

    def lasts(self, times: Sequence[int]) -> list[int]:
        """The last millisecond of the pane of each of *times*."""
        width, offset = self.pane_ms, self._offset_ms
        last = width - 1
        return [time - (time - offset) % width + last for time in times]

    def first_window(self, pane: int) -> int:
        """The last millisecond of the earliest window with the pane that ends with *pane*.

        >>> hopping = Hopping("1m", every="20s")
        >>> [hopping.first_window(pane) for pane in (19_999, 39_999, 59_999, 79_999)]
        [19999, 39999, 59999, 79999]
        """
        return pane + (self._offset_ms + self.size_ms - 1 - pane) % self.every_ms

    def last_window(self, pane: int) -> int:
        """The last millisecond of the latest window with this pane.

        >>> Hopping("1m", every="20s").last_window(19_999)
        59999
        """
        start = pane - self.pane_ms + 1
        return start - (start - self._offset_ms) % self.every_ms + self.size_ms - 1

    def windows(self, pane: int) -> range:
        """The last milliseconds of the windows with this pane, ascending."""
        return range(self.first_window(pane), self.last_window(pane) + 1, self.every_ms)

    def start(self, last: int) -> int:
        """The start of the window that ends with *last*."""
        return last + 1 - self.size_ms


@dataclass(frozen=True)
class Session(Timed):
    """Windows of activity: a record is in the session of its key if it comes less than *gap* before or after another.

    A session ends *gap* after its last record. ``Session("30m")``. Its result comes *wait* after its end, and it takes
    late records that long: those with a time above their floor less *wait*. ``Session("30m", wait="30m")`` takes each
    record whose own gap is not over at its floor.
    """

    gap: Duration
    wait: Duration = "0s"
    by_key = True

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        problems: list[str] = []
        if _duration(self.gap, "gap", problems) == 0 and not problems:
            problems.append(f"{self}: the gap must be above 0")
        _duration(self.wait, "wait", problems)
        return problems

    def describe(self) -> dict[str, Any]:
        return {"session": self.gap_ms} | ({"wait": self.wait_ms} if self.wait_ms else {})

    def state_of(self, entry: Any) -> Any:
        return get_args(entry)[2]

    def __str__(self) -> str:
        return f"session {self.gap}" + (f", wait {self.wait}" if self.wait != "0s" else "")

    @cached_property
    def gap_ms(self) -> int:
        return duration_ms(self.gap)

    @cached_property
    def wait_ms(self) -> int:
        return duration_ms(self.wait)

    @cached_property
    def due_ms(self) -> int:
        """How long after the time of its last record a session is due.

        >>> Session("30s").due_ms, Session("30s", wait="10s").due_ms
        (29999, 39999)
        """
        return self.gap_ms + self.wait_ms - 1


Window = Tumbling | Hopping | Session


def window_problems(window: Any) -> list[str]:
    """The mistakes in *window* as an argument, each with its remedy."""
    return window.problems if isinstance(window, Window) else [f'expected a window, as Tumbling("10s"), got {window!r}']


@dataclass(frozen=True)
class Revised(Timed):
    """A window with results before its end, after it, or both: what ``early=`` and ``lateness=`` of an operator make.

    A record counts from its time on, or from the millisecond after its floor, if that is later. A result has the
    records that count up to its slot, the moment at which it is due.
    """

    window: Tumbling | Hopping | Any
    """A session is a problem."""
    early: Duration | None = None
    lateness: Duration | None = None

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        if isinstance(self.window, Session):
            return [
                f"{self.window} takes no early= and no lateness=: a later record may move a session's start or unite "
                f"two, and a result that was given would stay beside theirs. Leave them out, and let the session wait "
                f'for late records, as Session("{self.window.gap}", wait="{self.window.gap}")'
            ]
        if problems := list(self.window.problems):
            return problems
        for name, given in (("early", self.early), ("lateness", self.lateness)):
            if given is not None and _duration(given, name, problems) == 0 and not problems:
                problems.append(f"{name}= must be above 0, or be left out")
        if not problems and getattr(self.window, "zone", None) is None and self.early_ms >= self.window.size_ms:
            problems.append(f"early={self.early!r} must be below the size of the window, {self.window.size!r}")
        return problems

    def state_of(self, entry: Any) -> Any:
        return get_args(get_args(entry)[1])[1]

    def describe(self) -> dict[str, Any]:
        early = {"early": self.early_ms} if self.early is not None else {}
        return self.window.describe() | early | ({"lateness": self.lateness_ms} if self.lateness is not None else {})

    def __str__(self) -> str:
        given = [f"{name} {of}" for name, of in (("early", self.early), ("lateness", self.lateness)) if of is not None]
        return ", ".join([str(self.window), *given])

    @cached_property
    def early_ms(self) -> int:
        """0: there are no results before the end."""
        return 0 if self.early is None else duration_ms(self.early, "early")

    @cached_property
    def lateness_ms(self) -> int:
        return 0 if self.lateness is None else duration_ms(self.lateness, "lateness")

    def lasts(self, times: Sequence[int]) -> list[Sequence[int]]:
        """The last milliseconds of the windows with each of *times*, ascending."""
        lasts = self.window.lasts(times)
        return [self.window.windows(last) if isinstance(self.window, Hopping) else (last,) for last in lasts]

    def slot(self, last: int, since: int) -> int:
        """The slot of the first result of the window that ends with *last* with a record that counts from *since*.

        Before a window's end, slots are those before multiples of *early* since 1970 in UTC, and its end. So they are
        after it, until the lateness is over; without *early*, a late record has its result as soon as it counts.

        >>> window = Revised(Tumbling("1m"), early="20s", lateness="50s")
        >>> [window.slot(59_999, since) for since in (0, 20_000, 59_999, 60_000, 101_000)]
        [19999, 39999, 59999, 79999, 109999]
        """
        end = last if since <= last else last + self.lateness_ms
        if early := self.early_ms:
            return min(end, since + early - 1 - since % early)
        return max(last, since)

    def start(self, last: int) -> int:
        """The start of the window that ends with *last*."""
        start: int = self.window.start(last)
        return start


def revised(window: Any, early: Duration | None, lateness: Duration | None) -> Any:
    """*window*, with the results that *early* and *lateness* add."""
    if not isinstance(window, Window) or (early is None and lateness is None):
        return window
    return Revised(window, early, lateness)


def window_of(meaning: str) -> Window | Revised | None:
    """The window of `Node.meaning`; None for the meaning of other slots.

    >>> str(window_of("hopping=60000 every=10000 early=5000 of=Count"))
    'hopping 60000ms every 10000ms, early 5000ms'
    """
    given: dict[str, str] = dict(re.findall(r"(\w+)=(.*?)(?= \w+=|$)", meaning))
    offset = f"{given['offset']}ms" if "offset" in given else "0s"
    window: Window | None = None
    if "tumbling" in given:
        zone = given.get("zone")
        window = Tumbling(given["tumbling"] + ("ms" if zone is None else ""), offset, zone)
    elif "hopping" in given:
        window = Hopping(f"{given['hopping']}ms", f"{given['every']}ms", offset)
    elif "session" in given:
        window = Session(f"{given['session']}ms", f"{given['wait']}ms" if "wait" in given else "0s")
    early, lateness = (f"{given[name]}ms" if name in given else None for name in ("early", "lateness"))
    of: Window | Revised | None = revised(window, early, lateness)
    return of


class Kept(NamedTuple):
    """What is kept of one key for a window, or a part of one."""

    start: int
    end: int
    """In ms: of the window, or of the pane of hopping windows. A session may still grow."""
    accumulator: Any


def kept_in(window: Window | Revised, slot: int, state: Any) -> list[Kept]:
    """What *state* in *slot* is of *window*; see `kept_state`. Of a revised one: the last result, then new parts.

    >>> kept_in(Hopping("1m", every="10s"), 19_997, 7)
    [Kept(start=10000, end=20000, accumulator=7)]
    """
    if isinstance(window, Session):
        first, last, accumulator = state
        return [Kept(first, last + window.gap_ms, accumulator)]
    if isinstance(window, Revised):
        given, new = state
        shown = [] if given is None else [(slot - window.lateness_ms, given[1])]
        parts = [*shown, *sorted((int(last), accumulator) for last, accumulator in new.items())]
        return [Kept(window.start(last), last + 1, accumulator) for last, accumulator in parts]
    (last,) = window.lasts([slot])
    start = last + 1 - window.pane_ms if isinstance(window, Hopping) else window.start(last)
    return [Kept(start, last + 1, state)]


def kept_state(window: Any, state: Any) -> Any:
    """The type of what is kept for a window, given the type of an accumulator.

    With a session, its first and last time. With a revised window, (number of results, accumulator) of that whose
    lateness ends with the slot, once it has a result, and by its last millisecond the new part of each window.
    """
    if isinstance(window, Revised):
        return tuple[tuple[int, state] | None, dict[int, state]]
    return tuple[int, int, state] if isinstance(window, Session) else state


def migrated(window: Any, migrate: Callable[[Any], Any], kept: Any) -> Any:
    """What is *kept* for *window*, of type `kept_state`, with each accumulator migrated."""
    if isinstance(window, Revised):
        given, new = kept
        given = None if given is None else (given[0], migrate(given[1]))
        return given, {last: migrate(accumulator) for last, accumulator in new.items()}
    return (*kept[:2], migrate(kept[2])) if isinstance(window, Session) else migrate(kept)
