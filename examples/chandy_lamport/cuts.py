"""A checker of cuts: whether a snapshot shows a possible state of the whole graph, and all of it.

A cut has, for each process, the number of its events before the cut, and for each channel the messages in flight. It is
*consistent* if no event before it depends on one after it, and *exact* if each channel holds, in order, the messages
sent before it less those received before it.

The history of events is the only witness. Every event has a vector clock: the number of events of each process up to
it. A cut is consistent if and only if no process's clock at the cut counts more events of another process than lie
before the cut (Mattern, Virtual Time and Global States of Distributed Systems, 1989). If one does, some message was
received before the cut and sent after it, and the checker names it.
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
"""The number of events by process."""


@dataclass(frozen=True)
class Cut:
    positions: Mapping[Any, int]
    """The number of events of each process before its state was recorded."""
    in_flight: Mapping[Any, tuple[Any, ...]] = field(default_factory=dict[Any, tuple[Any, ...]])
    """The recorded messages by channel."""


class Flaw(enum.Enum):
    NO_STATE = "has no recorded state"
    SENT_AFTER = "was received before the cut and sent after it"
    LOST = "was on its way at the cut and is not recorded"
    RECEIVED_TOO = "was received before the cut and is recorded as well"
    UNSENT = "is recorded, but was not sent before the cut"
    TWICE = "is recorded twice"
    OUT_OF_ORDER = "is recorded out of order"


class Violation(NamedTuple):
    flaw: Flaw
    place: Hashable
    """A channel, or a process without state."""
    message: Any = None

    def __str__(self) -> str:
        if self.flaw is Flaw.NO_STATE:
            return f"process {self.place} {self.flaw.value}"
        return f"message {self.message} of channel {self.place} {self.flaw.value}"


@dataclass
class _Message:
    """A message, and the clocks of its two events."""

    content: Any
    sent: Clock
    received: Clock | None = None


class CausalHistory:
    """The events in a graph of FIFO channels, with their causal order.

    >>> history = CausalHistory(["p", "q"], {"c": ("p", "q")})
    >>> history.sent("c", "hello"); history.received("c", "hello")
    >>> history.is_consistent({"p": 0, "q": 1})
    False
    >>> for violation in history.violations(Cut({"p": 0, "q": 1})): print(violation)
    message hello of channel c was received before the cut and sent after it
    """

    def __init__(self, processes: Iterable[Hashable], channels: Mapping[Any, tuple[Hashable, Hashable]]) -> None:
        """*channels*: (sender, receiver) by channel."""
        self._clocks: dict[Hashable, list[Clock]] = {process: [{}] for process in processes}
        self._ends = dict(channels)
        self._messages: dict[Hashable, dict[Any, _Message]] = {channel: {} for channel in channels}
        self._in_flight: dict[Hashable, deque[_Message]] = {channel: deque() for channel in channels}

    def sent(self, channel: Hashable, message: Any) -> None:
        """The channel's sender sends *message*, which no other message of the channel equals."""
        require(message not in self._messages[channel], "the messages of a channel differ, or none could be named")
        sent = _Message(message, self._tick(self._ends[channel][0], {}))
        self._messages[channel][message] = sent
        self._in_flight[channel].append(sent)

    def received(self, channel: Hashable, message: Any) -> None:
        """The channel's receiver takes *message*, the oldest in flight."""
        in_flight = self._in_flight[channel]
        in_order = bool(in_flight) and in_flight[0].content == message
        require(in_order, "messages are received once, in the order in which they were sent")
        in_flight[0].received = self._tick(self._ends[channel][1], in_flight[0].sent)
        in_flight.popleft()

    def position(self, process: Hashable) -> int:
        return len(self._clocks[process]) - 1

    def is_consistent(self, positions: Mapping[Any, int]) -> bool:
        """Whether no process knows, at its position, of more events of another than lie before the cut."""
        known = (self._clocks[process][position] for process, position in positions.items())
        return all(count <= positions[process] for clock in known for process, count in clock.items())

    def violations(self, cut: Cut) -> list[Violation]:
        """All flaws of *cut*; none if it is consistent and exact."""
        require(cut.in_flight.keys() <= self._ends.keys(), "a cut records channels of its graph")
        stateless = [Violation(Flaw.NO_STATE, process) for process in self._clocks if process not in cut.positions]
        if stateless:
            return stateless
        violations = [violation for channel in self._ends for violation in self._violations_of(channel, cut)]
        consistent = all(violation.flaw is not Flaw.SENT_AFTER for violation in violations)
        require(consistent == self.is_consistent(cut.positions), "a cut is consistent unless a message crosses it")
        return violations

    def _tick(self, process: Hashable, cause: Clock) -> Clock:
        """The clock of the next event of *process*, after its last one and *cause*."""
        last = self._clocks[process][-1]
        clock = {other: max(last.get(other, 0), cause.get(other, 0)) for other in {**last, **cause}}
        clock[process] = last.get(process, 0) + 1
        self._clocks[process].append(clock)
        return clock

    def _violations_of(self, channel: Hashable, cut: Cut) -> list[Violation]:
        """The flaws of one channel: first message by message, then, if there are none, of their order."""
        sender, receiver = self._ends[channel]
        recorded = cut.in_flight.get(channel, ())
        exact: list[Any] = []
        violations: list[Violation] = []
        for message in self._messages[channel].values():
            was_sent = message.sent[sender] <= cut.positions[sender]
            was_received = message.received is not None and message.received[receiver] <= cut.positions[receiver]
            exact += [message.content] if was_sent and not was_received else []
            flaw = _flaw(was_sent, was_received, recorded.count(message.content))
            violations += [Violation(flaw, channel, message.content)] if flaw is not None else []
        foreign = (content for content in recorded if content not in self._messages[channel])
        violations += [Violation(Flaw.UNSENT, channel, content) for content in foreign]
        if not violations:  # every message is recorded once, so only their order may differ
            misplaced = (content for content, right in zip(recorded, exact, strict=True) if content != right)
            violations += [Violation(Flaw.OUT_OF_ORDER, channel, content) for content in islice(misplaced, 1)]
        return violations


def _flaw(was_sent: bool, was_received: bool, times_recorded: int) -> Flaw | None:
    """The flaw of a message, given on which sides of the cut it was sent and received."""
    if was_received and not was_sent:
        return Flaw.SENT_AFTER
    if times_recorded and was_received:
        return Flaw.RECEIVED_TOO
    if times_recorded and not was_sent:
        return Flaw.UNSENT
    if was_sent and not was_received and not times_recorded:
        return Flaw.LOST
    return Flaw.TWICE if times_recorded > 1 else None
