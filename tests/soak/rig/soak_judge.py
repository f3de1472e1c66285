"""The judge of the soak: what readers of outputs have seen, against the input that a plain consumer has read.

It shares no code with the engine. The rules are those of docs/event-time.md and docs/joins.md:

- A record's floor is the latest time before it in its own partition, less the disorder and 1 ms.
- It is late for its window if the window's last ms is not above the floor; late for the join if its time is not.
- A late record is in its side output once, any other one in its window, or in the join.
- A partition that was added begins at the watermark W: its floor is W at least. W is one time for both, and above no
  floor of what was fed when a row of the partition was first seen.
- Orders of one user and partition keep their order.

Facts are kept in arrays by id, some 50 bytes a record. Rows are taken in any order between views.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

DISORDER_MS, WINDOW_MS = 2_000, 10_000
WITHIN_MS = (-1_000, 3_000)
"""The time of a payment less that of its order."""
END_MS = 1_900_000_000_000
"""Records from here on close the windows of all others, and are in none that closes."""
ADDED, LATE, LATE_JOINED = 1, 2, 4
"""Flags of an input record: of an added partition; late for its window; late for the join."""
VIEWS = ("windows", "late", "pairs", "late-left", "late-right", "totals", "pair-rows", "lake")
PAIRS = ("pairs", "pair-rows")
OF_PAYMENTS = (*PAIRS, "late-right")
"""Views with a row for each of some payments; pairs have others for orders without one."""
MUTANTS = ("lose", "double", "change")
SHOWN = 20
ABSENT = -1


class Finding(NamedTuple):
    kind: str
    """lost, doubled, wrong, or stalled."""
    where: str
    text: str


class Verdict(NamedTuple):
    records: int
    """Of the input."""
    rows: int
    """Of all outputs."""
    findings: list[Finding]


class Lowest(NamedTuple):
    id: int
    is_behind: bool
    """Whether it is in the input: no later one is ahead of it."""


class Side:
    """The facts of orders, or of payments, by id."""

    def __init__(self) -> None:
        self.at, self.floor = array("q"), array("q")
        self.flags = bytearray()
        self.seen = bytearray()
        """Bits by the views in which a record was seen."""
        self.greatest: dict[int, int] = {}
        """The latest time in each partition."""
        self.partitions = array("b")
        self.places = array("i")
        """The number of a record in its partition."""
        self._counts: Counter[int] = Counter()
        self.newest_ms: dict[int, int] = {}
        """The latest time that was fed when a row of an added partition was first seen."""
        self._early: dict[int, int] = {}
        """The same, by the id of each record whose row was seen before it was read."""

    def note(self, id: int, partition: int, at: int, first_partitions: int) -> bool:
        """Note the next record of *partition*; False: it was there before."""
        self.make_room(id)
        if self.at[id] != ABSENT:
            return False
        greatest = self.greatest.get(partition)
        flags = ADDED if partition >= first_partitions else 0
        if greatest is not None:
            floor = greatest - DISORDER_MS - 1
            flags |= LATE * (_over(at, LATE) <= floor) | LATE_JOINED * (_over(at, LATE_JOINED) <= floor)
        self.greatest[partition] = at if greatest is None else max(at, greatest)
        self.at[id], self.flags[id], self.partitions[id] = at, flags, partition
        self.places[id] = self._counts[partition]
        self._counts[partition] += 1
        if (newest_ms := self._early.pop(id, None)) is not None:
            self._show(id, newest_ms)
        return True

    def _show(self, id: int, newest_ms: int) -> None:
        if self.flags[id] & ADDED:
            partition = self.partitions[id]
            self.newest_ms[partition] = min(newest_ms, self.newest_ms.get(partition, newest_ms))

    def make_room(self, id: int) -> None:
        if (missing := id + 1 - len(self.at)) > 0:
            missing += 10_000
            self.at.extend([ABSENT] * missing)
            self.partitions.extend([ABSENT] * missing)
            self.places.extend([ABSENT] * missing)
            self.flags.extend(bytes(missing))
            self.seen.extend(bytes(missing))

    def mark(self, id: int, bit: int, newest_ms: int) -> bool:
        """Note that a row was seen; False: it was seen before. *newest_ms*: the latest time that is fed."""
        self.make_room(id)
        if self.at[id] == ABSENT:
            self._early.setdefault(id, newest_ms)
        else:
            self._show(id, newest_ms)
        is_new = not self.seen[id] & bit
        self.seen[id] |= bit
        return is_new

    def ids(self) -> Iterable[int]:
        return (id for id, at in enumerate(self.at) if at != ABSENT)


class Judge:
    """Takes rows as readers see them, from any thread, and says at once what is doubled or wrong."""

    def __init__(self, order_partitions: int, payment_partitions: int) -> None:
        """So many partitions has each topic to begin with."""
        self._first_partitions = (order_partitions, payment_partitions)
        self.orders, self.payments = Side(), Side()
        self._users = array("i")
        self._cents = array("i")
        self._orders_of_payments = array("q")
        self._sums: Counter[int] = Counter()
        self._last: dict[tuple[int, int], int] = {}
        """The last place in a partition, of each user, that is in totals."""
        self._windows: dict[tuple[int, int], tuple[int, int]] = {}
        self.rows: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """Findings by kind."""
        self.findings: list[Finding] = []
        self._pending: dict[str, list[tuple[Any, ...]]] = {view: [] for view in VIEWS if view != "windows"}
        self._lock = threading.Lock()

    # --- input ------------------------------------------------------------------------------------------------------

    def order(self, partition: int, id: int, user: str, at: int, cents: int) -> None:
        with self._lock:
            if not self.orders.note(id, partition, at, self._first_partitions[0]):
                raise AssertionError(f"order {id} is in the input twice: the feeder is wrong")
            for facts, fact in ((self._users, _number(user)), (self._cents, cents)):
                if (missing := id + 1 - len(facts)) > 0:
                    facts.extend([0] * (missing + 10_000))
                facts[id] = fact

    def payment(self, partition: int, id: int, order: int, at: int) -> None:
        with self._lock:
            if not self.payments.note(id, partition, at, self._first_partitions[1]):
                raise AssertionError(f"payment {id} is in the input twice: the feeder is wrong")
            if (missing := id + 1 - len(self._orders_of_payments)) > 0:
                self._orders_of_payments.extend([ABSENT] * (missing + 10_000))
            self._orders_of_payments[id] = order

    # --- output -----------------------------------------------------------------------------------------------------

    def take(self, view: str, rows: list[tuple[Any, ...]], newest_ms: int) -> None:
        """Rows of a view, in the order in which it has those of one user: (user, start, n, cents) of a window,
        (order, payment or None) of a pair, (id, user, cents so far) of a total, (id, user, at, cents) of the lake or a
        late order, and (id, order, at) of a late payment. *newest_ms*: the latest time that is fed by now."""
        with self._lock:
            self.rows[view] += len(rows)
            if view == "windows":
                for user, start, n, cents in rows:
                    place = (_number(user), start)
                    if place in self._windows:
                        self._find("doubled", view, f"the window of {user} from {start}")
                    self._windows.setdefault(place, (n, cents))
                return
            side = self._side_of(view)
            for row in rows:
                if view in PAIRS and row[1] is None:
                    is_new = self.orders.mark(row[0], _bit(view), newest_ms)
                else:
                    is_new = side.mark(_id(view, row), _bit(view), newest_ms)
                    self._pending[view].append(row)
                if not is_new:
                    self._find("doubled", view, f"{row}")
            self._compare(view)

    def _side_of(self, view: str) -> Side:
        return self.payments if view in OF_PAYMENTS else self.orders

    def _compare(self, view: str) -> None:
        """Compare rows with their records, as far as these are read."""
        rows, later, side = self._pending[view], 0, self._side_of(view)
        for row in rows:
            id = _id(view, row)
            if side.at[id] == ABSENT:
                break
            later += 1
            if view == "totals":
                self._compare_total(*row)
            elif view in PAIRS:
                self._compare_row(view, row, (self._orders_of_payments[id], id))
            elif view == "late-right":
                self._compare_row(view, row, (id, self._orders_of_payments[id], side.at[id]))
            else:
                self._compare_row(view, row, (id, f"u{self._users[id]}", side.at[id], self._cents[id]))
        del rows[:later]

    def _compare_row(self, view: str, row: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
        if row != expected:
            self._find("wrong", view, f"a row is {row}, and not {expected}")

    def _compare_total(self, id: int, user: str, cents: int) -> None:
        number = _number(user)
        self._sums[number] += self._cents[id]
        if (number, cents) != (self._users[id], self._sums[number]):
            self._find("wrong", "totals", f"the total at order {id} is {cents}, and not {self._sums[number]}")
            self._sums[number] = cents
        partition, place = self.orders.partitions[id], self.orders.places[id]
        if place < self._last.get((partition, number), place):
            self._find("wrong", "totals", f"order {id} of {user} comes after a later one of partition {partition}")
        self._last[partition, number] = place

    def _find(self, kind: str, where: str, text: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= SHOWN:
            self.findings.append(Finding(kind, where, text))

    def find(self, kind: str, where: str, text: str) -> None:
        """Note a finding of somebody else's."""
        with self._lock:
            self._find(kind, where, text)

    def lowest_missing(self, view: str, start: int) -> Lowest:
        """The lowest order from *start* on that is not in *view*."""
        with self._lock:
            bit, seen, at = _bit(view), self.orders.seen, self.orders.at
            while start < len(at) and at[start] != ABSENT and seen[start] & bit:
                start += 1
            return Lowest(start, start < len(at) and at[start] != ABSENT)

    # --- the verdict ------------------------------------------------------------------------------------------------

    def verdict(self) -> Verdict:
        """What is wrong, once all input and all output was taken."""
        with self._lock:
            for view, rows in self._pending.items():
                self._compare(view)
                for row in rows:
                    self._find("wrong", view, f"{row} is of no record")
            self._judge_orders()
            self._judge_added(self.orders, {"late": LATE, "late-left": LATE_JOINED})
            self._judge_added(self.payments, {"late-right": LATE_JOINED})
            self._judge_pairs()
            self._judge_windows()
            records = sum(1 for side in (self.orders, self.payments) for _ in side.ids())
            return Verdict(records, self.rows.total(), self.findings)

    def _judge_orders(self) -> None:
        """Each order is a row of totals and lake; each late record, and no other, is in a side output."""
        for id, at in enumerate(self.orders.at):
            seen = self.orders.seen[id]
            if at == ABSENT:
                if seen:
                    self._find("wrong", "an output", f"order {id} was never given")
                continue
            for view in ("totals", "lake"):
                if not seen & _bit(view):
                    self._find("lost", view, f"order {id}")
            self._judge_late(self.orders, id, "late", LATE)
            self._judge_late(self.orders, id, "late-left", LATE_JOINED)
        for id in range(len(self.payments.at)):
            if self.payments.at[id] != ABSENT:
                self._judge_late(self.payments, id, "late-right", LATE_JOINED)
            elif self.payments.seen[id]:
                self._find("wrong", "an output", f"payment {id} was never given")

    def _judge_late(self, side: Side, id: int, view: str, flag: int) -> None:
        flags, is_seen = side.flags[id], bool(side.seen[id] & _bit(view))
        if flags & flag and not is_seen:
            self._find("lost", view, f"record {id}, which is late")
        elif is_seen and not flags & (flag | ADDED):
            self._find("wrong", view, f"record {id}, which is not late")

    def _judge_added(self, side: Side, flags: dict[str, int]) -> None:
        """An added partition begins at one time: records that are over by then are late, and no others but by their own
        partition. *flags*: that of each view of late records."""
        late: dict[int, tuple[int, str, int]] = {}
        """By partition the last one that is over by then: when it is over, its view and its id."""
        in_time: dict[int, tuple[int, str, int]] = {}
        """The same of the first one that is not."""
        for id in side.ids():
            for view, flag in flags.items() if side.flags[id] & ADDED else ():
                partition, place = side.partitions[id], (_over(side.at[id], flag), view, id)
                if side.flags[id] & flag:
                    continue
                if side.seen[id] & _bit(view):
                    late[partition] = max(place, late.get(partition, place))
                else:
                    in_time[partition] = min(place, in_time.get(partition, place))
        for partition, (over, view, id) in late.items():
            what = f"record {id} of partition {partition}, which was added,"
            first = in_time.get(partition)
            if first is not None and over >= first[0]:
                self._find("wrong", view, f"{what} is late, though record {first[2]} is not in {first[1]}")
            elif over >= side.newest_ms[partition] - DISORDER_MS:
                self._find("wrong", view, f"{what} is late, though no record was so far when that was first seen")

    def _is_joined(self, side: Side, id: int) -> bool:
        """Whether a record takes part in the join, and its partners are all there."""
        late = _bit("late-right" if side is self.payments else "late-left")
        return side.at[id] != ABSENT and not side.seen[id] & late

    def _judge_pairs(self) -> None:
        has_partner = bytearray(len(self.orders.at))
        for view in ("pairs", "pair-rows"):
            bit = _bit(view)
            for id in self.payments.ids():
                order, is_pair = self._orders_of_payments[id], False
                if self._is_joined(self.payments, id) and self._is_joined(self.orders, order):
                    apart = self.payments.at[id] - self.orders.at[order]
                    is_pair = WITHIN_MS[0] <= apart <= WITHIN_MS[1]
                if is_pair:
                    has_partner[order] = 1
                self._compare_pair(view, f"order {order} and payment {id}", is_pair, self.payments.seen[id] & bit)
            for id in self.orders.ids():
                is_alone = self._is_joined(self.orders, id) and not has_partner[id] and self.orders.at[id] < END_MS
                self._compare_pair(view, f"order {id} without a payment", is_alone, self.orders.seen[id] & bit)

    def _compare_pair(self, view: str, what: str, is_due: bool, is_seen: int) -> None:
        if is_due and not is_seen:
            self._find("lost", view, what)
        elif is_seen and not is_due:
            self._find("wrong", view, f"{what}: no such pair is due")

    def _judge_windows(self) -> None:
        expected: dict[tuple[int, int], tuple[int, int]] = {}
        for id in self.orders.ids():
            at = self.orders.at[id]
            if at < END_MS and not self.orders.seen[id] & _bit("late"):
                place = (self._users[id], at - at % WINDOW_MS)
                n, cents = expected.get(place, (0, 0))
                expected[place] = (n + 1, cents + self._cents[id])
        for place in expected.keys() | self._windows.keys():
            due, seen = expected.get(place), self._windows.get(place)
            if seen is None:
                self._find("lost", "windows", f"the window of u{place[0]} from {place[1]}: {due}")
            elif due != seen:
                text = f"the window of u{place[0]} from {place[1]} has (n, cents) {seen}, and not {due}"
                self._find("wrong", "windows", text)


class Progress:
    """When each view had output last, and for how long none came while no fault was on. Times are seconds."""

    def __init__(self, judge: Judge, stall_s: float, now_s: float) -> None:
        self._judge, self._stall_s = judge, stall_s
        self._marks: dict[str, int] = dict.fromkeys(("windows", "pairs", "totals", "pair-rows", "lake"), 0)
        self._moved_s = dict.fromkeys(self._marks, now_s)
        self.fault_ended_s = now_s
        self.quiet_s = self.longest_stall_s = self.longest_quiet_s = 0.0

    def look(self, now_s: float, *, is_feeding: bool) -> str:
        """The view that has stalled, if one has. Totals and lake have if their oldest missing order stays so, windows
        and pairs, which come while records are fed, if nothing comes."""
        for view, mark in self._marks.items():
            lowest = self._judge.lowest_missing(view, mark) if view in ("totals", "lake") else None
            reached = self._judge.rows[view] if lowest is None else lowest.id
            is_idle = not is_feeding if lowest is None else not lowest.is_behind
            if reached != mark or is_idle:
                self._marks[view], self._moved_s[view] = reached, now_s
        self.quiet_s = now_s - min(self._moved_s.values())
        stall_s = min(self.quiet_s, now_s - self.fault_ended_s)
        self.longest_quiet_s = max(self.longest_quiet_s, self.quiet_s)
        self.longest_stall_s = max(self.longest_stall_s, stall_s)
        return min(self._moved_s, key=lambda view: self._moved_s[view]) if stall_s > self._stall_s else ""


def _over(at: int, flag: int) -> int:
    """A record of the time *at* is late if the floor is there: its window's last ms, or for the join its time."""
    return at - at % WINDOW_MS + WINDOW_MS - 1 if flag == LATE else at


def _id(view: str, row: tuple[Any, ...]) -> int:
    """That of the record that the row is of; the payment's of a pair."""
    return int(row[1] if view in PAIRS else row[0])


def _bit(view: str) -> int:
    return 1 << VIEWS.index(view)


def _number(user: str) -> int:
    return int(user[1:])


class Mutant:
    """A fault planted into what the reader of each view has seen: at its row number *at*."""

    def __init__(self, name: str, at: int) -> None:
        self._name, self._at = name, at
        self._passed: Counter[str] = Counter()

    def __call__(self, view: str, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        place = self._at - self._passed[view]
        self._passed[view] += len(rows)
        if not self._name or not 0 <= place < len(rows):
            return rows
        if self._name == "change":
            *kept, last = rows[place]
            mutated = [(*kept, (last or 0) + 1_000)]
        else:
            mutated = [] if self._name == "lose" else [rows[place]] * 2
        return [*rows[:place], *mutated, *rows[place + 1 :]]
