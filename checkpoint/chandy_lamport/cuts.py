"""A checker of cuts: whether a snapshot shows a state in which the whole graph could have been, and all of it.

A cut says of each process how many of its events lie before it, and of each channel what was on its way. It is
*consistent* if no event before it depends on one after it, and *exact* if each channel holds, in order, what was sent
before it less what was received before it.

The history of events is the only witness. Every event has a vector clock: how many events of each process have
happened before it, itself included. A cut is consistent if and only if no process's clock at the cut counts more events
of another process than lie before the cut (Mattern, Virtual Time and Global States of Distributed Systems, 1989). If
one does, some message was received before the cut and sent after it, and the checker names it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from exactlyonce.pipeline.errors import require

Clock = dict[Hashable, int]
"""By process: how many of its events have happened."""


@dataclass(frozen=True)
class Cut:
    """What a snapshot says."""

    positions: Mapping[Any, int]
    """By process: how many of its events had happened when its state was recorded."""
    in_flight: Mapping[Any, tuple[Any, ...]] = field(default_factory=dict)
    """By channel: the recorded messages. A channel that is missing has none."""


class Flaw(enum.Enum):
    """What may be wrong with a cut."""

    NO_STATE = "has no recorded state"
    SENT_AFTER = "was received before the cut and sent after it"
    LOST = "was on its way at the cut and is not recorded"
    RECEIVED_TOO = "was received before the cut and is recorded as well"
    UNSENT = "is recorded, but was not sent before the cut"
    TWICE = "is recorded twice"
    OUT_OF_ORDER = "is recorded out of order"


class Violation(NamedTuple):
    """One thing that is wrong, where, and with which message."""

    flaw: Flaw
    place: Hashable
    """A channel; a process where it has no state."""
    message: Any = None

    def __str__(self) -> str:
        if self.flaw is Flaw.NO_STATE:
            return f"process {self.place} {self.flaw.value}"
        return f"message {self.message} of channel {self.place} {self.flaw.value}"


@dataclass
class _Message:
    """A message, and the clocks of the two events that it is part of."""

    content: Any
    sent: Clock
    received: Clock | None = None


class CausalHistory:
    """What has happened in a graph of FIFO channels, and what had happened before what.

    >>> history = CausalHistory(["p", "q"], {"c": ("p", "q")})
    >>> history.sent("c", "hello"); history.received("c", "hello")
    >>> history.is_consistent({"p": 0, "q": 1})
    False
    >>> for violation in history.violations(Cut({"p": 0, "q": 1})): print(violation)
    message hello of channel c was received before the cut and sent after it
    """

    def __init__(self, processes: Iterable[Hashable], channels: Mapping[Any, tuple[Hashable, Hashable]]) -> None:
        """*channels*: by channel its sender and its receiver."""
        self._clocks: dict[Hashable, list[Clock]] = {process: [{}] for process in processes}
        self._ends = dict(channels)
        self._messages: dict[Hashable, dict[Any, _Message]] = {channel: {} for channel in channels}
        self._on_its_way: dict[Hashable, deque[_Message]] = {channel: deque() for channel in channels}

    def sent(self, channel: Hashable, message: Any) -> None:
        """The channel's sender sends *message*, which no other message of the channel equals."""
        require(message not in self._messages[channel], "the messages of a channel differ, or none could be named")
        each = _Message(message, self._tick(self._ends[channel][0], {}))
        self._messages[channel][message] = each
        self._on_its_way[channel].append(each)

    def received(self, channel: Hashable, message: Any) -> None:
        """The channel's receiver takes *message*, the oldest that is on its way."""
        on_its_way = self._on_its_way[channel]
        in_order = bool(on_its_way) and on_its_way[0].content == message
        require(in_order, "messages are received once, in the order in which they were sent")
        on_its_way[0].received = self._tick(self._ends[channel][1], on_its_way[0].sent)
        on_its_way.popleft()

    def position(self, process: Hashable) -> int:
        """How many events of *process* have happened."""
        return len(self._clocks[process]) - 1

    def is_consistent(self, positions: Mapping[Any, int]) -> bool:
        """Whether no process knows, at its position, of more events of another than lie before the cut."""
        known = (self._clocks[process][position] for process, position in positions.items())
        return all(count <= positions[process] for clock in known for process, count in clock.items())

    def violations(self, cut: Cut) -> list[Violation]:
        """All that is wrong with *cut*; nothing if it is consistent and exact."""
        require(cut.in_flight.keys() <= self._ends.keys(), "a cut records channels of its graph")
        stateless = [Violation(Flaw.NO_STATE, process) for process in self._clocks if process not in cut.positions]
        if stateless:
            return stateless
        found = [each for channel in self._ends for each in self._violations_of(channel, cut)]
        consistent = all(each.flaw is not Flaw.SENT_AFTER for each in found)
        require(consistent == self.is_consistent(cut.positions), "a cut is consistent unless a message crosses it")
        return found

    def _tick(self, process: Hashable, cause: Clock) -> Clock:
        """The clock of the next event of *process*, which knows what its last one knew, and *cause*."""
        last = self._clocks[process][-1]
        clock = {each: max(last.get(each, 0), cause.get(each, 0)) for each in {**last, **cause}}
        clock[process] = last.get(process, 0) + 1
        self._clocks[process].append(clock)
        return clock

    def _violations_of(self, channel: Hashable, cut: Cut) -> list[Violation]:
        """What is wrong with one channel: first message by message, then, if nothing is, their order."""
        sender, receiver = self._ends[channel]
        recorded = cut.in_flight.get(channel, ())
        exact: list[Any] = []
        found: list[Violation] = []
        for each in self._messages[channel].values():
            was_sent = each.sent[sender] <= cut.positions[sender]
            was_received = each.received is not None and each.received[receiver] <= cut.positions[receiver]
            exact += [each.content] if was_sent and not was_received else []
            flaw = _flaw(was_sent, was_received, recorded.count(each.content))
            found += [Violation(flaw, channel, each.content)] if flaw is not None else []
        foreign = (content for content in recorded if content not in self._messages[channel])
        found += [Violation(Flaw.UNSENT, channel, content) for content in foreign]
        if not found:  # each is recorded once, then: the two differ in their order alone
            misplaced = (each for each, right in zip(recorded, exact, strict=True) if each != right)
            found += [Violation(Flaw.OUT_OF_ORDER, channel, content) for content in islice(misplaced, 1)]
        return found


def _flaw(was_sent: bool, was_received: bool, times_recorded: int) -> Flaw | None:
    """What is wrong with a message, given on which sides of the cut it was sent and received."""
    if was_received and not was_sent:
        return Flaw.SENT_AFTER
    if times_recorded and was_received:
        return Flaw.RECEIVED_TOO
    if times_recorded and not was_sent:
        return Flaw.UNSENT
    if was_sent and not was_received and not times_recorded:
        return Flaw.LOST
    return Flaw.TWICE if times_recorded > 1 else None
